"""Groups of parts for a first look: a dozen lines that hold all of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .parts import Part, Piece
from .places import Place, Sources, parent_of, parse

_OWN_SHARE = 0.25  # of a step: such a part is a group of its own
_SMALL_SHARE = 0.05  # of a step: such groups of one function become one


@dataclass(frozen=True)
class Group:
    """Parts that are shown as one line. parts: the longest first."""

    parts: tuple[Part, ...]

    @property
    def time_us(self) -> float:
        return sum(part.time_us for part in self.parts)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for part in self.parts for piece in part.pieces]


def groups(found: Sequence[Part], sources: Sources) -> list[Group]:
    """Return the groups of parts, the longest first.

    Parts within one call are a group, such as `down(silu(gate(x)) * up(x))`. A part that takes a quarter of the step is
    a group of its own. Short groups of one function are one. Where no columns tell calls apart, each function is a
    group.
    """
    total = sum(part.time_us for part in found) or 1.0
    places = {part.key: place for part in found if (place := parse(part.key)) is not None}
    calls: dict[object, list[Part]] = {}
    for part in found:
        place = places.get(part.key)
        call: object = part.key
        if place is not None and place.begin is None:
            call = sources.function(place) or place
        elif place is not None and part.time_us < _OWN_SHARE * total:
            call = _outermost(place, list(places.values()))
        calls.setdefault(call, []).append(part)
    by_function: dict[object, list[Part]] = {}
    for call, own in calls.items():
        short = sum(part.time_us for part in own) < _SMALL_SHARE * total
        function = (call.file, call.function) if short and isinstance(call, Place) else call
        by_function.setdefault(function, []).extend(own)
    made = (Group(tuple(sorted(own, key=lambda part: -part.time_us))) for own in by_function.values())
    return sorted(made, key=lambda group: -group.time_us)


def _outermost(place: Place, places: Sequence[Place]) -> Place:
    while (parent := parent_of(place, places)) is not None:
        place = parent
    return place
