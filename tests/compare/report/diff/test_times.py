"""Times of two runs: intervals of independent rounds, what is refused, what is said beside a ratio."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from made_runs import CASE, QUIET, SEGMENT, record

from compare.plan.speedup import Sample, Verdict, compare_runs
from compare.record.record import Record
from compare.report.diff import times


def judged(a: Record, b: Record, *segments: dict[str, Any], tolerance: float = 0.05) -> times.Timing:
    found = times.judge(a, b, segments or (SEGMENT, SEGMENT), tolerance)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("noise", [0.01, 0.002])
def test_the_interval_of_two_runs_holds_the_true_ratio_as_often_as_it_says(noise: float) -> None:
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


def test_the_interval_of_runs_in_several_processes_holds_the_true_ratio() -> None:
    generator, held, processes = random.Random(3), 0, [0, 0, 1, 1, 2, 2]

    def run(seconds: float) -> Sample:
        offsets = [generator.gauss(1, 0.01) for _ in range(3)]
        return Sample([seconds * offsets[p] * generator.gauss(1, 0.003) for p in processes], processes)

    for _ in range(100):
        verdict = compare_runs(run(1.05e-4), run(1e-4), 0.05)
        assert verdict
        held += verdict.low <= 1.05 <= verdict.high
    assert held >= 95


def test_few_rounds_and_the_tolerance() -> None:
    assert compare_runs(Sample([1.0] * 4), Sample([1.0] * 9), 0.05) is None
    near = compare_runs(Sample([1.04] * 5), Sample([1.0] * 5), 0.05)
    beyond = compare_runs(Sample([1.04] * 5), Sample([1.0] * 5), 0.03)
    assert near and beyond and (near.word, beyond.word) == ("tie", "slower")
    assert str(near) == "tie: within 5%" and (near.low, near.high) == pytest.approx((1.04, 1.04))


@pytest.mark.parametrize(("after", "word"), [(100, "tie"), (104, "tie"), (110, "slower"), (90, "faster")])
def test_what_became_of_a_time(after: float, word: str) -> None:
    found = judged(record(100), record(after))
    assert (found.word, found.refused, found.notes) == (word, "", ())
    assert found.before_us == pytest.approx(100) and found.lost_us == pytest.approx(after - 100)
    assert found.main is not None and found.main.ratio == pytest.approx(after / 100)


def test_noise_is_not_reported() -> None:
    found = judged(record(100), record(108, noise=[0.8, 1.3, 1.0, 0.9, 1.1]))
    assert found.word == "unresolved"


@pytest.mark.parametrize(
    ("call", "busy", "word"),
    [
        ((150, QUIET), 60, "slower between kernels"),
        ((70, QUIET), 60, "faster between kernels"),
        ((100, QUIET), 90, "tie"),  # kernels take longer, and the call does not: they hid in its gaps
        ((115, [0.7, 1.3, 1.0, 0.9, 1.1]), 70, "slower"),  # the gaps' noise hides no slower kernels
        ((120, QUIET), 80, "slower"),
        ((90, QUIET), 80, "faster between kernels"),
    ],
)
def test_kernels_are_told_from_what_lies_between_them(call: tuple[float, list[float]], busy: float, word: str) -> None:
    """Before: a call of 100 us with kernels of 60 us."""
    assert judged(record(100, busy=60), record(call[0], noise=call[1], busy=busy)).word == word


def test_without_a_timer_that_sees_kernels_calls_alone_are_held_against_each_other() -> None:
    sides = record(100, timer="cuda-events"), record(150, timer="cuda-events")
    for side in sides:
        assert side.measurement
        side.measurement["parts"]["forward"] |= {"busy_time": None, "launches": None, "records": None}
    found = judged(*sides)
    assert found.word == "slower" and found.busy is None and "busy" not in (found.verdicts or {})
    assert found.notes == ("its kernels are not told from the gaps between them",)


def test_unequal_timers_give_no_ratio() -> None:
    found = judged(record(100), record(200, timer="cuda-events"))
    assert (found.word, found.verdicts) == (None, None)
    assert found.refused == "timed by cupti before, by cuda-events after"
    slow = {**SEGMENT, "clocks": {"xla": 1.03e-3, "torch": 2e-3}}
    found = judged(record(100), record(200), SEGMENT, slow)
    assert found.word is None and found.refused == "the two runs' clocks differ by 3.0%"
    assert judged(record(100), record(200), {**SEGMENT, "clocks": {}}, slow).notes == (
        "clocks not held against each other",
    )


def test_other_conditions_are_said() -> None:
    hot = [{"sm_mhz": 1500, "throttled": ["power cap"]}] * 5
    other = {
        **SEGMENT, "environment": {"workers": {"xla": {"device": "NVIDIA H100"}}},
        "ceilings": {"streams": {"1:1": 3e12}, "products": {}},
    }
    assert judged(record(100), record(100, conditions=hot), SEGMENT, other).notes == (
        "GPUs differ: NVIDIA H200, NVIDIA H100", "ceilings differ by up to 25%", "SM clock 1980 → 1500 MHz",
        "throttled rounds 0 → 5",
    )
    assert "clock rates not recorded in both" in judged(record(100), record(100, conditions=None)).notes


def test_what_was_not_timed() -> None:
    compiled = Record(CASE, "xla", "xla", "compiled")
    assert times.judge(compiled, compiled, (SEGMENT, SEGMENT), 0.05) is None
    assert judged(record(100), compiled).refused == "not timed after"
    assert judged(compiled, record(100)).refused == "not timed before"
    assert judged(record(100), replace(record(100), status="wrong")).refused == "not timed after"
    assert judged(record(100), record(100, noise=[1.0] * 4)).refused == "fewer than 5 rounds"


def test_every_timer_has_its_ratio() -> None:
    wall = {"wall_time": [2e-4] * 5}
    found = judged(record(100, **wall), record(100, wall_time=[3e-4] * 5))
    assert found.verdicts is not None and set(found.verdicts) == {"cold", "busy", "wall"}
    assert found.verdicts["wall"].word == "slower" and found.word == "tie"
    assert isinstance(found.verdicts["busy"], Verdict)
