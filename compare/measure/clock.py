"""One clock for every framework: CUPTI's records of kernels, copies and memsets, taken inside the worker's process.

device_time is the span from the first record's start to the last one's end within one call; busy_time is the length of
the union of the records. Both come from the GPU's own timestamps, so host overhead shows only as gaps between records.
Host calls are recorded for a timeline only (`CuptiClock.trace`), never while a call is timed.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..base.exchange_kernels import PEER_COPY
from ..record.record_fields import DeviceRecord


@dataclass(frozen=True)
class TracedRecord(DeviceRecord):
    """A device record for a timeline. stream: CUPTI's number of its stream.

    correlation: the number of the host call that launched it. All kernels of a CUDA graph have its launch's number.
    """

    stream: int = 0
    correlation: int = 0


@dataclass(frozen=True)
class HostRecord:
    """One call of CUDA's runtime or driver by a thread of this process; times in seconds on CUPTI's clock."""

    name: str
    start: float
    end: float
    thread: int
    correlation: int


@dataclass(frozen=True)
class CallTrace:
    """One traced call of one phase; times in seconds since the call began.

    returned: when the call returned to the host, before the device had finished. began: nanoseconds on CUPTI's clock,
    which the processes of one host share.
    """

    returned: float
    host: tuple[HostRecord, ...]
    device: tuple[TracedRecord, ...]
    began: int = 0


@dataclass(frozen=True)
class Sample:
    """One timed call of one phase. busy_time and records are None from a clock that sees no single kernels."""

    device_time: float
    busy_time: float | None
    records: tuple[DeviceRecord, ...] | None


class Clock(Protocol):
    """Times calls between `start` and the last `collect`; times of clocks of different names are never compared."""

    name: str

    def start(self) -> None: ...

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any: ...

    def collect(self, *, going_on: bool = False) -> list[Sample]:
        """Return the samples since `start` or the last `collect`. going_on: more calls follow."""
        ...


def cupti_missing() -> str | None:
    """Return why CUPTI cannot be used here, with the remedy, or None."""
    if os.environ.get("XLAFUSE_TIMER") == "none":
        return "another profiler watches this process, and CUPTI serves only one"
    if importlib.util.find_spec("cupti") is None:
        return 'cupti-python is not installed (pip install "cupti-python==13.0.1" for CUDA 13.0)'
    return None


def busy_time(records: list[DeviceRecord]) -> float:
    """Return the length of the union of the records' intervals."""
    total, until = 0.0, float("-inf")
    for record in sorted(records, key=lambda r: r.start):
        total += max(0.0, record.end - max(record.start, until))
        until = max(until, record.end)
    return total


# Host calls that give the device work, by the names of CUDA's runtime and driver.
LAUNCH = re.compile(r"cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")


def api_name(calls: Any, number: int) -> str:
    """Return the name of a runtime or driver call, without the version of its binary interface.

    calls: CUPTI's enumeration (runtime_api_trace_cbid or driver_api_trace_cbid), which may be older than the driver.
    """
    try:
        name = str(calls(number).name)
    except ValueError:
        return f"CUDA call {number}"
    return re.sub(r"(_v\d+|_ptsz|_ptds)+$", "", name.removeprefix("_runtime_api_trace_cbid__"))


def launches(calls: Iterable[HostRecord], device: Iterable[TracedRecord]) -> list[HostRecord]:
    """Return the calls that launched device work, in order of start: by name, or by a device record of theirs.

    A runtime call contains a driver call. The one with a device record is kept, else the outer one.
    """
    behind = {record.correlation for record in device}
    kept: list[HostRecord] = []
    open_calls: dict[int, int] = {}  # by thread, the index in `kept` of its last outermost call
    for call in sorted(calls, key=lambda c: (c.start, -c.end)):
        if not LAUNCH.match(call.name) and call.correlation not in behind:
            continue
        index = open_calls.get(call.thread)
        if index is None or call.end > kept[index].end:
            open_calls[call.thread] = len(kept)
            kept.append(call)
        elif call.correlation in behind and call.correlation != kept[index].correlation:
            if kept[index].correlation in behind:
                kept.append(call)  # both launched work
            else:
                kept[index] = call
    return sorted(kept, key=lambda c: c.start)


class _Ran(NamedTuple):
    """CUPTI's record of one kernel, copy or memset, in nanoseconds."""

    name: str
    start: int
    end: int
    grid: tuple[int, int, int] | None
    bytes: int | None
    stream: int
    correlation: int
    registers: int | None = None
    shared_bytes: int | None = None
    block: tuple[int, int, int] | None = None
    local_bytes: int | None = None


