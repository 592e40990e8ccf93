"""Where the boxes of one column lie: over which bands, and beside what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """A box from band `first` to band `last`, in a lane; a kernel whose bands have gaps may be several."""

    lane: int
    first: int
    last: int


def pieces(held: Mapping[int, Sequence[int]]) -> dict[int, list[Piece]]:
    """By kernel, in launch order, its boxes; none of a kernel without bands.

    held: by launch index the numbers of the bands, ascending. Boxes of one lane follow one another down the page in
    launch order, at most sharing a band at their ends. A kernel is one box over all between its first band and its
    last, unless boxes of what is adjacent alone need fewer lanes.
    """
    whole: dict[int, Runs] = {index: [(bands[0], bands[-1])] if bands else [] for index, bands in held.items()}
    parted = {index: _adjacent(bands) for index, bands in held.items()}
    best = _laid(whole)
    if parted != whole:
        other = _laid(parted)
        best = min(best, other, key=_lanes)
    return best


def _lanes(laid: Mapping[int, Sequence[Piece]]) -> int:
    return len({piece.lane for placed in laid.values() for piece in placed})


def _adjacent(bands: Iterable[int]) -> Runs:
    runs: Runs = []
    for band in bands:
        if runs and band == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], band)
        else:
            runs.append((band, band))
    return runs


def _laid(wanted: Mapping[int, Runs]) -> dict[int, list[Piece]]:
    """Each box into the first lane that has room for it."""
    lanes: list[Runs] = []
    laid: dict[int, list[Piece]] = {}
    for index, runs in wanted.items():
        laid[index] = []
        for first, last in runs:
            lane = next((number for number, taken in enumerate(lanes) if _fits(first, last, taken)), len(lanes))
            if lane == len(lanes):
                lanes.append([])
            lanes[lane].append((first, last))
            laid[index].append(Piece(lane, first, last))
    return laid


def _fits(first: int, last: int, taken: Runs) -> bool:
    """Below what was launched before, or wholly above it."""
    return all(end <= first or last < start for start, end in taken)
