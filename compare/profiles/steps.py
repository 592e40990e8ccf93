"""The device's work by steps, and the gaps in it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .model import DeviceEvent, Profile


@dataclass(frozen=True)
class ProfiledStep:
    """The work that one step launched, in the order in which it ran.

    name: "" for a profile without steps. program, called: as of `model.Step`.
    """

    name: str
    events: tuple[DeviceEvent, ...]
    program: str = ""
    called: float | None = None


@dataclass(frozen=True)
class Gap:
    """A time in which the device did nothing, between two kernels.

    host_late: the seconds of it before the host launched the second one; None where the launch is unknown. start: when
    it begins. number: of the second event in its step.
    """

    before: str
    after: str
    seconds: float
    host_late: float | None
    start: float = 0.0
    number: int = 0


def profiled_steps(profile: Profile) -> list[ProfiledStep]:
    """Return the steps with work on the device; one without a name where the host announced none.

    An event belongs to the step in which it was launched, or, where that is unknown, in which it began. A step ends
    where the next one begins, and the last one with the profile. Work before the first step belongs to none. Nsight
    Systems records a whole program, so there the last step ends by its own end.
    """
    if not profile.steps:
        return [ProfiledStep("", profile.events)]
    starts = [step.start for step in profile.steps]
    found: list[list[DeviceEvent]] = [[] for _ in starts]
    last = profile.steps[-1].end if profile.tool == "Nsight Systems" else math.inf
    for event in profile.events:
        at = event.start if event.launched is None else event.launched
        index = bisect_right(starts, at) - 1
        if index >= 0 and at <= last:
            found[index].append(event)
    return [
        ProfiledStep(step.name, tuple(events), step.program, step.called)
        for step, events in zip(profile.steps, found, strict=True) if events
    ]


def device_seconds(events: Sequence[DeviceEvent]) -> float:
    """Return the time from the first event's beginning to the last one's end."""
    return max(event.end for event in events) - events[0].start


def gaps(events: Sequence[DeviceEvent]) -> list[Gap]:
    """Return the times between events in which no stream did anything."""
    found = []
    latest = events[0]
    for number, event in enumerate(events[1:], 1):
        if event.start > latest.end:
            idle = event.start - latest.end
            late = None if event.launched is None else min(max(0.0, event.launched - latest.end), idle)
            found.append(Gap(latest.name, event.name, idle, late, latest.end, number))
        if event.end > latest.end:
            latest = event
    return found
