"""The CUPTI clock: device time, busy time, traces."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert

from xlafuse.compare.measure.clock import (
    CallTrace,
    CuptiClock,
    DeviceRecord,
    HostRecord,
    TracedRecord,
    api_name,
    busy_time,
    launches,
    sample_of,
)

intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12)


@given(intervals)
def test_busy_time_is_the_length_of_the_union(spans: list[tuple[int, int]]) -> None:
    records = [DeviceRecord("k", start, start + length) for start, length in spans]
    covered = {at for start, length in spans for at in range(start, start + length)}
    assert busy_time(records) == len(covered)
    sample = sample_of(records)
    assert 0 <= sample.busy_time <= sample.device_time


def test_gaps_count_as_device_time_only() -> None:
    sample = sample_of([DeviceRecord("a", 1.0, 2.0), DeviceRecord("b", 4.0, 5.0)])
    assert (sample.device_time, sample.busy_time) == (pytest.approx(4.0), pytest.approx(2.0))
    assert sample_of([]).device_time == 0


def host(name: str, start: int, end: int, correlation: int, thread: int = 1) -> HostRecord:
    return HostRecord(name, start, end, thread, correlation)


def ran(*correlations: int) -> list[TracedRecord]:
    return [TracedRecord("k", 0.0, 1.0, correlation=number) for number in correlations]


def test_nested_runtime_and_driver_calls_count_once() -> None:
    outer, inner = host("cudaLaunchKernel", 0, 10, 1), host("cuLaunchKernel", 2, 8, 2)
    assert launches([inner, outer], ran(1)) == [outer]
    assert launches([inner, outer], ran(2)) == [inner]  # the kernel belongs to it
    assert launches([inner, outer], []) == [outer]
    assert launches([outer, replace(inner, correlation=1)], ran(1)) == [outer]
    assert launches([outer, inner], ran(1, 2)) == [outer, inner]  # each launched a kernel
    other_thread = replace(inner, thread=2)
    assert launches([outer, other_thread], ran(1, 2)) == [outer, other_thread]
    after = host("cuLaunchKernelEx", 11, 12, 3)
    assert launches([after, inner, outer], ran(1)) == [outer, after]


def test_calls_without_device_work_are_left_out() -> None:
    calls = [host("cudaGetDevice", 0, 1, 1), host("cuStreamSynchronize", 1, 2, 2), host("cudaMemsetAsync", 2, 3, 3)]
    assert [call.name for call in launches(calls, [])] == ["cudaMemsetAsync"]
    assert [call.name for call in launches([host("CUDA call 999", 0, 1, 5)], ran(5))] == ["CUDA call 999"]


class Kind(IntEnum):
    MEMCPY, MEMSET, DRIVER, RUNTIME, CONCURRENT_KERNEL = 1, 2, 4, 5, 10


class RuntimeCalls(IntEnum):
    cudaLaunchKernel_ptsz_v7000 = 211
    cudaDeviceSynchronize_v3020 = 165


class DriverCalls(IntEnum):
    cuLaunchKernelEx = 652
    cuMemcpyDtoDAsync_v2_ptsz = 300


class ActivityAPI(SimpleNamespace): ...


class ActivityKernel10(SimpleNamespace): ...


class ActivityMemcpy6(SimpleNamespace): ...


class FakeCupti:
    """The part of CUPTI that a clock uses: it records enabled kinds, and a flush completes them."""

    ActivityKind, runtime_api_trace_cbid, driver_api_trace_cbid = Kind, RuntimeCalls, DriverCalls

    def __init__(self) -> None:
        self.now, self.enabled, self.pending = 0, set[int](), list[SimpleNamespace]()

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        self.completed = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(int(kind))

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(int(kind))

    def activity_flush_all(self, flag: int) -> None:
        self.completed(self.pending)
        self.pending = []

    def get_timestamp(self) -> int:
        self.now += 1000
        return self.now

    def launch(self, correlation: int) -> None:
        start = self.now
        found = [
            ActivityAPI(kind=Kind.RUNTIME, cbid=211, start=start + 10, end=start + 50, thread_id=7,
                        correlation_id=correlation),
            ActivityAPI(kind=Kind.DRIVER, cbid=652, start=start + 20, end=start + 40, thread_id=7,
                        correlation_id=correlation),
            ActivityAPI(kind=Kind.RUNTIME, cbid=165, start=start + 60, end=start + 90, thread_id=7,
                        correlation_id=correlation + 1),
            ActivityKernel10(kind=Kind.CONCURRENT_KERNEL, name="k", start=start + 45, end=start + 80, grid_x=2,
                             grid_y=1, grid_z=1, stream_id=13, correlation_id=correlation, registers_per_thread=40,
                             static_shared_memory=64, dynamic_shared_memory=1024, block_x=128, block_y=2,
                             block_z=1, local_memory_per_thread=8),
            ActivityMemcpy6(kind=Kind.MEMCPY, start=start + 80, end=start + 85, bytes=64, stream_id=13,
                            correlation_id=correlation),
        ]
        self.pending += [one for one in found if one.kind in self.enabled]


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake = FakeCupti()
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=fake))  # type: ignore[arg-type]
    return fake


def nothing(results: Any = None) -> None: ...


def test_a_trace_has_the_launch_and_its_kernels(cupti: FakeCupti) -> None:
    clock = CuptiClock()
    result, trace = clock.trace(lambda: cupti.launch(5) or "result", nothing)
    assert result == "result" and not cupti.enabled
    assert [(call.name, call.thread, call.correlation) for call in trace.host] == [("cudaLaunchKernel", 7, 5)]
    assert trace.host[0].start == pytest.approx(10e-9) and trace.host[0].end == pytest.approx(50e-9)
    kernel, copy = trace.device
    assert (kernel.name, kernel.grid, kernel.stream, kernel.correlation) == ("k", (2, 1, 1), 13, 5)
    assert (kernel.registers, kernel.shared_bytes, kernel.block, kernel.local_bytes) == (40, 1088, (128, 2, 1), 8)
    assert (copy.registers, copy.shared_bytes, copy.block, copy.local_bytes) == (None,) * 4
    assert (copy.name, copy.bytes, copy.start) == ("[memcpy]", 64, pytest.approx(80e-9))
    assert convert(json.loads(json.dumps(asdict(trace))), CallTrace) == trace
    assert trace.returned == pytest.approx(1e-6)


def test_timed_calls_record_no_host_calls_even_after_a_trace(cupti: FakeCupti) -> None:
    clock = CuptiClock()
    clock.trace(lambda: cupti.launch(5), nothing)
    clock.start()
    assert cupti.enabled == {Kind.MEMCPY, Kind.MEMSET, Kind.CONCURRENT_KERNEL}
    clock.time(lambda: cupti.launch(6), nothing)
    clock.time(lambda: cupti.launch(7), nothing)
    first, second = clock.collect()
    assert [record.name for record in first.records] == ["k", "[memcpy]"] == [r.name for r in second.records]
    assert not cupti.enabled
    assert first.device_time == pytest.approx(40e-9)
    assert type(first.records[0]) is DeviceRecord  # only a trace has streams and correlations
    assert first.records[0].registers == 40


def test_each_batch_has_its_own_calls(cupti: FakeCupti) -> None:
    clock = CuptiClock()
    clock.start()
    clock.time(lambda: cupti.launch(6), nothing)
    cupti.launch(7)  # between timed calls, like an L2 flush
    (first,) = clock.collect(going_on=True)
    assert cupti.enabled == {Kind.MEMCPY, Kind.MEMSET, Kind.CONCURRENT_KERNEL}
    clock.time(lambda: cupti.launch(8) or cupti.launch(9), nothing)
    (second,) = clock.collect()
    assert (len(first.records), len(second.records)) == (2, 4) and not cupti.enabled


def test_a_call_that_raises_leaves_nothing_enabled(cupti: FakeCupti) -> None:
    def broken() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        CuptiClock().trace(broken, nothing)
    assert not cupti.enabled


def test_names_of_calls() -> None:
    assert api_name(RuntimeCalls, 211) == "cudaLaunchKernel"
    assert api_name(DriverCalls, 300) == "cuMemcpyDtoDAsync"
    assert api_name(DriverCalls, 999) == "CUDA call 999"  # from a newer driver
