"""Data and libraries inside the page: script elements with gzipped text in base64.

The browser decompresses an element when a view first needs it (static/page.js). `await xlafuse.load(id)` returns data
of the run, `await xlafuse.load(kind, number)` those of one case. A list of objects with equal keys is stored by key
(`by_key`). This puts similar values next to each other: gzip finds repeated text only within 32 KB. Base64 has no
character that is special in HTML, so no data can end the element.
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
CASES_PER_ELEMENT = 24
_DIGITS = 7  # significant; no clock has more


def element(id: str, data: Any) -> Markup:
    """Return a script element with JSON data."""
    return text(id, json.dumps(by_key(data), separators=(",", ":"), allow_nan=False))


def elements(kind: str, cases: Sequence[Any]) -> Iterator[Markup]:
    """Yield script elements with the data of all cases, in order; None for a case without data."""
    for start in range(0, len(cases), CASES_PER_ELEMENT):
        yield element(f"{kind}-{start // CASES_PER_ELEMENT}", cases[start : start + CASES_PER_ELEMENT])


def by_key(value: Any) -> Any:
    """Return plain data with each list of objects with equal keys as {"=": {key: list of values}}, at every depth.

    Keys of other objects that begin with "=" get another one in front. static/page.js reverses this. Numbers are
    rounded; None replaces those that are not finite.
    """
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {f"={key}" if key.startswith("=") else key: by_key(item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    keys = list(value[0]) if value and isinstance(value[0], dict) else []
    if keys and all(isinstance(item, dict) and list(item) == keys for item in value):
        return {"=": by_key({key: [item[key] for item in value] for key in keys})}
    return [by_key(item) for item in value]


def text(id: str, content: str) -> Markup:
    """Return a script element with text."""
    packed = base64.b64encode(gzip.compress(content.encode(errors="replace"), mtime=0)).decode()
    return Markup('<script type="{}" id="{}">{}</script>').format(TYPE, id, Markup(packed))
