"""Shards: a plan in K parts of about equal work, one for each of several GPUs; `compare.run.merge` joins their runs."""

from __future__ import annotations

import re
from dataclasses import replace

from ..base.usage import UsageError
from ..plan.plan import Plan, Shard
from .batches import Group, compile_effort, groups_of

# Seconds by which a run on an H200 grows: for each unit of compile effort, each timed implementation, and each
# autotuned one. 18 autotuned ones took 27 s each on their own; runners that share the lock take less.
SECONDS_PER_EFFORT, SECONDS_PER_TIMED, SECONDS_PER_AUTOTUNED = 0.12, 0.4, 11.0


def seconds(group: Group) -> float:
    """Return the seconds by which a group makes a run longer, roughly."""
    found = [implementation for _, each in group for implementation in each]
    autotuned = sum(implementation.backend.autotunes_for_minutes for implementation in found)
    effort = SECONDS_PER_EFFORT * compile_effort(group)
    return effort + SECONDS_PER_TIMED * len(found) + SECONDS_PER_AUTOTUNED * autotuned


def shard_of(plan: Plan, shard: str) -> Plan:
    """Return shard "K/N" of the plan: the longest groups are dealt out first, each to the shard with the least work.

    Raises UsageError where `shard` is not of that form, or there are fewer shapes than shards.
    """
    form = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", shard)
    number, count = (int(digits) for digits in form.groups()) if form else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(f"--shard takes K/N, as in 1/2, the first of two shards; got {shard!r}")
    groups = sorted(groups_of(plan.work), key=seconds, reverse=True)
    if number > len(groups):
        shapes = "1 shape" if len(groups) == 1 else f"{len(groups)} shapes"
        raise UsageError(f"--shard {shard}: the selection has {shapes}; name no more shards than that")
    count = min(count, len(groups))
    loads = [0.0] * count
    mine: set[str] = set()
    for group in groups:
        least = loads.index(min(loads))
        loads[least] += seconds(group)
        if least == number - 1:
            mine |= {case.id for case, _ in group}
    own = Shard((f"{number}/{count}",), tuple(case.id for case, _ in plan.work))
    return replace(plan, work=tuple(entry for entry in plan.work if entry[0].id in mine), shard=own)
