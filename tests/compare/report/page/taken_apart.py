"""The inverse of compare.report.page.columns, as static/page.js has it."""

from __future__ import annotations

import itertools
from typing import Any


def together(node: Any) -> list[Any]:
    """The values that a node of compare.report.page.columns stands for."""
    if isinstance(node, list):
        return node
    if "kinds" in node:
        kinds = [iter(together(kind)) for kind in node["kinds"]]
        return [next(kinds[kind]) for kind in node["of"]]
    if "lengths" in node:
        items = iter(together(node["items"]))
        return [list(itertools.islice(items, length)) for length in node["lengths"]]
    if "places" in node:
        places = [together(place) for place in node["places"]]
        return [[place[i] for place in places] for i in range(node["many"])]
    fields = {name: together(field) for name, field in node["fields"].items()}
    return [{name: field[i] for name, field in fields.items()} for i in range(node["many"])]
