"""Pages about paths without records: HLO, folders and archives of dumps, Inductor's output, a saved result."""

from __future__ import annotations

import lzma
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.report.page import page
from xlafuse.compare.sources import source as sources
from xlafuse.compare.sources.explained import Explained
from xlafuse.compare.sources.opening import open_source

DATA = PROJECT / "tests" / "data"
HLO = DATA / "hlo" / "jax-0.11.2" / "h200-attention-fwd.hlo.txt.gz"
INDUCTOR = DATA / "inductor" / "torch-2.13.0" / "debug"


def report(*words: object) -> Result:
    return CliRunner().invoke(main.cli, ["report", *map(str, words)])


def written(path: Path, folder: Path) -> Path:
    out = folder / "page.html"
    page.write(open_source(path), out, files=False)
    return out


def test_an_hlo_file_opens_on_its_graph(tmp_path: Path, visit: Any) -> None:
    """No part about times, records or checks is there; the graph, the findings and the HLO are."""
    graph = open_source(HLO).results[0].load()
    with visit(written(HLO, tmp_path), ready="article[data-shown]") as it:
        text = it.locator("#case").inner_text()
        assert f"{len(graph.kernels or ())} kernels" in text and "xlafuse/blocks/attention.py:19" in text
        assert it.locator("#c-graphs svg").count()
        assert it.locator("#c-findings li").count() and "What helps" in it.locator("#c-findings").inner_text()
        it.locator("#c-sources").scroll_into_view_if_needed()
        it.wait_for_function("document.querySelector('#c-sources').innerText.includes('HloModule')")
        for part in ("#c-time", "#c-times", "#c-bytes", "#c-roofline", "#c-numerics", "figure.chart"):
            assert it.locator(f"#case {part}").count() == 0, part
        assert it.locator("nav a", has_text="records").count() == 0
        it.locator("nav a", has_text="overview").click()
        it.wait_for_selector("#overview:visible")
        assert it.locator("#matrix").count() == 0


def test_a_folder_lists_its_modules(tmp_path: Path, visit: Any) -> None:
    for name in ("h200-gelu-fwd.hlo.txt.gz", "h200-softmax-fwd.hlo.txt.gz"):
        shutil.copy(HLO.parent / name, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    with visit(written(tmp_path, out)) as it:
        links = it.locator("#overview table a")
        assert sorted(links.all_inner_texts()) == ["h200-gelu-fwd.hlo.txt.gz", "h200-softmax-fwd.hlo.txt.gz"]
        links.first.click()
        it.wait_for_selector("article[data-shown]")
        assert it.locator("#case h1").inner_text().startswith("h200-")


def test_only_the_largest_modules_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: Any) -> None:
    monkeypatch.setattr(sources, "MOST_MODULES", 1)
    folder, out = tmp_path / "dump", tmp_path / "page.html"
    folder.mkdir()
    (folder / "a.hlo.txt").write_text("HloModule small\n")
    shutil.copy(HLO, folder / "b.hlo.txt.gz")
    done = report(folder, "-o", out)
    assert done.exit_code == 0 and "2 modules" in done.stderr, done.output
    assert embedded(out, "settings")["cases"] == ["b.hlo.txt.gz"]


def test_inductors_output_and_its_code(tmp_path: Path, embedded: Any) -> None:
    out = written(INDUCTOR, tmp_path)
    sources = embedded(out, "sources", 0)
    assert any("def call" in line for text in sources["texts"] for line in text["lines"] if line)
    (record,) = sources["records"]
    assert record["name"] == "inductor" and any(document["kernels"] for document in record["documents"])


def test_graphs_of_one_file_are_side_by_side(tmp_path: Path, embedded: Any) -> None:
    graph = open_source(HLO).results[0].load()
    path = tmp_path / "explained.json"
    Explained({"mine": graph, "theirs": replace(graph, name="other")}).save(path)
    drawing = embedded(written(path, tmp_path), "drawing", 0)
    assert [column["name"] for column in drawing["columns"]] == ["mine", "theirs"]


def test_a_graph_with_times_but_no_record(tmp_path: Path, visit: Any) -> None:
    graph = open_source(HLO).results[0].load()
    timed = replace(graph, kernels=tuple(replace(kernel, device_time_us=7.5) for kernel in graph.kernels or ()))
    store.save(timed, tmp_path / "graph.json")
    with visit(written(tmp_path / "graph.json", tmp_path), ready="article[data-shown]") as it:
        it.locator("#c-kernels details.kernels").click()
        assert "7.5" in it.locator("#c-kernels table").inner_text()


def test_a_selection_needs_records(tmp_path: Path) -> None:
    done = report(HLO, "-o", tmp_path / "a.html", "--block", "softmax")
    assert done.exit_code == 2 and "--block" in done.stderr and not list(tmp_path.iterdir())


def test_a_capture_has_the_times_of_a_median_step(tmp_path: Path, embedded: Any) -> None:
    capture = DATA / "profiles" / "jax"
    out = tmp_path / "page.html"
    run = open_source(capture)
    page.write(run, out, files=False)
    assert run.warnings[0].endswith("kernels have the times of a median step of 2; <1% of the time is of other kernels")
    (result,) = run.results
    assert result.graph is not None and result.graph.kernels is not None
    times = [kernel.device_time_us for kernel in result.graph.kernels]
    shown = embedded(out, "case", 0)
    assert [took / 1e3 for took in shown["bars"][0]["took"]] == pytest.approx(times, abs=1e-3)
    assert "The measured time of each kernel" in shown["html"] and "nothing was measured" not in shown["html"]
    assert "HloModule jit_train_step" in embedded(out, "sources", 0)["texts"][0]["lines"][0]


def test_a_captured_step_opens_on_its_parts_and_changes(tmp_path: Path, visit: Any) -> None:
    with lzma.open(DATA / "captures" / "nnx.tar.xz") as packed, tarfile.open(fileobj=packed) as archive:
        archive.extractall(tmp_path, filter="data")
    out = tmp_path / "page.html"
    page.write(open_source(tmp_path / "nnx"), out, files=False)
    with visit(out) as it:
        assert "34.1 ms" in it.locator(".overall").inner_text()
        rows = it.locator("#parts tbody tr").all_inner_texts()
        assert "33.60" in rows[0] and "dot_product_attention" in rows[1] and "52%" in rows[1]
        first = it.locator("#changes li").first.inner_text()
        assert 'implementation="cudnn"' in first and "train_nnx.py:8" in first


def test_a_profile_without_a_graph_has_no_page(tmp_path: Path) -> None:
    trace = shutil.copy(DATA / "profiles" / "torch" / "profile" / "torch.json.gz", tmp_path)
    done = report(trace, "-o", tmp_path / "a.html")
    assert done.exit_code == 2 and "no kernel of this profile is joined to a graph" in done.stderr
