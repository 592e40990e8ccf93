"""The collector is off while a report is made, and only then; nothing is left lying about for it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from compare.cli import report as report_cli
from compare.record.run_folder import RunFolderError
from xlafuse.hlo.gc_pause import collector_paused

QUICK = Path(__file__).parents[3] / "reports" / "h200-quick"


def report(run: Path, **options: object) -> str:
    choices = {
        "html": None, "files": True, "views": {}, "kernels": False, "form": "text", "picture": None,
        "wanted": {"block": ["rmsnorm"]}, "warn": lambda warnings: None,
    }
    return report_cli.report(run, **(choices | options))  # type: ignore[arg-type]


def test_it_is_off_while_a_report_is_made(tmp_path: Path) -> None:
    seen = []
    report(QUICK, warn=lambda warnings: seen.append(gc.isenabled()))
    assert seen == [False] and gc.isenabled()
    with pytest.raises(RunFolderError):
        report(tmp_path)
    assert gc.isenabled()


def test_who_had_it_off_has_it_off() -> None:
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_page_leaves_hardly_any_circles(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    pytest.importorskip("itables")
    while gc.collect():  # what other tests left, and what its finalizers let go of
        pass
    with collector_paused():
        report(QUICK, html=tmp_path / "page.html", files=False)
        assert gc.collect() < 1000
