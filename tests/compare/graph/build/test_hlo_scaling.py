"""Large modules of the benchmark stay within bounds on time and memory that are ten times the usual need."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from xlafuse.hlo import gpu_program, proto_reader, text_reader

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[4]
BENCHMARK = ROOT / "tools" / "benchmarks" / "hlo_scaling.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hlo_scaling", BENCHMARK)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kernels(module: text_reader.Module) -> list[gpu_program.Kernel]:
    assert not module.unparsed
    program = gpu_program.program(module)
    assert not program.unresolved and len(program.outputs) == 1
    return [launch.kernel for launch in program.launches]


def test_both_forms_hold_the_same_layers(benchmark: ModuleType) -> None:
    pytest.importorskip("jaxlib", reason="protos are read by the definitions in jaxlib")
    text = _kernels(text_reader.parse(benchmark.layers_as_text(1000).decode()))
    assert len(text) > 80 and len({kernel.name for kernel in text}) == len(text)
    proto_reader.message_type("xla.HloProto")
    assert _kernels(proto_reader.parse_proto(benchmark.layers_as_proto(1000))) == text


DRIVER = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_twenty_thousand_instructions(benchmark: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "layers.txt"
    path.write_bytes(benchmark.layers_as_text(20_000))
    command = [sys.executable, "-c", DRIVER, str(BENCHMARK), "--measure", str(path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
