"""A plan in parts of about equal work, one for each of several GPUs; `compare.merge` makes one run of theirs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from compare.blocks import BLOCKS
from compare.selection import Plan, UsageError
from compare.session import widest
from compare.spec import Case, Implementation

Group = Sequence[tuple[Case, Sequence[Implementation]]]  # cases that share their inputs: directions of one shape


def groups_of(work: Iterable[tuple[Case, Sequence[Implementation]]]) -> Iterator[Group]:
    """The directions of a shape together: they share inputs and references."""
    for _, group in groupby(work, key=lambda each: widest(each[0])):
        yield list(group)


def effort(group: Group) -> float:
    """Grows with the time that a group takes, most of which goes by compiling: the more tensors a block has, the more
    is done with them. Of the quick suite's groups on H200s it tells the times with a correlation of 0.73 (in proportion
    to the tensors: 0.45), and shares them out among two GPUs to within 3%."""
    block = BLOCKS[group[0][0].block]
    return sum(len(found) for _, found in group) * math.sqrt(len(block.inputs + block.outputs))


def part_of(plan: Plan, part: str) -> Plan:
    """Part "K/N" of the plan, the K-th of N: each group goes where least has gone yet, those that take longest first.

    Raises UsageError where `part` is not of that form, or nothing is left for it.
    """
    form = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    number, count = (int(digits) for digits in form.groups()) if form else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(f"--part takes K/N, as in 1/2, the first of two parts; got {part!r}")
    groups = sorted(groups_of(plan.work), key=effort, reverse=True)
    if number > len(groups):
        shapes = "1 shape" if len(groups) == 1 else f"{len(groups)} shapes"
        raise UsageError(f"--part {part}: the selection has {shapes} to share out; take no more parts than that")
    loads = [0.0] * min(count, len(groups))
    mine: set[str] = set()
    for group in groups:
        least = loads.index(min(loads))
        loads[least] += effort(group)
        if least == number - 1:
            mine |= {case.id for case, _ in group}
    return replace(plan, work=tuple(entry for entry in plan.work if entry[0].id in mine))
