"""Every kind of path in every view and every output: each answers, or says in one line why not."""

from __future__ import annotations

import csv
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from output_schemas import assert_valid

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli import selection
from xlafuse.compare.cli.main import cli
from xlafuse.compare.graph import store
from xlafuse.compare.report.views import GRAPH_VIEWS, TABLE_VIEWS, VIEWS
from xlafuse.compare.sources.explained import Explained
from xlafuse.compare.sources.opening import open_source

DATA = PROJECT / "tests" / "data"
RUNS, HLO = DATA / "runs", DATA / "xla" / "softmax.hlo.txt"
RECORDS = set(TABLE_VIEWS) - {"traffic", "parts", "remedies"}
# The views that answer, by kind of path; the others say why they do not.
ANSWERS = {
    "a run with times": RECORDS | {"kernels", "why", "stages", "traffic"},
    "a run for a target": RECORDS | {"kernels", "why"},
    "two runs": {"kernels", "why", "stages", "findings", "kernel-roofline"},
    "an HLO file": {"kernels", "why", "findings", "kernel-roofline", "parts"},
    "a dump": {"kernels", "why", "passes", "findings", "kernel-roofline", "parts"},
    "a dump of many modules": {"kernels", "findings", "kernel-roofline", "parts"},
    "Inductor's output": {"kernels", "why", "findings", "kernel-roofline", "parts"},
    "a profile with graphs": {
        "kernels", "why", "passes", "steps", "findings", "kernel-roofline", "parts", "remedies",
    },
    "a profile": {"steps", "findings"},
    "an Explained": {"kernels", "why", "stages", "findings", "kernel-roofline"},
    "a graph": {"kernels", "why", "findings", "kernel-roofline", "parts"},
    "two files": {"kernels", "why", "stages", "findings", "kernel-roofline"},
}
WITHOUT_PAGE = {"a profile"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    folder = tmp_path_factory.mktemp("paths")
    graph = open_source(HLO).results[0].load()
    store.save(graph, folder / "graph.json")
    Explained({"mine": graph, "theirs": replace(graph, name="theirs")}).save(folder / "explained.json")
    shutil.copy(DATA / "profiles" / "torch" / "profile" / "torch.json.gz", folder)
    dump = folder / "dump"
    dump.mkdir()
    shutil.copy(HLO, dump / "module_0001.jit_softmax.sm_9.0_gpu_after_optimizations.txt")
    return {
        "a run with times": [RUNS / "h200-small"], "a run for a target": [RUNS / "jax-0.11"],
        "two runs": [RUNS / "jax-0.10", RUNS / "jax-0.11"], "an HLO file": [HLO], "a dump": [dump],
        "a dump of many modules": [DATA / "hlo" / "jax-0.11.2"],
        "Inductor's output": [DATA / "inductor" / "torch-2.13.0" / "debug"],
        "a profile with graphs": [DATA / "profiles" / "jax"], "a profile": [folder / "torch.json.gz"],
        "an Explained": [folder / "explained.json"], "a graph": [folder / "graph.json"],
        "two files": [folder / "graph.json", HLO],
    }


@pytest.fixture(scope="module")
def opened_once() -> Callable[..., Any]:
    return functools.cache(open_source)


@pytest.fixture(autouse=True)
def each_path_is_opened_once(monkeypatch: pytest.MonkeyPatch, opened_once: Callable[..., Any]) -> None:
    monkeypatch.setattr(selection, "open_source", opened_once)


def xlafuse(command: str, paths: list[Path], *words: object) -> Result:
    return CliRunner().invoke(cli, [command, *map(str, (*paths, *words))])


def refused(result: Result) -> bool:
    """Return whether a command answered with one line that says why not; fail where it did neither."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 2), result.output
    if result.exit_code == 0:
        return False
    (line,) = (line for line in result.stderr.splitlines() if not line.startswith("warning: "))
    assert line.startswith("Error: ") and len(line) > 20 and result.stdout == ""
    return True


def strict(text: str) -> dict[str, Any]:
    """Return the JSON, which fits its schema and has no NaN."""
    data: dict[str, Any] = json.loads(text, parse_constant=lambda constant: pytest.fail(f"not JSON: {constant}"))
    assert_valid(data)
    return data


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ANSWERS)
def test_each_answers_or_says_why_not(kind: str, view: str, paths: dict[str, list[Path]], tmp_path: Path) -> None:
    shown = xlafuse("inspect", paths[kind], "--view", view)
    as_json = xlafuse("inspect", paths[kind], "--view", view, "--json")
    files = {ending: tmp_path / f"file{ending}" for ending in (".md", ".json", ".csv")}
    written = {ending: xlafuse("report", paths[kind], "--view", view, "-o", file) for ending, file in files.items()}
    if view not in ANSWERS[kind]:
        assert all(map(refused, (shown, as_json, *written.values())))
        assert not list(tmp_path.iterdir())
        return
    assert not refused(shown) and shown.stdout.strip()
    assert not refused(as_json) and not refused(written[".json"]) and not refused(written[".md"])
    data = strict(as_json.stdout)
    assert strict(files[".json"].read_text()) == data and files[".md"].read_text().strip()
    if refused(written[".csv"]):
        assert view in GRAPH_VIEWS and not files[".csv"].exists()
    else:
        lines = list(csv.DictReader(files[".csv"].open()))
        assert len(lines) == len(data["modules" if view in GRAPH_VIEWS else "rows"])


@pytest.mark.parametrize("kind", ANSWERS)
def test_each_has_a_page_or_says_why_not(kind: str, paths: dict[str, list[Path]], tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    pytest.importorskip("itables")
    out = tmp_path / "page.html"
    assert refused(xlafuse("report", paths[kind], "--view", "kernels", "-o", out)), "a page holds all views"
    assert refused(xlafuse("report", paths[kind], "--no-files", "-o", out)) == (kind in WITHOUT_PAGE)
    assert out.exists() == (kind not in WITHOUT_PAGE)
