"""`xlafuse report A B`: graphs of two runs, of two implementations or of two files on one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from examples import INDUCTOR, XLA
from made_records import made_record

from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record import run_folder
from xlafuse.compare.spec.blocks import BLOCKS

CASE = next(c for c in BLOCKS["swiglu_mlp"].cases("quick") if c.direction == "train")
TPU = replace(INDUCTOR, compiler="xla", target="tpu-v5e")


def run_of(folder: Path, target: str, **graphs: FusionGraph) -> Path:
    run_folder.create(folder, {"segments": []})
    for name, graph in graphs.items():
        store.save(graph, folder / "graphs" / f"{name}.json.gz")
        run_folder.append(
            folder, made_record(CASE, name, name, "compiled", target=target, graph=f"graphs/{name}.json.gz")
        )
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return run_of(tmp_path / "v5e", "tpu-v5e", xla=TPU), run_of(tmp_path / "gpu", "h200", xla=XLA, inductor=INDUCTOR)


def report(*words: Any) -> Result:
    return CliRunner().invoke(main.cli, ["report", *map(str, words)])


def test_a_tpu_and_a_gpu_in_a_browser(runs: tuple[Path, Path], tmp_path: Path, visit: Any, ready: Any) -> None:
    out = tmp_path / "both.html"
    done = report(*runs, "-o", out)
    assert done.exit_code == 0 and done.stdout.startswith(f"{out}: 2 fusion graphs"), done.output
    with visit(out, f"#/case/{CASE.id}/xla") as page:
        ready(page)
        heads = page.locator(".dr-head").all_inner_texts()
        assert [head.split("\n")[0] for head in heads] == ["xla tpu-v5e", "xla h200"]
        assert page.locator(".dr-box").count() >= len(XLA.kernels or ()) + len(TPU.kernels or ())
        assert "the data sheet of tpu-v5e and h200" in page.locator("#c-why").inner_text()
        assert page.locator("header.top .home").inner_text() == "v5e and gpu: fusion report"
        page.locator('.dr-box[data-key="1.0"]').click()
        page.locator(".dr-actions button").click()  # leads to the sources of the same column
        page.wait_for_function("document.querySelector('.so-choose select').value === '0'")
        assert page.locator('.so > .so-tabs [aria-pressed="true"]').inner_text() == "xla h200"


def test_findings_over_two_devices_have_no_times(runs: tuple[Path, Path], tmp_path: Path, embedded: Any) -> None:
    """Neither bandwidth is that of both. The front page has them, as it does where no device is known."""
    report(*runs, "-o", tmp_path / "both.html")
    html = embedded(tmp_path / "both.html", "case", 0)["html"]
    findings = html.split('id="c-findings"')[1].split("</section>")[0]
    assert "xla tpu-v5e" in findings and "µs" not in findings
    front = (tmp_path / "both.html").read_text()
    assert "Main findings" in front and "worth up to" not in front


def test_implementations_of_a_run_and_two_files(runs: tuple[Path, Path], tmp_path: Path, embedded: Any) -> None:
    store.save(XLA, tmp_path / "a.json")
    store.save(INDUCTOR, tmp_path / "b.json")
    for words in ((runs[1], "-i", "xla,inductor"), (tmp_path / "a.json", tmp_path / "b.json")):
        assert report(*words, "-o", tmp_path / "page.html").exit_code == 0
        columns = embedded(tmp_path / "page.html", "drawing", 0)["columns"]
        assert [column["name"] for column in columns] == ["xla", "inductor"]


def test_devices_that_two_runs_measured_are_not_one(tmp_path: Path, embedded: Any) -> None:
    """The ceilings of one run price no finding over both. Within a run they do."""
    ceilings = {"streams": {"1:0": 4.4e12, "1:1": 4e12, "0:1": 3e12}, "products": {"bfloat16": 8e14}}
    for run, graphs in {"a": {"xla": XLA, "inductor": INDUCTOR}, "b": {"xla": INDUCTOR}}.items():
        run_folder.create(tmp_path / run, {"segments": [{"id": "s1", "environment": {}, "ceilings": ceilings}]})
        for name, made in graphs.items():
            file = f"graphs/{name}.json.gz"
            store.save(replace(made, compiler=name, target=""), tmp_path / run / file)
            run_folder.append(tmp_path / run, made_record(CASE, name, name, "ok", graph=file, segment="s1"))

    def findings(*runs: Path) -> str:
        assert report(*runs, "-o", tmp_path / "page.html").exit_code == 0
        html: str = embedded(tmp_path / "page.html", "case", 0)["html"]
        return html.split('id="c-findings"')[1].split("</section>")[0]

    assert "µs" in findings(tmp_path / "a")
    of_both = findings(tmp_path / "a", tmp_path / "b")
    assert "xla a" in of_both and "xla b" in of_both and "µs" not in of_both


@pytest.mark.parametrize("words", [["--view", "why"], ["--why"], ["--kernel", "1"], ["--price-as", "h200"]])
def test_a_page_holds_all_views(runs: tuple[Path, Path], tmp_path: Path, words: list[str]) -> None:
    done = report(*runs, *words, "-o", tmp_path / "x.html")
    assert done.exit_code == 2 and words[0] in done.stderr, done.output
    assert not (tmp_path / "x.html").exists()


def test_two_runs_without_a_common_record_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    other = run_of(tmp_path / "other", "h200", inductor=INDUCTOR)
    done = report(runs[0], other, "-o", tmp_path / "x.html")
    assert done.exit_code == 2 and str(runs[0]) in done.stderr and str(other) in done.stderr
    assert not (tmp_path / "x.html").exists()
