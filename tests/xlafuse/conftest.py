"""jax on the GPU where there is one, else on the CPU; with ptxas at hand to compile for an H200."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xlafuse.compile.environment import configure_environment, find_cuda_tools, gpu_present

HAS_JAX = importlib.util.find_spec("jax") is not None
# Reading text and graphs needs no framework, and neither do the other files; protos are read by jaxlib's definitions.
NEED_JAX = (
    "blocks", "calls", "compiler", "cost_analysis", "dump", "environment", "hlo_hostile", "hlo_proto", "hlo_source",
)
collect_ignore = [] if HAS_JAX else [f"test_{name}.py" for name in NEED_JAX]

if "jax" not in sys.modules:
    configure_environment(deviceless=not gpu_present() and find_cuda_tools() is not None)
elif find_cuda_tools() is not None and "xla_gpu_cuda_data_dir" not in os.environ.get("XLA_FLAGS", ""):
    raise pytest.UsageError(
        "jax was imported before its environment was set; configure it in the outermost conftest"
    )

if TYPE_CHECKING:
    from xlafuse.compile import compiler

PACK = Path(__file__).parents[2] / "compare" / "targets" / "h200" / "xla"
DATA = Path(__file__).parents[1] / "data" / "xla"


@pytest.fixture(scope="session")
def h200() -> "compiler.Target":
    """An H200 to compile for, nothing replayed; skips where jax, its CUDA plugin or ptxas is not installed."""
    jax = pytest.importorskip("jax")
    from xlafuse.compile import compiler

    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("compiling for a GPU needs the jax-cuda13-pjrt package")
    if find_cuda_tools() is None:
        pytest.skip("compiling for a GPU needs ptxas and libdevice.10.bc (in the triton package)")
    series = ".".join(jax.__version__.split(".")[:2])
    return compiler.Target((PACK / f"gpu_target_config-{series}.pbtxt").read_text())


@pytest.fixture
def data() -> Iterator[Path]:
    yield DATA
