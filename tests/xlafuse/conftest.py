"""jax on the GPU where there is one, else on the CPU; with ptxas at hand to compile for an H200."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xlafuse.environment import configure_environment, find_cuda_tools, gpu_present

if "jax" not in sys.modules:
    configure_environment(deviceless=not gpu_present() and find_cuda_tools() is not None)
elif find_cuda_tools() is not None and "xla_gpu_cuda_data_dir" not in os.environ.get("XLA_FLAGS", ""):
    raise pytest.UsageError(
        "jax was imported before its environment was set; configure it in the outermost conftest"
    )

import jax  # noqa: E402

from xlafuse import compiler  # noqa: E402

PACK = Path(__file__).parents[2] / "compare" / "targets" / "h200" / "xla"
DATA = Path(__file__).parents[1] / "data" / "xla"


@pytest.fixture(scope="session")
def h200() -> compiler.Target:
    """An H200 to compile for, nothing replayed; skips where jax's CUDA plugin or ptxas is not installed."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("compiling for a GPU needs the jax-cuda13-pjrt package")
    if find_cuda_tools() is None:
        pytest.skip("compiling for a GPU needs ptxas and libdevice.10.bc (in the triton package)")
    series = ".".join(jax.__version__.split(".")[:2])
    return compiler.Target((PACK / f"gpu_target_config-{series}.pbtxt").read_text())


@pytest.fixture
def data() -> Iterator[Path]:
    yield DATA
