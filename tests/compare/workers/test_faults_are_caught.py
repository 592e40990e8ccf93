"""The check that precedes timing notices wrong gradients and unwritten memory; test_faults.py has wrong outputs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.measure.measurement import MeasuredProgram, WrongResult  # noqa: E402
from xlafuse.compare.measure.worker_backend import lies_within  # noqa: E402
from xlafuse.compare.numerics import reference  # noqa: E402
from xlafuse.compare.numerics.errors import ErrorCheck  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402
from xlafuse.compare.workers.pytorch import prepare  # noqa: E402
from xlafuse.compare.workers.pytorch.worker import TorchBackend  # noqa: E402

_spec = importlib.util.spec_from_file_location("faulty", Path(__file__).with_name("faulty.py"))
assert _spec and _spec.loader
faulty = importlib.util.module_from_spec(_spec)
sys.modules["faulty"] = faulty
_spec.loader.exec_module(faulty)


def subject_of(function: str, folder: Path, direction: str = "fwd", dtype: str = "float32") -> MeasuredProgram:
    case = Case("softmax", "odd", {"rows": 7, "columns": 257}, dtype, direction)
    folders = [folder / "0", folder / "1"]
    scales = [reference.produce(case, seed, path) for seed, path in enumerate(folders)]
    program = prepare.program_of(case, getattr(faulty, function))
    return MeasuredProgram(TorchBackend(), program, case, folders, scales)


def verdicts_of(function: str, folder: Path, direction: str = "fwd", dtype: str = "float32") -> list[ErrorCheck]:
    return subject_of(function, folder, direction, dtype).check()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("direction", ["fwd", "train"])
def test_the_right_one_passes(tmp_path: Path, direction: str, dtype: str) -> None:
    assert all(v.passes for v in verdicts_of("right", tmp_path, direction, dtype))


@pytest.mark.parametrize("function", ["wrong_gradient", "cached_gradient"])
def test_a_wrong_gradient_is_caught(tmp_path: Path, function: str) -> None:
    assert [v.name for v in verdicts_of(function, tmp_path, "train") if not v.passes] == ["d_x"]


def test_poison_reaches_every_way_to_ask_for_empty_memory(tmp_path: Path) -> None:
    subject = subject_of("right", tmp_path)
    like = torch.zeros(4, 3)
    with subject.backend.poisoned_allocations(subject.program):
        empties = [torch.empty(3), torch.empty_like(like), like.new_empty(5), torch.empty_strided((2, 2), (1, 2))]
    assert all(e.isnan().all() for e in empties)


@pytest.mark.parametrize(
    ("extent", "ranges", "inside"),
    [
        ((10, 20), [(0, 30)], True),
        ((10, 20), [(0, 15), (15, 25)], True),
        ((10, 20), [(15, 25), (0, 15)], True),
        ((10, 20), [(0, 15), (16, 25)], False),
        ((10, 20), [(11, 30)], False),
        ((10, 20), [], False),
        ((10, 10), [], True),
    ],
)
def test_addresses_within_ranges(extent: tuple[int, int], ranges: list[tuple[int, int]], inside: bool) -> None:
    assert lies_within(extent, ranges) is inside


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["fwd", "train"])
def test_a_side_stream_must_be_joined(tmp_path: Path, direction: str) -> None:
    assert all(v.passes for v in verdicts_of("joined_side_stream", tmp_path / "joined", direction))
    for attempt in range(5):
        with pytest.raises(WrongResult, match="y is written on another stream"):
            verdicts_of("side_stream", tmp_path / str(attempt), direction)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["fwd", "train"])
def test_timed_calls_write_into_poisoned_memory(tmp_path: Path, direction: str) -> None:
    from xlafuse.compare.measure.clock import cupti_missing
    from xlafuse.compare.workers.pytorch.worker import EventClock

    if cupti_missing():
        clock = EventClock()
    else:
        from xlafuse.compare.measure.clock import CuptiClock

        clock = CuptiClock()
    measured = subject_of("right", tmp_path, direction).measure(clock, 0.01)
    assert all(times["poisoned"] for times in measured["phases"].values())
    with pytest.raises(WrongResult, match="timed call"):
        subject_of("unwritten_element", tmp_path).measure(clock, 0.01)
