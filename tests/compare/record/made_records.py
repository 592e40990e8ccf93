"""Invented records for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins

from xlafuse.compare.record.record import Record
from xlafuse.compare.record.record_fields import Measurement
from xlafuse.compare.spec.case import Case


def made_record(
    case: Case, implementation: str = "xla", compiler: str = "xla", status: str = "ok", **fields: Any
) -> Record:
    """Return a record from fields as JSON has them. The fields that its status needs have values by default."""
    needed: dict[str, Any] = {}
    if status == "ok":
        checked = {"device": "NVIDIA H200", "backend": "cuda", "dtype": case.dtype, "case": case.name}
        needed = {"checked": checked, "errors": [{"name": "y", "error": 0.1, "tolerance": 0.3}]}
    elif status != "compiled":
        needed = {"detail": "the reason"}
    named = {"case": case, "implementation": implementation, "compiler": compiler, "status": status}
    return convert(to_builtins({**named, **needed, **fields}), Record)


def measurement_of(record: Record) -> Measurement:
    """Return the measurement of a record that has one."""
    assert record.measurement is not None
    return record.measurement


def with_fields(record: Record, **fields: Any) -> Record:
    """Return the record with other fields, as `made_record` takes them."""
    known = {name: value for name in record.__struct_fields__ if (value := getattr(record, name))}
    return made_record(**{**known, **fields})


def without_kernel_times(record: Record) -> None:
    """Take the times of single kernels from a record, as of CUDA events."""
    for times in record.times.values():
        times.busy_time = times.launches = times.records = None


def append_malformed(folder: Path, record: Record, **fields: Any) -> None:
    """Append the record to a run, with values that its fields cannot have."""
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps({**record.to_json(), **fields}) + "\n")
