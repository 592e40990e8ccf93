"""Programs that are timed in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from xlafuse.compare.measure.clock import DeviceRecord, Sample, sample_of
from xlafuse.compare.measure.rounds import ROUNDS, joined, rounds_of
from xlafuse.compare.plan.paired_rounds import counted, round_medians


class FakeClock:
    """Gives each call the seconds that the program names."""

    name = "fake"

    def start(self) -> None:
        self._samples: list[Sample] = []

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
        self._samples.append(sample_of([DeviceRecord("k", 0.0, call())]))

    def collect(self, *, going_on: bool = False) -> list[Sample]:
        found, self._samples = self._samples, []
        return found


def test_programs_take_turns_from_a_cold_cache() -> None:
    called: list[str] = []

    def program(name: str, seconds: float) -> Callable[[], float]:
        def call() -> float:
            assert called.pop() == "flush"
            called.append(name)
            return seconds

        return call

    calls = {"a": program("a", 2e-6), "b": program("b", 1e-6)}
    found = rounds_of(calls, FakeClock(), lambda: called.append("flush"), lambda results=None: None)
    times = {name: counted(joined(rounds)) for name, rounds in found.items()}
    assert {name: round_medians([times[name].device_time]) for name in times} == {
        "a": pytest.approx([2e-6] * ROUNDS), "b": pytest.approx([1e-6] * ROUNDS),
    }
    turns = [name for name, before in zip(called, [None, *called], strict=False) if name != before]
    assert turns == ["a", "b", "a", "b", "a", "b"][: len(turns)] and turns.count("b") == 3
