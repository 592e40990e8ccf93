"""Record the kernels that a hand-written implementation launches, in order; a FusionGraph is built from them.

    with record_launches() as launches:
        out = rmsnorm.apply(inputs, eps=1e-6)["y"]
        out.backward(dy)
    launches[0].name, launches[0].grid, launches[0].artifacts.resources.registers

`record_launches(compile_only=True)` is for an absent GPU (triton_side.deviceless.for_target). It compiles every kernel
through the path of a launch, including specialisation, and runs nothing. It records Triton kernels and the CUDA C++
kernels of triton_side.cuda, but not PyTorch's own launches (a GEMM, a copy); triton_side.calls.dispatch records all.

`JITFunction.run` and `Autotuner._bench` are not public API (versions.py lists the tested series).
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from xlafuse.triton_side.calls import cuda_program, declare, effects, stages
from xlafuse.triton_side.calls.artifacts import Artifacts, Resources, check_triton, of_cuda, of_triton
from xlafuse.triton_side.calls.direct_launch import DESCRIPTORS, DirectKernel

CUDA_SCALARS = {ctypes.c_int: "i32", ctypes.c_longlong: "i64", ctypes.c_float: "fp32"}
CUDA_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32",
}


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument of a kernel.

    storage: a number within the recording; arguments with the same number share memory.
    parameter, name: the kernel's and the caller's name for it, or "". strides, offset: in elements.
    used: how many elements are read or written, if not all. A lookup reads as many as it returns.
    """

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    storage: int
    parameter: str = ""
    name: str = ""
    itemsize: int = 0
    used: int | None = None

    @property
    def bytes_used(self) -> int:
        return self.bytes if self.used is None else min(self.bytes, self.used * self.itemsize)

    @property
    def bytes(self) -> int:
        """The bytes of the view's elements in memory. Elements that a stride of 0 repeats count once."""
        sizes = (size for size, stride in zip(self.shape, self.strides, strict=True) if stride != 0 or size == 0)
        return math.prod(sizes) * self.itemsize


class Storages:
    """Numbers storages, so that tensors that share memory get the same number. It keeps no memory alive."""

    def __init__(self) -> None:
        # While a weak reference exists, PyTorch does not use the storage's address again.
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}

    def of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        return self._numbers.setdefault(storage._cdata, (len(self._numbers), StorageWeakRef(storage)))[0]

    def describe(self, tensor: torch.Tensor, position: int, parameter: str = "") -> TensorArgument:
        return TensorArgument(
            position,
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
            str(tensor.dtype).removeprefix("torch."),
            int(tensor.storage_offset()),
            self.of(tensor),
            parameter,
            declare.name_of(parameter),
            tensor.element_size(),
        )


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch.

    name: the driver's and profilers' name of the kernel (mangled for C++).
    label: the name in the source: the Python function, or the instance of the C++ template.
    source, line: where the kernel is defined.
    grid: blocks in x, y, z. block: threads in x, y, z. num_stages: Triton's launch option; 1 for CUDA C++.
    signature: Triton's type of each argument in order ("*bf16", "i32", "constexpr").
    constants: compile-time values by parameter name: constexprs, and integers that Triton specialised to 1.
    scalars: the numbers among the other arguments, by parameter name.
    parameters: the kernel's names for its arguments. A tuple's items are arguments, named "x_ptr.0" and so on.
    tensors: the arguments that are tensors.
    operations: the declared operations (triton_side.calls.declare), inside the stages that are open at the launch.
    flops: as declared; None for a kernel that declares none, or whose work depends on data.
    direct: later launches bypass Triton's launcher (triton_side.calls.direct_launch).
    """

    name: str
    label: str
    kind: Literal["triton", "cuda"]
    source: Path
    line: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    num_warps: int
    num_stages: int
    signature: tuple[str, ...]
    constants: dict[str, Any]
    scalars: dict[str, Any]
    parameters: tuple[str, ...]
    tensors: tuple[TensorArgument, ...]
    operations: tuple[declare.Computed, ...]
    flops: float | None
    _artifacts: Callable[[], Artifacts] = field(repr=False)
    direct: bool = False

    @functools.cached_property
    def artifacts(self) -> Artifacts:
        """The compiled kernel's representations and resources; the first use reads them."""
        return self._artifacts()

    @property
    def resources(self) -> Resources:
        return self.artifacts.resources

    @functools.cached_property
    def effects(self) -> effects.Effects:
        """Positions, among all arguments, of the tensors that the kernel's code reads and writes."""
        if self.kind == "cuda":
            return effects.of_ptx(self.artifacts.texts["ptx"], self.name)
        left = effects.arguments_in_ir(enumerate(self.signature))
        texts = self.artifacts.texts
        found = effects.of_ttir(texts.get("ttir", texts["ttgir"]), self.name)
        return effects.Effects(*(frozenset(left[i] for i in side) for side in (found.reads, found.writes)))

    @property
    def reads(self) -> tuple[TensorArgument, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.position in self.effects.reads)

    @property
    def writes(self) -> tuple[TensorArgument, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.position in self.effects.writes)

    def write(self, folder: Path, index: int) -> list[Path]:
        """Write all representations into `folder` as <index>_<label>.<suffix>."""
        label = re.sub(r"\W+", "_", self.label).strip("_")
        return self.artifacts.write(folder, f"{index:02d}_{label}")


