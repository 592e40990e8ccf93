"""Graphs for Model Explorer: its exact format, a node for every kernel, edges for every buffer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from examples import EAGER, INDUCTOR, STRANGE, XLA

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel
from xlafuse.compare.graph.render import model_explorer
from xlafuse.compare.sources.opening import open_source

GRAPHS = {"xla": XLA, "inductor": INDUCTOR, "eager": EAGER, "strange": STRANGE}
# The used fields of ai-edge-model-explorer 0.1.34's graph_builder.py, by class.
FIELDS: dict[str, dict[str, Any]] = {
    "collection": {"label": str, "graphs": ["graph"]},
    "graph": {"id": str, "nodes": ["node"], "groupNodeAttributes": dict, "tasksData": "tasks"},
    "node": {"id": str, "label": str, "namespace": str, "attrs": ["pair"], "incomingEdges": ["edge"],
             "outputsMetadata": ["metadata"]},
    "edge": {"sourceNodeId": str, "sourceNodeOutputId": str, "targetNodeInputId": str},
    "metadata": {"id": str, "attrs": ["pair"]},
    "pair": {"key": str, "value": str},
    "tasks": {"edgeOverlaysDataListLeftPane": ["overlays"], "edgeOverlaysDataListRightPane": ["overlays"]},
    "overlays": {"name": str, "type": str, "overlays": ["overlay"]},
    "overlay": {"name": str, "edgeColor": str, "edges": ["overlay edge"]},
    "overlay edge": {"sourceNodeId": str, "targetNodeId": str, "label": str},
}


def check(data: Any, kind: Any) -> None:
    if isinstance(kind, list):
        assert isinstance(data, list)
        for each in data:
            check(each, kind[0])
    elif isinstance(kind, type):
        assert isinstance(data, kind)
    else:
        assert isinstance(data, dict) and data.keys() <= FIELDS[kind].keys(), data.keys() - FIELDS[kind].keys()
        for name, value in data.items():
            check(value, FIELDS[kind][name])


@pytest.mark.parametrize("name", GRAPHS)
def test_the_format_is_kept_and_every_edge_leads_somewhere(name: str) -> None:
    made = json.loads(json.dumps(model_explorer.collection("a run", [(name, GRAPHS[name])])))
    check(made, "collection")
    (graph,) = made["graphs"]
    by_id = {node["id"]: node for node in graph["nodes"]}
    assert len(by_id) == len(graph["nodes"])
    for node in graph["nodes"]:
        for edge in node["incomingEdges"]:
            outputs = {each["id"] for each in by_id[edge["sourceNodeId"]]["outputsMetadata"]}
            assert edge["sourceNodeOutputId"] in outputs
    for panes in graph.get("tasksData", {}).values():
        for overlay in (overlay for each in panes for overlay in each["overlays"]):
            assert all({edge["sourceNodeId"], edge["targetNodeId"]} <= by_id.keys() for edge in overlay["edges"])


@pytest.mark.parametrize("name", GRAPHS)
def test_model_explorer_itself_takes_it(name: str) -> None:
    builder = pytest.importorskip("model_explorer", reason="ai-edge-model-explorer is not installed").graph_builder
    dacite = pytest.importorskip("dacite")
    made = model_explorer.collection("a run", [(name, GRAPHS[name])])
    found = dacite.from_dict(builder.GraphCollection, made, dacite.Config(strict=True))
    assert len(found.graphs[0].nodes) == len(made["graphs"][0]["nodes"])


def node(graph: FusionGraph, id: str) -> dict[str, Any]:
    (made,) = model_explorer.collection("x", [("g", graph)])["graphs"]
    found: dict[str, Any] = next(each for each in made["nodes"] if each["id"] == id)
    return found


def attributes(each: dict[str, Any]) -> dict[str, str]:
    return {pair["key"]: pair["value"] for pair in each["attrs"]}


def test_a_kernel_tells_what_it_is_and_moves() -> None:
    found = node(XLA, "k0")
    assert (found["label"], found["namespace"]) == ("input_convert_reduce_fusion", "forward/norm/mean_square")
    told = attributes(found)
    assert told["kind"] == "reduction" and told["device time"] == "11.4 µs" and told["bytes read"] == "16.8 MB"
    assert "reduce_sum" in told["operations"] and "rmsnorm.py:11" in told["lines"]
    assert node(XLA, "k1")["namespace"] == "forward/norm"  # its operations' stages share no more


def test_an_edge_is_a_buffer_with_its_bytes() -> None:
    (edge,) = [each for each in node(XLA, "k2")["incomingEdges"] if each["sourceNodeId"] == "k1"]
    written = node(XLA, "k1")["outputsMetadata"][int(edge["sourceNodeOutputId"])]
    told = attributes(written)
    assert (told["buffer"], told["shape"], told["bytes"]) == ("h", "bf16[2048,4096] 16.8 MB", "16777216")


def test_what_is_updated_in_place_comes_in_and_goes_out() -> None:
    x = (Access("x", 4),)
    kernels = (Kernel("a", "custom", inputs=x, outputs=x), Kernel("b", "custom", inputs=x, outputs=x))
    graph = FusionGraph("inplace", "triton", kernels, (Buffer("x", (1,), "f32", 4, "output"),))
    (made,) = model_explorer.collection("x", [("g", graph)])["graphs"]
    edges = {(edge["sourceNodeId"], each["id"]) for each in made["nodes"] for edge in each["incomingEdges"]}
    assert edges == {("b0", "k0"), ("k0", "k1"), ("k1", "b0-out")}


def test_reasons_are_overlays() -> None:
    (made,) = model_explorer.collection("x", [("g", XLA)])["graphs"]
    (left,) = made["tasksData"]["edgeOverlaysDataListLeftPane"]
    assert {overlay["name"] for overlay in left["overlays"]} <= {reason.code for reason in XLA.reasons}
    assert left["overlays"][0]["edges"][0]["label"].startswith("reduction")


def test_graphs_of_a_run_have_the_ids_of_their_records() -> None:
    run = open_source(PROJECT / "tests" / "data" / "runs" / "h200-small").select({
        "block": ["softmax"], "case": ["gpt2-scores"], "direction": ["fwd"], "implementation": ["xla", "triton"],
    })
    made = model_explorer.collection(run.name, [(result.id, result.load()) for result in run.results])
    check(json.loads(json.dumps(made)), "collection")
    case = "softmax/gpt2-scores/bf16/fwd"
    assert [graph["id"] for graph in made["graphs"]] == [f"{case}/xla", f"{case}/triton"]
