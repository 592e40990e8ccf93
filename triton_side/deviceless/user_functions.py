"""Compile a user's function or module with TorchInductor, for this machine's GPU or for an absent one (for_target).

A graph break is no error: every graph is compiled, `Captured.breaks` says where and why, and the operations that
PyTorch runs between the graphs are recorded. For an absent GPU nothing runs; after a graph break the call continues
with fake results, to the first operation whose results cannot be known without data (`Captured.stopped`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from xlafuse.triton_side.deviceless import _fake_cuda
from xlafuse.triton_side.inductor import _private as private
from xlafuse.triton_side.inductor import compiler
from xlafuse.triton_side.inductor.compiler import Captured
from xlafuse.triton_side.inductor.graph import GraphBreak

Products = Literal["padded", "triton"]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data. dtype: such as "bfloat16"."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    is_parameter: bool = False


class TensorFactory:
    """Makes the tensors of a call: fake ones on the fake GPU, or real ones on this machine's GPU."""

    def __init__(self) -> None:
        self.mode = private.fake_tensor_mode() if _fake_cuda.active() else None

    def assumed(self) -> list[str]:
        """Return, and forget, the assumptions about values that code between the pieces of a broken graph read."""
        assert self.mode is not None
        found = list(self.mode.assumed)
        self.mode.assumed.clear()
        return found

    def tensor(self, like: TensorSpec) -> torch.Tensor:
        """Return a tensor. A real one is normally distributed, or zeros if its dtype is not floating.

        Zeros are valid indices. Floating dtypes of one byte are zeros, too.
        """
        dtype = getattr(torch, like.dtype)
        with self.mode or contextlib.nullcontext():
            made = torch.empty_strided(like.shape, like.stride, dtype=dtype, device="cuda")
        if self.mode is None:
            made.normal_() if dtype.is_floating_point and dtype.itemsize > 1 else made.zero_()
        if like.is_parameter:
            return torch.nn.Parameter(made, requires_grad=like.requires_grad)
        return made.requires_grad_(like.requires_grad)


def compile_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], factory: TensorFactory, *,
    train: bool, products: Products | None = None, settings: Mapping[str, str] = MappingProxyType({}),
    keep_compiled: bool = False, forced: compiler.Forced | None = None,
) -> tuple[Captured, Callable[[], Any]]:
    """Compile `function(*args, **kwargs)` with static shapes in the default mode. All its tensors are `factory`'s.

    Return what Inductor made, and a function that makes the compiled call again on this machine's GPU: with `train` a
    forward and a backward call, whose cotangents are ones.

    train: compile backward, too, for every tensor that requires grad. If none does, every floating argument is made to.
        Without `train`, everything is compiled as under `torch.no_grad()`.
    products: the assumed result of measuring matrix products on an absent GPU. "padded" pads operands where Inductor
        would measure whether to pad. "triton" takes Inductor's own templates, as in mode="max-autotune". None takes
        ATen's products, unpadded.
    settings: options of torch._inductor.config by name, as text ("1", "True", "max-autotune").
    keep_compiled: earlier calls stay compiled. Otherwise they compile again when they are made.
    forced: two kernels that are to be one.

    Raises RuntimeError if nothing was compiled, ValueError for an unknown setting, compiler.NotForced, and any error of
    PyTorch or the function.
    """
    if train:
        _require_some_grad(function, args, kwargs)
    if not keep_compiled:
        torch.compiler.reset()
    with contextlib.ExitStack() as stack:
        captured = stack.enter_context(compiler.recording(measured=factory.mode is None, forced=forced))
        compile_fx = private.compile_fx if factory.mode is None else functools.partial(_compile_and_fake, captured)
        # Dynamo would take an earlier call's code, compiled with other settings, if the backend were the same object.
        backend = functools.partial(compile_fx)
        compiled = torch.compile(function, backend=backend, dynamic=False)
        stack.enter_context(torch.set_grad_enabled(train))
        if factory.mode is not None:
            stack.enter_context(_fake_cuda.sdpa_choice("math"))  # while Dynamo traces, only shapes matter
            stack.enter_context(factory.mode)
            stack.enter_context(private.compiling_only(pad=products == "padded"))
            if products == "triton":
                stack.enter_context(private.autotuned_gemms())
        stack.enter_context(private.inductor_settings(settings))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        outputs = None
        try:
            with captured.following("cuda" if torch.cuda.is_available() else None):
                outputs = compiled(*args, **kwargs)
        except Exception as problem:
            reason = private.why_not_followed(problem)
            if factory.mode is None or not (reason or factory.mode.assumed):
                raise
            line = private.users_line(traceback.extract_tb(problem.__traceback__))
            captured.stopped = GraphBreak(reason or f"it fails there: {type(problem).__name__}: {problem}", line)
        finally:
            captured.assumed = factory.assumed() if factory.mode is not None else ()
        if isinstance(outputs, torch.nn.Module) and not captured.graphs:
            raise TypeError("it returns a module; to explain that, write () after the function's name")
        captured.record_results(_tensors(outputs))
        call = _Call(compiled, args, kwargs, _trained(function, args, kwargs) if train else None)
        if train and factory.mode is None:
            call.differentiate(outputs)  # compiled already; the first run of a Triton kernel autotunes it
    return captured, call


class _Call:
    """A compiled call, to be made again. trained: the tensors to differentiate by, or None for a forward call."""

    def __init__(
        self, compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
        trained: list[torch.Tensor] | None,
    ) -> None:
        self._compiled, self._args, self._kwargs, self._trained = compiled, args, kwargs, trained
        self._cotangents: list[torch.Tensor] | None = None

    def __call__(self) -> Any:
        with torch.set_grad_enabled(self._trained is not None):
            outputs = self._compiled(*self._args, **self._kwargs)
            return outputs if self._trained is None else self.differentiate(outputs)

    def differentiate(self, outputs: Any) -> Any:
        tensors = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        if self._cotangents is None:  # made once, so that later calls launch no kernels for them
            self._cotangents = [torch.ones_like(tensor) for tensor in tensors]
        return torch.autograd.grad(tensors, self._trained or (), self._cotangents, allow_unused=True)


def _compile_and_fake(captured: Captured, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    before = captured.graphs
    with _fake_cuda.sdpa_choice(_attention_of(graph), after="math"):
        private.compile_fx(graph, inputs)
    made = [new for new in captured.graphs if new.part == "forward" and not any(new is known for known in before)]

    def fake(*args: Any) -> Any:
        with captured.compiled_code():
            results = graph.forward(*args)  # the code after a graph break needs their shapes
        for forward in made:
            captured.record_call(forward, args, results)
        return results

    return fake


def _attention_of(graph: torch.fx.GraphModule) -> str:
    """Return the attention kernel to take. A GPU prefers flash, which supports only fp16 and bf16.

    Flash also takes no mask; fake_cuda_hooks.cpp checks that.
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
    if _trained(function, args, kwargs):
        return
    floating = [tensor for tensor in _tensors((tuple(args), dict(kwargs))) if tensor.is_floating_point()]
    if not floating:
        raise TypeError("grad=True needs a tensor of a floating dtype to differentiate by; there is none")
    for tensor in floating:
        tensor.requires_grad_(True)


def _trained(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    owner = getattr(function, "__self__", function)
    held = list(owner.parameters()) if isinstance(owner, torch.nn.Module) else []
    given = (*_tensors((tuple(args), dict(kwargs))), *held)
    return list({id(tensor): tensor for tensor in given if tensor.requires_grad}.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
