"""Data and libraries inside the page: gzipped text, in base64, in script elements.

The browser decompresses an element when a view first needs it (static/page.js). `await xlafuse.load(id)` gives the data
of a run, `await xlafuse.load(kind, number)` the data of one case. Base64 has no character that HTML treats specially,
so that nothing in the data can end the element.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

TYPE = "application/gzip-base64"
AT_ONCE = 24  # cases in one element
_DIGITS = 7  # of a number: no clock here has more


def element(id: str, data: Any) -> Markup:
    return text(id, json.dumps(_plain(data), separators=(",", ":"), allow_nan=False))


def elements(kind: str, cases: Sequence[Any]) -> Iterator[Markup]:
    """cases: what there is of each, in order; None where there is nothing."""
    for start in range(0, len(cases), AT_ONCE):
        yield element(f"{kind}-{start // AT_ONCE}", cases[start : start + AT_ONCE])


def text(id: str, content: str) -> Markup:
    packed = base64.b64encode(gzip.compress(content.encode(errors="replace"), mtime=0)).decode()
    return Markup('<script type="{}" id="{}">{}</script>').format(TYPE, id, Markup(packed))


def _plain(value: Any) -> Any:
    """The value as JSON has it: numbers are rounded, and null stands for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
