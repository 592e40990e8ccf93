"""The garbage collector is off while a report is made, and a report leaves few reference cycles."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli import report as report_cli

from xlafuse.hlo.gc_pause import collector_paused

QUICK = Path(__file__).parents[2] / "data" / "runs" / "h200-small"


def report(run: Path, **options: object) -> str:
    defaults = {
        "view": "table", "form": "text", "kernels": False, "every": False, "html": None, "files": True,
        "picture": None, "filters": {"block": ["rmsnorm"]},
    }
    return report_cli.report(run, **(defaults | options))  # type: ignore[arg-type]


def test_the_collector_is_off_only_while_a_report_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(report_cli, "warn", lambda warnings: seen.append(gc.isenabled()))
    report(QUICK)
    assert seen == [False] and gc.isenabled()
    with pytest.raises(UsageError):
        report(tmp_path)
    assert gc.isenabled()


def test_nested_pauses_keep_the_collector_off() -> None:
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_page_leaves_few_reference_cycles(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    pytest.importorskip("itables")
    while gc.collect():  # garbage of other tests, and of its finalizers
        pass
    with collector_paused():
        report(QUICK, html=tmp_path / "page.html", files=False)
        assert gc.collect() < 1000
