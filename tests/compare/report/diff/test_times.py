"""Times of two runs: intervals of independent rounds, refusals, and notes on other differences."""

from __future__ import annotations

import random
from typing import Any

import pytest
from full_marks import first_of_each
from made_records import made_record, with_fields, without_kernel_times
from made_runs import CASE, QUIET, SEGMENT, record

from xlafuse.compare.plan.speedup import Sample, Speedup, compare_runs
from xlafuse.compare.record.record import Record
from xlafuse.compare.report.diff import times


def compared(a: Record, b: Record, *segments: dict[str, Any], tolerance: float = 0.05) -> times.TimeChange:
    found = times.compare_times(a, b, segments or (SEGMENT, SEGMENT), tolerance)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("noise", first_of_each([0.01, 0.002]))
def test_the_interval_of_two_runs_contains_the_true_ratio(noise: float) -> None:
    generator, held, won, found = random.Random(2), 0, 0, 0

    def run(seconds: float) -> Sample:
        return Sample([seconds * generator.gauss(1, noise) for _ in range(5)])

    for _ in range(250):
        ratio = compare_runs(run(1.05e-4), run(1e-4), 0.05)
        same, slower = compare_runs(run(1e-4), run(1e-4), 0.01), compare_runs(run(1.1e-4), run(1e-4), 0.05)
        assert ratio and same and slower
        held += ratio.low <= 1.05 <= ratio.high
        won += same.word in ("faster", "slower")
        found += slower.word == "slower"
    assert held >= 0.94 * 250 and won <= 0.01 * 250 and found >= 0.97 * 250


def test_the_interval_of_several_processes_contains_the_true_ratio() -> None:
    generator, held, processes = random.Random(3), 0, [0, 0, 1, 1, 2, 2]

    def run(seconds: float) -> Sample:
        offsets = [generator.gauss(1, 0.01) for _ in range(3)]
        return Sample([seconds * offsets[p] * generator.gauss(1, 0.003) for p in processes], processes)

    for _ in range(100):
        verdict = compare_runs(run(1.05e-4), run(1e-4), 0.05)
        assert verdict
        held += verdict.low <= 1.05 <= verdict.high
    assert held >= 95


def test_rounds_below_five_and_tolerance() -> None:
    assert compare_runs(Sample([1.0] * 4), Sample([1.0] * 9), 0.05) is None
    near = compare_runs(Sample([1.04] * 5), Sample([1.0] * 5), 0.05)
    beyond = compare_runs(Sample([1.04] * 5), Sample([1.0] * 5), 0.03)
    assert near and beyond and (near.word, beyond.word) == ("tie", "slower")
    assert str(near) == "tie: within 5%" and (near.low, near.high) == pytest.approx((1.04, 1.04))


@pytest.mark.parametrize(("after", "word"), [(100, "tie"), (104, "tie"), (110, "slower"), (90, "faster")])
def test_words_of_a_time_change(after: float, word: str) -> None:
    found = compared(record(100), record(after))
    assert (found.word, found.refused, found.notes) == (word, "", ())
    assert found.before_us == pytest.approx(100) and found.lost_us == pytest.approx(after - 100)
    assert found.main is not None and found.main.ratio == pytest.approx(after / 100)


def test_noise_is_unresolved() -> None:
    found = compared(record(100), record(108, noise=[0.8, 1.3, 1.0, 0.9, 1.1]))
    assert found.word == "unresolved"


@pytest.mark.parametrize(
    ("call", "busy", "word"),
    [
        ((150, QUIET), 60, "longer launch gaps"),
        ((70, QUIET), 60, "shorter launch gaps"),
        ((100, QUIET), 90, "tie"),  # longer kernels, same call: they fill its gaps
        ((115, [0.7, 1.3, 1.0, 0.9, 1.1]), 70, "slower"),  # noise of the gaps does not hide slower kernels
        ((120, QUIET), 80, "slower"),
        ((90, QUIET), 80, "shorter launch gaps"),
    ],
)
def test_kernel_time_is_separated_from_launch_gaps(call: tuple[float, list[float]], busy: float, word: str) -> None:
    """The earlier call takes 100 us, its kernels 60 us."""
    assert compared(record(100, busy=60), record(call[0], noise=call[1], busy=busy)).word == word


def test_without_kernel_times_the_call_decides() -> None:
    records = record(100, timer="cuda-events"), record(150, timer="cuda-events")
    for each in records:
        without_kernel_times(each)
    found = compared(*records)
    assert found.word == "slower" and found.busy is None and "busy" not in (found.speedups or {})
    assert found.notes == ("the timer did not record single kernels",)


def test_unequal_timers_give_no_ratio() -> None:
    found = compared(record(100), record(200, timer="cuda-events"))
    assert (found.word, found.speedups) == (None, None)
    assert found.refused == "the timers differ: cupti before, cuda-events after"
    slow = {**SEGMENT, "clocks": {"xla": 1.03e-3, "torch": 2e-3}}
    found = compared(record(100), record(200), SEGMENT, slow)
    assert found.word is None and found.refused == "the two runs' clocks differ by 3.0%"
    assert compared(record(100), record(200), {**SEGMENT, "clocks": {}}, slow).notes == (
        "the clocks were not compared",
    )


def test_other_conditions_are_noted() -> None:
    hot = [{"sm_mhz": 1500, "throttled": ["power cap"]}] * 5
    other = {
        **SEGMENT, "environment": {"workers": {"xla": {"device": "NVIDIA H100"}}},
        "ceilings": {"streams": {"1:1": 3e12}, "products": {}},
    }
    assert compared(record(100), record(100, conditions=hot), SEGMENT, other).notes == (
        "GPUs differ: NVIDIA H200, NVIDIA H100", "ceilings differ by up to 25%", "SM clock: 1980 → 1500 MHz",
        "throttled rounds: 0 → 5",
    )
    assert "not both runs recorded clock rates" in compared(record(100), record(100, conditions=[])).notes


def test_untimed_records_are_refused() -> None:
    compiled = made_record(CASE, "xla", "xla", "compiled")
    assert times.compare_times(compiled, compiled, (SEGMENT, SEGMENT), 0.05) is None
    assert compared(record(100), compiled).refused == "not timed after"
    assert compared(compiled, record(100)).refused == "not timed before"
    wrong = with_fields(record(100), status="wrong", detail="y is wrong")
    assert compared(record(100), wrong).refused == "not timed after"
    assert compared(record(100), record(100, noise=[1.0] * 4)).refused == "fewer than 5 rounds"


def test_every_timer_has_its_ratio() -> None:
    wall = {"wall_time": [2e-4] * 5}
    found = compared(record(100, **wall), record(100, wall_time=[3e-4] * 5))
    assert found.speedups is not None and set(found.speedups) == {"cold", "busy", "wall"}
    assert found.speedups["wall"].word == "slower" and found.word == "tie"
    assert isinstance(found.speedups["busy"], Speedup)
