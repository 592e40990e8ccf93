"""The data of the drawing of a case's fusion graphs; test_layout.py has the boxes that the browser makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.graph import formats
from xlafuse.compare.graph.analyse.totals import declared_bytes
from xlafuse.compare.graph.model import FusionGraph, Reason
from xlafuse.compare.report.page.drawing import drawing
from xlafuse.compare.report.page.drawing.bands import UNNAMED
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.result import Result

NORM = kernel("n", "reduction", "norm:mean@1", "x", "h")
GATE = kernel("g", "gemm", "gate:dot@2", "h wg", "g")
UP = kernel("u", "gemm", "up:dot@3", "h wu", "u")
ACT = kernel("a", "elementwise", "act:exp@4 act:mul@4", "g u", "y")
FUSED = kernel("all", "custom", "norm:mean@1 gate:dot@2 up:dot@3 act:exp@4 act:mul@4", "x wg wu", "y")


def found(name: str, of: FusionGraph) -> Result:
    return Result(name, 1, Path("run"), lambda: of)


def drawn(*results: Result) -> dict[str, Any]:
    data = drawing.of_case(results)
    assert data is not None
    return data


def column(data: dict, name: str) -> dict:
    return next(column for column in data["columns"] if column["name"] == name)


def test_a_kernel_has_the_bands_of_its_operations() -> None:
    data = drawn(found("apart", graph(NORM, GATE, UP, ACT)), found("fused", graph(FUSED)))
    assert [band["label"] for band in data["bands"]] == ["norm", "gate", "up", "act"]
    assert [list(each["ops"]) for each in column(data, "apart")["kernels"]] == [[str(i)] for i in range(4)]
    (box,) = column(data, "fused")["kernels"]
    assert box["ops"] == {"0": "mean", "1": "dot", "2": "dot", "3": "exp, mul"}


def test_edges_have_bytes_and_are_sorted() -> None:
    data = drawn(found("apart", graph(NORM, GATE, UP, ACT, sizes="h=10 g=500 u=400")))
    own = column(data, "apart")
    found_edges = [(edge["from"], edge["to"], own["buffers"][edge["buffer"]][1]) for edge in own["edges"]]
    assert found_edges == [(1, 3, 2000), (2, 3, 1600), (0, 1, 40), (0, 2, 40)]
    assert own["buffers"][own["edges"][0]["buffer"]] == ["g f32[500] 2.00 kB", 2000, "intermediate"]


def test_an_edge_has_the_reasons_for_not_fusing() -> None:
    reason = Reason("n", "g", "gemm", "the <consumer> is\na dot", "xla priority-fusion")
    data = drawn(found("apart", replace(graph(NORM, GATE), reasons=(reason,))))
    own = column(data, "apart")
    assert own["edges"][0]["why"] == [0]
    assert own["reasons"] == ["gemm: the <consumer> is a dot (xla priority-fusion)"]


def test_a_box_has_the_remarks_that_the_terminal_shows() -> None:
    sort = replace(NORM, launches=None, facts={"sort_launches": "unknown", "other_memory": {"host": 4096}})
    data = drawn(found("xla", graph(sort, GATE)))
    box, plain = column(data, "xla")["kernels"]
    assert box["facts"]["remarks"] == (
        "moves 4.10 kB of host memory; a sort of an unknown number of launches; bytes of one pass"
    )
    assert "remarks" not in plain["facts"]


def test_a_band_is_placed_by_its_costly_kernels() -> None:
    """Compilers launch a mask's index long before the costly attention kernel of the same stage."""
    index = kernel("index", "elementwise", "attention:iota@9", "", "i")
    attend = kernel("attend", "attention", "attention:dot@8", "h i", "y", device_time_us=900.0)
    data = drawn(found("xla", graph(index, NORM, attend)))
    assert [band["label"] for band in data["bands"]] == ["norm", "attention"]


def test_views_do_not_count_as_computing() -> None:
    viewed = kernel("a", "elementwise", "gate:view@2 act:exp@4", "g", "y")
    data = drawn(found("one", graph(NORM, GATE, viewed)))
    assert column(data, "one")["kernels"][2]["ops"] == {"2": "exp", "": "view"}


