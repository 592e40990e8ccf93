"""The GPUs of a case that spans several: the page's table, and all of them on one time axis."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli import main
from xlafuse.compare.report import ranks
from xlafuse.compare.report.columns import as_data
from xlafuse.compare.report.page import page
from xlafuse.compare.report.page.content import kernels
from xlafuse.compare.sources.case_results import CaseResults
from xlafuse.compare.sources.opening import open_source

RUN = PROJECT / "reports" / "h200-x2"
CASE = "mlp_parallel/llama-8b/bf16/fwd"
WANTED = {"block": ["mlp_parallel"], "direction": ["fwd"]}
BARS = """[...document.querySelectorAll('[data-chart="ranks"] .mark-rect path')]
  .filter((path) => path.__data__?.datum?.kernel)
  .map((path) => ({ ...path.__data__.datum, box: path.getBBox(), left: path.getBoundingClientRect().left }))
  .map(({ implementation, rank, kind, start, end, took, left, box }) =>
    ({ implementation, rank, kind, start, took, left, width: box.width }))"""


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks") / "page.html"
    page.write(open_source(RUN).select(WANTED), out, files=False)
    return out


def case_of(run: Path, **wanted: str) -> CaseResults:
    return open_source(run).select({name: [value] for name, value in wanted.items()}).cases[0]


def test_the_table_has_the_numbers_of_the_command(of_ranks: Path, embedded: Any, tables: Any) -> None:
    options = ["--view", "ranks", "--json", "--block", "mlp_parallel", "--direction", "fwd"]
    asked = CliRunner().invoke(main.cli, ["inspect", str(RUN), *options])
    assert asked.exit_code == 0, asked.output
    of_gpus = ranks.of(open_source(RUN).select(WANTED).results)
    assert json.loads(asked.output)["rows"] == as_data(of_gpus, ranks.COLUMNS)
    head, *lines = next(t for t in tables(embedded(of_ranks, "case", 0)["html"]) if "exposed µs" in t[0])
    assert head == [column.header for column in ranks.SHOWN]
    expected = {(gpu.row.implementation, gpu.rank): [column.text(gpu) for column in ranks.SHOWN] for gpu in of_gpus}
    assert len(of_gpus) == len(lines) == 22
    assert {(line[0], int(line[1])): line for line in lines} == expected
    assert any(line[head.index("overlapped")] == "100%" for line in lines)


def test_all_ranks_are_drawn_on_one_scale(of_ranks: Path, visit: Any, ready: Any) -> None:
    with visit(of_ranks, f"#/case/{CASE}") as it:
        ready(it)
        bars = it.evaluate(BARS)
        kinds = ("communication", "compute")
        drawn = {(bar["implementation"], bar["rank"], bar["kind"]) for bar in bars}
        names = {bar["implementation"] for bar in bars}
        assert names >= {"xla", "inductor-async", "triton", "triton-put", "eager"}
        assert drawn == {(name, rank, kind) for name in names for rank in (0, 1) for kind in kinds}
        assert min(bar["start"] for bar in bars) == 0
        first = next(bar for bar in bars if bar["start"] == 0)
        last = max(bars, key=lambda bar: bar["start"])
        pixels = (last["left"] - first["left"]) / last["start"]
        for bar in bars:
            assert bar["left"] - first["left"] == pytest.approx(bar["start"] * pixels, abs=1)
            assert bar["width"] == pytest.approx(bar["took"] * pixels, abs=1)
        exchange = it.locator('[data-chart="ranks"] [aria-label*="ncclDevKernel_AllGather"]').first
        exchange.hover()
        tip = it.locator("#vg-tooltip-element").inner_text()
        assert re.search(r"start, µs\s+[\d.,]+\s+duration, µs\s+[\d.,]+", tip) and "ncclDevKernel_AllGather" in tip
        for theme in ("dark", "light"):
            it.locator("#theme").click()
            it.wait_for_function("theme => document.documentElement.dataset.theme === theme", arg=theme)
            it.wait_for_selector('[data-chart="ranks"] svg')
            assert len(it.evaluate(BARS)) == len(bars)


def test_the_kinds_are_those_of_the_measurement() -> None:
    """A copy counts by its name at run time, also where the graph names it after its operation or exchange."""
    for block in ("mlp_parallel", "moe_parallel"):
        bars = kernels.calls_of_ranks(case_of(RUN, block=block, direction="fwd")).bars
        copies = {(b["kernel"], b["kind"]) for b in bars if "[memcpy" in b["kernel"]}
        for ending, kind in (("[memcpy peer]", "communication"), ("[memcpy]", "compute")):
            of_kind = {(kernel, found) for kernel, found in copies if kernel.endswith(ending)}
            assert {found for _, found in of_kind} == {kind}
            assert ending in {kernel for kernel, _ in of_kind} and len(of_kind) > 1
            if block == "moe_parallel" and kind == "compute":
                assert "aten.sort.stable: [memcpy]" in {kernel for kernel, _ in of_kind}


@pytest.mark.parametrize("content", [None, b"no archive"], ids=["missing", "damaged"])
def test_without_timelines_the_table_stands_alone(
    content: bytes | None, tmp_path: Path, embedded: Any, tables: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUN, run, ignore=shutil.ignore_patterns("timelines.zip", "artifacts.zip", "report.html"))
    if content is not None:
        (run / "timelines.zip").write_bytes(content)
    page.write(open_source(run).select(WANTED), tmp_path / "page.html", files=False)
    shown = embedded(tmp_path / "page.html", "case", 0)
    assert any("exposed µs" in table[0] for table in tables(shown["html"]))
    assert "ranks" not in shown["charts"] and 'data-chart="ranks"' not in shown["html"]


def test_an_implementation_without_a_timeline_is_named(tmp_path: Path, embedded: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUN, run, ignore=shutil.ignore_patterns("timelines.zip", "artifacts.zip", "report.html"))
    with zipfile.ZipFile(RUN / "timelines.zip") as every, zipfile.ZipFile(run / "timelines.zip", "w") as kept:
        for name in every.namelist():
            if "xla-windowed" not in name:
                kept.writestr(name, every.read(name))
    page.write(open_source(run).select(WANTED), tmp_path / "page.html", files=False)
    assert "No timeline of xla-windowed" in embedded(tmp_path / "page.html", "case", 0)["html"]


def test_a_case_of_one_gpu_has_no_ranks(report: Path, embedded: Any) -> None:
    shown = embedded(report, "case", 0)
    assert "c-ranks" not in shown["html"] and "ranks" not in shown["charts"]


def test_the_committed_page_has_the_ranks(embedded: Any) -> None:
    for number in range(4):
        shown = embedded(RUN / "report.html", "case", number)
        assert 'data-chart="ranks"' in shown["html"] and shown["charts"]["ranks"]["data"]["values"]
