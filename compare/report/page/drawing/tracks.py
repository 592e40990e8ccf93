"""The boxes of a column: the bands that each covers, and its track."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """A box from band `first` to band `last` in a track. A kernel whose bands have gaps may have several."""

    track: int
    first: int
    last: int


def pieces(held: Mapping[int, Sequence[int]]) -> dict[int, list[Piece]]:
    """Return the boxes of each kernel by launch index; none for a kernel without bands.

    held: the ascending band numbers by launch index. The boxes of a track follow each other in launch order; two may
    share a band at their ends. A kernel is one box from its first band to its last, unless one box for each run of
    adjacent bands needs fewer tracks.
    """
    spanning: dict[int, Runs] = {index: [(bands[0], bands[-1])] if bands else [] for index, bands in held.items()}
    split = {index: _adjacent(bands) for index, bands in held.items()}
    return min(_placed(spanning), _placed(split), key=_track_count)


def _track_count(placed_boxes: Mapping[int, Sequence[Piece]]) -> int:
    return len({piece.track for boxes in placed_boxes.values() for piece in boxes})


def _adjacent(bands: Iterable[int]) -> Runs:
    runs: Runs = []
    for band in bands:
        if runs and band == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], band)
        else:
            runs.append((band, band))
    return runs


def _placed(wanted: Mapping[int, Runs]) -> dict[int, list[Piece]]:
    """Put each box into the first track with free space for it."""
    tracks: list[Runs] = []
    laid: dict[int, list[Piece]] = {}
    for index, runs in wanted.items():
        laid[index] = []
        for first, last in runs:
            track = next((number for number, taken in enumerate(tracks) if _fits(first, last, taken)), len(tracks))
            if track == len(tracks):
                tracks.append([])
            tracks[track].append((first, last))
            laid[index].append(Piece(track, first, last))
    return laid


def _fits(first: int, last: int, taken: Runs) -> bool:
    """True if the box lies below or entirely above each earlier box of the track."""
    return all(end <= first or last < start for start, end in taken)
