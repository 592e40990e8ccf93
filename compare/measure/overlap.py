"""Communication and computation of one call on one GPU: which kernels are which, and how long they run together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..base.exchange_kernels import moves_between_gpus
from .clock import DeviceRecord

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds of one call on one GPU. Each is the length of a union of intervals.

    communication: a communication kernel or a copy between two GPUs ran. compute: any other kernel, copy or memset ran.
    both: the intersection of the two.
    """

    communication: float
    compute: float
    both: float


def overlap(records: Iterable[DeviceRecord]) -> Overlap:
    """Return the times of one call's records."""
    exchanging: list[Interval] = []
    computing: list[Interval] = []
    for record in records:
        (exchanging if moves_between_gpus(record.name) else computing).append((record.start, record.end))
    exchanges, computes = union(exchanging), union(computing)
    return Overlap(_length(exchanges), _length(computes), _length(_intersection(exchanges, computes)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the common parts of two lists of disjoint intervals in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
