"""Record the operations that PyTorch runs and the launches of hand-written kernels, in one order.

    recorded = record_call(apply, inputs, train=True)
    recorded.parts["forward"]      # (Operation("aten.mm", ...), Launch(...), ...)

An operation is one that ATen runs below autograd: a "CPU op" of a profiler that reaches the GPU. Views and
allocations launch nothing and are left out. Recording works with fake tensors, so no GPU is needed
(xlafuse.triton_side.deviceless.for_target.fake_mode, with `compile_only=True`).

`after_each` serves to join an operation with its kernels: it is called after each operation and before the next, and
can wait for the device and collect the kernels that ran. Never time a call that is recorded in this way. A function
that torch.compile compiled cannot be recorded: Dynamo runs it uncompiled while a dispatch mode is active.

These names are not public API; versions.py lists the tested builds:
- `torch._C._current_autograd_node`: the autograd node that runs;
- `torch.autograd._get_sequence_nr`: the number that the forward and backward of an operation share;
- `torch._C._dispatch_has_kernel_for_dispatch_key`, `Library._destroy`: to register an operation temporarily;
- `torch._guards.CompileContext`: whether Dynamo is compiling.
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from xlafuse.triton_side.calls.artifacts import disassemble
from xlafuse.triton_side.calls.declare import current_stage
from xlafuse.triton_side.calls.flops import grouped_product_flops
from xlafuse.triton_side.calls.launches import Launch, Storages, TensorArgument, record_launches
from xlafuse.triton_side.calls.stages import preparing

Kind = Literal[
    "elementwise", "reduction", "gemm", "attention", "copy", "scatter", "collective", "library", "memset"
]
Call = Callable[[Any], Mapping[str, torch.Tensor]]

_TORCH = str(Path(torch.__file__).parent)
_DEVICELESS = str(Path(__file__).parents[1] / "deviceless")  # it calls users' functions
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
_LOOKUPS = {"index", "index_select", "gather", "embedding"}  # they read as many elements of the table as they return
_CONVERSIONS = {"_to_copy", "copy_", "copy"}  # between dtypes; with equal dtypes they copy
_SCATTERS = {
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "index_put", "index_put_",
    "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_", "embedding_dense_backward",
}
_FILLS = {"zero_", "zeros", "zeros_like", "new_zeros", "fill_", "ones", "ones_like", "new_ones", "full", "full_like",
          "new_full"}
_TO_HOST = {"_local_scalar_dense", "equal"}  # they return no tensor
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# In-place operations that do not read the old values.
_OVERWRITES = {"exchange", "copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"}
_WINDOWS = ("window_size_left", "window_size_right", "window_size")  # arguments of attention with a window
# FLOPs per element of the largest tensor, as the blocks count them. Other pointwise operations and reductions have 1.
_FLOPS_PER_ELEMENT = {
    "_softmax": 5, "_softmax_backward_data": 4, "gelu": 9, "gelu_backward": 17, "_fused_rms_norm": 4,
    "_fused_rms_norm_backward": 9, "native_layer_norm": 7, "native_layer_norm_backward": 13, "silu": 4,
    "silu_backward": 7,
}


@dataclass(frozen=True)
class Operation:
    """One ATen operation.

    op: such as "aten.mul.Tensor". reads, writes: the tensors whose elements it reads and writes.
    stage: the stages around it, outermost first. line: "file:line" outside PyTorch; "" if unknown. A backward operation
        has the stage and line of its forward operation.
    backward: it computes a gradient. rematerialized: torch.utils.checkpoint repeats a forward operation.
    flops: None if unknown.
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

# CUDA builds have one kernel for each of these operations. CPU builds lack it and would run several operations.
_FUSED_ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")


@dataclass(frozen=True)
class Recorded:
    """One call: its events by phase ("forward", and for a training step "backward"), in order.

    inputs: the call's arguments by name; the gradient of output y is "dy". outputs: its results by name; the gradient
    of input x is "dx". A storage has the same number everywhere.
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
    """Record this thread's operations and launches within the context. Autograd's backward passes run in it as well.

    Args:
        after_each: called with an event's index after its launch.
        compile_only: compile hand-written kernels, but do not run them (see record_launches).
        device: leave out operations whose tensors are all on other device types than this one ("cuda").
        storages: storage numbers of an earlier recording, to continue.
        sites: lines and stages of forward operations. The forward recording fills it, the backward recording reads it.

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
    """Record `call(inputs)`, and if `train` also its gradient with respect to every input that requires one.

    cotangents: gradients of the outputs; ones by default.
    after_each: called with phase and index. In a training step it needs `cotangents` (else ValueError), because the
        kernels that make them would run between the phases and belong to no event.
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
    """Register, for fake tensors, the operations that only CUDA builds have. They are never called."""

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
    """Write the representations of every hand-written kernel into `folder`/<phase>."""
    launches = {part: [e for e in events if isinstance(e, Launch)] for part, events in recorded.parts.items()}
    disassemble(launch.artifacts for made in launches.values() for launch in made)
    for part, made in launches.items():
        for index, launch in enumerate(made):
            launch.write(folder / part, index)


def unobserved() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no dispatch mode sees operations, for tensors of a class that a mode cannot make."""
    context: contextlib.AbstractContextManager[object] = _disable_current_modes()
    return context


