"""What ran, in order, placed in the launches to come, in order: the cheapest monotone alignment of two sequences.

    align_sequences(slots, records, fit)    # of each record the index of the slot that takes it, or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

UNPLACED = 1000.0  # the cost of a record that no slot takes, and of a slot that should have run and takes none


class Slot(NamedTuple):
    """A launch to come of a kernel. any_number: how often is not known. idle: it may run nothing."""

    kernel: int
    any_number: bool = False
    idle: bool = False


class Fit(NamedTuple):
    """What a record may be to a kernel: what a library launches before the kernel, after it, or, at a cost, the kernel.
    """

    before: bool
    after: bool
    main: float | None


Ran = TypeVar("Ran", bound=Hashable)
# Both by how many records are behind: the least that it costs, and the last move there, until a slot's main kernel ran
# and from then on.
_Costs = dict[int, float]
_Moves = tuple[dict[int, str], dict[int, str]]


def align_sequences(slots: Sequence[Slot], records: Sequence[Ran], fit: Callable[[int, Ran], Fit]) -> list[int | None]:
    """A slot takes one record for its main kernel, and what fits around that; any number of main ones, and what fits
    before each, where that is how many there may be. fit: of a kernel and a record; of equal ones it is asked once.
    """
    first: dict[Ran, int] = {}
    sorts = [first.setdefault(record, index) for index, record in enumerate(records)]

    @cache
    def fit_of(kernel: int, sort: int) -> Fit:
        return fit(kernel, records[sort])

    moves = _cheapest(slots, sorts, fit_of)
    placed: list[int | None] = [None] * len(records)
    j, at, ran = len(records), len(slots) - 1, True
    while at >= 0:
        move = moves[at][ran][j]
        if move == "open":
            at, ran = at - 1, True
        elif move == "skip":
            ran = False
        else:
            j -= 1
            placed[j] = None if move == "leave" else at
            ran = ran and move != "main"
    return placed


def _cheapest(slots: Sequence[Slot], records: Sequence[int], fit: Callable[[int, int], Fit]) -> list[_Moves]:
    """By slot the moves that end in the cheapest alignment.

    Nearly every record is what the next slot is to run, and what costs little strays little from that: of the pairs of
    hundreds of slots and records few lie on a way that costs no more than a limit. The limit is raised until it has
    room for a whole alignment. None is cheaper than the one found then, for no part of one costs more than the whole.
    """
    limit = UNPLACED * (1 + max(0, len(records) - len(slots)))  # so many are left over, where nothing helps a slot
    while True:
        done = {j: j * UNPLACED for j in range(len(records) + 1) if j * UNPLACED <= limit}
        moves: list[_Moves] = []
        for slot in slots:
            done, led = _through(slot, records, fit, done, limit)
            moves.append(led)
            if not done:
                break
        if len(records) in done:
            return moves
        limit *= 2


def _through(
    slot: Slot, records: Sequence[int], fit: Callable[[int, int], Fit], done: _Costs, limit: float
) -> tuple[_Costs, _Moves]:
    """One slot's turn: from what it costs before the slot to what it costs after, both where within the limit."""
    nothing = 0.0 if slot.idle else UNPLACED
    first, last = min(done), max(done)
    before, early = {first: done[first]}, {first: "open"}
    after, late = {first: done[first] + nothing}, {first: "skip"}
    for j in range(first + 1, len(records) + 1):
        opened, ran = before[j - 1], after[j - 1]
        if j > last and opened > limit and ran > limit:
            break
        helps, follows, main = fit(slot.kernel, records[j - 1])
        between = helps and slot.any_number  # of its main kernels
        before[j], early[j] = min(
            (done.get(j, math.inf), "open"), (opened, "take") if helps else (opened + UNPLACED, "leave")
        )
        ways = [(before[j] + nothing, "skip"), (ran, "take") if follows or between else (ran + UNPLACED, "leave")]
        if main is not None:
            ways.append((opened + main, "main"))
            if slot.any_number:
                ways.append((ran + main, "take"))
        after[j], late[j] = min(ways)
    return {j: cost for j, cost in after.items() if cost <= limit}, (early, late)