@contextlib.contextmanager
def record_launches(
    compile_only: bool = False,
    *,
    storages: Storages | None = None,
    launched: Callable[[Launch], None] | None = None,
) -> Iterator[list[Launch]]:
    """Record every launch of the process within the context, from any thread, since autograd has its own.

    Stages, however, are known in one thread only. An autotuner's launches, which time its candidates, are left out.
    Recordings do not nest.

    storages: storage numbers of an earlier recording, to continue. launched: called after each launch.

    Raises (from the launch itself):
        RuntimeError: `compile_only` with an autotuned kernel of several candidates; choosing one needs the GPU.
        DoesNotFit: `compile_only`, and the GPU's shared memory is too small for the launch.
        xlafuse.triton_side.calls.artifacts.UnsupportedTriton: the installed Triton is not of a tested series.
    """
    check_triton()
    if JITFunction.run is not _run:
        raise RuntimeError("launches are being recorded already: leave the other record_launches() first")
    recorder = _Recorder(compile_only, storages or Storages(), launched)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stages.recorded_stages())
        stack.enter_context(_replaced(JITFunction, "run", recorder.run_triton))
        stack.enter_context(_replaced(Autotuner, "_bench", recorder.bench))
        stack.enter_context(cuda_program.launched_by(recorder.run_cuda))
        yield recorder.launches


class DoesNotFit(RuntimeError):
    """A launch asks for more shared memory than a block of the absent GPU can have. shared_bytes: what it asks for."""

    def __init__(self, message: str, shared_bytes: int) -> None:
        super().__init__(message)
        self.shared_bytes = shared_bytes


def _check_fits(name: str, shared_bytes: int) -> None:
    device: Any = torch.cuda.get_device_properties(0)
    most = device.shared_memory_per_block_optin
    if shared_bytes > most:
        raise DoesNotFit(
            f"{name} asks for {shared_bytes:,} bytes of shared memory a block, and a block on the {device.name} has at "
            f"most {most:,}: the launch would fail there; choose a smaller tile or fewer stages", shared_bytes,
        )


_run = JITFunction.run
_bench = Autotuner._bench


