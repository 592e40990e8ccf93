"""Device time and busy time from records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.clock import DeviceRecord, busy_time, sample_of

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


def test_no_record_is_no_time() -> None:
    assert sample_of([]).device_time == 0
