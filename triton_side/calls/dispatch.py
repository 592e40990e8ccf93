"""The operations that PyTorch runs, in order, together with the launches of hand-written kernels among them.

    recorded = record_call(apply, inputs, train=True)
    recorded.parts["forward"]      # (Operation("aten.mm", ...), Launch(...), ...)

An operation is one that ATen runs below autograd: one row of a profiler's "CPU op" column that reaches the GPU. Views
and allocations are left out: they launch nothing. Works with fake tensors, so that a GPU is not needed
(triton_side.deviceless.for_target.fake_mode, with `compile_only=True`).

`after_each` is for joining an operation with the kernels that it launched: called after each one, before the next
starts, it can wait for the device and collect what ran. A call recorded so is never one to time. What torch.compile
compiled cannot be recorded: Dynamo runs it uncompiled while a dispatch mode is active.

The autograd node that runs (`torch._C._current_autograd_node`) and the numbers by which forward and backward of an
operation find each other (`torch.autograd._get_sequence_nr`) are not public API, nor is how an operation is registered
for a while (`torch._C._dispatch_has_kernel_for_dispatch_key`, `Library._destroy`). versions.py lists the tested
builds.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from triton_side.calls.artifacts import disassemble
from triton_side.calls.declare import current_stage
from triton_side.calls.flops import grouped_product_flops
from triton_side.calls.launches import Launch, Storages, TensorArgument, record_launches

Kind = Literal["elementwise", "reduction", "gemm", "attention", "copy", "scatter", "library", "memset"]
Call = Callable[[Any], Mapping[str, torch.Tensor]]

_TORCH = str(Path(torch.__file__).parent)
_CHECKPOINT = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")
_ENGINE = "_engine_run_backward"  # torch.autograd.graph: every backward pass goes through it

_GEMMS = {
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_int_mm", "mv", "addmv", "dot", "_addmm_activation",
}
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "norm", "var", "std",
    "var_mean", "std_mean", "linalg_vector_norm", "logsumexp", "nansum", "aminmax",
}
_COPIES = {
    "_to_copy", "copy_", "copy", "clone", "cat", "stack", "constant_pad_nd", "repeat", "flip", "roll", "index_select",
    "index", "gather", "slice_backward", "select_backward", "tril", "triu", "embedding",
}
_LOOKUPS = {"index", "index_select", "gather", "embedding"}  # of the first tensor they read what they yield
_CONVERSIONS = {"_to_copy", "copy_", "copy"}  # between dtypes; otherwise they copy to another device or layout
_SCATTERS = {
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "index_put", "index_put_",
    "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_", "embedding_dense_backward",
}
_FILLS = {"zero_", "zeros", "zeros_like", "new_zeros", "fill_", "ones", "ones_like", "new_ones", "full", "full_like",
          "new_full"}
_TO_HOST = {"_local_scalar_dense", "equal"}  # no tensor comes back
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# In place, and what was there before is not looked at.
_OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"}
_WINDOWS = ("window_size_left", "window_size_right", "window_size")  # of attention: how far a row sees
# FLOPs an element of the largest tensor, as the blocks count them; other pointwise operations and reductions have 1.
_FLOPS_AN_ELEMENT = {
    "_softmax": 5, "_softmax_backward_data": 4, "gelu": 9, "gelu_backward": 17, "_fused_rms_norm": 4,
    "_fused_rms_norm_backward": 9, "native_layer_norm": 7, "native_layer_norm_backward": 13, "silu": 4,
    "silu_backward": 7,
}


@dataclass(frozen=True)
class Operation:
    """One ATen operation.

    op: "aten.mul.Tensor". reads, writes: the tensors whose elements it reads and writes. stage: the stages around it,
    outermost first; of a backward operation, around the forward one. line: "file:line" outside PyTorch; of a backward
    operation, of the forward one; "" where that is not known. backward: the gradient of an operation. rematerialized:
    a forward operation that torch.utils.checkpoint repeats. flops: None where not known.
    """

    op: str
    kind: Kind
    reads: tuple[TensorArgument, ...]
    writes: tuple[TensorArgument, ...]
    stage: str
    line: str
    backward: bool
    rematerialized: bool
    flops: float | None


Event = Launch | Operation

# Composite operations that CUDA has a kernel for, of which a CPU build knows nothing and would run the parts.
_FUSED_ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")


@dataclass(frozen=True)
class Recorded:
    """One call: its events by part ("forward", and "backward" of a training step), in order.

    inputs: what the call was given, by name, and "d" and an output's name for its gradient. outputs: what it returned,
    and "d" and an input's name. Storages are numbered alike throughout.
    """

    parts: Mapping[str, tuple[Event, ...]]
    inputs: Mapping[str, TensorArgument]
    outputs: Mapping[str, TensorArgument]


@contextlib.contextmanager
def record_operations(
    after_each: Callable[[int], None] | None = None,
    *,
    compile_only: bool = False,
    device: str | None = None,
    storages: Storages | None = None,
    sites: dict[int, tuple[str, str]] | None = None,
) -> Iterator[list[Event]]:
    """Record what this thread runs within the context; autograd's backward passes run in it as well.

    Args:
        after_each: called with an event's index after it was launched.
        compile_only: hand-written kernels are compiled and not run (record_launches).
        device: leave out operations that have tensors, but none on devices of this type ("cuda").
        storages: numbers to go on with.
        sites: what an earlier recording of the forward pass kept for the backward one; filled.

    Raises: as record_launches.
    """
    storages = storages or Storages()
    events: list[Event] = []

    def add(event: Event) -> None:
        events.append(event)
        if after_each:
            after_each(len(events) - 1)

    with (
        _fused_as_on_cuda() if compile_only else contextlib.nullcontext(),
        torch.autograd.set_multithreading_enabled(False),
        record_launches(compile_only, storages=storages, launched=add),
        _Recorder(storages, events, add, {} if sites is None else sites, device),
    ):
        yield events


def record_call(
    call: Call,
    inputs: Mapping[str, torch.Tensor],
    *,
    train: bool,
    cotangents: Mapping[str, torch.Tensor] | None = None,
    compile_only: bool = False,
    after_each: Callable[[str, int], None] | None = None,
) -> Recorded:
    """Call `call(inputs)`, and if `train` its gradient in every floating-point input, and record both parts.

    cotangents: gradients of the outputs, of ones where none are given. after_each: called with part and index; needs
    the cotangents of a training step, or what makes them would run between the parts and belong to no event (ValueError
    without).
    """
    if after_each and train and cotangents is None:
        raise ValueError("after_each in a training step needs cotangents: making them would run kernels of no event")
    storages, sites = Storages(), dict[int, tuple[str, str]]()
    device = next((tensor.device.type for tensor in inputs.values()), None)
    parts: dict[str, tuple[Event, ...]] = {}

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        each = functools.partial(after_each, name) if after_each else None
        with record_operations(
            each, compile_only=compile_only, device=device, storages=storages, sites=sites
        ) as events:
            yield
        parts[name] = tuple(events)

    with torch.set_grad_enabled(train), part("forward"):
        outputs = call(inputs)
    given, returned = dict(inputs), dict(outputs)
    if train:
        wanted = {name: x for name, x in inputs.items() if x.requires_grad}
        reached = {name: y for name, y in outputs.items() if y.requires_grad}
        dy = {name: cotangents[name] if cotangents else torch.ones_like(y) for name, y in reached.items()}
        with part("backward"):
            gradients = torch.autograd.grad(list(reached.values()), list(wanted.values()), list(dy.values()))
        given |= {f"d{name}": tensor for name, tensor in dy.items()}
        returned |= {f"d{name}": tensor for name, tensor in zip(wanted, gradients, strict=True)}

    def described(tensors: dict[str, torch.Tensor]) -> dict[str, TensorArgument]:
        return {name: storages.describe(tensor, i, name) for i, (name, tensor) in enumerate(tensors.items())}

    return Recorded(parts, described(given), described(returned))


@contextlib.contextmanager
def _fused_as_on_cuda() -> Iterator[None]:
    """Register what only a CUDA build has, for fake tensors: nothing is ever called."""

    def absent(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this kernel is in CUDA builds of PyTorch only")

    library = torch.library.Library("aten", "IMPL")
    for name in _FUSED_ON_CUDA:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, absent, "CUDA")
    try:
        yield
    finally:
        library._destroy()


def write_launches(recorded: Recorded, folder: Path) -> None:
    """Write the representations of every hand-written kernel into `folder`/<part>."""
    launches = {part: [e for e in events if isinstance(e, Launch)] for part, events in recorded.parts.items()}
    disassemble(launch.artifacts for made in launches.values() for launch in made)
    for part, made in launches.items():
        for index, launch in enumerate(made):
            launch.write(folder / part, index)


class _Recorder(TorchDispatchMode):
    def __init__(
        self, storages: Storages, events: Sequence[Event], add: Callable[[Operation], None],
        sites: dict[int, tuple[str, str]], device: str | None,
    ) -> None:
        super().__init__()
        self._storages, self._events, self._add, self._device = storages, events, add, device
        # Sequence number of a forward operation's autograd node -> its line and stage.
        self._sites = sites
        self._newest = max(sites, default=torch.autograd._get_sequence_nr() - 1)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._events)
        result = function(*args, **(kwargs or {}))
        # An operation that somebody registered may launch hand-written kernels: these stand for it.
        if not isinstance(function, torch._ops.OpOverload) or len(self._events) > before:
            return result
        site = self._site()
        written = _written(function, args, kwargs or {})
        results = _unique([*written, *_tensors(result)])
        given = _unique(_tensors([args, kwargs]))
        name = function._schema.name.partition("::")[2]
        if name not in _TO_HOST and self._launches_nothing(name, given, written, results):
            return result
        kind = _kind(function, name)
        if name in _CONVERSIONS and len({tensor.dtype for tensor in [*given, *results]}) > 1:
            kind = "elementwise"
        if name.endswith("_like") or name.startswith("new_"):
            given = []
        elif name in _OVERWRITES or function._schema.overload_name == "out":
            given = [tensor for tensor in given if not any(tensor is w for w in written)]
        reads = self._describe(given)
        if name in _LOOKUPS:
            reads = (replace(reads[0], used=results[0].numel()), *reads[1:])
        backward, rematerialized, line, stage = site
        self._add(
            Operation(
                f"{function.namespace}.{name}.{function._schema.overload_name or 'default'}",
                kind,
                reads,
                self._describe(results),
                stage,
                line,
                backward,
                rematerialized,
                _flops(function, name, kind, args, kwargs or {}, result, given, results),
            )
        )
        return result

    def _launches_nothing(
        self, name: str, given: list[torch.Tensor], written: list[torch.Tensor], results: list[torch.Tensor]
    ) -> bool:
        """Views, allocations, what is empty, and what another device does."""
        held = {self._storages.of(tensor) for tensor in given}
        if not written and all(self._storages.of(tensor) in held for tensor in results):
            return True
        if name in _ALLOCATIONS or all(tensor.numel() == 0 for tensor in results):
            return True
        return self._device is not None and all(tensor.device.type != self._device for tensor in [*given, *results])

    def _describe(self, tensors: list[torch.Tensor]) -> tuple[TensorArgument, ...]:
        return tuple(self._storages.describe(tensor, position) for position, tensor in enumerate(tensors))

    def _site(self) -> tuple[bool, bool, str, str]:
        """Whether backward, whether repeated, line and stage of the operation that runs."""
        node = torch._C._current_autograd_node()
        line, repeated = _line(backward=node is not None)
        stage = current_stage()
        if node is not None and not repeated:
            if line:  # a backward pass that somebody wrote
                return True, False, line, stage
            return True, False, *self._sites.get(node._sequence_nr(), ("", ""))
        # Autograd numbers a node just before its operation runs: what comes with an old number has no node.
        number = torch.autograd._get_sequence_nr() - 1
        if number > self._newest:
            self._newest = number
            self._sites[number] = (line, stage)
        return False, repeated, line, stage


def _line(backward: bool) -> tuple[str, bool]:
    """The innermost line outside PyTorch and this module, in a backward pass up to the engine ("" where there is
    none); and whether torch.utils.checkpoint runs it again there."""
    line = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _ENGINE:
        file = frame.f_code.co_filename
        if not line and not file.startswith((_TORCH, "<")) and file != __file__:
            line = f"{file}:{frame.f_lineno}"
        if line and (not backward or file == _CHECKPOINT):
            return line, backward
        frame = frame.f_back
    return line, False


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _unique(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each view of memory once."""
    kept: dict[tuple[Any, ...], torch.Tensor] = {}
    for tensor in tensors:
        view = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        kept.setdefault(view, tensor)
    return list(kept.values())


