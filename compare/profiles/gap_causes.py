"""Why the device did nothing: the host waited for it, for input or for a compiler, or launched too slowly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .model import HostWait
from .steps import Gap

_HOST_LATE = 0.5  # the share of a gap in which the host had not launched, above which the host caused it
_BEFORE = 50e-6  # seconds before a gap in which a wait for the device ends: its last kernel ended the wait
_KINDS = ("compile", "input", "copy", "synchronisation")  # the first of several decides


class Cause(NamedTuple):
    """kind: that of a wait, "launches" of a part, or "device" where the host was in time, or its launch is unknown.

    name: the operation that waits, or the part that is launched; "" for the device. function: the user's function that
    calls it, as of `DeviceEvent.host_function`.
    """

    kind: str
    name: str
    function: str = ""


def gap_causes(gaps: Sequence[Gap], waits: Sequence[HostWait], launches: Mapping[int, Cause]) -> dict[Cause, float]:
    """Return the seconds of a step's gaps by cause, the most first. launches: of events, by their number."""
    found: dict[Cause, float] = {}
    for gap in gaps:
        cause = _cause(gap, waits, launches[gap.number])
        found[cause] = found.get(cause, 0.0) + gap.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _cause(gap: Gap, waits: Sequence[HostWait], launch: Cause) -> Cause:
    if gap.host_late is None or gap.host_late <= _HOST_LATE * gap.seconds:
        return Cause("device", "")
    first, last = gap.start - _BEFORE, gap.start + gap.host_late
    within = [wait for wait in waits if wait.start < last and wait.end > first]
    wait = min(within, key=lambda wait: _KINDS.index(wait.kind), default=None)
    return launch if wait is None else Cause(wait.kind, wait.name, wait.host_function)
