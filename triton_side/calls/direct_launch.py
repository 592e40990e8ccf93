"""Launch a @triton.jit kernel with little host time, once Triton has compiled and launched it for such arguments.

    kernel = launched_directly(kernel)
    kernel[(programs,)](x, y, x.numel(), eps, BLOCK=1024, num_warps=4)

Triton binds, specialises and formats the arguments of every launch to find the compiled kernel. Here a dictionary
finds it, by facts that Triton's choice depends on. Scalars count by value, except that floats count by type, because
Triton compiles one kernel for all of them. A dictionary needs no specialisation of an integer, so a miss costs one
ordinary launch. The compiled kernel's own launcher then takes the arguments, with tensors as addresses.

Triton launches in its own way, in each of these cases:
- the first launch for such arguments, or an argument that is no tensor, number, string, dtype, None or tuple of these;
- a positional float for a constexpr, a keyword for another parameter, or a grid that is a function;
- a hook that wants to see launches, and `record_launches`, which replaces `JITFunction.run`;
- the interpreter, and a Triton that lacks a name below.

These names are not public API (versions.py lists the tested series): `JITFunction.run`, `params`, `pre_run_hooks` and
`used_global_vals`; `GluonJITFunction`; `CompiledKernel.run`, `function` and `packed_metadata`; `triton.runtime.driver.active`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_Kernel = TypeVar("_Kernel")

MOST_BOUND = 1024  # per kernel; an integer that differs in each launch would otherwise fill memory

DESCRIPTORS = (TensorDescriptor, GluonDescriptor)  # of a tensor, made on the host; an argument that stands for it
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_SCALARS = frozenset({int, float, bool, str, type(None), triton.language.dtype})
_run = JITFunction.run


class _Bound(NamedTuple):
    """A compiled kernel on one device, and the arguments after the positional ones, which are constexprs."""

    compiled: CompiledKernel
    run: Callable[..., None]
    function: int
    metadata: tuple[int, ...]
    constants: tuple[Any, ...]
    global_values: tuple[tuple[dict[str, Any], str, Any], ...]


class DirectKernel(JITFunction):
    """A kernel whose `kernel[grid](...)` avoids most of Triton's work where it can."""

    bound: dict[Hashable, _Bound]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(_launch, self, grid)


class DirectGluonKernel(DirectKernel, GluonJITFunction):
    """The same of a Gluon kernel."""


_DIRECT = {JITFunction: DirectKernel, GluonJITFunction: DirectGluonKernel}


def launched_directly(kernel: _Kernel) -> _Kernel:
    """Return `kernel`, made a DirectKernel if it is Triton's own kind of compiled kernel."""
    if direct := _DIRECT.get(type(kernel)):
        kernel.__class__ = direct
        kernel.bound = {}  # type: ignore[attr-defined]
    return kernel


def _launch(kernel: DirectKernel, grid: Any, /, *args: Any, **constants: Any) -> Any:
    if _is_observed(kernel) or callable(grid):
        return kernel.run(*args, grid=grid, warmup=False, **constants)
    active = driver.active
    device = active.get_current_device()
    known = [device, knobs.runtime.debug, knobs.compilation.instrumentation_mode, *constants, *constants.values()]
    passed = _pass(args, known)
    key = tuple(known)
    try:
        bound = kernel.bound.get(key)
    except TypeError:  # an argument has no hash
        return kernel.run(*args, grid=grid, warmup=False, **constants)
    if bound is None or _changed(bound):
        compiled = kernel.run(*args, grid=grid, warmup=False, **constants)
        _bind(kernel, key, compiled, args, constants)
        return compiled
    x, y, z = (*grid, 1, 1)[:3]
    stream = active.get_current_stream(device)
    bound.run(x, y, z, stream, bound.function, bound.metadata, None, None, None, *passed, *bound.constants)
    return bound.compiled


def _pass(args: tuple[Any, ...], known: list[Any]) -> list[Any]:
    """Return the arguments with addresses for tensors, and add to `known` what Triton's choice depends on."""
    passed: list[Any] = []
    for value in args:
        kind = type(value)
        if kind in _TENSORS:
            address = value.data_ptr()
            # Triton rejects a tensor in the host's memory, but it does not check an address.
            known += (value.dtype, value.is_cuda, address % 16 == 0)
            passed.append(address)
        elif kind in DESCRIPTORS:
            known += (value.base.dtype, value.base.is_cuda, *value.block_shape, getattr(value, "layout", None))
            known.append(value.padding)
            passed.append(value)
        elif kind is tuple:
            known.append(len(value))
            passed.append(tuple(_pass(value, known)))
        else:
            known += (kind, None if kind is float else value)
            passed.append(value)
    return passed


def _is_observed(kernel: DirectKernel) -> bool:
    """Return whether something must see each launch, or changes how Triton compiles."""
    runtime = knobs.runtime
    try:
        hooks = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or kernel.pre_run_hooks
        return bool(hooks) or runtime.add_stages_inspection_hook is not None or JITFunction.run is not _run
    except AttributeError:  # a hook instead of Triton's chain of hooks, or another Triton
        return True


def _changed(bound: _Bound) -> bool:
    """Return whether a global constant of the kernel has another value than at its compilation; Triton then raises."""
    for scope, name, value in bound.global_values:
        if scope.get(name) is not value:
            return True
    return False


def _bind(
    kernel: DirectKernel, key: Hashable, compiled: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Remember the compiled kernel for launches with the same key, if the key distinguishes all that matters."""
    try:
        given, left = kernel.params[: len(args)], kernel.params[len(args) :]
        if (
            not isinstance(compiled, CompiledKernel)
            or not all(map(_is_distinguished, given, args))
            or not all(parameter.is_constexpr for parameter in left)
        ):
            return
        bound = _Bound(
            compiled, compiled.run, compiled.function, compiled.packed_metadata,
            tuple(constants.get(parameter.name, parameter.default) for parameter in left),
            tuple((scope, name, scope.get(name)) for (name, _), (_, scope) in kernel.used_global_vals.items()),
        )
    except AttributeError:  # another Triton
        return
    if len(kernel.bound) >= MOST_BOUND:
        kernel.bound.clear()
    kernel.bound[key] = bound


def _is_distinguished(parameter: Any, value: Any) -> bool:
    if type(value) in _TENSORS:
        return is_on_gpu(value)
    if type(value) in DESCRIPTORS:
        return is_on_gpu(value.base)
    if type(value) is tuple:
        return not parameter.is_constexpr and all(_is_distinguished(parameter, item) for item in value)
    return type(value) in _SCALARS and not (parameter.is_constexpr and type(value) is float)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda
