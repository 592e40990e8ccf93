"""The parts of two steps side by side: which became longer and which shorter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .parts import Part
from .places import parse
from .step import Step


@dataclass(frozen=True)
class PartChange:
    """A part's device time in a step, before and after; None where a step has no such part.

    name, where: of the part after, where there is one.
    """

    name: str
    where: str
    before_us: float | None
    after_us: float | None

    @property
    def lost_us(self) -> float:
        """How much longer it takes after than before."""
        return (self.after_us or 0.0) - (self.before_us or 0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "part": self.name, "where": self.where, "before_us": self.before_us, "after_us": self.after_us,
            "lost_us": self.lost_us,
        }


def changes(before: Step, after: Step) -> list[PartChange]:
    """Return the change of each part, the largest first.

    Two parts are one if they have the same scope, or if a function calls the same in both. Where the user's files are
    not found, they are one if they begin at the same place of a function: arguments may differ.
    """
    by_call = _names_calls(before) and _names_calls(after)
    old, new = (_by_identity(step, by_call) for step in (before, after))
    found = []
    for identity in {**new, **old}:
        was, now = old.get(identity, []), new.get(identity, [])
        step, part = (after, now[0]) if now else (before, was[0])
        place = parse(part.key)
        found.append(PartChange(step.name(part), "" if place is None else place.where, _time(was), _time(now)))
    return sorted(found, key=lambda change: -abs(change.lost_us))


def _names_calls(step: Step) -> bool:
    """Return whether the user's files were found, which name the calls."""
    places = [(place, part) for part in step.parts if (place := parse(part.key)) is not None and place.function]
    return any(step.name(part) != place.function for place, part in places)


def _by_identity(step: Step, by_call: bool) -> dict[object, list[Part]]:
    found: dict[object, list[Part]] = {}
    for part in step.parts:
        place = parse(part.key)
        identity: object = part.key
        if place is not None:
            identity = (place.function, step.name(part) if by_call else (place.line, place.begin))
        found.setdefault(identity, []).append(part)
    return found


def _time(parts: list[Part]) -> float | None:
    return sum(part.time_us for part in parts) if parts else None
