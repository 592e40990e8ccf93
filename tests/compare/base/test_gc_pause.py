"""The garbage collector is off while a report is made, and a report leaves few reference cycles."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from click.testing import CliRunner

from xlafuse.compare.cli import report as report_cli
from xlafuse.compare.cli.main import cli
from xlafuse.compare.report.page import page
from xlafuse.compare.sources.run_source import open_run
from xlafuse.hlo.gc_pause import collector_paused

QUICK = Path(__file__).parents[2] / "data" / "runs" / "h200-small"


def test_the_collector_is_off_only_while_a_report_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(report_cli, "warn", lambda warnings: seen.append(gc.isenabled()))
    for run, code in ((QUICK, 0), (tmp_path / "none", 2)):
        words = ["report", str(run), "--block", "rmsnorm", "--view", "times", "-o", str(tmp_path / "times.md")]
        assert CliRunner().invoke(cli, words).exit_code == code
        assert seen == [False] and gc.isenabled()


def test_nested_pauses_keep_the_collector_off() -> None:
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_page_leaves_few_reference_cycles(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    pytest.importorskip("itables")
    source = open_run(QUICK).select({"block": ["rmsnorm"]})  # kept, as results refer to the others of their run
    while gc.collect():  # garbage of other tests, and of its finalizers
        pass
    with collector_paused():
        page.write(source, tmp_path / "page.html", files=False)
        assert gc.collect() < 1000 and source.results
