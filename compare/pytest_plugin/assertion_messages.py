"""What pytest prints: of a comparison that failed, and at the end of a session."""

from __future__ import annotations

from pathlib import Path

from .per_choice import by_world, pairs, short
from .session_summary import Book
from .snapshot import shown_test
from .view import Materialized


def comparison(op: str, left: object, right: object) -> list[str] | None:
    """Lines for pytest's assertion message; None where pytest's own say as much."""
    if op not in ("in", "not in"):
        return _in_each(op, left, right)
    lines = []
    for world, value in (by_world(right) or {"": right}).items():
        if not isinstance(value, Materialized):
            return None
        found = value.described(str(left) if op == "not in" else None)
        where = f", products by {world}" if world else ""
        said = f"materialized{where}:" if op == "not in" else f"not among what is materialized{where}:"
        lines += [said, *(f"  {line}" for line in found or ["nothing is"])]
    return [f"{left!r} {op} g.materialized", *lines]


def _in_each(op: str, left: object, right: object) -> list[str] | None:
    if by_world(left) is None and by_world(right) is None:
        return None
    lines = [f"{world}: {short(a)} {op} {short(b)}" for world, (a, b) in pairs(left, right).items()]
    return [f"{op}: false in every world", *lines]


def summary(book: Book, root: Path) -> list[str]:
    """Lines about the session's snapshots; none where there is nothing to do about them."""
    written = [f"written: {_place(Path(path), root)}" for path in sorted(book.written)]
    uncompared = [f"not compared: {shown_test(message)}" for message in sorted(book.uncompared)]
    unused = [f"unused, no test asks for it: {_place(path, root)}" for path in book.unused()]
    return written + uncompared + unused


def _place(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
