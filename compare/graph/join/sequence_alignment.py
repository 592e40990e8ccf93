"""The cheapest monotone alignment of two sequences: the records that ran, and the launches that were expected.

    align_sequences(slots, records, fit)    # for each record, the index of its slot or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

UNPLACED = 1000.0  # the cost of a record without a slot, and of a slot without a record


class Slot(NamedTuple):
    """An expected launch of a kernel. any_number: it may run several times. idle: it may run nothing."""

    kernel: int
    any_number: bool = False
    idle: bool = False


class Fit(NamedTuple):
    """The ways in which a record can belong to a kernel.

    before, after: a helper that the library launches before or after it. main: the cost of being the kernel itself.
    """

    before: bool
    after: bool
    main: float | None


Ran = TypeVar("Ran", bound=Hashable)
# By the number of records passed: the lowest cost, and the last move there. Moves come in two tables, before and after
# the slot's main kernel.
_Costs = dict[int, float]
_Moves = tuple[dict[int, str], dict[int, str]]


def align_sequences(slots: Sequence[Slot], records: Sequence[Ran], fit: Callable[[int, Ran], Fit]) -> list[int | None]:
    """Return, for each record, the index of the slot that takes it, or None.

    A slot takes one record as its main kernel and helpers around it. A slot with `any_number` takes several main
    records, and helpers before each. fit: of a kernel and a record; it is called once for equal records.
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
    """Return the moves of the cheapest alignment, by slot.

    Nearly every record fits the next slot, so a cheap alignment stays near the diagonal, and few of the pairs of slots
    and records lie on a path within a cost limit. The limit grows until a complete alignment fits. It is the
    cheapest one, because no prefix of an alignment costs more than the whole.
    """
    limit = UNPLACED * (1 + max(0, len(records) - len(slots)))  # that many are left over if there are no helpers
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
    """Return the costs after one slot from those before it, within the limit, and the moves."""
    nothing = 0.0 if slot.idle else UNPLACED
    first, last = min(done), max(done)
    before, early = {first: done[first]}, {first: "open"}
    after, late = {first: done[first] + nothing}, {first: "skip"}
    for j in range(first + 1, len(records) + 1):
        opened, ran = before[j - 1], after[j - 1]
        if j > last and opened > limit and ran > limit:
            break
        helps, follows, main = fit(slot.kernel, records[j - 1])
        between = helps and slot.any_number  # helpers between its main kernels
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
