"""A plan in parts: each case in one, directions together, about as much work in each."""

from __future__ import annotations

import pytest

from compare.base.usage import UsageError
from compare.plan import selection
from compare.run.shards import groups_of, part_of, seconds


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_share_a_suite_out(count: int) -> None:
    plan = selection.resolve((), suite="full")
    parts = [part_of(plan, f"{number}/{count}") for number in range(1, count + 1)]
    shared = [entry for part in parts for entry in part.work]
    assert sorted(case.id for case, _ in shared) == sorted(case.id for case, _ in plan.work)
    assert all(entry in plan.work for entry in shared)
    for part in parts:
        assert list(part.work) == [entry for entry in plan.work if entry in part.work]  # in the table's order
        shapes = {(case.block, case.name, case.dtype, case.precision) for case, _ in part.work}
        others = [case for other in parts if other is not part for case, _ in other.work]
        assert not shapes & {(case.block, case.name, case.dtype, case.precision) for case in others}
    loads = [sum(map(seconds, groups_of(part.work))) for part in parts]
    assert max(loads) < 1.1 * min(loads)


@pytest.mark.parametrize("part", ["", "1", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", "1/2\n", f"1/{'9' * 5000}"])
def test_what_is_no_part_is_refused(part: str) -> None:
    plan = selection.resolve(("gelu", "softmax"), suite="quick")
    with pytest.raises(UsageError, match="--part takes K/N"):
        part_of(plan, part)


def test_there_may_be_more_parts_than_shapes() -> None:
    """Those that nothing is left for say so; the others have a shape each, however many parts there are."""
    plan = selection.resolve(("gelu", "softmax"), suite="quick")
    for count in (5, 999_999_999):
        work = [part_of(plan, f"{number}/{count}").work for number in range(1, 5)]
        assert sorted(case.id for each in work for case, _ in each) == sorted(case.id for case, _ in plan.work)
        with pytest.raises(UsageError, match="has 4 shapes to share out; take no more"):
            part_of(plan, f"5/{count}")
