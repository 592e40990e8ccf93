"""Remarks on a machine name its slices, kinds and other programs, and a run that cannot work does not begin."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
from pretended_gpus import GPUS, PretendedGpu, gpu, pretend

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.measure import gpu_conditions, machine_remarks
from xlafuse.compare.plan.selection import resolve
from xlafuse.compare.run import run

PLAN = resolve(["gelu"], suite="check", implementations=["triton"], cases=[], directions=["fwd"], dtypes=["bfloat16"])
KNOWN = gpu("l4", "NVIDIA L4")
SLICE = PretendedGpu(
    {**GPUS["b200"].properties, "name": "NVIDIA B200 MIG 1g.23gb", "total_memory": 23 << 30}, slice_of="NVIDIA B200"
)


def test_nothing_is_said_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, KNOWN)
    assert machine_remarks.remarks(["NVIDIA L4"]) == [] and machine_remarks.problem() is None
    pretend(monkeypatch)
    assert machine_remarks.remarks() == []


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        ([GPUS["sm_121"]], ["NVIDIA Pretended 121", "xlafuse tune"]),
        ([SLICE], ["slice", "CUDA_VISIBLE_DEVICES"]),
        ([KNOWN, GPUS["sm_86"]], ["NVIDIA L4", GPUS["sm_86"].visible_as]),
        ([gpu("l4", "NVIDIA L4", total_memory=8 << 30)], ["9 GB"]),
        ([gpu("l4", major=7, minor=5)], ["7.5", "8.0"]),
        ([replace(KNOWN, processes=1)], ["1 other process "]),
        ([replace(KNOWN, busy=80)], ["80%"]),
        ([replace(KNOWN, mode=3)], ["exclusive process", f"nvidia-smi -i {KNOWN.visible_as}"]),
        ([replace(KNOWN, mode=2)], ["prohibited"]),
    ],
)
def test_what_is_special_is_said(
    monkeypatch: pytest.MonkeyPatch, devices: list[PretendedGpu], named: list[str]
) -> None:
    pretend(monkeypatch, *devices)
    said = machine_remarks.remarks()
    assert any(all(words in sentence for words in named) for sentence in said), said


def test_wsl_and_hidden_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, KNOWN)
    monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    assert "WSL" in machine_remarks.remarks()[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-another-machine")
    (only,) = machine_remarks.remarks(["NVIDIA L4, 580.82, 23034 MiB"])
    assert "CUDA_VISIBLE_DEVICES" in only and "MIG" in only


def test_a_run_does_not_begin_where_its_processes_cannot_share_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, replace(KNOWN, mode=3))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    with pytest.raises(UsageError, match="exclusive process"):
        run.execute(PLAN, folder=tmp_path / "run", target=None, resume=False)
    assert not (tmp_path / "run").exists()
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()  # NVIDIA's MPS runs
    assert machine_remarks.problem() is None


def test_conditions_are_those_of_the_gpu_that_cuda_names_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, GPUS["b200"], KNOWN, SLICE)
    for visible, clock in (("1,0", 2040), (KNOWN.visible_as, 2040), ("0", 1965), (SLICE.visible_as[:9], None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = gpu_conditions.read()
        assert found is not None and found.throttled == ["power cap"]
        assert clock is None or found.sm_mhz == clock