def test_kernels_without_stages_have_no_band() -> None:
    library = kernel("flash", "attention", "", "x wg wu", "y")
    staged = [found(name, graph(NORM, GATE, UP, ACT)) for name in ("apart", "other")]
    data = drawn(*staged, found("library", graph(library)))
    assert not column(data, "library")["kernels"][0]["ops"].keys() - {""}
    assert [band["label"] for band in data["bands"]] == ["norm", "gate", "up", "act"]
    copy = kernel("c", "copy", ":copy", "y", "z")
    data = drawn(found("apart", graph(NORM, copy)), found("other", graph(NORM)))
    assert [band["label"] for band in data["bands"]] == ["norm", UNNAMED]
    assert column(data, "apart")["kernels"][1]["ops"] == {"1": "copy"}


def test_graphs_without_common_stages_share_one_band() -> None:
    library = graph(kernel("flash", "attention", "", "x", "y"))
    data = drawn(found("xla", graph(NORM)), found("library", library))
    assert [band["label"] for band in data["bands"]] == [UNNAMED]


def test_without_stages_operations_are_matched() -> None:
    bare = kernel("d", "gemm", ":dot@2 :exp@4", "x", "y")
    data = drawn(found("one", graph(bare)), found("other", graph(bare)))
    assert data["inferred"]
    assert column(data, "one")["kernels"][0]["ops"] == {"0": "dot, exp", "1": ""}


def test_a_graph_without_kernels_lists_operations() -> None:
    eager = FusionGraph("eager", "eager", None, operations=NORM.source_ops)
    data = drawn(found("eager", eager))
    assert column(data, "eager")["note"] == "kernels unknown; operations: mean"


def test_an_unreadable_graph_has_no_column() -> None:
    def broken() -> FusionGraph:
        raise UsageError("graph.json: <b>no</b> JSON")

    data = drawn(found("good", graph(NORM)), Result("bad", 1, Path("run"), broken))
    assert [each["name"] for each in data["columns"]] == ["good"]
    assert data["unread"] == [{"name": "bad", "why": "graph.json: <b>no</b> JSON"}]


def test_too_many_kernels_are_not_drawn() -> None:
    many = graph(*[replace(NORM, name=f"n{i}") for i in range(drawing.MOST_KERNELS + 1)])
    data = drawn(found("good", graph(NORM)), found("huge", many))
    assert [each["name"] for each in data["columns"]] == ["good"]
    assert data["unread"][0]["why"].startswith("2,001 kernels are too many")


@pytest.fixture(scope="module")
def train() -> list[Result]:
    every = open_source(PROJECT / "tests" / "data" / "runs" / "h200-rmsnorm").results
    return [each for each in every if each.record and each.record.case.id == "rmsnorm/llama-8b/bf16/train"]


def test_numbers_are_those_of_the_graphs(train: list[Result]) -> None:
    results = [each for each in train if each.read is not None]
    data = drawn(*results)
    assert len(data["columns"]) == len(results) > 5
    json.dumps(data, allow_nan=False)
    graphs = {each.record.implementation: each.load() for each in results if each.record}
    for own in data["columns"]:
        kernels = graphs[own["name"]].kernels or ()
        assert len(own["kernels"]) == len(kernels)
        for kernel_, box in zip(kernels, own["kernels"], strict=True):
            assert box["bytes"] == formats.size(declared_bytes(kernel_))
            assert box["time"] == formats.number_of_us(kernel_.device_time_us)
            assert box["lines"] == list(kernel_.lines)
    assert "xla" in [data["columns"][i]["name"] for i in data["shown"]]


def test_main_implementations_come_first(train: list[Result]) -> None:
    """Baselines come last; they are visible at first only without other columns."""
    results = [each for each in reversed(train) if each.read is not None]
    data = drawn(*results)
    names = [column["name"] for column in data["columns"]]
    assert names[:3] == ["xla", "inductor", "triton"]
    assert set(names[-2:]) == {"xla-unfused", "eager"}
    assert [names[i] for i in data["shown"]] == names[:5]
    alone = drawn(*(each for each in results if each.name == "eager"))
    assert alone["shown"] == [0]
