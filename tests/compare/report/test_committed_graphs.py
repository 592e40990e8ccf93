"""The committed H200 run: each record has a graph, and each launch on the GPU belongs to one of its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.align import align
from xlafuse.compare.graph.analyse.totals import totals
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record.record import Record
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.record.run_folder import read_records
from xlafuse.compare.spec.blocks import BLOCKS

RUN = Path(__file__).parents[2] / "data" / "runs" / "h200-small"
RECORDS = {record.id: record for record in read_records(RUN)[0] if record.status == "ok"}


def graph_of(record: Record) -> FusionGraph:
    assert record.graph
    return store.load(recorded_file(RUN, record, record.graph))


def test_every_launch_belongs_to_a_kernel() -> None:
    for name, record in RECORDS.items():
        graph = graph_of(record)
        assert graph.kernels is not None and not graph.unparsed, name
        assert record.times, name
        for phase, times in record.times.items():
            assert record.kernels[phase].unjoined == [], name
            ran = sum(launch.end - launch.start for launch in times.records or ()) * 1e6
            joined = sum(kernel.device_time_us or 0 for kernel in graph.kernels if kernel.phase == phase)
            assert joined == pytest.approx(ran), name


CASES = sorted({(record.case.block, record.case.direction) for record in RECORDS.values()})


@pytest.mark.parametrize(("block", "direction"), CASES)
def test_graphs_of_a_block_are_aligned_by_its_stages(block: str, direction: str) -> None:
    first = next(c for c in BLOCKS[block].cases("quick") if c.direction == direction)
    graphs = [graph_of(RECORDS[f"{first.id}/{name}"]) for name in ("xla", "inductor", "triton")]
    alignment = align(graphs)
    assert alignment.rows
    forward = [row for row in alignment.rows if row.phase == "forward"]
    for row in forward:
        assert all(cell.kernels for cell in row.cells), (row.stage, [cell.kernels for cell in row.cells])
    for graph in graphs:
        summed = totals(graph)
        assert summed.declared.exact
        assert summed.fusion_efficiency and 0 < summed.fusion_efficiency <= 1
