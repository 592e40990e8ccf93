"""Rows as data for programs and notebooks: one flat table, as JSON and as CSV. docs/report-data.md has the columns."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from typing import Any

from .rows import Row

# What is known of a check, by the name in a record; each a column of its own, checked_device and so on.
CHECKED = ("device", "backend", "dtype", "case")


def as_json(rows: Iterable[Row]) -> str:
    """A list of objects in strict JSON: a number that is not finite becomes null; the row's detail says what it was."""
    return json.dumps(flat(rows), indent=1)


def as_csv(rows: Iterable[Row]) -> str:
    """A line of names, then one a row; what is not known, or not finite, is empty. Text stands as it is, quoted where
    CSV needs it; characters that no CSV can hold are left out."""
    found = flat(rows)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(found[0]) if found else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in found)
    return stream.getvalue()


def flat(rows: Iterable[Row]) -> list[Row]:
    """Rows whose values are texts, finite numbers and None, all with the same columns."""
    return [{name: _finite(value) for key, each in row.items() for name, value in _columns(key, each)} for row in rows]


def _columns(name: str, value: Any) -> list[tuple[str, Any]]:
    if name != "checked":
        return [(name, value)]
    known = value or {}
    return [(f"checked_{part}", None if known.get(part) is None else str(known[part])) for part in CHECKED]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    return value.replace("\0", "").replace("\r", "") if isinstance(value, str) else value
