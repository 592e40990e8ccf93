"""Launch a Triton or Gluon kernel with little host time, once Triton has compiled and launched it for such arguments.

    kernel = launched_directly(kernel)
    kernel[(programs,)](x, y, x.numel(), eps, BLOCK=1024, num_warps=4)

Triton binds, specialises and formats the arguments of every launch to find the compiled kernel. Here a dictionary finds
it, by what Triton's choice depends on: tensors by dtype and alignment, floats by type, everything else by value. An
integer's value distinguishes more than Triton does, so the first launch with another integer is Triton's own.

Triton launches in its own way, in each of these cases:
- the first launch for such arguments;
- an argument that is no tensor on a GPU, descriptor of one, number, string, dtype, None or tuple of these;
- a positional float for a constexpr, a keyword for another parameter, or a grid that is no tuple;
- within `by_triton`;
- a hook that wants to see launches, and `record_launches`, which replaces `JITFunction.run`;
- the interpreter, and a series of Triton that is not in versions.py.

These names are not public API:
- `JITFunction.run`, `params`, `pre_run_hooks` and `used_global_vals`, `GluonJITFunction`;
- `triton.runtime.driver.active`;
- `CompiledKernel.run`, `function` and `packed_metadata`;
- `CudaLauncher` and the arguments of its `launch`, which differ between Triton 3.6 and 3.7;
- `torch._C._cuda_getDevice`, which `torch.cuda.current_device` calls after three Python functions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from xlafuse.triton_side.versions import TRITON

_Kernel = TypeVar("_Kernel")

MOST_BOUND = 1024  # per kernel; an integer that differs in each launch would otherwise fill memory

SERIES = ".".join(triton.__version__.split(".")[:2])
DESCRIPTORS = (TensorDescriptor, GluonDescriptor)  # of a tensor, made on the host; an argument that stands for it
SCALARS = (int, float, bool, str, type(None), triton.language.dtype)
ALIGNMENT = 16  # bytes; Triton compiles other code for a tensor that is not aligned to them

_runtime, _compilation = knobs.runtime, knobs.compilation
_run = JITFunction.run
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class _Bound(NamedTuple):
    """A compiled kernel on one device, and how to launch it.

    launch: takes the grid, the stream, `leading` and the kernel's arguments, which are one tuple if `packs`.
    stream_of: returns a device's current stream. left: the arguments after the positional ones; all are constexprs.
    global_values: the globals that the kernel uses, as (scope, name, value).
    """

    compiled: Any
    launch: Callable[..., None]
    leading: tuple[Any, ...]
    packs: bool
    stream_of: Callable[[int], int]
    left: tuple[Any, ...]
    global_values: tuple[tuple[dict[str, Any], str, Any], ...]


class DirectKernel(JITFunction):
    """A kernel whose `kernel[grid](...)` avoids most of Triton's work where it can."""

    bound: dict[Hashable, _Bound]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(_launch, self, grid) if type(grid) is tuple else super().__getitem__(grid)


class DirectGluonKernel(DirectKernel, GluonJITFunction):
    """The same of a Gluon kernel."""


_DIRECT = {JITFunction: DirectKernel, GluonJITFunction: DirectGluonKernel}


_by_triton = False


@contextmanager
def by_triton() -> Iterator[None]:
    """Let Triton launch all kernels itself, for a measurement beside that of direct launches."""
    global _by_triton
    _by_triton = True
    try:
        yield
    finally:
        _by_triton = False


def launch_directly_in(modules: Iterable[ModuleType]) -> None:
    """Make the kernels among the modules' global names DirectKernels."""
    for module in modules:
        for value in list(vars(module).values()):
            launched_directly(value)


def launched_directly(kernel: _Kernel) -> _Kernel:
    """Return `kernel`, made a DirectKernel if it is Triton's own kind of compiled kernel."""
    direct = _DIRECT.get(type(kernel))
    if direct and SERIES in TRITON:
        kernel.__class__ = direct
        kernel.bound = {}  # type: ignore[attr-defined]
    return kernel


