"""Run jax on the GPU if there is one, else on the CPU; find ptxas, so that tests can compile for an H200."""

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xlafuse.compile.environment import configure_environment, find_cuda_tools
from xlafuse.compile.gpus import gpu_present

if TYPE_CHECKING:
    from xlafuse.compile import compiler

PACK = Path(__file__).parents[2] / "compare" / "targets" / "h200" / "xla"
DATA = Path(__file__).parents[1] / "data" / "xla"
HAS_JAX = importlib.util.find_spec("jax") is not None

if "jax" not in sys.modules:
    configure_environment(deviceless=not gpu_present() and find_cuda_tools() is not None)
elif find_cuda_tools() is not None and "xla_gpu_cuda_data_dir" not in os.environ.get("XLA_FLAGS", ""):
    raise pytest.UsageError("jax was imported before its environment was set; configure it in the outermost conftest")


class _ModuleThatNeedsJax(pytest.Module):
    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(f"{self.path.name} needs jax, which is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without jax, report each file that imports it as skipped."""
    statements = ast.parse(module_path.read_text()).body
    if HAS_JAX or not any(re.match(r"(?:import|from) jax\b", ast.unparse(statement)) for statement in statements):
        return None
    return _ModuleThatNeedsJax.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def h200() -> "compiler.Target":
    """An H200 to compile for, without autotuning results; skip without jax, its CUDA plugin or ptxas."""
    jax = pytest.importorskip("jax")
    from xlafuse.compile import compiler

    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("compiling for a GPU needs the jax-cuda13-pjrt package")
    if find_cuda_tools() is None:
        pytest.skip("compiling for a GPU needs ptxas and libdevice.10.bc (in the triton package)")
    series = ".".join(jax.__version__.split(".")[:2])
    return compiler.Target((PACK / f"gpu_target_config-{series}.pbtxt").read_text())


@pytest.fixture
def data() -> Path:
    """The folder of HLO text recorded on an H200."""
    return DATA
