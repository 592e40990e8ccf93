"""Writing a page reads the records and each graph of the run once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from xlafuse.compare.record.run_files import RunFile
from xlafuse.compare.report.page import page
from xlafuse.compare.sources.opening import open_source

RUN = Path(__file__).parents[3] / "data" / "runs" / "h200-small"


def test_each_file_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    pytest.importorskip("itables")
    seen: Counter[str] = Counter()
    plain, archived = Path.read_bytes, RunFile.read_bytes

    def counted(path: Path) -> bytes:
        seen[path.name] += 1
        return plain(path)

    def counted_file(file: RunFile) -> bytes:
        seen[file.name] += 1
        return archived(file)

    monkeypatch.setattr(Path, "read_bytes", counted)
    monkeypatch.setattr(RunFile, "read_bytes", counted_file)
    source = open_source(RUN).select({"block": ["rmsnorm"]})
    page.write(source, tmp_path / "page.html", files=False)
    graphs = [result.record.graph for result in source.results if result.record]
    assert len(graphs) > 5
    assert {seen[name] for name in ("records.jsonl", *map(str, graphs))} == {1}