class _Called(NamedTuple):
    """CUPTI's record of one host call, in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int
    correlation: int


class CuptiClock:
    """CUPTI activity records (cupti-python; https://docs.nvidia.com/cupti-python).

    A process must have only one: a second one would silently get all records of the first. peer_copies: also record
    copies from one GPU to another.
    """

    name = "cupti"

    def __init__(self, *, peer_copies: bool = False) -> None:
        from cupti import cupti

        from . import cupti_records  # imports numpy, which reading a run does not need

        self._cupti = cupti
        kinds = cupti.ActivityKind
        self._kinds: tuple[Any, ...] = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
        self._labels = {int(kinds.MEMCPY): "[memcpy]", int(kinds.MEMSET): "[memset]"}
        if peer_copies:
            self._kinds = (*self._kinds, kinds.MEMCPY2)
            self._labels[int(kinds.MEMCPY2)] = PEER_COPY
        self._calls = {
            int(kinds.RUNTIME): cupti.runtime_api_trace_cbid, int(kinds.DRIVER): cupti.driver_api_trace_cbid
        }
        self._windows: list[tuple[int, int]] = []
        self._ran: list[_Ran] = []
        self._called: list[_Called] = []
        self._read = cupti_records.reader(cupti, self._fields_of)
        cupti.activity_register_callbacks(lambda: (8 << 20, 0), self._completed)

    def _fields_of(self, kind: int) -> tuple[str, ...]:
        if kind in self._calls:
            return "cbid", "start", "end", "thread_id", "correlation_id"
        if kind in self._labels:
            return "start", "end", "bytes", "stream_id", "correlation_id"
        return (
            "name", "start", "end", "grid_x", "grid_y", "grid_z", "stream_id", "correlation_id",
            "registers_per_thread", "static_shared_memory", "dynamic_shared_memory", "block_x", "block_y", "block_z",
            "local_memory_per_thread",
        )

    def _completed(self, activities: list[Any]) -> None:
        # CUPTI frees the records' memory after this call, so the fields are copied.
        for one in activities:
            kind, *found = self._read(one)
            if kind in self._calls:
                number, start, end, thread, correlation = found
                self._called.append(_Called(api_name(self._calls[kind], number), start, end, thread, correlation))
            elif kind in self._labels:
                start, end, moved, stream, correlation = found
                self._ran.append(_Ran(self._labels[kind], start, end, None, moved, stream, correlation))
            else:
                name, start, end, x, y, z, stream, correlation, registers, static, dynamic, *block, local = found
                self._ran.append(_Ran(
                    name, start, end, (x, y, z), None, stream, correlation, registers, static + dynamic,
                    (block[0], block[1], block[2]), local,
                ))

    def start(self) -> None:
        self._windows, self._ran, self._called = [], [], []
        for kind in self._kinds:
            self._cupti.activity_enable(kind)
        self._last_lap = self._cupti.get_timestamp()

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
        """Run `call` while the device is idle before and after it, so that all records in between belong to it."""
        synchronize()
        begin = self._cupti.get_timestamp()
        result = call()
        synchronize(result)
        self._windows.append((begin, self._cupti.get_timestamp()))
        return result

    def lap(self, synchronize: Callable[[], None]) -> None:
        """Wait for an idle device and end a window, which began at the last lap or at `start`."""
        synchronize()
        now = self._cupti.get_timestamp()
        self._windows.append((self._last_lap, now))
        self._last_lap = now

    def collect(self, *, going_on: bool = False) -> list[Sample]:
        if going_on:
            self._cupti.activity_flush_all(1)
        else:
            self._stop(self._kinds)
        samples = [
            sample_of([_device_record(begin, ran) for ran in group])
            for (begin, _), group in zip(self._windows, _within(self._ran, self._windows), strict=True)
        ]
        self._windows, self._ran = [], []
        return samples

    def trace(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> tuple[Any, CallTrace]:
        """Return the call's results and its trace for a timeline; recording host calls makes the call slower."""
        self.start()
        host = tuple(self._calls)
        for kind in host:
            self._cupti.activity_enable(kind)
        try:
            synchronize()
            begin = self._cupti.get_timestamp()
            result = call()
            returned = self._cupti.get_timestamp()
            synchronize(result)
            window = [(begin, self._cupti.get_timestamp())]
        finally:
            self._stop((*self._kinds, *host))
        device = tuple(TracedRecord(**_since(begin, ran)._asdict()) for ran in _within(self._ran, window)[0])
        calls = [HostRecord(*_since(begin, called)) for called in _within(self._called, window)[0]]
        return result, CallTrace((returned - begin) * 1e-9, tuple(launches(calls, device)), device, begin)

    def _stop(self, kinds: Sequence[int]) -> None:
        self._cupti.activity_flush_all(1)
        for kind in kinds:
            self._cupti.activity_disable(kind)


def _within(records: Iterable[Any], windows: Sequence[tuple[int, int]]) -> list[list[Any]]:
    """Return the records that start in each window, both in order of time."""
    ordered = sorted(records, key=lambda r: r.start)
    position = 0
    groups = []
    for begin, end in windows:
        while position < len(ordered) and ordered[position].start < begin:
            position += 1
        inside = []
        while position < len(ordered) and ordered[position].start <= end:
            inside.append(ordered[position])
            position += 1
        groups.append(inside)
    return groups


def _device_record(begin: int, ran: _Ran) -> DeviceRecord:
    fields = _since(begin, ran)._asdict()
    del fields["stream"], fields["correlation"]
    return DeviceRecord(**fields)


def _since(begin: int, record: Any) -> Any:
    """Return the record with its times in seconds since `begin`."""
    return record._replace(start=(record.start - begin) * 1e-9, end=(record.end - begin) * 1e-9)


def sample_of(records: list[DeviceRecord]) -> Sample:
    """Return the sample of one call's records; without records the call took no device time."""
    if not records:
        return Sample(0.0, 0.0, ())
    span = max(r.end for r in records) - min(r.start for r in records)
    return Sample(span, busy_time(records), tuple(records))
