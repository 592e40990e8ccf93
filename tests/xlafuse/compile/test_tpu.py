"""Compiles for a TPU on a machine without one, by libtpu."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from xlafuse.blocks import softmax
from xlafuse.compare import targets
from xlafuse.compare.graph import store
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.record.run_folder import read_records
from xlafuse.compile import _jax_private, compiler, directions, environment
from xlafuse.dumps import artifacts, dump_folder
from xlafuse.hlo.gpu_program import parse, program
from xlafuse.hlo.platform import platform_of
from xlafuse.reasons.pass_changes import read_pass_changes

V5E = compiler.Target("v5e:1x1", platform="tpu")
ROWS = {"x": jax.ShapeDtypeStruct((300, 1000), jnp.bfloat16)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[compiler.Compilation, Path]:
    """Softmax for a v5e, and the folder of its artifacts."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("compiling for a TPU needs libtpu")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.NO_TPU_HERE.items():
            if name not in os.environ:
                patched.setenv(name, value)
        folder = tmp_path_factory.mktemp("tpu")
        return compiler.compile(directions.forward(softmax.apply, {}), (ROWS,), target=V5E, dump_to=folder), folder


def test_softmax_is_compiled_for_a_tpu(compiled: tuple[compiler.Compilation, Path]) -> None:
    softmax, _ = compiled
    module = parse(softmax.hlo_text)
    assert platform_of(module) == "tpu"
    assert not softmax.unparsed and softmax.executable is None
    found = program(module)
    assert [(buffer.padding, buffer.bytes) for buffer in found.buffers if buffer.role == "input"] == [
        (304 * 1024 * 2 - 300 * 1000 * 2, 304 * 1024 * 2)
    ]
    stages = {op.stage for launch in found.launches for op in launch.source_ops}
    assert {"max", "exp", "sum", "divide"} <= stages
    assert set(softmax.autotuning.values()) == {"compiled"}  # XLA for TPUs does not autotune


def test_its_artifacts_show_the_fusion_pass(compiled: tuple[compiler.Compilation, Path]) -> None:
    _, folder = compiled
    assert {"hlo_before", "hlo", "hlo_proto", "buffer_assignment"} <= artifacts.collect_artifacts(folder).keys()
    changes = read_pass_changes(dump_folder.single_module(folder))
    assert any(change.last == "tpu_fusion" and change.fusions for change in changes)


def test_without_libtpu_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(RuntimeError, match=r'pip install "jax\[tpu\]=='):
        _jax_private.target_devices.__wrapped__("v5e:1x1", 1, "tpu")


def test_a_tpu_has_no_choices_to_replay() -> None:
    with pytest.raises(ValueError, match="one chip without autotuning results"):
        compiler.Target("v5e:1x1", products="triton", platform="tpu")


def test_a_run_for_a_tpu_compiles_xlas_programs_and_skips_the_others(
    compiled: tuple[compiler.Compilation, Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "xlafuse", "run", "softmax", "--direction", "fwd", "--target", "tpu-v5e"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=300,
        env=os.environ | {"XLAFUSE_XLA_PYTHON": sys.executable},  # the one that has libtpu
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records, warnings = read_records(tmp_path / "run")
    assert not warnings
    of_xla = [record for record in records if record.implementation == "xla"]
    assert of_xla and {record.status for record in of_xla} == {"compiled"}
    assert {"skipped"} == {r.status for r in records if r.implementation in ("inductor", "triton", "cuda")}
    for record in of_xla:
        assert record.graph is not None
        graph = store.load(recorded_file(tmp_path / "run", record, record.graph))
        assert targets.is_tpu(graph.target) and graph.kernels
