"""A plan in parts of about equal work, one for each of several GPUs; `compare.merge` makes one run of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from compare.blocks import BLOCKS
from compare.selection import Plan, UsageError
from compare.session import widest
from compare.spec import Case, Implementation, Tensor

Group = Sequence[tuple[Case, Sequence[Implementation]]]  # cases that share their inputs: directions of one shape


def groups_of(work: Iterable[tuple[Case, Sequence[Implementation]]]) -> Iterator[Group]:
    """The directions of a shape together: they share inputs and references."""
    for _, group in groupby(work, key=lambda each: widest(each[0])):
        yield list(group)


def effort(group: Group) -> int:
    """Grows with the time that a group takes, most of which goes by compiling: the more tensors a block has, the more
    is done with them."""
    return sum(len(found) * len(tensors(case)) for case, found in group)


def tensors(case: Case) -> tuple[Tensor, ...]:
    """A block's inputs and outputs."""
    return BLOCKS[case.block].inputs + BLOCKS[case.block].outputs


def part_of(plan: Plan, part: str) -> Plan:
    """Part "K/N" of the plan, the K-th of N: each group goes where least has gone yet, those that take longest first.

    Raises UsageError where `part` is nothing such, or nothing is left for it.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"--part takes K/N, as in 1/2, the first of two parts; got {part!r}")
    loads = [0] * int(count)
    mine: set[str] = set()
    for group in sorted(groups_of(plan.work), key=effort, reverse=True):
        least = loads.index(min(loads))
        loads[least] += effort(group)
        if least == int(number) - 1:
            mine |= {case.id for case, _ in group}
    if not mine:
        raise UsageError(f"--part {part}: the selection has no {count} shapes to be shared out; take fewer parts")
    return replace(plan, work=tuple(entry for entry in plan.work if entry[0].id in mine))
