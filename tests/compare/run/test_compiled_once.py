"""A program is compiled once: preparing another implementation must not make it compile again when it is timed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.measure.measurement import MeasuredProgram  # noqa: E402
from xlafuse.compare.numerics import reference  # noqa: E402
from xlafuse.compare.spec.blocks import BLOCKS  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402
from xlafuse.compare.workers.pytorch.worker import TorchBackend  # noqa: E402
from xlafuse.triton_side.inductor import compiler  # noqa: E402


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


def test_each_build_compiles_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo finds compiled code by the code object, so two builds of one function would share their first graph."""

    class Stop(Exception):
        pass

    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compile_and_stop(function: Callable[..., Any], mode: str | None) -> None:
        torch.compile(function, backend=count)({"x": torch.ones(3, 33)})
        raise Stop

    monkeypatch.setattr(compiler, "compile", compile_and_stop)
    train = Case("gelu", "odd", {"rows": 3, "columns": 33}, "float32", "train")
    reference.produce(train, 0, tmp_path / "data")
    backend, inductor = TorchBackend(), BLOCKS["gelu"].implementation("inductor")
    for built, case in enumerate((train, replace(train, direction="joint")), 1):
        with pytest.raises(Stop):
            backend.build(case, inductor, tmp_path / "data", tmp_path / case.direction)
        assert len(graphs) == built


@pytest.mark.full
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
