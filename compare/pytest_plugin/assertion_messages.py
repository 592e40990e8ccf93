"""Lines that pytest prints for a failed comparison."""

from __future__ import annotations

from .per_choice import by_choice, pairs, short
from .view import Materialized


def comparison(op: str, left: object, right: object) -> list[str] | None:
    """Return lines for pytest's assertion message, or None where pytest's own lines suffice."""
    if op not in ("in", "not in"):
        return _for_each_choice(op, left, right)
    lines = []
    for choice, value in (by_choice(right) or {"": right}).items():
        if not isinstance(value, Materialized):
            return None
        found = value.described(str(left) if op == "not in" else None)
        where = f", products by {choice}" if choice else ""
        heading = f"materialized{where}:" if op == "not in" else f"not among the materialized buffers{where}:"
        lines += [heading, *(f"  {line}" for line in found or ["no buffer is materialized"])]
    return [f"{left!r} {op} g.materialized", *lines]


def _for_each_choice(op: str, left: object, right: object) -> list[str] | None:
    if by_choice(left) is None and by_choice(right) is None:
        return None
    lines = [f"{choice}: {short(a)} {op} {short(b)}" for choice, (a, b) in pairs(left, right).items()]
    return [f"{op}: false for every autotune choice", *lines]
