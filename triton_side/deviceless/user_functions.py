"""Compile what a user wrote with TorchInductor: a function or module called with its own arguments.

A graph break is no error here: every graph is compiled, and `Captured.breaks` says where and why. On a GPU that is not
there (deviceless.py) nothing runs; after a graph break the call goes on with fake results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from triton_side.deviceless import _fake_cuda
from triton_side.inductor import _private as private
from triton_side.inductor import compiler
from triton_side.inductor.compiler import Captured

Products = Literal["padded", "triton"]


@dataclasses.dataclass(frozen=True)
class TensorLike:
    """A tensor without its data. dtype: as in "bfloat16"."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    is_parameter: bool = False


class Factory:
    """Makes the tensors of a call: fake ones on the fake GPU, or real ones on this machine's."""

    def __init__(self) -> None:
        self.mode = private.fake_tensor_mode() if _fake_cuda.active() else None

    def tensor(self, like: TensorLike) -> torch.Tensor:
        """Real ones are normal deviates, or zeros where the dtype is not floating (an index must be in range)."""
        dtype = getattr(torch, like.dtype)
        with self.mode or contextlib.nullcontext():
            made = torch.empty_strided(like.shape, like.stride, dtype=dtype, device="cuda")
        if self.mode is None:
            made.normal_() if dtype.is_floating_point and dtype.itemsize > 1 else made.zero_()
        if like.is_parameter:
            return torch.nn.Parameter(made, requires_grad=like.requires_grad)
        return made.requires_grad_(like.requires_grad)


def compile_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], factory: Factory, *, train: bool,
    products: Products | None = None,
) -> Captured:
    """Compile `function(*args, **kwargs)`, static shapes, default mode; all tensors in it are `factory`'s.

    train: backward is compiled, too: of every tensor that requires grad; where none does, every floating argument is
    made to. Otherwise all is compiled as under `torch.no_grad()`.
    products: what a GPU that is not there would choose by measuring for matrix products: "padded" operands, where that
    decides about padding, or, as in mode="max-autotune", Inductor's own "triton" templates. None: ATen's, unpadded.

    Raises RuntimeError where nothing was compiled, or whatever PyTorch or the function does.
    """
    if train:
        _require_some_grad(function, args, kwargs)
    torch.compiler.reset()
    with contextlib.ExitStack() as stack:
        captured = stack.enter_context(compiler.recording(measured=factory.mode is None))
        backend = private.compile_fx if factory.mode is None else functools.partial(_compile_and_fake, captured)
        compiled = torch.compile(function, backend=backend, dynamic=False)
        stack.enter_context(torch.set_grad_enabled(train))
        if factory.mode is not None:
            stack.enter_context(_fake_cuda.sdpa_choice("math"))  # while dynamo traces, where shapes alone count
            stack.enter_context(factory.mode)
            stack.enter_context(private.compiling_only(pad=products == "padded"))
            if products == "triton":
                stack.enter_context(private.products_tuned())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        outputs = compiled(*args, **kwargs)
        if train and factory.mode is None:
            _differentiate(outputs)
    return captured


def _differentiate(outputs: Any) -> None:
    """Backward, which is compiled already, once: a Triton kernel is tuned when it first runs."""
    leaves = tree_leaves(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _compile_and_fake(captured: Captured, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    before = captured.graphs
    with _fake_cuda.sdpa_choice(_attention_of(graph), after="math"):
        private.compile_fx(graph, inputs)
    made = [new for new in captured.graphs if new.part == "forward" and not any(new is known for known in before)]

    def fake(*args: Any) -> Any:
        results = graph.forward(*args)  # what follows a graph break needs their shapes
        for forward in made:
            captured.saw(forward, args, results)
        return results

    return fake


def _attention_of(graph: torch.fx.GraphModule) -> str:
    """The attention kernel to take: a device prefers flash, which is for fp16 and bf16 (and, see the hooks, no mask).
    """
    calls = [node for node in graph.graph.nodes if _name(node.target) == "scaled_dot_product_attention"]
    nodes = [call.args[0] for call in calls if call.args] or list(graph.graph.nodes)
    values = [node.meta.get("example_value") for node in nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    half = {torch.float16, torch.bfloat16}
    return "flash" if (dtypes <= half if calls else dtypes & half) else "efficient"


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _require_some_grad(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given = [x for x in tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
    owner = getattr(function, "__self__", function)
    held = list(owner.parameters()) if isinstance(owner, torch.nn.Module) else []
    if any(tensor.requires_grad for tensor in (*given, *held)):
        return
    floating = [tensor for tensor in given if tensor.is_floating_point()]
    if not floating:
        raise TypeError("grad=True needs a tensor of a floating dtype to differentiate by; there is none")
    for tensor in floating:
        tensor.requires_grad_(True)
