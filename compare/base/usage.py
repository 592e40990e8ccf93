"""Errors that the user can mend, and names checked against a list."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable
from pathlib import Path

from . import atomic_write


class UsageError(Exception):
    """The user's request cannot be served. The message is one line that says what is possible."""


def write_file(file: Path, content: bytes) -> None:
    """Write a file that the user named. Raises UsageError where that fails."""
    try:
        atomic_write.write(file, content)
    except OSError as problem:
        raise UsageError(f"{file}: cannot be written: {problem.strerror}") from None


def join_some(names: Iterable[str], most: int | None) -> str:
    """Join the names, or the first `most` of them and the number of the rest."""
    listed = list(names)
    more = len(listed) - (len(listed) if most is None else most)
    return f"{', '.join(listed[:most])} and {more:,} more" if more > 0 else ", ".join(listed)


def one_of(
    kind: str, name: str, possible: Iterable[str], shown: Iterable[str] | None = None, *, most: int | None = None,
    where: str = "", elsewhere: Container[str] = (),
) -> str:
    """Return `name` if it is possible. Raises UsageError with near matches and the possible names.

    shown: names to list instead. most: how many to list. where: what was searched ("among these records"), if the name
    may exist elsewhere. elsewhere: names that exist, but not here; they have no near matches.
    """
    possible = list(possible)
    if name in possible:
        return name
    near = [] if name in elsewhere else difflib.get_close_matches(name, possible, n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    what = f"{kind} {name!r} {where}".rstrip()
    raise UsageError(f"no {what}{meant} {kind}s: {join_some(shown or possible, most) or 'none'}")