@contextlib.contextmanager
def _replaced(owner: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    # A function, unlike the bound method, becomes a method of the owner's instances.
    setattr(owner, name, lambda self, *args, **kwargs: method(self, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Recorder:
    def __init__(self, compile_only: bool, storages: Storages, launched: Callable[[Launch], None] | None) -> None:
        self.compile_only = compile_only
        self.launches: list[Launch] = []
        self._storages = storages
        self._launched = launched
        self._timing = threading.local()

    def _add(self, launch: Launch) -> None:
        self.launches.append(launch)
        if self._launched:
            self._launched(launch)

    def run_triton(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or getattr(self._timing, "active", False):
            return _run(function, *args, grid=grid, warmup=warmup, **kwargs)
        parameters = {name: value for name, value in kwargs.items() if name in function.signature.parameters}
        bound = function.signature.bind(*args, **parameters)
        bound.apply_defaults()
        blocks = tuple(grid(bound.arguments) if callable(grid) else grid)
        if self.compile_only:
            pointers = [_as_pointer(value) for value in args]
            named = {name: _as_pointer(value) for name, value in kwargs.items()}
            kernel = _run(function, *pointers, grid=blocks, warmup=True, **named)
            _check_fits(kernel.metadata.name, kernel.metadata.shared)
        else:
            kernel = _run(function, *args, grid=blocks, warmup=False, **kwargs)
        launch = self._of_triton(function, kernel, blocks, bound)
        self._add(replace(launch, direct=isinstance(function, DirectKernel) and type(grid) is tuple))
        return kernel

    def _of_triton(
        self, function: JITFunction, kernel: Any, blocks: tuple[int, ...], bound: inspect.BoundArguments
    ) -> Launch:
        source = kernel.src
        metadata = kernel.metadata
        declaration = declare.of_kernel(function)
        kinds = [source.signature[name] for name in function.arg_names]
        names, signature, values, paths = zip(
            *_without_tuples(function.arg_names, kinds, bound.arguments.values()), strict=True
        )
        arguments = dict(zip(names, values, strict=True))
        tensors = _used(declaration, self._tensors(values, names))
        constants = {
            name: source.constants[path] for name, path in zip(names, paths, strict=True) if path in source.constants
        }
        return Launch(
            name=metadata.name,
            label=function.fn.__name__,
            kind="triton",
            source=Path(inspect.getsourcefile(function.fn) or ""),
            line=function.starting_line_number,
            grid=_three(blocks),
            block=(metadata.num_warps * metadata.target.warp_size, 1, 1),
            num_warps=metadata.num_warps,
            num_stages=metadata.num_stages,
            signature=signature,
            constants=constants,
            scalars={
                name: value for name, value in arguments.items()
                if isinstance(value, (int, float)) and name not in constants
            },
            parameters=names,
            tensors=tensors,
            operations=declare.operations_of(declaration),
            flops=_flops(declaration, tensors, arguments),
            _artifacts=lambda: of_triton(kernel),
        )

    def bench(self, tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if self.compile_only:
            name = tuner.base_fn.__name__
            raise RuntimeError(f"{name} is autotuned, and choosing among its candidates needs the GPU; pass one config")
        self._timing.active = True
        try:
            return _bench(tuner, *args, **kwargs)
        finally:
            self._timing.active = False

    def run_cuda(self, request: cuda_program.LaunchRequest) -> None:
        kernel = request.kernel
        threads = request.block[0] * request.block[1] * request.block[2]
        if not self.compile_only:
            cuda_program.run(request)
        line, parameters = _cuda_definition(kernel.source, kernel.expression.partition("<")[0])
        tensors = self._tensors(request.arguments, parameters)
        declaration = declare.of_template(kernel.source.name, kernel.expression)
        self._add(
            Launch(
                name=kernel.symbol,
                label=kernel.expression,
                kind="cuda",
                source=kernel.source,
                line=line,
                grid=request.grid,
                block=request.block,
                num_warps=-(-threads // 32),
                num_stages=1,
                signature=tuple(
                    CUDA_POINTERS[a.dtype] if isinstance(a, torch.Tensor) else CUDA_SCALARS[type(a)]
                    for a in request.arguments
                ),
                constants={},
                scalars={
                    name: value.value for name, value in zip(parameters, request.arguments, strict=True)
                    if not isinstance(value, torch.Tensor)
                },
                parameters=parameters,
                tensors=tensors,
                operations=declare.operations_of(declaration),
                flops=_flops(declaration, tensors, {}),
                _artifacts=lambda: of_cuda(kernel, threads),
            )
        )

    def _tensors(self, arguments: Iterable[Any], names: Sequence[str]) -> tuple[TensorArgument, ...]:
        values = (value.base if isinstance(value, DESCRIPTORS) else value for value in arguments)
        return tuple(
            self._storages.describe(value, position, name)
            for position, (value, name) in enumerate(zip(values, names, strict=True))
            if isinstance(value, torch.Tensor)
        )


def _shapes(tensors: tuple[TensorArgument, ...]) -> declare.Shapes:
    return {tensor.parameter: tensor.shape for tensor in tensors}


def _flops(
    declaration: declare.Declaration | None, tensors: tuple[TensorArgument, ...], arguments: Mapping[str, Any]
) -> float | None:
    if declaration is None:
        return None
    values = {name: value for name, value in arguments.items() if value is not None}
    flops = declaration.flops({**values, **_shapes(tensors)})
    return None if flops is None else float(flops)


def _used(
    declaration: declare.Declaration | None, tensors: tuple[TensorArgument, ...]
) -> tuple[TensorArgument, ...]:
    """Return the tensors with the number of elements read, where the declaration says that only a part is read."""
    reads = declaration.reads if declaration else {}
    return tuple(
        replace(t, used=reads[t.parameter](_shapes(tensors))) if t.parameter in reads else t for t in tensors
    )


@functools.cache
def _cuda_definition(source: Path, template: str) -> tuple[int, tuple[str, ...]]:
    """Return the line that names a __global__ function, and its parameters' names."""
    text = source.read_text()
    heads = list(re.finditer(rf"__global__[^;{{]*?\b({template})\(([^)]*)\)", text))
    if len(heads) != 1:
        raise ValueError(f"{source.name} must define the kernel {template} once, found {len(heads)} definitions")
    line = text.count("\n", 0, heads[0].start(1)) + 1
    return line, tuple(re.findall(r"(\w+)\s*(?:,|$)", heads[0][2]))


class _Pointer:
    """A fake tensor's dtype and address alignment, for a launch that only compiles."""

    def __init__(self, tensor: FakeTensor) -> None:
        self.dtype = tensor.dtype
        # PyTorch's CUDA allocator aligns every storage to 512 bytes.
        self._address = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


def _as_pointer(value: Any) -> Any:
    if isinstance(value, DESCRIPTORS) and isinstance(value.base, FakeTensor):
        value = copy.copy(value)
        value.base = _Pointer(value.base)
    if isinstance(value, tuple):
        return tuple(map(_as_pointer, value))
    return _Pointer(value) if isinstance(value, FakeTensor) else value


def _without_tuples(
    names: Sequence[str], kinds: Iterable[Any], values: Iterable[Any], path: tuple[int, ...] = ()
) -> Iterator[tuple[str, str, Any, tuple[int, ...]]]:
    """Yield name, Triton's type, value and path of each argument, and of each item of a tuple instead of the tuple.

    The items of a tuple "x_ptr" are "x_ptr.0", "x_ptr.1" and so on.
    """
    for index, (name, kind, value) in enumerate(zip(names, kinds, values, strict=True)):
        if isinstance(kind, tuple):
            items = [f"{name}.{item}" for item in range(len(kind))]
            yield from _without_tuples(items, kind, value, (*path, index))
        else:
            yield name, kind, value, (*path, index)


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return int(x), int(y), int(z)
