"""Values that depend on an unrecorded autotune choice: which kernels compute the matrix products.

`combine` turns a value for each choice into one value: a plain one where all choices agree, else a `PerChoice`, which
computes for all of them. Only an answer that all choices share is given. Otherwise `Undetermined` is raised, so neither
an assert nor an `if` passes by what holds for one choice only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

__tracebackhide__ = True  # pytest: a failing test ends at its own line
PLAIN = (bool, int, float, str, type(None))


class Undetermined(AssertionError):
    """The choices disagree: an outcome of its own, neither true nor false."""


def combine(values: Mapping[str, Any]) -> Any:
    """Return one value for a value by choice. Only equal numbers and strings are the same under all choices."""
    several = list(values.values())
    if all(isinstance(value, PLAIN) and value == several[0] for value in several):
        return several[0]
    return several[0] if len(several) == 1 else PerChoice(values)


def for_each_choice(compute: Callable[[str], Any], choices: Mapping[str, Any]) -> Any:
    """Return `compute(choice)` of every choice, combined.

    An error of all choices is raised as it is. An error of some raises Undetermined.
    """
    values: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    for choice in choices:
        try:
            values[choice] = compute(choice)
        except Exception as problem:
            errors[choice] = problem
    if not values:
        raise next(iter(errors.values()))
    if errors:
        raise_undetermined({each: errors[each] if each in errors else repr(values[each]) for each in choices})
    return combine(values)


def raise_undetermined(answers: Mapping[str, Any], what: str = "it") -> NoReturn:
    listed = "\n".join(f"  {choice}: {short(answer)}" for choice, answer in answers.items())
    raise Undetermined(
        f"undetermined: {what} depends on which kernels compute the matrix products, which the GPU chooses by "
        f"measuring, and no choice is recorded for this code\n{listed}\n"
        "either assert what holds for each choice (g.choices), or record the GPU's choices: docs/pytest-plugin.md, "
        "'Undetermined'"
    )


def by_choice(value: Any) -> Mapping[str, Any] | None:
    """Return the values of a `PerChoice` by choice, or None for a plain value."""
    return value._values if isinstance(value, PerChoice) else None


def pairs(left: Any, right: Any) -> dict[str, tuple[Any, Any]]:
    """Return the values of both sides for each choice.

    Two compilers make their choices independently. Where the sides' choices differ, each of the left goes with each of
    the right, because every pair can come about.
    """
    ours, theirs = by_choice(left), by_choice(right)
    if ours is None or theirs is None:
        choices = ours or theirs or {"": None}
        return {c: (left if ours is None else ours[c], right if theirs is None else theirs[c]) for c in choices}
    if ours.keys() == theirs.keys():
        return {choice: (ours[choice], theirs[choice]) for choice in ours}
    return {f"{one} / {other}": (ours[one], theirs[other]) for one in ours for other in theirs}


class PerChoice:
    """A value for each choice where these differ, used like the value itself.

    Attributes, items, calls, arithmetic and comparisons (`pairs`) apply to every choice. Python needs one plain answer
    for `if`, `in`, `len` and loops: it is given where all choices agree; otherwise Undetermined is raised.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __repr__(self) -> str:
        return "<" + " | ".join(f"{choice}: {short(value)}" for choice, value in self._values.items()) + ">"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks these up to copy or pickle
            raise AttributeError(name)
        return for_each_choice(lambda choice: getattr(self._values[choice], name), self._values)

    def __getitem__(self, key: Any) -> Any:
        return for_each_choice(lambda choice: self._values[choice][key], self._values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return for_each_choice(lambda choice: self._values[choice](*args, **kwargs), self._values)

    def __bool__(self) -> bool:
        return bool(self._answer("whether it holds", bool))

    def __len__(self) -> int:
        return int(self._answer("their number", len))

    def __contains__(self, item: Any) -> bool:
        return bool(self._answer(f"whether {item!r} is among them", lambda value: item in value))

    def __iter__(self) -> Iterator[Any]:
        raise_undetermined(self._values, "a loop's sequence")

    __hash__ = None  # type: ignore[assignment]

    def _answer(self, what: str, ask: Callable[[Any], Any]) -> Any:
        found = for_each_choice(lambda choice: ask(self._values[choice]), self._values)
        if answers := by_choice(found):
            raise_undetermined({c: f"{answer} ({short(self._values[c])})" for c, answer in answers.items()}, what)
        return found


def _binary(name: str, compute: Callable[[Any, Any], Any], *, compares: bool) -> None:
    def method(self: PerChoice, other: Any) -> Any:
        sides = pairs(self, other)
        values = {choice: compute(a, b) for choice, (a, b) in sides.items()}
        found = combine(values)
        if compares and isinstance(found, PerChoice):
            shown = {choice: f"{short(a)} and {short(b)}: {values[choice]}" for choice, (a, b) in sides.items()}
            raise_undetermined(shown, f"a comparison ({_SIGNS[name]})")
        return found

    setattr(PerChoice, name, method)


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
