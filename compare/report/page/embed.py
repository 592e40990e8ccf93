"""Data and libraries inside the page: compressed text in script elements, which the page unpacks when it needs them.

`await xlafuse.load(id)`, or `xlafuse.load(kind, number)` for what there is of each case (static/page.js), reads what is
written here. Base64 has no character that HTML treats specially, so that nothing in the data can end the element.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from . import columns

TYPE = "application/gzip-base64"
# Cases in one element. More of them are smaller together, and are unpacked together: of 854 records in 107 cases 24
# make 1.71 MB, 8 make 1.85 and 50 make 1.67.
AT_ONCE = 24


def element(id: str, data: Any) -> Markup:
    return _element(id, [data])


def elements(kind: str, cases: Sequence[Any]) -> Iterator[Markup]:
    """cases: what there is of each, in order; None where there is nothing."""
    for start in range(0, len(cases), AT_ONCE):
        yield _element(f"{kind}-{start // AT_ONCE}", cases[start : start + AT_ONCE])


def text(id: str, content: str) -> Markup:
    packed = base64.b64encode(gzip.compress(content.encode(errors="replace"), mtime=0)).decode()
    return Markup('<script type="{}" id="{}">{}</script>').format(TYPE, id, Markup(packed))


def _element(id: str, values: Sequence[Any]) -> Markup:
    return text(id, json.dumps(columns.apart(values), separators=(",", ":"), allow_nan=False))
