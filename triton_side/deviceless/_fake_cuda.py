"""Pretend, for the rest of this process, that a CUDA GPU is present.

TorchInductor and Triton need a GPU's properties to generate its code, but not the GPU. `activate` supplies them.
libtorch gets a CUDA device that does nothing (fake_cuda_hooks.cpp), `torch.cuda` answers from the given properties, and
Triton's active driver names the target. Tensors on the device must be fake (`torch._subclasses.FakeTensorMode`);
nothing can run. It cannot be undone, so use a separate process.

The builds of torch in versions.py were tested on a machine without a GPU or a driver: 2.11.0 with triton 3.6.0, the
others with 3.7.1. A CUDA build needs the C++ part too: its own hooks call the driver as soon as autograd handles a CUDA
tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xlafuse.triton_side.versions import TORCH_BUILDS

HOOKS_SOURCE = Path(__file__).with_name("fake_cuda_hooks.cpp")
REQUIRED_PROPERTIES = (
    "name", "major", "minor", "multi_processor_count", "total_memory", "warp_size", "regs_per_multiprocessor",
    "max_threads_per_multi_processor", "max_threads_per_block", "L2_cache_size", "shared_memory_per_block",
    "shared_memory_per_block_optin", "shared_memory_per_multiprocessor",
)

# at::SDPBackend
SDPA_BACKENDS = {None: -1, "math": 0, "flash": 1, "efficient": 2, "cudnn": 3}

_active: types.SimpleNamespace | None = None
_hooks: ctypes.CDLL | None = None


class Unsupported(RuntimeError):
    """This installation cannot pretend to have a GPU; the message says what is needed."""


def active_properties() -> types.SimpleNamespace:
    """Return the properties of the GPU that this process pretends to have. Raises RuntimeError before `activate`."""
    if _active is None:
        raise RuntimeError(
            "no fake GPU in this process: call xlafuse.triton_side.deviceless.for_target.activate(properties) before "
            "importing torch"
        )
    return _active


def active() -> bool:
    """Return whether this process pretends to have a GPU."""
    return _active is not None


@contextlib.contextmanager
def sdpa_choice(backend: str | None, *, after: str | None = None) -> Iterator[None]:
    """Make scaled_dot_product_attention on the fake GPU pick `backend` inside, and `after` afterwards.

    Both are keys of SDPA_BACKENDS. With None, only a caller that enables a single backend gets an answer.
    """
    active_properties()
    assert _hooks is not None
    if backend not in SDPA_BACKENDS:
        raise ValueError(f"no attention backend {backend!r}: use one of {', '.join(map(repr, SDPA_BACKENDS))}")
    _hooks.record_sdpa_choice(ctypes.c_int64(SDPA_BACKENDS[backend]))
    try:
        yield
    finally:
        _hooks.record_sdpa_choice(ctypes.c_int64(SDPA_BACKENDS[after]))


def activate(properties: Mapping[str, Any], cache_folder: str | os.PathLike[str] | None = None) -> None:
    """Pretend that the GPU of `properties` is device cuda:0 of this process.

    properties: the attributes of `torch.cuda.get_device_properties` on that GPU.
    cache_folder: where the first use builds the C++ part with g++, in about 10 s; by default xlafuse/fake_cuda in
        $XDG_CACHE_HOME or ~/.cache.

    Raises:
        RuntimeError: torch is already imported, a GPU is already activated, or TRITON_INTERPRET=1 is set.
        ValueError: a property that code generation needs is missing.
        Unsupported: this build of torch is not a tested one, or there is no g++.
    """
    global _active, _hooks
    if _active is not None:
        raise RuntimeError(f"this process already pretends to have {_active.name}: use a new process for another GPU")
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported: activate the fake GPU first, in a fresh process")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 is set: Triton would interpret kernels instead of compiling; unset it")
    missing = [name for name in REQUIRED_PROPERTIES if name not in properties]
    if missing:
        raise ValueError(
            f"properties of {properties.get('name', 'the GPU')} lack {', '.join(missing)}: record them on that GPU"
        )
    torch_folder, build = _installed_torch()
    if build not in TORCH_BUILDS:
        raise Unsupported(f"compiling for an absent GPU needs {_known()}; found torch {_describe(*build)}")
    device = types.SimpleNamespace(**{"is_integrated": 0, "gcnArchName": "", **properties})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides a real GPU
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    _hooks = _install_hooks(torch_folder, _build_hooks(torch_folder, build, cache_folder))
    _patch_torch(device)
    _use_cudnn_for_recurrent_layers()
    _fake_state_of_optimizers()
    _patch_triton(device)
    _active = device


def _installed_torch() -> tuple[Path, tuple[str, str | None]]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unsupported(f"compiling for an absent GPU needs {_known()}; torch is not installed")
    folder = Path(spec.origin).parent
    version = runpy.run_path(str(folder / "version.py"))
    return folder, (str(version["__version__"]).split("+")[0], version["cuda"])


def _describe(release: str, cuda: str | None) -> str:
    return f"{release} ({f'CUDA {cuda} build' if cuda else 'CPU build'})"


def _known() -> str:
    return "torch " + " or ".join(_describe(*build) for build in TORCH_BUILDS)


def _build_hooks(
    torch_folder: Path, build: tuple[str, str | None], cache_folder: str | os.PathLike[str] | None
) -> Path:
    source = HOOKS_SOURCE.read_bytes()
    key = hashlib.sha256(source + str(torch_folder).encode()).hexdigest()[:12]  # the path is in the library's rpath
    if cache_folder is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xlafuse" / "fake_cuda"
    else:
        cache = Path(cache_folder)
    library = cache / f"hooks-torch{build[0]}-{build[1] or 'cpu'}-{key}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unsupported("compiling for an absent GPU needs g++ to build fake_cuda_hooks.cpp once; none is on PATH")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / "hooks.so"
        lib = torch_folder / "lib"
        command = [
            compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(HOOKS_SOURCE),
            "-o", str(built), f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unsupported(
                f"g++ could not build {HOOKS_SOURCE.name} for torch {_describe(*build)}:\n{done.stderr[-2000:]}"
            )
        os.replace(built, library)  # atomic, so no process loads half a library
    return library


def _install_hooks(torch_folder: Path, library: Path) -> ctypes.CDLL:
    # `import torch` calls the hooks, so they must be installed before it. libtorch_cuda's guard would replace ours, so
    # that library is loaded first.
    cuda = torch_folder / "lib" / "libtorch_cuda.so"
    if cuda.exists():
        ctypes.CDLL(str(cuda), mode=ctypes.RTLD_GLOBAL)
    hooks = ctypes.CDLL(str(library))
    hooks.install_fake_cuda()
    return hooks


def _patch_torch(device: types.SimpleNamespace) -> None:
    import torch

    capability = (device.major, device.minor)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda _=None: device,
        "get_device_capability": lambda _=None: capability,
        "get_device_name": lambda _=None: device.name,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "is_tf32_supported": lambda: capability >= (8, 0),
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda _=None: (device.total_memory, device.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # Imported after the assignments: Dynamo's device interface keeps torch.cuda's functions as of its import.
    import torch._dynamo.device_interface as device_interface
    from torch._subclasses import fake_tensor

    torch._C._cuda_getCurrentRawStream = lambda device: 0
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"  # Inductor compares it with 12.x before it uses a feature
    # If an accelerator is available, Dynamo tracks real streams.
    torch.accelerator.is_available = lambda: False
    # Inductor's compile workers get these from their parent process.
    device_interface.caching_worker_device_properties["cuda"] = [device]
    device_interface.caching_worker_current_devices["cuda"] = 0
    # Otherwise fake tensors would use the device to start its context, and for constants.
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment,method-assign]
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]


def _fake_state_of_optimizers() -> None:
    """Let optimizers make fake state for fake parameters. Dynamo calls their `_init_group` outside the fake mode."""
    import torch
    from torch._subclasses import FakeTensor

    def with_fake_state(make: Any) -> Any:
        @functools.wraps(make)
        def init_group(optimizer: Any, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            fake = next((p for p in group["params"] if isinstance(p, FakeTensor)), None)
            with contextlib.nullcontext() if fake is None else fake.fake_mode:
                return make(optimizer, group, *args, **kwargs)

        return init_group

    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and "_init_group" in vars(kind):
            kind._init_group = with_fake_state(kind._init_group)  # type: ignore[attr-defined]


_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
_library: Any = None  # while it exists, its operations are registered


def _use_cudnn_for_recurrent_layers() -> None:
    """Make LSTM, GRU and RNN one call of cuDNN, as a GPU does. A CPU build would run them cell by cell."""
    global _library
    import torch

    _library = torch.library.Library("aten", "IMPL")

    def calling(name: str, mode: int) -> Any:
        def layer(
            x: Any, state: Any, weights: Any, has_biases: bool, layers: int, dropout: float, train: bool,
            bidirectional: bool, batch_first: bool,
        ) -> Any:
            hx, cx = state if name == "lstm" else (state, None)
            hidden = (hx if cx is None else cx).shape[2]
            projected = hx.shape[2] if hx.shape[2] != hidden else 0
            y, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
                x, weights, 4 if has_biases else 2, None, hx, cx, mode, hidden, projected, layers, batch_first, dropout,
                train, bidirectional, [], None,
            )
            return (y, hy, cy) if name == "lstm" else (y, hy)

        return layer

    for name, mode in _CUDNN_MODES.items():
        for key in ("CUDA", "AutogradCUDA"):
            _library.impl(f"{name}.input", torch.compiler.disable(calling(name, mode)), key)


def _patch_triton(device: types.SimpleNamespace) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class FakeDriver:
        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", device.major * 10 + device.minor, device.warp_size)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, index: int) -> None:
            pass

        def get_current_stream(self, index: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

    driver.set_active(FakeDriver())
