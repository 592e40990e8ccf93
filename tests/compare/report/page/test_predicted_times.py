"""The page of a run for a GPU that is not there: each predicted time is marked, and a timed run's page has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.report.page import page
from xlafuse.compare.report.page.content import kernels
from xlafuse.compare.sources.run_source import open_run

RUNS = PROJECT / "tests" / "data" / "runs"
CASE = "attention/llama-8b/bf16/fwd"


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tour") / "tour.html"
    page.write(open_run(RUNS / "tour"), file, files=False)
    return file


def test_all_kernels_of_a_compiled_case_have_a_marked_time(tour: Path, embedded: Any, tables: Any) -> None:
    number = embedded(tour, "settings")["cases"].index(CASE)
    drawn = [kernel for column in embedded(tour, "drawing", number)["columns"] for kernel in column["kernels"]]
    assert drawn and all(kernel["time"].startswith("~") and kernel["us"] is None for kernel in drawn)
    assert all("to" in kernel["facts"]["predicted time"] for kernel in drawn)
    data = embedded(tour, "case", number)
    assert all(bars["predicted"] for bars in data["bars"])
    glance = tables(data["html"])[0]
    at = next(index for index, title in enumerate(glance[0]) if title == "predicted µs")
    assert all(row[at].startswith("~") for row in glance[1:])


def test_a_cell_of_the_overview_has_a_recorded_or_a_marked_time(tour: Path) -> None:
    front = tour.read_text()
    assert front.count(" · ~") == 10 and " · 406 µs" in front


def test_a_timed_case_has_no_predicted_bars() -> None:
    (timed, *_) = open_run(RUNS / "h200-small").cases
    assert timed.timed and not kernels.predicted(timed)
    assert not any(bars["predicted"] for bars in kernels.bars(timed))
