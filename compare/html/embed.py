"""Data and libraries inside the page: compressed text in script elements, which the page unpacks when it needs them.

`await xlafuse.load(id)` (static/page.js) reads what `element` wrote. Base64 has no character that HTML treats
specially, so that nothing in the data can end the element.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any

from markupsafe import Markup

TYPE = "application/gzip-base64"


def element(id: str, data: Any) -> Markup:
    """JSON; a number that is not finite becomes null, which JSON has no other word for."""
    return text(id, json.dumps(finite(data), separators=(",", ":"), allow_nan=False))


def text(id: str, content: str) -> Markup:
    packed = base64.b64encode(gzip.compress(content.encode(errors="replace"), mtime=0)).decode()
    return Markup('<script type="{}" id="{}">{}</script>').format(TYPE, id, Markup(packed))


def finite(data: Any) -> Any:
    """The same data with None for infinities and NaN."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data
