"""Writing a page reads each file of the run once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from compare.report import run_results
from compare.report.page import page

QUICK = Path(__file__).parents[4] / "reports" / "h200-quick"


def test_each_file_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    pytest.importorskip("itables")
    seen: Counter[Path] = Counter()
    plain = Path.read_bytes

    def counted(path: Path) -> bytes:
        seen[path] += 1
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    run = page.write(QUICK, tmp_path / "page.html", {"block": ["rmsnorm"]}, files=False)
    graphs = [result.source.record.graph for result in run.results if result.source.record]
    assert isinstance(run, run_results.Run) and len(graphs) > 5
    assert {seen[QUICK / name] for name in ("records.jsonl", *map(str, graphs))} == {1}
