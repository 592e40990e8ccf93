"""The artifacts that one compile leaves in a folder."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax import Array
from jax import ShapeDtypeStruct as Struct

from xlafuse.blocks import rmsnorm
from xlafuse.compile import compiler, directions, variants
from xlafuse.dumps import artifacts
from xlafuse.hlo import gpu_program

INPUTS = {"x": Struct((512, 1024), jnp.bfloat16), "weight": Struct((1024,), jnp.bfloat16)}
FORWARD = directions.forward(rmsnorm.apply, {"eps": 1e-6})


@pytest.fixture(scope="module")
def dumped(h200: compiler.Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[compiler.Compilation, Path]:
    """An rmsnorm compiled for an H200, and the folder of its artifacts."""
    folder = tmp_path_factory.mktemp("rmsnorm") / "dump"
    return compiler.compile(FORWARD, (INPUTS,), target=h200, dump_to=folder), folder


def test_an_h200_compile_leaves_named_artifacts(dumped: tuple[compiler.Compilation, Path]) -> None:
    compiled, folder = dumped
    found = artifacts.collect_artifacts(folder)
    # Nothing was tuned, no visualisation was requested, and there is one launch.
    absent = {"autotune_results", "fusion_frames", "thunks_after_passes"}
    assert artifacts.ARTIFACTS.keys() - absent <= found.keys()
    assert {"before_priority-fusion", "after_priority-fusion", "after_priority-fusion_proto"} <= found.keys()
    (kernel,) = compiled.kernels
    assert f"ptx/{kernel.runtime_name}" in found
    assert f".entry {kernel.runtime_name}" in found[f"ptx/{kernel.runtime_name}"].read_text()
    assert f"{kernel.runtime_name} grid:" in found["thunks"].read_text()
    assert "fusion_steps" in found["priority_fusion"].read_text()
    assert "rmsnorm.py" in found["stablehlo"].read_text()
    module = gpu_program.parse(found["hlo"].read_text())
    assert not module.unparsed
    assert [k.opcodes for k in gpu_program.kernels(module)] == [kernel.opcodes]


def test_a_pass_that_changed_nothing_leaves_no_file(dumped: tuple[compiler.Compilation, Path]) -> None:
    folder = dumped[1] / "passes"
    passes = {path.name for path in folder.iterdir()}
    assert passes and not any("dot-merger" in name or "triton-gemm" in name for name in passes)
    for before in (name for name in passes if "_before_" in name):
        after = before.replace("_before_", "_after_")
        assert (folder / before).read_bytes() != (folder / after).read_bytes()


def test_a_folder_holds_one_compile(tmp_path: Path) -> None:
    (tmp_path / "older.txt").write_text("")
    with pytest.raises(FileExistsError, match="holds one compile"):
        compiler.compile(FORWARD, (INPUTS,), dump_to=tmp_path)


def test_artifacts_are_those_of_the_newest_module(tmp_path: Path) -> None:
    raw, kept = tmp_path / "raw", tmp_path / "kept"
    raw.mkdir()
    kept.mkdir()
    for number, module in ((7, "jit_f"), (9, "jit_f"), (12, "jit_other")):
        (raw / f"module_{number:04d}.{module}.before_optimizations.txt").write_text(f"{number}")
    (raw / "module_0009.jit_f.autotune_results.pbtxt").write_text("version: 3\n")
    found = artifacts.keep_artifacts(raw, kept, "jit_f", "module @jit_f {}")
    assert found.keys() == {"stablehlo", "hlo_before"}
    assert found["hlo_before"].read_text() == "9"


def test_ptx_is_named_after_its_kernels(tmp_path: Path) -> None:
    raw, kept = tmp_path / "raw", tmp_path / "kept"
    raw.mkdir()
    kept.mkdir()
    entries = ".visible .entry {}(\n"
    (raw / "module_0001.jit_f.1.ptx").write_text(entries.format("fusion_1"))
    (raw / "module_0001.jit_f.3.ptx").write_text(entries.format("loop_a") + entries.format("loop_b"))
    (raw / "module_0001.jit_f.5.ptx").write_text("")
    found = artifacts.keep_artifacts(raw, kept, "jit_f", "")
    assert {name for name in found if name.startswith("ptx/")} == {"ptx/fusion_1", "ptx/loop_a+1"}


_THUNKS = """\
001: kCopy          [source       | next=002 (1)] kCopy
002: kCommandBuffer [prev=001 (1) | sink]
    003: kCustomKernel   [source | next=004 (1)] fusion grid: [8, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
    004: kWhile          [prev=003 (1) | sink]
        005: kCublasLtMatmul [source | sink] kCublasLtMatmul
006: kWhile         [source | sink]
    007: kCustomKernel   [source | sink] loop_fusion grid: [8, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
"""


def test_launches_in_command_buffers_are_counted(tmp_path: Path) -> None:
    assert artifacts.count_command_buffer_launches(_THUNKS) == (2, 4)
    assert artifacts.count_command_buffer_launches("") == (0, 0)
    assert artifacts.command_buffer_launches(tmp_path) is None
    (tmp_path / "thunks.txt").write_text("001: kCustomKernel [source | sink] fusion grid: [8, 1, 1]\n")
    assert artifacts.command_buffer_launches(tmp_path) == (0, 1)
    (tmp_path / "thunks_after_passes.txt").write_text(_THUNKS)
    assert artifacts.command_buffer_launches(tmp_path) == (2, 4)


@pytest.mark.parametrize(("setting", "share"), [("default", (0, 4)), ("all", (4, 4)), ("none", (0, 4))])
def test_command_buffers_follow_their_setting(
    h200: compiler.Target, tmp_path: Path, setting: variants.CommandBuffers, share: tuple[int, int]
) -> None:
    """Four launches are too few for XLA's default."""
    compiler.compile(_chain(2), (_SQUARE,), command_buffers=setting, target=h200, dump_to=tmp_path)
    assert artifacts.command_buffer_launches(tmp_path) == share


def test_six_launches_are_one_command_buffer_by_default(h200: compiler.Target, tmp_path: Path) -> None:
    compiler.compile(_chain(3), (_SQUARE,), target=h200, dump_to=tmp_path / "default")
    assert artifacts.command_buffer_launches(tmp_path / "default") == (6, 6)
    compiler.compile(_chain(3), (_SQUARE,), command_buffers="none", target=h200, dump_to=tmp_path / "none")
    assert artifacts.command_buffer_launches(tmp_path / "none") == (0, 6)


_SQUARE = Struct((256, 256), jnp.float32)


def _chain(products: int) -> Callable[[Array], Array]:
    def chain(x: Array) -> Array:
        for _ in range(products):
            x = jnp.sin(x) @ x  # two launches
        return x

    return chain
