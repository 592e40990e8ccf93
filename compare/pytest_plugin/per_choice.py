"""Values that may depend on what nobody measured: which kernels compute the matrix products.

Each choice is a *world*. `combined` makes one value of a value in each world: a plain one where all worlds agree, else
a `Both`, which goes on computing in all of them. An answer is given only where all worlds give it; else `Undetermined`
is raised, so that neither an assert nor an `if` can pass by what happens to be true in one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

__tracebackhide__ = True  # pytest: a failing test ends at its own line
PLAIN = (bool, int, float, str, type(None))


class Undetermined(AssertionError):
    """The worlds disagree: an outcome of its own, neither true nor false."""


def combined(values: Mapping[str, Any]) -> Any:
    """One value of a value by world. Only numbers and words are the same thing in all worlds when they are equal."""
    several = list(values.values())
    if all(isinstance(value, PLAIN) and value == several[0] for value in several):
        return several[0]
    return several[0] if len(several) == 1 else Both(values)


def each(compute: Callable[[str], Any], worlds: Mapping[str, Any]) -> Any:
    """`compute(world)` of every world, combined. An error is raised where all raise one; in some it is undetermined."""
    values: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    for world in worlds:
        try:
            values[world] = compute(world)
        except Exception as problem:
            errors[world] = problem
    if not values:
        raise next(iter(errors.values()))
    if errors:
        disagree({world: errors[world] if world in errors else repr(values[world]) for world in worlds})
    return combined(values)


def disagree(answers: Mapping[str, Any], what: str = "it") -> NoReturn:
    listed = "\n".join(f"  {world}: {short(answer)}" for world, answer in answers.items())
    raise Undetermined(
        f"undetermined: {what} depends on which kernels compute the matrix products, which the GPU chooses by "
        f"measuring, and no choice is recorded for this code\n{listed}\n"
        "either assert what holds in each (g.worlds), or record the GPU's choices: docs/gate.md, 'Undetermined'"
    )


def by_world(value: Any) -> Mapping[str, Any] | None:
    """What a `Both` is in each world; None of a plain value."""
    return value._values if isinstance(value, Both) else None


def pairs(left: Any, right: Any) -> dict[str, tuple[Any, Any]]:
    """Both sides in each world. Where they have other worlds than one another (two compilers' choices), each of the
    left side's goes with each of the right side's: those choices are made apart, so all of them can come about."""
    ours, theirs = by_world(left), by_world(right)
    if ours is None or theirs is None:
        worlds = ours or theirs or {"": None}
        return {w: (left if ours is None else ours[w], right if theirs is None else theirs[w]) for w in worlds}
    if ours.keys() == theirs.keys():
        return {world: (ours[world], theirs[world]) for world in ours}
    return {f"{one} / {other}": (ours[one], theirs[other]) for one in ours for other in theirs}


class Both:
    """A value in each world, where they are not the same; used as the value itself.

    Attributes, items, calls, arithmetic and comparisons (`pairs`) are taken in every world. What Python wants one plain
    answer of (`if`, `in`, `len`, a loop) is answered where all worlds agree, and raises Undetermined where they do not.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __repr__(self) -> str:
        return "<" + " | ".join(f"{world}: {short(value)}" for world, value in self._values.items()) + ">"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for, to copy or pickle
            raise AttributeError(name)
        return each(lambda world: getattr(self._values[world], name), self._values)

    def __getitem__(self, key: Any) -> Any:
        return each(lambda world: self._values[world][key], self._values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return each(lambda world: self._values[world](*args, **kwargs), self._values)

    def __bool__(self) -> bool:
        return bool(self._answer("whether it holds", bool))

    def __len__(self) -> int:
        return int(self._answer("their number", len))

    def __contains__(self, item: Any) -> bool:
        return bool(self._answer(f"whether {item!r} is among them", lambda value: item in value))

    def __iter__(self) -> Iterator[Any]:
        disagree(self._values, "what a loop goes through")

    __hash__ = None  # type: ignore[assignment]

    def _answer(self, what: str, ask: Callable[[Any], Any]) -> Any:
        found = each(lambda world: ask(self._values[world]), self._values)
        if answers := by_world(found):
            disagree({w: f"{answer} ({short(self._values[w])})" for w, answer in answers.items()}, what)
        return found


def _binary(name: str, compute: Callable[[Any, Any], Any], *, compares: bool) -> None:
    def method(self: Both, other: Any) -> Any:
        sides = pairs(self, other)
        values = {world: compute(a, b) for world, (a, b) in sides.items()}
        found = combined(values)
        if compares and isinstance(found, Both):
            shown = {world: f"{short(a)} and {short(b)}: {values[world]}" for world, (a, b) in sides.items()}
            disagree(shown, f"a comparison ({_SIGNS[name]})")
        return found

    setattr(Both, name, method)


def _swapped(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compute(b, a)


_SIGNS = {"__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}
for _name in _SIGNS:
    _binary(_name, getattr(operator, _name), compares=True)
for _name in ("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__and__", "__or__"):
    _binary(_name, getattr(operator, _name), compares=False)
    _binary(f"__r{_name.removeprefix('__')}", _swapped(getattr(operator, _name)), compares=False)


def short(value: Any, most: int = 160) -> str:
    text = str(value) if isinstance(value, (str, Exception)) else repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