def _launch(kernel: DirectKernel, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> Any:
    if _is_observed(kernel):
        return kernel.run(*args, grid=grid, warmup=False, **constants)
    known, passed = _describe(args)
    device = current_device()
    key = (*known, device, _runtime.debug, _compilation.instrumentation_mode, *constants, *constants.values())
    try:
        bound = kernel.bound.get(key)
    except TypeError:  # an argument has no hash
        return kernel.run(*args, grid=grid, warmup=False, **constants)
    if bound is None or (bound.global_values and _changed(bound.global_values)):
        compiled = kernel.run(*args, grid=grid, warmup=False, **constants)
        _bind(kernel, key, compiled, args, constants)
        return compiled
    compiled, launch, leading, packs, stream_of, left, _ = bound
    x, y, z = (*grid, 1, 1)[:3]
    if packs:
        launch(x, y, z, stream_of(device), *leading, (*passed, *left))
    else:
        launch(x, y, z, stream_of(device), *leading, *passed, *left)
    return compiled


def _is_observed(kernel: DirectKernel) -> bool:
    """Return whether something must see each launch, or changes how Triton compiles."""
    try:
        return _by_triton or bool(
            _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls or kernel.pre_run_hooks
            or _runtime.add_stages_inspection_hook or JITFunction.run is not _run
        )
    except AttributeError:  # a hook instead of Triton's chain of hooks
        return True


def _describe(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """Return what Triton's choice of the compiled kernel depends on, and the arguments with addresses for tensors."""
    known, passed = list(args), list(args)
    bits = 0  # of all addresses, or-ed
    for index, value in enumerate(args):
        kind = type(value)
        if kind is int or value is None:
            continue
        if kind is Tensor or kind is Parameter:
            passed[index] = address = value.data_ptr()
            bits |= address
            known[index] = value.dtype
            # Triton rejects a tensor in the host's memory, but it does not check an address.
            known.append(value.is_cuda)
        elif kind is float:
            known[index] = float
        elif kind is tuple:
            inside, items = _describe(value)
            known[index], passed[index] = tuple(inside), tuple(items)
        elif kind in DESCRIPTORS:
            base = value.base
            known[index] = kind, base.dtype, base.is_cuda, *value.block_shape, getattr(value, "layout", None)
            known.append(value.padding)
        else:
            known[index] = kind, value  # the kind, because True equals 1
    if bits % ALIGNMENT:
        known.append(tuple(_is_tensor(value) and value.data_ptr() % ALIGNMENT == 0 for value in args))
    return known, passed


def _is_tensor(value: Any) -> bool:
    return type(value) in (Tensor, Parameter)


def _changed(global_values: tuple[tuple[dict[str, Any], str, Any], ...]) -> bool:
    """Return whether a global of the kernel is another than at its compilation. Triton raises if its value differs."""
    for scope, name, value in global_values:
        if scope.get(name) is not value:
            return True
    return False


def _bind(
    kernel: DirectKernel, key: Hashable, compiled: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Remember the compiled kernel for launches with the same key, if the key distinguishes all that matters."""
    given, left = kernel.params[: len(args)], kernel.params[len(args) :]
    if (
        not isinstance(compiled, CompiledKernel)
        or not all(map(_is_distinguished, given, args))
        or not all(parameter.is_constexpr for parameter in left)
    ):
        return
    if len(kernel.bound) >= MOST_BOUND:
        kernel.bound.clear()
    kernel.bound[key] = _Bound(
        compiled, *_launcher(compiled), driver.active.get_current_stream,
        tuple(constants.get(parameter.name, parameter.default) for parameter in left),
        tuple((scope, name, scope.get(name)) for (name, _), (_, scope) in kernel.used_global_vals.items()),
    )


def _is_distinguished(parameter: Any, value: Any) -> bool:
    if _is_tensor(value):
        return is_on_gpu(value)
    if type(value) in DESCRIPTORS:
        return is_on_gpu(value.base)
    if type(value) is tuple:
        return not parameter.is_constexpr and all(_is_distinguished(parameter, item) for item in value)
    return type(value) in SCALARS and not (parameter.is_constexpr and type(value) is float)


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _launcher(compiled: CompiledKernel) -> tuple[Callable[..., None], tuple[Any, ...], bool]:
    """Return `launch`, `leading` and `packs` of _Bound, with Triton's C function if a launch needs nothing else."""
    from triton.backends.nvidia.driver import CudaLauncher  # not imported before a kernel of a tested series needs it

    run, metadata, no_hooks = compiled.run, compiled.packed_metadata, (None, None, None)
    if (
        not isinstance(run, CudaLauncher) or run.global_scratch_size or run.profile_scratch_size
        or not isinstance(run.launch, BuiltinFunctionType)  # a Python function, which encodes tensor descriptors
    ):
        return run, (compiled.function, metadata, *no_hooks), False
    leading, no_scratch = (compiled.function, run.launch_cooperative_grid, run.launch_pdl), (None, None)
    if SERIES == "3.6":
        return run.launch, (*leading, *no_scratch, metadata, *no_hooks), False
    return run.launch, (*leading, metadata, *no_hooks, *no_scratch, run.arg_annotations, run.kernel_signature), True
