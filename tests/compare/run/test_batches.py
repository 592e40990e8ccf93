"""Batches: every group in one, within the GPU's memory, the longest compiles first."""

from __future__ import annotations

import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.plan.selection import resolve
from xlafuse.compare.record import run_folder
from xlafuse.compare.run.batches import RUNNER_BYTES, batches, compile_effort, groups_of, memory_of, name_of

GIB = 1 << 30
FULL = list(groups_of(resolve((), suite="full").work))


@pytest.mark.parametrize(("memory", "runners"), [(141 * GIB, 10), (80 * GIB, 10), (141 * GIB, 1), (None, 1)])
def test_every_group_is_in_one_batch_that_fits(memory: int | None, runners: int) -> None:
    made = list(batches(FULL, memory, runners))
    assert sorted(name_of(group) for batch in made for group in batch) == sorted(map(name_of, FULL))
    assert any(len(batch) > 1 for batch in made) == (runners > 1)
    for batch in made:
        assert 1 <= len(batch) <= runners
        if len(batch) > 1:
            assert memory is not None and sum(map(memory_of, batch)) <= memory - runners * RUNNER_BYTES


def test_the_longest_compiles_come_first() -> None:
    first = [compile_effort(batch[0]) for batch in batches(FULL, 141 * GIB, 8)]
    assert first == sorted(first, reverse=True)


def test_the_directions_of_a_shape_stay_together() -> None:
    (group,) = groups_of(resolve(["gelu"], suite="quick", cases=["llama-8b"]).work)
    assert [case.direction for case, _ in group] == ["fwd", "train"]
    inference = list(groups_of(resolve(["gelu"], suite="quick", cases=["llama-8b"], directions=["fwd"]).work))
    assert memory_of(inference[0]) < memory_of(group)  # no gradients, no cotangents


def test_the_estimate_covers_what_xla_planned_on_an_h200() -> None:
    """A group takes at least twice its largest call: inputs, and what the other worker processes hold."""
    planned: dict[str, int] = {}
    for record in run_folder.read_records(PROJECT / "reports" / "h200")[0]:
        peaks = record.measurement.peak_memory if record.measurement else None
        for peak in (peaks or {}).values():
            if peak.planned and record.implementation == "xla":
                shape = record.id.rsplit("/", 2)[0]
                planned[shape] = max(planned.get(shape, 0), peak.planned)
    known = [group for group in FULL if name_of(group) in planned]
    assert len(known) > 50
    assert [name_of(group) for group in known if memory_of(group) < 2 * planned[name_of(group)]] == []
