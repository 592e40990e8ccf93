"""Groups and batches. The directions of one shape form a group; groups that fit in GPU memory together form a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation

Group = Sequence[tuple[Case, Sequence[Implementation]]]  # cases that share inputs and references

# Bytes of GPU memory that the three processes of a runner take at their start and keep.
RUNNER_BYTES = 4 << 30
# Copies of inputs and outputs: two processes hold them and their references, for two input sets. On an H200, groups
# took a quarter of this estimate (median), and more than the estimate 2% of the time.
COPIES = 8
TRAINED_COPIES = 24  # with gradients: also copies of gradients, cotangents and their references
# Copies of `Block.working_bytes`. XLA's allocator takes regions of doubling size and keeps them; eager PyTorch holds as
# much during its check. With 2 copies, six of eight groups next to decoder_block and attention ran out of memory.
WORKING_COPIES = 5


def widest(case: Case) -> Case:
    """Return the case in the direction whose inputs and references contain those of all directions of its block."""
    differentiating = (d for d in BLOCKS[case.block].directions if replace(case, direction=d).differentiates)
    return replace(case, direction=next(differentiating, case.direction))


def groups_of(work: Iterable[tuple[Case, Sequence[Implementation]]]) -> Iterator[Group]:
    """Yield one group for each shape. The cases of a shape must be consecutive in `work`."""
    for _, group in groupby(work, key=lambda each: widest(each[0])):
        yield list(group)


def name_of(group: Group) -> str:
    """Return the id that the group's cases share: block, shape and dtype."""
    return group[0][0].id.rpartition("/")[0]


def memory_of(group: Group) -> int:
    """Return an estimate, from its tensors, of the bytes of GPU memory that a group takes to prepare and measure."""
    case = group[0][0]
    block = BLOCKS[case.block]
    tensors = sum(tensor.bytes(case) for tensor in block.inputs + block.outputs)
    copies = TRAINED_COPIES if any(case.differentiates for case, _ in group) else COPIES
    working = block.working_bytes(case.sizes)
    pools = sum(i.backend.replays_graphs for _, found in group for i in found)  # each keeps what its call needs
    return copies * tensors + WORKING_COPIES * working + pools * (tensors + working)


def compile_effort(group: Group) -> float:
    """Return a measure of a group's compile time: implementations times the square root of the number of tensors.

    For 41 groups on an H200, its correlation with PyTorch's compile seconds was 0.71, without autotuned compiles.
    """
    block = BLOCKS[group[0][0].block]
    return sum(len(found) for _, found in group) * math.sqrt(len(block.inputs + block.outputs))


def batches(groups: Iterable[Group], free_bytes: int | None, runners: int) -> Iterator[list[Group]]:
    """Yield batches of at most `runners` groups that fit in `free_bytes` together, the longest compiles first.

    A batch takes as long to prepare as its slowest group, so a batch takes groups of similar effort. A group that fits
    in no other batch gets its own. Without `free_bytes`, every group gets its own batch.
    """
    left = sorted(groups, key=compile_effort, reverse=True)
    while left:
        batch: list[Group] = []
        free = 0 if free_bytes is None else free_bytes - runners * RUNNER_BYTES
        for group in list(left):
            if not batch or (len(batch) < runners and memory_of(group) <= free):
                batch.append(group)
                left.remove(group)
                free -= memory_of(group)
        yield batch
