"""Rows as data for programs and notebooks: one flat table, as JSON and as CSV (docs/report-data.md)."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable
from typing import Any

from .columns import Row


def as_json(rows: Iterable[Row]) -> str:
    """Return a list of objects in strict JSON. A number that is not finite becomes null; the row's detail has it."""
    return json.dumps([{name: _finite(value) for name, value in row.items()} for row in rows], indent=1)


def as_csv(rows: Iterable[Row]) -> str:
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
