"""Data and libraries inside the page: compressed text in script elements, which the page unpacks when it needs them.

`await xlafuse.load(id)` (static/page.js) reads what is written here. Base64 has no character that HTML treats
specially, so that nothing in the data can end the element.

Cases repeat each other: templates, kernels, lines of sources. What stands in several of them is kept once (PIECES), for
gzip sees no further back than 32 kB: it makes the pages of 1,000 records a third smaller.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from markupsafe import Markup

TYPE = "application/gzip-base64"
PIECES = "pieces"
_LEAST = 30  # characters of a piece; a reference takes three bytes, and the piece its place in the list
_ENDS = ("\\n", "},", "],")  # of pieces: a line's end within a string, an object's, a list's
# A reference is one character: JSON is written in ASCII, so that every other one is free; surrogates are none.
_END = "\0"  # of an element; JSON has no such character
_FIRST, _SURROGATES, _AFTER = 0x100, 0xD800, 0xE000


def element(id: str, data: Any) -> Markup:
    return text(id, _json(data))


def text(id: str, content: str, *, refers: bool = False) -> Markup:
    """refers: to pieces, which are in an element of their own."""
    packed = base64.b64encode(gzip.compress(content.encode(errors="replace"), mtime=0)).decode()
    flag = Markup(" data-pieces") if refers else ""
    return Markup('<script type="{}" id="{}"{}>{}</script>').format(TYPE, id, flag, Markup(packed))


def elements(data: Mapping[str, Any]) -> Iterator[Markup]:
    """An element for each, by its id, and the one with the pieces that several of them have in common."""
    split = _joined({id: _pieces(_json(each)) for id, each in data.items()})
    holders = Counter(piece for pieces in split.values() for piece in dict.fromkeys(pieces))
    shared = [piece for piece, count in holders.items() if count > 1 and len(piece) >= _LEAST]
    references = {piece: _reference(number) for number, piece in enumerate(shared)}
    yield element(PIECES, shared)
    for id, pieces in split.items():
        yield text(id, "".join(references.get(piece, piece) for piece in pieces), refers=True)


def _pieces(text: str) -> list[str]:
    for end in _ENDS:
        text = text.replace(end, f"{end}{_END}")
    return text.split(_END)


def _joined(split: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Pieces that stand one after the other wherever either stands as one piece: a reference for many."""
    after: dict[str, str | None] = {}
    before: dict[str, str | None] = {}
    for pieces in split.values():
        for one, other in pairwise([_END, *pieces, _END]):
            if after.setdefault(one, other) != other:
                after[one] = None
            if before.setdefault(other, one) != one:
                before[other] = None
    made = {}
    for id, pieces in split.items():
        runs: list[list[str]] = []
        for previous, piece in pairwise([_END, *pieces]):
            if runs and after[previous] == piece and before[piece] == previous:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        made[id] = ["".join(run) for run in runs]
    return made


def _reference(number: int) -> str:
    code = _FIRST + number
    return chr(code if code < _SURROGATES else code + _AFTER - _SURROGATES)


def _json(data: Any) -> str:
    """A number that is not finite becomes null: JSON has no other word for it."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
