"""CUPTI's records, read from memory by cupti-python's layouts."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xlafuse.compare.measure.cupti_records import reader

LAYOUT = np.dtype(
    [("kind", "i4"), ("grid_x", "i4"), ("end", "u8"), ("name", "i8"), ("start", "u8"), ("stream_id", "u4")], align=True
)
NAME = ctypes.create_string_buffer("void gelu\u00e9<float>(float*)".encode())
FIELDS = ("name", "start", "end", "grid_x", "stream_id")
VALUES = (NAME.value.decode(), 2**60 + 1, 2**60 + 9, 7, 13)


class ActivityKernel10:
    """A record in memory; only its kind is an attribute."""

    kind = 10

    def __init__(self) -> None:
        self.memory = np.zeros(1, LAYOUT)
        self.memory[0] = (10, 7, 2**60 + 9, ctypes.addressof(NAME), 2**60 + 1, 13)

    def __int__(self) -> int:
        return int(self.memory.ctypes.data)


def test_fields_are_read_from_the_record_s_memory() -> None:
    asked: list[int] = []

    def fields_of(kind: int) -> tuple[str, ...]:
        asked.append(kind)
        return FIELDS

    read = reader(SimpleNamespace(activity_kernel10_dtype=LAYOUT), fields_of)
    assert [read(ActivityKernel10()) for _ in range(2)] == [(10, *VALUES)] * 2
    assert asked == [10]


def test_a_kernel_may_have_no_name_and_a_kind_none_to_read() -> None:
    read = reader(SimpleNamespace(activity_kernel10_dtype=LAYOUT), lambda kind: ("end", "start"))
    assert read(ActivityKernel10()) == (10, 2**60 + 9, 2**60 + 1)
    record = ActivityKernel10()
    record.memory["name"] = 0
    assert reader(SimpleNamespace(activity_kernel10_dtype=LAYOUT), lambda kind: FIELDS)(record)[1] == ""


def test_without_a_layout_attributes_are_read() -> None:
    record = SimpleNamespace(kind=10, **dict(zip(FIELDS, VALUES, strict=True)))
    assert reader(SimpleNamespace(), lambda kind: FIELDS)(record) == (10, *VALUES)


@pytest.mark.parametrize("name, kind", [("ActivityKernel10", 10), ("ActivityMemset4", 2), ("ActivityAPI", 5)])
def test_cupti_pythons_own_records_read_as_their_attributes(name: str, kind: int) -> None:
    cupti: Any = pytest.importorskip("cupti.cupti")
    if not hasattr(cupti, name):
        pytest.skip(f"this version of cupti-python has no {name}")
    fields = {10: FIELDS[1:], 2: ("start", "end", "bytes"), 5: ("cbid", "start", "thread_id", "correlation_id")}[kind]
    record = getattr(cupti, name)()
    record.kind = kind
    for number, field in enumerate(fields):
        setattr(record, field, 1000 + number)
    assert reader(cupti, lambda _: fields)(record) == (kind, *range(1000, 1000 + len(fields)))
