"""One clock for every framework: CUPTI's records of kernels, copies and memsets, taken inside the worker's process.

device_time is the span from the first record's start to the last one's end within one call; busy_time is the union of
the records' intervals. Both come from the GPU's own timestamps, so host overhead shows only as gaps between records.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class DeviceRecord:
    """One kernel, copy or memset as the GPU ran it; times in seconds on CUPTI's clock.

    grid: a kernel's, blocks in x, y, z. bytes: a copy's or memset's.
    """

    name: str
    start: float
    end: float
    grid: tuple[int, int, int] | None = None
    bytes: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceRecord:
        """From what dataclasses.asdict made of one."""
        grid = data.get("grid")
        return cls(data["name"], data["start"], data["end"], grid and tuple(grid), data.get("bytes"))


@dataclass(frozen=True)
class Sample:
    """One call of one part."""

    device_time: float
    busy_time: float
    records: tuple[DeviceRecord, ...]


class Clock(Protocol):
    """Times calls between `start` and `collect`; times of clocks of different names are never compared."""

    name: str

    def start(self) -> None: ...

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any: ...

    def collect(self) -> list[Sample]: ...


def cupti_missing() -> str | None:
    """Why CUPTI cannot be used here, with the remedy, or None."""
    if os.environ.get("XLAFUSE_TIMER") == "none":
        return "another profiler watches this process, and CUPTI serves one"
    if importlib.util.find_spec("cupti") is None:
        return 'cupti-python is not installed (pip install "cupti-python==13.0.1" for CUDA 13.0)'
    return None


def busy_time(records: list[DeviceRecord]) -> float:
    """Length of the union of the records' intervals."""
    total, until = 0.0, float("-inf")
    for record in sorted(records, key=lambda r: r.start):
        total += max(0.0, record.end - max(record.start, until))
        until = max(until, record.end)
    return total


class CuptiClock:
    """CUPTI activity records (cupti-python; https://docs.nvidia.com/cupti-python)."""

    name = "cupti"

    def __init__(self) -> None:
        from cupti import cupti

        self._cupti = cupti
        kinds = cupti.ActivityKind
        self._kinds = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
        self._labels = {int(kinds.MEMCPY): "[memcpy]", int(kinds.MEMSET): "[memset]"}
        self._windows: list[tuple[int, int]] = []
        self._raw: list[tuple[str, int, int, tuple[int, int, int] | None, int | None]] = []
        cupti.activity_register_callbacks(lambda: (8 << 20, 0), self._completed)

    def _completed(self, activities: list[Any]) -> None:
        # The records' memory is CUPTI's and goes back after this call: copy what is needed.
        for activity in activities:
            label = self._labels.get(int(activity.kind))
            grid = None if label else (activity.grid_x, activity.grid_y, activity.grid_z)
            moved = activity.bytes if label else None
            self._raw.append((label or activity.name, activity.start, activity.end, grid, moved))

    def start(self) -> None:
        self._windows, self._raw = [], []
        for kind in self._kinds:
            self._cupti.activity_enable(kind)
        self._last_lap = self._cupti.get_timestamp()

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
        """Run `call` between two idle moments of the device; what the GPU did in between belongs to it."""
        synchronize()
        begin = self._cupti.get_timestamp()
        result = call()
        synchronize(result)
        self._windows.append((begin, self._cupti.get_timestamp()))
        return result

    def lap(self, synchronize: Callable[[], None]) -> None:
        """End a window once the device is idle; it began at the last lap, or at `start`."""
        synchronize()
        now = self._cupti.get_timestamp()
        self._windows.append((self._last_lap, now))
        self._last_lap = now

    def collect(self) -> list[Sample]:
        self._cupti.activity_flush_all(1)
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        raw = sorted(self._raw, key=lambda r: r[1])
        samples, position = [], 0
        for begin, end in self._windows:
            while position < len(raw) and raw[position][1] < begin:
                position += 1
            inside = []
            while position < len(raw) and raw[position][1] <= end:
                name, start, stop, grid, moved = raw[position]
                inside.append(DeviceRecord(name, (start - begin) * 1e-9, (stop - begin) * 1e-9, grid, moved))
                position += 1
            samples.append(sample_of(inside))
        return samples


def sample_of(records: list[DeviceRecord]) -> Sample:
    """The sample that one call's records make; an empty call took no device time."""
    if not records:
        return Sample(0.0, 0.0, ())
    span = max(r.end for r in records) - min(r.start for r in records)
    return Sample(span, busy_time(records), tuple(records))