def _written(function: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def _kind(function: Any, name: str) -> Kind:
    if name in _GEMMS:
        return "gemm"
    if "attention" in name:
        return "attention"
    if name in _FILLS:
        return "memset"
    if name in _COPIES or name == "_local_scalar_dense":
        return "copy"
    if name in _SCATTERS:
        return "scatter"
    if name in _REDUCTIONS:
        return "reduction"
    if torch.Tag.pointwise in function.tags or name.rstrip("_") in ("add", "sub", "mul", "div", "masked_fill"):
        return "elementwise"
    return "elementwise" if name == "arange" else "library"


def _flops(
    function: Any, name: str, kind: Kind, args: Any, kwargs: Mapping[str, Any], result: Any,
    given: list[torch.Tensor], results: list[torch.Tensor],
) -> float | None:
    if name == "_grouped_mm":  # which torch 2.13's registry lacks
        return grouped_product_flops(tuple(args[0].shape), tuple(args[1].shape))
    formula = flop_registry.get(function.overloadpacket)
    if formula is not None:
        # Of addmm and baddbmm (torch 2.13) it would take a fourth argument, out_dtype, for the result's shape.
        factors = args[:3] if name in ("addmm", "baddbmm") else args
        try:
            flops = float(formula(*factors, **kwargs, out_val=result))
        except AssertionError:
            return None  # torch 2.11's formula of attention takes no grouped heads; 2.13's does
        names = [argument.name for argument in function._schema.arguments]
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        if any(bound.get(window) not in (None, -1) for window in _WINDOWS):
            return None
        causal = bound.get("is_causal") or bound.get("custom_mask_type")  # the latter from either corner
        return flops / 2 if causal else flops  # half of the square of scores
    largest = max((tensor.numel() for tensor in [*given, *results]), default=0)
    if name in _FLOPS_AN_ELEMENT:
        return float(_FLOPS_AN_ELEMENT[name] * largest)
    if kind in ("elementwise", "reduction"):
        return float(largest)
    return 0.0 if kind in ("copy", "memset") else None
