"""Causes of the gaps of a step: waits of the host, slow launches, or neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import xlafuse

from xlafuse.compare.profiles.gap_causes import Cause, gap_causes
from xlafuse.compare.profiles.model import DeviceEvent, HostWait
from xlafuse.compare.profiles.steps import gaps


def step(*launched: float) -> list[DeviceEvent]:
    """Return kernels of 1 ms, each of which begins 4 ms after the one before; launched: by the host, in ms."""
    return [DeviceEvent(f"k{n}", 4e-3 * n, 4e-3 * n + 1e-3, launched=at * 1e-3) for n, at in enumerate(launched)]


def causes(events: list[DeviceEvent], *waits: HostWait) -> dict[Cause, float]:
    found = gap_causes(gaps(events), waits, {1: "AdamW.step", 2: "clip", 3: "AdamW.step"})
    return {cause: round(seconds * 1e3, 3) for cause, seconds in found.items()}


def test_a_late_launch_is_of_the_part_that_it_launches() -> None:
    assert causes(step(0, 3.9, 7.9, 11.9)) == {Cause("launches", "AdamW.step"): 6, Cause("launches", "clip"): 3}


def test_a_gap_in_which_the_host_was_in_time_is_the_devices() -> None:
    assert causes(step(0, 1.2, 3, 11.9)) == {Cause("device", ""): 6, Cause("launches", "AdamW.step"): 3}
    unknown = [DeviceEvent("a", 0, 1e-3), DeviceEvent("b", 4e-3, 5e-3)]
    assert causes(unknown) == {Cause("device", ""): 3}


def test_a_wait_that_ends_as_the_gap_begins_or_in_it_is_its_cause() -> None:
    ends = HostWait("synchronisation", "aten::item", 0.2e-3, 0.99e-3)
    assert causes(step(0, 3.9), ends) == {Cause("synchronisation", "aten::item"): 3}
    before = HostWait("synchronisation", "aten::item", 0.1e-3, 0.8e-3)
    assert causes(step(0, 3.9), before) == {Cause("launches", "AdamW.step"): 3}
    after = HostWait("synchronisation", "aten::item", 3.95e-3, 3.99e-3)
    assert causes(step(0, 3.9), after) == {Cause("launches", "AdamW.step"): 3}


@pytest.mark.parametrize("kind", ["input", "compile"])
def test_input_and_compiles_come_before_a_synchronisation(kind: str) -> None:
    other = HostWait(kind, "why", 2e-3, 3e-3)  # type: ignore[arg-type]
    waits = HostWait("synchronisation", "aten::item", 0.5e-3, 1.1e-3), other
    assert causes(step(0, 3.9), *waits) == {Cause(kind, "why"): 3}


def test_the_captured_steps_causes_add_up_to_its_gaps_and_name_the_line_that_waits(gpt: Path) -> None:
    shown = json.loads(xlafuse("inspect", gpt, "--json").stdout)
    mean = sum(step["idle_us"] for step in shown["steps"]) / len(shown["steps"])
    assert sum(cause["us"] for cause in shown["gap_causes"]) == pytest.approx(mean)
    by_name = {cause["name"]: cause["us"] for cause in shown["gap_causes"]}
    assert by_name["aten::item"] == pytest.approx(907, abs=1)  # 1000 and 814 us before the step's first kernel
    assert "train_gpt.py:30" in xlafuse("inspect", gpt).output  # `loss.item()`
