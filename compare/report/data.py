"""A flat table as data for programs and spreadsheets (docs/report-data.md)."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

SCHEMA = "xlafuse.rows/3"


def finite(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows for strict JSON. A number that is not finite becomes null; the row's detail has it."""
    return [{name: _finite(value) for name, value in row.items()} for row in rows]


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a line of names, then a line a row. Values that are not known or not finite are empty.

    Text is kept, quoted where CSV needs it, except for the characters that no CSV can hold: NUL and carriage return.
    Text that a spreadsheet would run as a formula begins with an apostrophe.
    """
    rows = list(rows)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(_finite(value)) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_FORMULA = re.compile(r"[=+\-@\t\n＝＋－＠]")  # the last four are the full-width forms of the first four


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.replace("\0", "").replace("\r", "")
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
