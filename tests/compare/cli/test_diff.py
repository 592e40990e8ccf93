"""`xlafuse diff`: the pairs that it compares, and its exit code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from examples import EAGER, XLA
from made_records import made_record
from made_runs import changed, diff, flat

from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record import run_folder
from xlafuse.compare.spec.blocks import BLOCKS

CASES = BLOCKS["swiglu_mlp"].cases("quick")


def renumbered() -> FusionGraph:
    names = {kernel.name: f"fusion.{number}" for number, kernel in enumerate(XLA.kernels or ())}
    return dataclasses.replace(
        XLA,
        kernels=tuple(dataclasses.replace(k, name=names[k.name], device_time_us=1.0) for k in XLA.kernels or ()),
        reasons=tuple(
            dataclasses.replace(r, producer=names[r.producer], consumer=names[r.consumer]) for r in XLA.reasons
        ),
    )


def saved(folder: Path, **graphs: FusionGraph) -> list[Path]:
    for name, graph in graphs.items():
        store.save(graph, folder / f"{name}.json")
    return [folder / f"{name}.json" for name in graphs]


def run(folder: Path, **graphs: FusionGraph | None) -> Path:
    run_folder.create(folder, {"segments": []})
    for name, graph in graphs.items():
        if graph is not None:
            store.save(graph, folder / "graphs" / f"{name}.json.gz")
        path = None if graph is None else f"graphs/{name}.json.gz"
        run_folder.append(folder, made_record(CASES[0], name, "xla", "ok", graph=path))
    return folder


def test_changes_as_text_and_json(tmp_path: Path) -> None:
    a, b = saved(tmp_path, a=XLA, b=changed())
    result = diff(a, b)
    assert result.exit_code == 1, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    text = flat(result.stdout)
    for part in (
        "8 → 9 kernels, 1.36 GB → 1.42 GB declared", "split: act +58.7 MB, +85.9 µs",
        "- 5. loop_convert_multiply_fusion.1 elementwise 235 MB", "+ 5. fusion.7", "+ 6. fusion.8",
        "input_convert_reduce_fusion → loop_convert_multiply_fusion: reduction → unprofitable",
    ):
        assert part in text, part
    result = diff(a, b, "--json")
    assert result.exit_code == 1
    (answer,) = json.loads(result.stdout)["graphs"]
    (split,) = answer["kernels"]
    assert (split["kind"], split["before_names"]) == ("split", ["loop_convert_multiply_fusion.1"])
    assert split["after_names"] == ["fusion.7", "fusion.8"]


def test_operations_without_kernels_are_named(tmp_path: Path) -> None:
    first, *rest = EAGER.operations
    after = dataclasses.replace(EAGER, operations=(dataclasses.replace(first, op="aten.exotic"), *rest))
    text = flat(diff(*saved(tmp_path, a=EAGER, b=after)).stdout)
    assert f"{len(EAGER.operations)} → {len(EAGER.operations)} operations" in text and "declared" not in text
    assert "+ 1. aten.exotic" in text and f"- 1. {first.op}" in text


@pytest.mark.parametrize("again", [XLA, renumbered()], ids=["itself", "other names and times"])
def test_no_difference_is_exit_0(tmp_path: Path, again: FusionGraph) -> None:
    result = diff(*saved(tmp_path, a=XLA, b=again))
    assert (result.exit_code, result.stdout) == (0, "no difference in 1 graph\n")
    assert json.loads(diff(tmp_path / "a.json", tmp_path / "b.json", "--json").stdout)["graphs"][0]["differs"] is False


def test_runs_are_compared_record_by_record(tmp_path: Path) -> None:
    a = run(tmp_path / "a", xla=XLA, remat=XLA, old=XLA, cuda=None)
    b = run(tmp_path / "b", xla=XLA, remat=changed(), new=XLA, cuda=None)
    result = diff(a, b)
    assert result.exit_code == 1
    text = flat(result.stdout)
    assert f"{CASES[0].id}/remat 8 → 9 kernels" in text
    assert f": 1 record {CASES[0].id}/old" in text
    assert f": 1 record {CASES[0].id}/new" in text
    assert "1 record fused differently, 1 fused the same regressions: 1 missing" in text


def test_folders_are_compared_graph_by_graph(tmp_path: Path) -> None:
    saved(tmp_path / "a", forward=XLA, backward=XLA, gone=XLA)
    saved(tmp_path / "b", forward=XLA, backward=changed())
    graphs = json.loads(diff(tmp_path / "a", tmp_path / "b", "--json").stdout)["graphs"]
    answers = {graph["name"]: graph for graph in graphs}
    assert {name: answer["differs"] for name, answer in answers.items()} == {
        "forward": False, "backward": True, "gone": True,
    }
    assert answers["gone"]["only_in"] == str(tmp_path / "a" / "gone.json")
    assert diff(tmp_path / "a", tmp_path / "b", "--module", "forward").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/none", "{tmp}/a.json"], "no such file or folder"),
        (["{tmp}/bad.json", "{tmp}/a.json"], "bad.json"),
        (["{tmp}/run", "{tmp}/a.json"], "can only be compared with another run"),
        (["{tmp}/run", "{tmp}/run"], "no record has a time or a graph in both runs"),
        (["{tmp}/a.json", "{tmp}/eager.json"], "has operations and no kernels"),
    ],
)
def test_incomparable_paths_exit_2(tmp_path: Path, words: list[str], message: str) -> None:
    saved(tmp_path, a=XLA, eager=EAGER)
    (tmp_path / "bad.json").write_text('{"schema": ')
    run(tmp_path / "run", xla=None)
    result = diff(*(word.format(tmp=tmp_path) for word in words))
    assert result.exit_code == 2, result.output
    assert message in result.stderr.splitlines()[-1]
    assert result.stdout == ""


@pytest.mark.parametrize("ending", ["html", "md", "json"])
def test_changes_are_written_by_the_ending_of_the_file(tmp_path: Path, ending: str) -> None:
    a, b = saved(tmp_path, a=XLA, b=changed())
    out = tmp_path / f"changes.{ending}"
    result = diff(a, b, "-o", out)
    assert result.exit_code == 1 and str(out) in result.stderr
    text = out.read_text()
    assert "fusion.7" in text
    if ending == "json":
        assert json.loads(text) == json.loads(diff(a, b, "--json").stdout)
    assert diff(a, b, "-o", tmp_path / "changes.csv").exit_code == 2
