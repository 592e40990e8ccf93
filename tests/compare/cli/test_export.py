"""`xlafuse export`: which graphs and records it takes of a path, and what it writes for each tool."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from commands import xlafuse

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli.export import TOOLS

DATA = PROJECT / "tests" / "data"
RUN, CASE = DATA / "runs" / "h200-small", "softmax/gpt2-scores/bf16/fwd"
PROFILE, DUMP = DATA / "profiles" / "torch", DATA / "inductor" / "torch-2.13.0" / "debug"
HLO = next((DATA / "hlo" / "jax-0.11.2").glob("h200-gelu-fwd.hlo.txt.gz"))
SOFTMAX = ("--block", "softmax", "--case", "gpt2-scores", "--direction", "fwd", "-i", "xla,triton")


def export(*words: object) -> Result:
    return xlafuse("export", *words)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((RUN, *SOFTMAX), 2), ((RUN, "--module", f"{CASE}/xla"), 1), ((HLO,), 1), ((DUMP,), 1),
        ((DUMP, "--module", "1"), 1), ((PROFILE,), 1),
    ],
)
def test_graphs_of_every_kind_of_path(tmp_path: Path, words: tuple[object, ...], count: int) -> None:
    printed = export(*words, "--to", "dot")
    assert printed.exit_code == 0 and printed.stdout.count("digraph xlafuse {") == count, printed.output
    written = export(*words, "--to", "dot", "-o", tmp_path / "graphs.dot")
    assert written.exit_code == 0 and (tmp_path / "graphs.dot").read_text() == printed.stdout
    assert export(*words, "--to", "model-explorer", "-o", tmp_path / "graphs.json").exit_code == 0
    graphs = json.loads((tmp_path / "graphs.json").read_text())["graphs"]
    assert len(graphs) == len({graph["id"] for graph in graphs}) == count and all(graph["nodes"] for graph in graphs)


def test_graphs_of_a_run_are_called_like_their_records(tmp_path: Path) -> None:
    file = tmp_path / "graphs.json"
    result = export(RUN, *SOFTMAX, "--to", "model-explorer", "-o", file)
    assert result.exit_code == 0 and "2 graphs" in result.output
    assert [graph["id"] for graph in json.loads(file.read_text())["graphs"]] == [f"{CASE}/xla", f"{CASE}/triton"]


@pytest.mark.parametrize("tool", TOOLS)
def test_only_text_goes_without_a_file(tool: str) -> None:
    result = export(RUN, "--to", tool, "--module", f"{CASE}/xla")
    assert (result.exit_code == 0) == (tool == "dot")
    assert tool == "dot" or "needs -o" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((RUN, "--to", "xprof", *SOFTMAX), f"one is needed: --module ID; ids: {CASE}/xla, {CASE}/triton"),
        ((RUN, "--to", "dot", "--module", f"{CASE}/xl"), f"did you mean {CASE}/xla"),
        ((RUN, "--to", "dot", "--module", f"{CASE}/xla", "-i", "triton"), f"no record '{CASE}/xla'"),
        ((RUN, "--to", "perfetto", "--rank", 1), "--rank chooses among the ranks"),
        ((RUN, "--to", "dot", "--dump", DUMP), "--dump goes with one profile"),
        ((PROFILE, "--to", "perfetto"), "takes records of a run"),
        ((PROFILE, "--to", "dot", "-i", "xla"), "select in runs only"),
        ((HLO, "--to", "dot", "--block", "gelu"), "select in runs only"),
        ((DUMP, "--to", "dot", "--module", "forwrd"), "no module 'forwrd'"),
        (("/nowhere", "--to", "dot"), "no such file or folder"),
        ((HLO, "--to", "dot", "-o", HLO / "x"), "cannot be written"),
    ],
)
def test_a_request_that_cannot_be_served_is_one_line(tmp_path: Path, words: tuple[object, ...], said: str) -> None:
    out = () if "-o" in words else ("-o", tmp_path / "out")
    result = export(*words, *out)
    *warnings, error = result.stderr.splitlines()
    assert result.exit_code == 2 and said in error and error.startswith("Error: "), result.output
    assert all(line.startswith("warning: ") for line in warnings)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_many_modules_needs_a_choice(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.hlo.txt.gz").write_bytes(HLO.read_bytes())
    result = export(tmp_path, "--to", "dot")
    assert result.exit_code == 2 and "holds 3 modules; choose one: --module NAME or NUMBER" in result.stderr
    assert export(tmp_path, "--to", "dot", "--module", 2).exit_code == 0


def test_a_graph_that_cannot_be_read_costs_a_warning(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    (run / "graphs").mkdir()
    (run / "graphs" / f"{CASE.replace('/', '-')}-xla.json.gz").write_bytes(b"broken")
    result = export(run, *SOFTMAX, "--to", "dot")
    assert result.exit_code == 0 and result.stdout.count("digraph") == 1 and f"warning: {CASE}/xla" in result.stderr
    alone = export(run, "--module", f"{CASE}/xla", "--to", "dot")
    assert alone.exit_code == 2 and "none of 1 records has a graph that can be read" in alone.stderr
