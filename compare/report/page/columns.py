"""Data of many cases, column by column: what gzip, which sees no further back than 32 kB, can make small.

The cases of a block repeat each other's names, lines and operations, case by case too far apart. Taken apart, as
columnar formats do with nested records (Melnik et al., "Dremel: Interactive Analysis of Web-Scale Datasets", VLDB
2010), all values of one field stand together. Of the cases' data of `reports/h200-blocks`, 854 records, it leaves 1.71
MB of 2.81, of the drawings half.

A node stands for a list of values:

    [...]                              the values themselves
    {"many": n, "fields": {name: node}}   n objects of the same fields
    {"many": n, "places": [node, ...]}    n lists of the same length
    {"lengths": [...], "items": node}     lists, their items one after the other
    {"kinds": [node, ...], "of": [...]}   values of several kinds: of each the number of its kind

`xlafuse.load` (static/page.js) puts them together again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_PLACES = 40  # a list that is longer is no row of a table
_FEW = 4  # kinds that are worth being kept apart: values for each, on average
_DIGITS = 7  # of a number: more than any clock here, or any eye, tells


def apart(values: Sequence[Any]) -> Any:
    """The node of these values, of what JSON has. Numbers that are not finite become null: JSON has no other word."""
    kinds: dict[Any, list[Any]] = {}
    for value in values:
        kinds.setdefault(_kind(value), []).append(value)
    if len(kinds) == 1:
        return _alike(next(iter(kinds)), values)
    if not kinds or len(kinds) * _FEW > len(values):
        return [_plain(value) for value in values]
    numbers = {kind: number for number, kind in enumerate(kinds)}
    return {
        "kinds": [_alike(kind, own) for kind, own in kinds.items()], "of": [numbers[_kind(value)] for value in values],
    }


def _kind(value: Any) -> Any:
    """Equal for values that one node can hold."""
    return tuple(value) if isinstance(value, dict) else list if isinstance(value, list | tuple) else None


def _alike(kind: Any, values: Sequence[Any]) -> Any:
    if kind is None:
        return [_plain(value) for value in values]
    if kind is not list:
        return {"many": len(values), "fields": {name: apart([value[name] for value in values]) for name in kind}}
    lengths = [len(value) for value in values]
    if 0 < lengths[0] <= _PLACES and len(set(lengths)) == 1:
        return {"many": len(values), "places": [apart(column) for column in zip(*values, strict=True)]}
    return {"lengths": lengths, "items": apart([item for value in values for item in value])}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
