"""Communication and computation of one call on one GPU: which kernels are which, and how long they run together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..backends import Backend
from .clock import COPY, PEER_COPY, DeviceRecord

Interval = tuple[float, float]

# Kernels of NCCL and NVSHMEM, and those of XLA and PyTorch that read or write another GPU's memory. Inductor names its
# own kernels after the operations in them ("triton_poi_fused_all_gather_..."), so those are none.
_EXCHANGES = re.compile(
    r"nccl|nvshmem|multimem|(ragged_?)?all_?to_?all|all_?gather|all_?reduce|reduce_?scatter", re.IGNORECASE
)
_OF_INDUCTOR = "triton_"


@dataclass(frozen=True)
class Overlap:
    """Seconds of one call on one GPU. Each is the length of a union of intervals.

    communication: a communication kernel or a copy from another GPU ran. compute: any other kernel, copy or memset ran.
    both: the intersection of the two.
    """

    communication: float
    compute: float
    both: float


def own_exchanges(backend: Backend) -> tuple[str, ...]:
    """Return prefixes of the names of all that only moves data between GPUs in this backend's programs."""
    return (COPY,) if backend.options.get("copies_exchange") else ()


def is_communication(name: str, own: Sequence[str] = ()) -> bool:
    """Return whether a kernel or copy exchanges data with other GPUs. own: see `own_exchanges`."""
    if name.startswith(tuple(own)):
        return True
    return name == PEER_COPY or (not name.startswith(_OF_INDUCTOR) and bool(_EXCHANGES.search(name)))


def overlap(records: Iterable[DeviceRecord], own: Sequence[str] = ()) -> Overlap:
    """Return the times of one call's records. own: as in `is_communication`."""
    exchanging: list[Interval] = []
    computing: list[Interval] = []
    for record in records:
        (exchanging if is_communication(record.name, own) else computing).append((record.start, record.end))
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
