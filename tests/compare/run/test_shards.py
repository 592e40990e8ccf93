"""A plan in shards: each case in one, directions together, about as much work in each."""

from __future__ import annotations

import pytest

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.plan import selection
from xlafuse.compare.run.batches import groups_of
from xlafuse.compare.run.shards import seconds, shard_of


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shards_share_a_suite(count: int) -> None:
    plan = selection.resolve((), suite="full")
    shards = [shard_of(plan, f"{number}/{count}") for number in range(1, count + 1)]
    shared = [entry for shard in shards for entry in shard.work]
    assert sorted(case.id for case, _ in shared) == sorted(case.id for case, _ in plan.work)
    assert all(entry in plan.work for entry in shared)
    for shard in shards:
        assert list(shard.work) == [entry for entry in plan.work if entry in shard.work]  # in the table's order
        shapes = {(case.block, case.name, case.dtype, case.precision) for case, _ in shard.work}
        others = [case for other in shards if other is not shard for case, _ in other.work]
        assert not shapes & {(case.block, case.name, case.dtype, case.precision) for case in others}
    loads = [sum(map(seconds, groups_of(shard.work))) for shard in shards]
    assert max(loads) < 1.1 * min(loads)


@pytest.mark.parametrize("shard", ["", "1", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", "1/2\n", f"1/{'9' * 5000}"])
def test_another_form_is_refused(shard: str) -> None:
    plan = selection.resolve(("gelu", "softmax"), suite="quick")
    with pytest.raises(UsageError, match="--shard takes K/N"):
        shard_of(plan, shard)


def test_more_shards_than_shapes_are_refused() -> None:
    plan = selection.resolve(("gelu", "softmax"), suite="quick")
    shapes = len(list(groups_of(plan.work)))
    for count in (shapes + 1, 999_999_999):
        work = [shard_of(plan, f"{number}/{count}").work for number in range(1, shapes + 1)]
        assert sorted(case.id for each in work for case, _ in each) == sorted(case.id for case, _ in plan.work)
        with pytest.raises(UsageError, match="shapes"):
            shard_of(plan, f"{shapes + 1}/{count}")
