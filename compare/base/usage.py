"""Errors that the user can mend, and names checked against a list with near matches."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from . import atomic_write


class UsageError(Exception):
    """What the user asked for cannot be done as asked; the message is one line that says what could."""


def write_file(file: Path, content: bytes) -> None:
    """Make or replace a file that the user named. Raises UsageError where it cannot be written."""
    try:
        atomic_write.write(file, content)
    except OSError as problem:
        raise UsageError(f"{file}: cannot be written: {problem.strerror}") from None


def some(names: Iterable[str], most: int | None) -> str:
    """The names, or the first of them and how many more there are."""
    listed = list(names)
    more = len(listed) - (len(listed) if most is None else most)
    return f"{', '.join(listed[:most])} and {more:,} more" if more > 0 else ", ".join(listed)


def one_of(
    kind: str, name: str, possible: Iterable[str], shown: Iterable[str] | None = None, *, most: int | None = None,
    where: str = "",
) -> str:
    """`name`, if it is among the possible. Raises UsageError with near matches and what is possible: `shown` in its
    place, `most` of it.

    where: what was searched, as in "among these records", if a name may well be known elsewhere.
    """
    possible = list(possible)
    if name in possible:
        return name
    near = difflib.get_close_matches(name, possible, n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    what = f"{kind} {name!r} {where}".rstrip()
    raise UsageError(f"no {what}{meant} {kind}s: {some(shown or possible, most) or 'none'}")
