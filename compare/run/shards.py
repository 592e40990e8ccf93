"""A plan in parts of about equal work, one for each of several GPUs; `compare.run.merge` makes one run of theirs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ..base.usage import UsageError
from ..plan.plan import Plan, Share
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation
from .session import widest

Group = Sequence[tuple[Case, Sequence[Implementation]]]  # cases that share their inputs: directions of one shape


def groups_of(work: Iterable[tuple[Case, Sequence[Implementation]]]) -> Iterator[Group]:
    """The directions of a shape together: they share inputs and references."""
    for _, group in groupby(work, key=lambda each: widest(each[0])):
        yield list(group)


# Of a run, for what tunes (`Implementation.tunes`): 18 took 27 s in the mean on an H200, alone; less is a guess, for
# lanes do so beside each other.
TUNED_SECONDS = 11.0
SHARED_SECONDS = 0.12  # of a run, for each unit of `effort`: 0.84 s of one lane, of eight
TIMED_SECONDS = 0.4  # of a run, for each implementation of a case


def effort(group: Group) -> float:
    """Grows with the time that a lane takes to compile a group: the more tensors a block has, the more is done with
    them. Of 41 groups it has a correlation of 0.71 with the seconds that PyTorch's side took on an H200, but for what
    tunes."""
    block = BLOCKS[group[0][0].block]
    return sum(len(found) for _, found in group) * math.sqrt(len(block.inputs + block.outputs))


def tuned(group: Group) -> int:
    """How many of its implementations tune."""
    return sum(implementation.tunes for _, found in group for implementation in found)


def seconds(group: Group) -> float:
    """By which a group makes a run longer, roughly."""
    implementations = sum(len(found) for _, found in group)
    return SHARED_SECONDS * effort(group) + TIMED_SECONDS * implementations + TUNED_SECONDS * tuned(group)


def part_of(plan: Plan, part: str) -> Plan:
    """Part "K/N" of the plan, the K-th of N: each group goes where least has gone yet, those that take longest first.

    Raises UsageError where `part` is not of that form, or nothing is left for it.
    """
    form = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    number, count = (int(digits) for digits in form.groups()) if form else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(f"--part takes K/N, as in 1/2, the first of two parts; got {part!r}")
    groups = sorted(groups_of(plan.work), key=seconds, reverse=True)
    if number > len(groups):
        shapes = "1 shape" if len(groups) == 1 else f"{len(groups)} shapes"
        raise UsageError(f"--part {part}: the selection has {shapes} to share out; take no more parts than that")
    count = min(count, len(groups))  # no more parts than that have anything to do
    loads = [0.0] * count
    mine: set[str] = set()
    for group in groups:
        least = loads.index(min(loads))
        loads[least] += seconds(group)
        if least == number - 1:
            mine |= {case.id for case, _ in group}
    share = Share((f"{number}/{count}",), tuple(case.id for case, _ in plan.work))
    return replace(plan, work=tuple(entry for entry in plan.work if entry[0].id in mine), share=share)
