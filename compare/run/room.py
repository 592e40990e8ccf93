"""Which groups of cases are made ready at once: one a lane, of those that the GPU has memory for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base import host
from ..spec.blocks import BLOCKS
from .shards import Group

MOST_LANES = 12
# On the 16 cores of an H200's host twelve lanes got no further than ten: in the median of 677 programs, to compile one
# took 1.23 times as long.
CORES_A_LANE = 1.5
CORES_BESIDE = 8  # for each compile of each framework that goes on while something is timed
KEPT_BYTES = 2 << 30  # of the GPU's memory, which one process may keep from earlier groups
LANE_BYTES = KEPT_BYTES + (2 << 30)  # which a lane's three processes have before they do anything
LEAST_BYTES = 11 << 30  # to a lane, or there are fewer
# Of ten lanes on an H200, groups took a quarter of what these come to in the median, 0.9 of it for 95% of the time, and
# more than it for 2%, seconds at a time. What finds none then is tried again with twice as much.
COPIES = 8  # of inputs and outputs: two processes hold those and references, of two input sets
TRAINED_COPIES = 24  # where there are gradients: those, cotangents and their references, too
WORKING_COPIES = 2  # of working_bytes: XLA's allocator takes memory in regions that double, and keeps them
SMALL_BYTES = 2 << 30  # what a group may need that is taken in beside any others
LARGE_SHARE = 0.3  # of the memory that there is for groups: what takes more is large


def needs(group: Group) -> int:
    """Bytes of the GPU's memory, roughly, that its lane's processes take in all; none where they are few."""
    case = group[0][0]
    block = BLOCKS[case.block]
    held = sum(tensor.bytes(case) for tensor in block.inputs + block.outputs)
    copies = TRAINED_COPIES if any(case.differentiates for case, _ in group) else COPIES
    found = copies * held + WORKING_COPIES * block.working_bytes(case.sizes)
    return 0 if found <= SMALL_BYTES else found


@dataclass(frozen=True)
class Room:
    """How many groups are made ready at once, how many bytes of the GPU's memory all of them may take, and how many
    compiles of each framework go on beside what is timed."""

    lanes: int
    bytes: int
    beside: int = 0

    @property
    def kept(self) -> int | None:
        """How many bytes a process may keep; None where nobody else needs them."""
        return KEPT_BYTES if self.lanes > 1 else None

    def large(self, group: Group) -> bool:
        """Whether little can be made ready beside it."""
        return self.lanes > 1 and needs(group) > LARGE_SHARE * self.bytes

    @staticmethod
    def of(memory_bytes: int | None, most: int) -> Room:
        """For `most` groups at most; one lane where nobody knows how much memory the GPU has."""
        if not memory_bytes:
            return Room(1, 0)
        cores = host.usable_cores()
        lanes = max(1, min(MOST_LANES, most, int(cores / CORES_A_LANE), memory_bytes // LEAST_BYTES))
        return Room(lanes, memory_bytes - lanes * LANE_BYTES, cores // CORES_BESIDE)

    def next(self, left: Sequence[Group], held: Sequence[Group], starved: Sequence[Group] = ()) -> Group | None:
        """The first of those left that there is memory for beside those held; None where there is none. What needs more
        than there is has but small ones beside it. starved: groups that found too little, and take twice as much."""

        def taken(group: Group) -> int:
            return min(2 * max(needs(group), SMALL_BYTES) if group in starved else needs(group), self.bytes)

        free = self.bytes - sum(map(taken, held))
        return next((group for group in left if taken(group) <= free), None)
