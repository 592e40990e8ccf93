"""Compile CUDA C++ with NVRTC, and load and launch it with cuda.core on PyTorch's current stream.

NVRTC is called through cuda.bindings, because compiling must work without a driver and cuda.core's Program needs one
(0.3.2 to 0.6.0). Only `_cuda_core` depends on the version of cuda.core. Tested without a driver: cuda-bindings 13.0.3
with NVRTC 13.0, and 13.5.0 with NVRTC 13.4.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOURCE_FOLDER = Path(__file__).parents[1] / "cuda"
INSTALL = "pip install 'cuda-core>=0.3.2' 'cuda-bindings==13.*' 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*'"

Argument = torch.Tensor | ctypes.c_int | ctypes.c_longlong | ctypes.c_float


class CudaUnavailable(RuntimeError):
    """A part of the CUDA toolchain is missing; the message says which, and how to install it."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


@functools.cache
def header_folder() -> Path:
    """Return the folder with cuda_bf16.h: of the nvidia-cuda-runtime wheel, a CUDA toolkit, or Triton's wheel.

    The runtime wheel comes first, because pip gives it a version that matches NVRTC's.

    Raises:
        CudaUnavailable: no folder has it.
    """
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [
        *_wheel_folders("nvidia-cuda-runtime"),
        *(Path(toolkit, "include") for toolkit in toolkits if toolkit),
        *_wheel_folders("triton"),
    ]
    for place in places:
        if (place / "cuda_bf16.h").is_file():
            return place
    looked = ", ".join(map(str, places))
    raise CudaUnavailable(f"cuda_bf16.h is in none of: {looked}; install it: pip install 'nvidia-cuda-runtime==13.*'")


def _wheel_folders(distribution: str) -> Iterator[Path]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(distribution) or ():
            if file.name == "cuda_bf16.h":
                yield Path(str(file.locate())).parent


@dataclass(frozen=True, eq=False)
class Kernel:
    """One instance of a kernel template, compiled for one architecture.

    expression: the C++ name ("gelu_forward<float, 4, 2, 256>"). symbol: the mangled name that the driver and profilers
    use. options: NVRTC's options besides the architecture.
    """

    source: Path
    expression: str
    symbol: str
    arch: str
    options: tuple[str, ...]
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    @functools.cached_property
    def handle(self) -> Any:
        """cuda.core's kernel, which the driver loads at the first use."""
        return _cuda_core().ObjectCode.from_cubin(self.cubin).get_kernel(self.symbol)


@functools.cache
def compile_kernel(source: str, expression: str, arch: str, *options: str) -> Kernel:
    """Compile the instance `expression` of a template in triton_side/cuda/`source` for `arch` ("sm_90").

    options: NVRTC's, such as "--ftz=true". The process caches the result; a kernel takes 0.1 to 0.3 s.

    Raises:
        CompileError: NVRTC refused the source, the expression or an option.
        CudaUnavailable: cuda.bindings, NVRTC or the CUDA headers are missing.
    """
    path = SOURCE_FOLDER / source
    name = expression.encode()
    includes = [f"--include-path={folder}" for folder in (SOURCE_FOLDER, header_folder())]
    arguments = [o.encode() for o in (f"--gpu-architecture={arch}", "--std=c++17", *includes, *options)]
    with _nvrtc_program(path) as (call, program):
        call("AddNameExpression", name)
        try:
            call("CompileProgram", len(arguments), arguments)
        except CompileError as error:
            log = b" " * call("GetProgramLogSize")
            call("GetProgramLog", log)
            text = log.rstrip(b"\0 \n").decode(errors="replace")
            raise CompileError(f"NVRTC could not compile {expression} of {source} for {arch}:\n{text}") from error
        ptx = b" " * call("GetPTXSize")
        call("GetPTX", ptx)
        cubin = b" " * call("GetCUBINSize")
        call("GetCUBIN", cubin)
        symbol = call("GetLoweredName", name).decode()
    return Kernel(path, expression, symbol, arch, options, ptx.rstrip(b"\0").decode(), cubin)


@contextlib.contextmanager
def _nvrtc_program(path: Path) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Yield an NVRTC program of the file, and a function that calls nvrtc<name>(program, ...) and checks its status."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        _load_builtins()
        status, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, None, None)
    except (ImportError, RuntimeError) as error:  # cuda.bindings without libnvrtc raises RuntimeError
        raise CudaUnavailable(f"CUDA C++ needs cuda.bindings and NVRTC ({error}); install them: {INSTALL}") from error

    def call(name: str, *arguments: Any) -> Any:
        status, *result = getattr(nvrtc, f"nvrtc{name}")(program, *arguments)
        if int(status) != 0:
            raise CompileError(f"nvrtc{name} of {path.name}: {status.name}")
        return result[0] if result else None

    if int(status) != 0:
        raise CompileError(f"nvrtcCreateProgram of {path.name}: {status.name}")
    try:
        yield call, program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _load_builtins() -> None:
    """Load NVRTC's builtins library from NVRTC's folder.

    NVRTC searches where the library that loaded it searches. cuda.bindings searches pip's packages. jax's CUDA plugin
    loads NVRTC if it is imported first, and does not search there (jax 0.10.2, NVRTC 13.0.88).
    """
    found = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path
    for path in Path(found).parent.glob("libnvrtc-builtins.so.*") if found else ():
        ctypes.CDLL(str(path))


@functools.cache
def device_arch(device: torch.device) -> str:
    """Return the architecture of a CUDA device as NVRTC names it, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@dataclass(frozen=True)
class LaunchRequest:
    """One launch: grid in blocks, block in threads, and the kernel's arguments in order."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    device: torch.device


def launch(
    kernel: Kernel, grid: int, block: tuple[int, int], arguments: Sequence[Argument], device: torch.device
) -> None:
    """Enqueue `kernel` on PyTorch's current stream of `device`. Tensors are passed by address, numbers as ctypes."""
    _launcher(LaunchRequest(kernel, (grid, 1, 1), (*block, 1), tuple(arguments), device))


def run(request: LaunchRequest) -> None:
    """Run the kernel. `launch` calls this function unless `launched_by` has replaced it."""
    core = _cuda_core()
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in request.arguments]
    with torch.cuda.device(request.device):
        core.Device(request.device.index).set_current()
        stream = _Stream(torch.cuda.current_stream().cuda_stream)
        core.launch(stream, _launch_config(request.grid, request.block), request.kernel.handle, *values)


@functools.lru_cache(1024)
def _launch_config(grid: tuple[int, int, int], block: tuple[int, int, int]) -> Any:
    return _cuda_core().LaunchConfig(grid=grid, block=block)


@dataclass(frozen=True)
class _Stream:
    """A stream of PyTorch, with the protocol by which cuda.core accepts foreign streams."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@functools.cache
def _cuda_core() -> ModuleType:
    """Return cuda.core, or before version 0.5 cuda.core.experimental."""
    try:
        module = importlib.import_module("cuda.core")
        return module if hasattr(module, "ObjectCode") else importlib.import_module("cuda.core.experimental")
    except ImportError as error:
        raise CudaUnavailable(f"launching CUDA C++ kernels needs cuda.core ({error}); install it: {INSTALL}") from error


_launcher: Callable[[LaunchRequest], None] = run


@contextlib.contextmanager
def launched_by(launcher: Callable[[LaunchRequest], None]) -> Iterator[None]:
    """Make every `launch` of the process call `launcher` instead of `run`.

    This holds for all threads, because autograd runs backward passes in its own threads.
    """
    global _launcher
    previous, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = previous
