"""A program is compiled once: preparing another implementation must not make it compile again when it is timed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.measure.measurement import MeasuredProgram  # noqa: E402
from xlafuse.compare.numerics import reference  # noqa: E402
from xlafuse.compare.spec.blocks import BLOCKS  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402
from xlafuse.compare.workers.pytorch.worker import TorchBackend  # noqa: E402


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or os.name != "posix", reason="tests the CPU's Inductor")
def test_preparing_the_next_implementation_leaves_the_last_compiled(tmp_path: Path) -> None:
    case = Case("gelu", "odd", {"rows": 3, "columns": 33}, "float32", "fwd")
    folders = [tmp_path / "data" / str(seed) for seed in (0, 1)]
    scales = [reference.produce(case, seed, folder) for seed, folder in enumerate(folders)]
    backend, block = TorchBackend(), BLOCKS["gelu"]
    programs = [
        backend.build(case, block.implementation(name), folders[0], tmp_path / name)
        for name in ("inductor", "eager", "library")
    ]
    with torch.compiler.set_stance("fail_on_recompile"):
        checks = MeasuredProgram(backend, programs[0], case, folders, scales).check()
    assert all(v.passes for v in checks)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or os.name != "posix", reason="tests the CPU's Inductor")
def test_directions_that_begin_alike_are_each_compiled(tmp_path: Path) -> None:
    train = Case("gelu", "odd", {"rows": 3, "columns": 33}, "float32", "train")
    folders = [tmp_path / "data" / str(seed) for seed in (0, 1)]
    scales = [reference.produce(train, seed, folder) for seed, folder in enumerate(folders)]
    backend, inductor = TorchBackend(), BLOCKS["gelu"].implementation("inductor")
    for case in (train, replace(train, direction="joint")):
        program = backend.build(case, inductor, folders[0], tmp_path / case.direction)
        assert program.graph and program.graph.kernels
        assert all(v.passes for v in MeasuredProgram(backend, program, case, folders, scales).check())
