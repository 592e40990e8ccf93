"""Which keys a query sees, evaluated from a mask that is computed from positions alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .operation_graph import Operation

HIDDEN = -1e4  # a score below is a masked one: -inf, or finfo's minimum
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "and": np.logical_and, "or": np.logical_or, "xor": np.not_equal,
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}


class Mask(NamedTuple):
    """A condition or an added array. hides: what it means where it is true, or None for an added array."""

    operation: Operation
    hides: bool | None


class Visibility(NamedTuple):
    """causal: None where data decides. window: the latest keys that a query sees, 0 for all. data: a part is data."""

    causal: bool | None
    window: int
    data: bool


def visibility(masks: list[Mask], queries: int, keys: int, *, data: bool = False) -> Visibility:
    """Evaluate masks at the first, a middle and the last query, for all keys.

    XLA may transpose scores, so keys are the positions along the last axis, or those along another one, if that makes
    the mask causal. A part that is data counts as visible, and is noted. A mask of positions that is neither causal nor
    a causal window counts as data. data: another part of the mask is data.
    """
    found = [_visibility(masks, queries, keys, data, along_last=along_last) for along_last in (True, False)]
    return next((visibility for visibility in found if visibility.causal), found[0])


def _visibility(masks: list[Mask], queries: int, keys: int, data: bool, *, along_last: bool) -> Visibility:
    rows = sorted({0, queries // 2, queries - 1})
    seen = np.ones((len(rows), keys), bool)
    for mask in masks:
        axes = [np.arange(keys)[None], np.array(rows)[:, None]]
        last, other = axes if along_last else axes[::-1]
        value, known = _evaluate(mask.operation, other, last)
        data |= not known
        if value is None:
            continue
        if mask.hides is None:
            visible = value > HIDDEN
        else:
            visible = np.logical_not(value) if mask.hides else value.astype(bool)
        seen &= visible
    positions = np.arange(keys)[None]
    last = np.array(rows)[:, None]
    if seen.all():
        return Visibility(None if data else False, 0, data)
    window = int(seen[-1].sum())
    if (seen == (positions <= last) & (positions > last - window)).all():
        return Visibility(True, window if window < queries else 0, data)
    return Visibility(None, 0, True)


def _evaluate(operation: Operation, query: Any, key: Any) -> tuple[Any, bool]:
    """Return the value at these positions, None where it is data; and whether no part of it is data."""
    if operation.op == "constant":
        value = operation.value
        return (None, False) if value is None else (np.array(value), True)
    if operation.op == "iota":
        return (key if operation.facts["axis"] == 1 else query), True
    if operation.op == "axis":
        return _evaluate(operation.operands[0], query, key if operation.facts["axis"] == 1 else query)
    if operation.op == "gather":  # positions, looked up at positions
        index, known = _evaluate(operation.operands[-1], query, key)
        return _evaluate(operation.operands[0], index, index) if known else (None, False)
    parts = [_evaluate(operand, query, key) for operand in operation.operands]
    values, known = [value for value, _ in parts], all(known for _, known in parts)
    if operation.op in ("and", "or", "add") and sum(value is None for value in values) == 1:
        return next(value for value in values if value is not None), False
    if any(value is None for value in values) or not values:
        return None, False
    with np.errstate(all="ignore"):
        if operation.op == "compare":
            compared = _COMPARISONS.get(operation.facts["direction"])
            return (None, False) if compared is None else (compared(*values), known)
        if operation.op in _BINARY:
            return _BINARY[operation.op](*values), known
        if operation.op == "not":
            return np.logical_not(values[0]), known
        if operation.op == "negate":
            return -values[0], known
        if operation.op == "select":
            return np.where(*values), known
    return None, False
