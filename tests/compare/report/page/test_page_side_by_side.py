"""`xlafuse inspect A B --html`: graphs of two runs, of two implementations or of two files on one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from examples import INDUCTOR, XLA
from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.spec.blocks import BLOCKS

CASE = next(c for c in BLOCKS["swiglu_mlp"].cases("quick") if c.direction == "train")
TPU = replace(INDUCTOR, compiler="xla", target="tpu-v5e")


def run_of(folder: Path, target: str, **graphs: FusionGraph) -> Path:
    run_folder.create(folder, {"segments": []})
    for name, graph in graphs.items():
        store.save(graph, folder / "graphs" / f"{name}.json.gz")
        run_folder.append(
            folder, Record(CASE, name, name, "compiled", target=target, graph=f"graphs/{name}.json.gz")
        )
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return run_of(tmp_path / "v5e", "tpu-v5e", xla=TPU), run_of(tmp_path / "gpu", "h200", xla=XLA, inductor=INDUCTOR)


def inspect(*words: Any) -> str:
    asked = CliRunner().invoke(main.cli, ["inspect", *map(str, words)])
    return asked.output if asked.exit_code == 0 else f"{asked.exit_code}: {asked.output}"


def test_a_tpu_and_a_gpu_in_a_browser(runs: tuple[Path, Path], tmp_path: Path, visit: Any, ready: Any) -> None:
    out = tmp_path / "both.html"
    assert inspect(*runs, "--html", out) == f"{out}: 1 case side by side; open it in a browser\n"
    with visit(out, f"#/case/{CASE.id}/xla") as page:
        ready(page)
        heads = page.locator(".dr-head").all_inner_texts()
        assert [head.split("\n")[0] for head in heads] == ["xla tpu-v5e", "xla h200"]
        assert page.locator(".dr-box").count() >= len(XLA.kernels or ()) + len(TPU.kernels or ())
        assert "the data sheet of tpu-v5e and h200" in page.locator("#c-why").inner_text()
        assert page.locator("header.top .home").inner_text() == "v5e and gpu: fusion report"


def test_findings_over_two_devices_have_no_times(runs: tuple[Path, Path], tmp_path: Path, embedded: Any) -> None:
    """Neither bandwidth is that of both. The front page has them, as it does where no device is known."""
    inspect(*runs, "--html", tmp_path / "both.html")
    html = embedded(tmp_path / "both.html", "case", 0)["html"]
    findings = html.split('id="c-findings"')[1].split("</section>")[0]
    assert "xla tpu-v5e" in findings and "µs" not in findings
    front = (tmp_path / "both.html").read_text()
    assert "Main findings" in front and "worth up to" not in front


def test_named_implementations_of_a_run_and_two_files(
    runs: tuple[Path, Path], tmp_path: Path, embedded: Any
) -> None:
    inspect(*runs, "--align", "xla", "inductor", "--html", tmp_path / "named.html")
    columns = embedded(tmp_path / "named.html", "drawing", 0)["columns"]
    assert [column["name"] for column in columns] == ["xla tpu-v5e", "inductor h200"]
    inspect(runs[1], "--align", "xla", "inductor", "--html", tmp_path / "one.html")
    columns = embedded(tmp_path / "one.html", "drawing", 0)["columns"]
    assert [column["name"] for column in columns] == ["xla", "inductor"]
    store.save(XLA, tmp_path / "a.json")
    store.save(INDUCTOR, tmp_path / "b.json")
    inspect(tmp_path / "a.json", tmp_path / "b.json", "--html", tmp_path / "files.html")
    columns = embedded(tmp_path / "files.html", "drawing", 0)["columns"]
    assert [column["name"] for column in columns] == ["xla", "inductor"]


def test_devices_that_two_runs_measured_are_not_one(tmp_path: Path, embedded: Any) -> None:
    """The ceilings of one run price no finding over both. Within a run they do."""
    ceilings = {"streams": {"1:0": 4.4e12, "1:1": 4e12, "0:1": 3e12}, "products": {"bfloat16": 8e14}}
    for name in ("a", "b"):
        run_folder.create(tmp_path / name, {"segments": [{"id": "s1", "environment": {}, "ceilings": ceilings}]})
        for made in (XLA, INDUCTOR):
            file, who = f"graphs/{made.compiler}.json.gz", made.compiler
            store.save(replace(made, target=""), tmp_path / name / file)
            run_folder.append(tmp_path / name, Record(CASE, who, who, "ok", graph=file, segment="s1"))

    def findings(*runs: Path) -> str:
        inspect(*runs, "--align", "xla", "inductor", "--html", tmp_path / "page.html")
        html: str = embedded(tmp_path / "page.html", "case", 0)["html"]
        return html.split('id="c-findings"')[1].split("</section>")[0]

    assert "µs" in findings(tmp_path / "a")
    assert "µs" not in findings(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{a}"], "--html is for graphs side by side; `xlafuse report {a} --html FILE` shows one path"),
        (["{a}", "{b}", "--json"], "leave --json out"), (["{a}", "{b}", "--target", "h200"], "leave --target out"),
        (["{a}", "{b}", "--why"], "--why shows one graph at a time"),
    ],
)
def test_refusals(runs: tuple[Path, Path], tmp_path: Path, words: list[str], message: str) -> None:
    a, b = runs
    said = inspect(*(word.format(a=a, b=b) for word in words), "--html", tmp_path / "x.html")
    assert said.startswith("2: ") and message.format(a=a) in " ".join(said.split())
    assert not (tmp_path / "x.html").exists()
