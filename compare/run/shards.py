"""Shards: parts of a plan with about equal work. `compare.run.merge` merges the runs of several GPUs; the nodes of a
cluster each do some shards of one run."""

from __future__ import annotations

import re
from dataclasses import replace

from ..base.usage import UsageError
from ..plan.plan import Plan, Shard
from .batches import Group, compile_effort, groups_of

# Seconds of a run on an H200: for each unit of compile effort, for each timed implementation, and in addition for each
# autotuned one. Alone, 18 autotuned ones took 27 s each; they take less with several runners, which share the lock.
SECONDS_PER_EFFORT, SECONDS_PER_TIMED, SECONDS_PER_AUTOTUNED = 0.12, 0.4, 11.0


def seconds(group: Group) -> float:
    """Return an estimate of the seconds that a group adds to a run."""
    found = [implementation for _, each in group for implementation in each]
    autotuned = sum(implementation.backend.autotunes_for_minutes for implementation in found)
    effort = SECONDS_PER_EFFORT * compile_effort(group)
    return effort + SECONDS_PER_TIMED * len(found) + SECONDS_PER_AUTOTUNED * autotuned


def shard_of(plan: Plan, shard: str) -> Plan:
    """Return shard "K/N" of the plan.

    Raises UsageError if `shard` does not have that form, or if K is larger than the number of shapes.
    """
    form = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", shard)
    number, count = (int(digits) for digits in form.groups()) if form else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(f"--shard takes K/N, as in 1/2, the first of two shards; got {shard!r}")
    found = divide(plan, count)
    if number > len(found):
        shapes = "1 shape" if len(found) == 1 else f"{len(found)} shapes"
        raise UsageError(f"--shard {shard}: the selection has {shapes}; name no more shards than that")
    own = Shard((f"{number}/{len(found)}",), tuple(case.id for case, _ in plan.work))
    return replace(found[number - 1], shard=own)


def divide(plan: Plan, count: int) -> list[Plan]:
    """Return the plan in at most `count` shards of about equal work, whole groups each.

    Each group goes to the shard with the least work so far, the longest group first.
    """
    groups = sorted(groups_of(plan.work), key=seconds, reverse=True)
    loads = [0.0] * min(count, len(groups))
    owner: dict[str, int] = {}
    for group in groups:
        least = loads.index(min(loads))
        loads[least] += seconds(group)
        owner |= {case.id: least for case, _ in group}
    return [
        replace(plan, work=tuple(entry for entry in plan.work if owner[entry[0].id] == number))
        for number in range(len(loads))
    ]
