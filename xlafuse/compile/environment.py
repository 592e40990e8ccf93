"""Settings of the process that XLA reads once, before jax is imported: CUDA tools, platform, memory, recording.

Options that XLA accepts for each compile are passed there (see compiler.py).
"""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from .gpus import gpu_present

CONSTANT_BYTES = 4096  # smaller constants are tables, not weights
CPU_THREADS = 8  # at least

# Without these, libtpu asks the cloud's metadata server for its TPU, warns, writes logs to /tmp/tpu_logs, and lets only
# one process of a machine load it.
NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
_PTXAS, _LIBDEVICE = Path("bin/ptxas"), Path("nvvm/libdevice/libdevice.10.bc")


def configure_environment(
    *, deviceless: bool = False, tpu: bool = False, record_autotune_to: Path | None = None,
    reuse_autotune_from: Path | None = None, constants_as_inputs: bool = False,
) -> None:
    """Set the environment of this process for XLA. Call it before anything imports jax.

    deviceless: code will be compiled for a `Target`; a GPU of this machine stays unused.
    tpu: the target is a TPU, which needs libtpu but no CUDA tools.
    record_autotune_to: a `.textproto` file (XLA writes text only to such names). After every compile XLA overwrites it
        with all autotuning results of this process. Needs a GPU. Give each process a file and merge the files with
        `autotune.merge_results`; `compiler.Target` replays them.
    reuse_autotune_from: results that this very device recorded with this jax version. XLA does not tune again what they
        contain.
    constants_as_inputs: arrays of more than `CONSTANT_BYTES` that a function closes over become parameters of the
        compiled module. As constants they would be printed in full, which takes many times their size in memory.

    Changes in the environment:

    - XLA_FLAGS: flags that are already set stay and win.
    - JAX_PLATFORMS=cpu without a GPU, because jax's CUDA plugin would print tracebacks.
    - NPROC, XLA's number of threads, without a GPU and where it is not set.
    - GPU memory preallocation is off.
    - For a TPU target, libtpu is told not to look for a TPU of this machine, and not to write logs.
    - jax's persistent compilation cache is off, because a cache hit writes no dump.

    Raises RuntimeError if jax is already imported, or if a deviceless process finds no ptxas and libdevice; ValueError
    if record_autotune_to has another suffix.
    """
    if "jax" in sys.modules:
        raise RuntimeError(
            "configure_environment must run before jax is imported, for XLA reads its flags once; "
            "jax is already imported. Call it first in the process, or compile in a subprocess"
        )
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if constants_as_inputs:  # jax reads the first one while it is imported
        os.environ["JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS"] = "true"
        os.environ["JAX_EMBEDDED_CONSTANTS_MAX_BYTES"] = str(CONSTANT_BYTES)
    if deviceless or not gpu_present():
        os.environ["JAX_PLATFORMS"] = "cpu"
        # XLA reads its number of threads from NPROC. In Pallas' interpreter, each warpgroup that waits at a barrier
        # holds one; without a free one the interpreter hangs.
        os.environ.setdefault("NPROC", str(max(CPU_THREADS, os.cpu_count() or 1)))
    if deviceless:
        # A replay may miss, and XLA then logs the whole body of each such instruction as an error.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if tpu:
        for name, value in NO_TPU_HERE.items():
            os.environ.setdefault(name, value)
    if record_autotune_to is not None:
        if record_autotune_to.suffix != ".textproto":
            raise ValueError(f"autotuning results are recorded to a .textproto file, got {record_autotune_to}")
        record_autotune_to.parent.mkdir(parents=True, exist_ok=True)
        _add_flag("xla_gpu_dump_autotune_results_to", str(record_autotune_to.resolve()))
    if reuse_autotune_from is not None:
        _add_flag("xla_gpu_load_autotune_results_from", str(reuse_autotune_from.resolve()))
    if "--xla_gpu_cuda_data_dir=" not in os.environ.get("XLA_FLAGS", ""):
        tools = find_cuda_tools()
        if tools is not None:
            _add_flag("xla_gpu_cuda_data_dir", str(_assemble(*tools)))
        elif deviceless and not tpu:
            raise RuntimeError(
                "compiling for a GPU needs CUDA's ptxas and libdevice.10.bc; neither the nvidia wheels, "
                "the triton wheel nor CUDA_HOME has both. Install the triton package, or set "
                "XLA_FLAGS=--xla_gpu_cuda_data_dir=DIR"
            )


def find_cuda_tools() -> tuple[Path, Path] | None:
    """Return (ptxas, libdevice.10.bc) of the nvidia wheels, the triton wheel or CUDA_HOME, the first that has both."""
    candidates = []
    for root in _package_folders("nvidia"):
        candidates += [
            (toolkit / _PTXAS, toolkit / _LIBDEVICE) for toolkit in (root / "cu13", root / "cuda_nvcc")
        ]
    for root in _package_folders("triton"):
        wheel = root / "backends" / "nvidia"
        candidates.append((wheel / "bin" / "ptxas", wheel / "lib" / "libdevice.10.bc"))
    if home := os.environ.get("CUDA_HOME"):
        candidates.append((Path(home) / _PTXAS, Path(home) / _LIBDEVICE))
    return next((pair for pair in candidates if pair[0].is_file() and pair[1].is_file()), None)


def _package_folders(package: str) -> list[Path]:
    """Return the folders of a package without importing it."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def _assemble(ptxas: Path, libdevice: Path) -> Path:
    """Create a folder laid out like a CUDA toolkit, as XLA requires; it is removed when the process exits.

    A killed process leaves it. A run names the folder XLAFUSE_SCRATCH, and removes what its killed workers leave there.
    """
    folder = Path(tempfile.mkdtemp(prefix="xlafuse-cuda-", dir=os.environ.get("XLAFUSE_SCRATCH")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for link, file in ((_PTXAS, ptxas), (_LIBDEVICE, libdevice)):
        (folder / link).parent.mkdir(parents=True)
        (folder / link).symlink_to(file)
    return folder


def _add_flag(name: str, value: str) -> None:
    # The last occurrence of a flag wins, so ours come first and the user's win.
    os.environ["XLA_FLAGS"] = f"--{name}={value} {os.environ.get('XLA_FLAGS', '')}".strip()