class _Recorder(TorchDispatchMode):
    def __init__(
        self, storages: Storages, events: Sequence[Event], add: Callable[[Operation], None],
        sites: dict[int, tuple[str, str]], device: str | None,
    ) -> None:
        super().__init__()
        self._storages, self._events, self._add, self._device = storages, events, add, device
        # sequence number of a forward operation's autograd node -> its line and stage
        self._sites = sites
        self._newest = max(sites, default=torch.autograd._get_sequence_nr() - 1)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._events)
        result = function(*args, **(kwargs or {}))
        # A custom operation may launch hand-written kernels, which are recorded instead of it.
        if not isinstance(function, torch._ops.OpOverload) or len(self._events) > before or preparing():
            return result
        site = self._site()
        written = _written(function, args, kwargs or {})
        results = _unique([*written, *_tensors(result)])
        given = _unique(_tensors([args, kwargs]))
        name = function._schema.name.partition("::")[2]
        if name == "wait_tensor":  # it launches nothing
            return result
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
        """Return whether this is a view, an allocation, empty, or an operation of another device."""
        held = {self._storages.of(tensor) for tensor in given}
        if not written and all(self._storages.of(tensor) in held for tensor in results):
            return True
        if name in _ALLOCATIONS or all(tensor.numel() == 0 for tensor in results):
            return True
        return self._device is not None and all(tensor.device.type != self._device for tensor in [*given, *results])

    def _describe(self, tensors: list[torch.Tensor]) -> tuple[TensorArgument, ...]:
        return tuple(self._storages.describe(tensor, position) for position, tensor in enumerate(tensors))

    def _site(self) -> tuple[bool, bool, str, str]:
        """Return whether the running operation is backward, whether it is repeated, its line and its stage."""
        node = torch._C._current_autograd_node()
        line, repeated = _line(backward=node is not None)
        stage = current_stage()
        if node is not None and not repeated:
            if line:  # a hand-written backward pass
                return True, False, line, stage
            return True, False, *self._sites.get(node._sequence_nr(), ("", ""))
        # Autograd numbers a node just before its operation runs, so an operation with an old number has no node.
        number = torch.autograd._get_sequence_nr() - 1
        if number > self._newest:
            self._newest = number
            self._sites[number] = (line, stage)
        return False, repeated, line, stage


class EagerRecorder(_Recorder):
    """While it is active, calls `add` for each operation that a function under torch.compile runs uncompiled.

    device: as in `record_operations`. An operation that raises an error is recorded, too, without results.
    """

    supports_higher_order_operators = True

    def __init__(self, add: Callable[[Operation], None], storages: Storages, device: str | None) -> None:
        super().__init__(storages, (), add, {}, device)
        self._paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise Dynamo compiles nothing while this mode is active

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside, where compiled code runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused or torch._guards.CompileContext.current_compile_id() is not None:
            return function(*args, **(kwargs or {}))
        try:
            return super().__torch_dispatch__(function, types, args, kwargs)
        except Exception:
            if isinstance(function, torch._ops.OpOverload):
                backward, rematerialized, line, stage = self._site()
                reads = self._describe(_unique(_tensors([args, kwargs])))
                kind = _kind(function, function._schema.name.partition("::")[2])
                op = str(function)
                self._add(Operation(op, kind, reads, (), stage, line, backward, rematerialized, None))
            raise


def _line(backward: bool) -> tuple[str, bool]:
    """Return the innermost line outside PyTorch and this module, and whether torch.utils.checkpoint repeats it.

    In a backward pass the search ends at autograd's engine; the line is "" if there is none.
    """
    line = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _ENGINE:
        file = frame.f_code.co_filename
        if not line and not file.startswith((_TORCH, _DEVICELESS, "<")) and file != __file__:
            line = f"{file}:{frame.f_lineno}"
        if line and (not backward or file == _CHECKPOINT):
            return line, backward
        frame = frame.f_back
    return line, False


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _unique(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return `tensors` with each view of memory once."""
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
    if function.namespace == "_c10d_functional" or name == "exchange":
        return "collective"
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
    if name == "_grouped_mm":  # torch 2.13's registry lacks it
        return grouped_product_flops(tuple(args[0].shape), tuple(args[1].shape))
    formula = flop_registry.get(function.overloadpacket)
    if formula is not None:
        # The formula of addmm and baddbmm (torch 2.13) would take a fourth argument, out_dtype, as the result's shape.
        factors = args[:3] if name in ("addmm", "baddbmm") else args
        try:
            flops = float(formula(*factors, **kwargs, out_val=result))
        except AssertionError:
            return None  # torch 2.11's formula of attention accepts no grouped heads; 2.13's does
        names = [argument.name for argument in function._schema.arguments]
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        if any(bound.get(window) not in (None, -1) for window in _WINDOWS):
            return None
        causal = bound.get("is_causal") or bound.get("custom_mask_type")
        return flops / 2 if causal else flops  # a causal mask leaves half of the scores
    largest = max((tensor.numel() for tensor in [*given, *results]), default=0)
    if name in _FLOPS_PER_ELEMENT:
        return float(_FLOPS_PER_ELEMENT[name] * largest)
    if kind in ("elementwise", "reduction"):
        return float(largest)
    return 0.0 if kind in ("copy", "memset") else None
