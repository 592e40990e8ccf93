"""The cheapest alignment of records and slots equals that of a plain dynamic programme over all pairs."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlafuse.compare.graph.join.sequence_alignment import UNPLACED, Fit, Slot, align_sequences

SORTS = 4

fits = st.builds(Fit, st.booleans(), st.booleans(), st.sampled_from([None, None, 0.0, 0.0, 1.0, 3.0]))
slots = st.lists(st.builds(Slot, st.integers(0, SORTS - 1), st.booleans(), st.booleans()), max_size=12)
tables = st.lists(fits, min_size=SORTS * SORTS, max_size=SORTS * SORTS)


def plain(slots: list[Slot], records: list[int], table: list[Fit]) -> list[int | None]:
    """Return the alignment of a plain dynamic programme over all pairs; the first move by name wins a tie."""
    Way = tuple[float, str, tuple[int | None, ...]]  # cost, last move, the slot of each record so far

    @cache
    def best(at: int, ran: bool, j: int) -> Way:
        """Return the cost of the first j records in the slots up to `at`. ran: that slot's main kernel ran."""
        if at < 0:
            return j * UNPLACED, "leave", (None,) * j
        slot = slots[at]
        ways: list[Way] = []

        def add(name: str, cost: float, before: Way, *places: int | None) -> None:
            ways.append((before[0] + cost, name, (*before[2], *places)))

        if j:
            fit = table[slot.kernel * SORTS + records[j - 1]]
            takes = fit.after or (fit.before and slot.any_number) if ran else fit.before
            if takes:
                add("take", 0, best(at, ran, j - 1), at)
            else:
                add("leave", UNPLACED, best(at, ran, j - 1), None)
            if ran and fit.main is not None:
                add("main", fit.main, best(at, False, j - 1), at)
                if slot.any_number:
                    add("take", fit.main, best(at, True, j - 1), at)
        if ran:
            add("skip", 0 if slot.idle else UNPLACED, best(at, False, j))
        else:
            add("open", 0, best(at - 1, True, j))
        return min(ways, key=lambda way: way[:2])

    return list(best(len(slots) - 1, True, len(records))[2])


@given(slots, st.lists(st.integers(0, SORTS - 1), max_size=16), tables)
def test_it_equals_an_exhaustive_alignment(
    slots: list[Slot], records: list[int], table: list[Fit]
) -> None:
    def fit(kernel: int, record: int) -> Fit:
        return table[kernel * SORTS + record]

    assert align_sequences(slots, records, fit) == plain(slots, records, table)


def _same(kernel: int, record: int) -> Fit:
    return Fit(False, False, 0.0 if kernel == record else None)


@pytest.mark.parametrize("planted", [0, 1, 5])
def test_few_pairs_of_hundreds_are_compared(planted: int) -> None:
    asked = []

    def fit(kernel: int, record: int) -> Fit:
        asked.append((kernel, record))
        return _same(kernel, record)

    records = list(range(500))
    for at in range(planted):
        records.insert(100 * at, 1000 + at)
    placed = align_sequences([Slot(kernel) for kernel in range(500)], records, fit)
    assert [at for at in placed if at is not None] == list(range(500))
    assert len(asked) < 20 * 500


def test_records_that_fit_nothing_are_left_over() -> None:
    assert align_sequences([Slot(kernel) for kernel in range(60)], list(range(100, 160)), _same) == [None] * 60
    assert align_sequences([], [1, 2], _same) == [None, None]
    assert align_sequences([Slot(1)], [], _same) == []
