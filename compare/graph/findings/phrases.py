"""Lists and numbers in sentences."""

from __future__ import annotations

from collections.abc import Iterable

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LISTED = 8


def count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def how_often(number: int) -> str:
    return "twice" if number == 2 else f"{count(number)} times"


def named(place: str, ops: Iterable[str]) -> str:
    """Return `place (operations)`."""
    listed = ", ".join(ops)
    return f"{place} ({listed})" if place else listed


def series(words: Iterable[str]) -> str:
    """Return `a, b and c`, each word once; a long list ends in "3 more"."""
    listed = list(dict.fromkeys(word for word in words if word))
    if len(listed) > _LISTED:
        listed[_LISTED - 1 :] = [f"{len(listed) - _LISTED + 1} more"]
    if len(listed) < 2:
        return "".join(listed)
    return f"{', '.join(listed[:-1])} and {listed[-1]}"


def verb(names: list[str], stem: str) -> str:
    """Return the names and the verb: "XLA computes", "XLA and Triton compute"."""
    return f"{series(names)} {stem}{'s' if len(names) == 1 else ''}"
