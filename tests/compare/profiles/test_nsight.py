"""Nsight Systems' SQLite export, built here by its published schema."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from xlafuse.compare.graph.join.kernel_records import MEMCPY, MEMSET
from xlafuse.compare.profiles import files, nsight
from xlafuse.compare.profiles.model import ProfileError
from xlafuse.compare.profiles.steps import profiled_steps

Tables = Mapping[str, tuple[Sequence[str], Sequence[Sequence[object]]]]
PROCESS = 5 << 24  # globalPid: the bits of the process; a globalTid has the thread's below
TABLES: Tables = {
    "StringIds": (("id", "value"), [(1, "void gemm<128>(float*)"), (2, "gemm"), (3, "fusion_1"), (4, "iteration 3")]),
    "TARGET_INFO_GPU": (("id", "name"), [(0, "NVIDIA H200")]),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "demangledName", "shortName",
         "gridX", "gridY", "gridZ"),
        [(2000, 5000, 0, 7, 11, PROCESS, 1, 2, 8, 2, 1), (6000, 7000, 0, 7, 12, PROCESS, None, 3, 4, 1, 1)],
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind"),
        [(7500, 7600, 0, 7, 13, PROCESS, 64, 2)],
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        ("start", "end", "deviceId", "streamId", "correlationId", "globalPid"), [(1800, 1900, 0, 7, 10, PROCESS)],
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        ("start", "end", "globalTid", "correlationId", "nameId"),
        [(1000, 1100, PROCESS + 9, 11, 2), (1200, 1300, PROCESS + 9, 12, 2), (500, 600, (6 << 24) + 9, 11, 2)],
    ),
    "NVTX_EVENTS": (
        ("start", "end", "eventType", "text", "textId", "globalTid"),
        [(900, 8000, 59, "step 2", None, PROCESS + 9), (8001, 9000, 59, None, 4, PROCESS + 9),
         (900, 950, 59, "forward", None, PROCESS + 9)],
    ),
}


def export(folder: Path, tables: Tables = TABLES, *statements: str) -> Path:
    path = folder / "report.sqlite"
    with closing(sqlite3.connect(path)) as base:
        for name, (columns, rows) in tables.items():
            base.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
            base.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})", rows)
        for statement in statements:
            base.execute(statement)
        base.commit()
    return path


def test_kernels_have_times_launches_and_steps(tmp_path: Path) -> None:
    path = export(tmp_path)
    assert files.profile_files(path) == files.profile_files(tmp_path) == [path]
    (profile,) = files.read(path)
    assert (profile.tool, profile.device, profile.skipped) == ("Nsight Systems", "NVIDIA H200", 0)
    assert [event.name for event in profile.events] == [MEMSET, "void gemm<128>(float*)", "fusion_1", MEMCPY]
    gemm = profile.events[1]
    assert gemm.seconds == pytest.approx(3e-6)
    assert gemm.launched == pytest.approx(1e-6)  # of its own process
    assert gemm.grid == (8, 2, 1)
    assert [step.name for step in profile.steps] == ["step 2", "step 3"]
    (step,) = profiled_steps(profile)
    assert len(step.events) == 4


def test_each_process_and_gpu_is_a_profile(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES gives each process a GPU 0. A step is of the process that announced it."""
    other = 6 << 24
    rows = [(2000, 5000, 0, 11, PROCESS, 2), (2500, 3000, 0, 11, other, 2), (2600, 3000, 1, 12, other, 3)]
    tables = {
        "StringIds": TABLES["StringIds"], "TARGET_INFO_GPU": (("id", "name"), [(2, "H200 A"), (5, "H200 B")]),
        "TARGET_INFO_CUDA_DEVICE": (("gpuId", "cudaId", "pid"), [(2, 0, 5), (5, 0, 6)]),
        "CUPTI_ACTIVITY_KIND_KERNEL": (("start", "end", "deviceId", "correlationId", "globalPid", "shortName"), rows),
        "NVTX_EVENTS": TABLES["NVTX_EVENTS"],
    }
    found = nsight.read(export(tmp_path, tables))
    assert [(profile.device, profile.gpu, len(profile.events), len(profile.steps)) for profile in found] == [
        ("H200 A", 2, 1, 2), ("H200 B", 5, 1, 0), ("GPU 1", 1, 1, 0),
    ]


def test_graphs_that_are_recorded_as_a_whole_are_work_of_the_gpu(tmp_path: Path) -> None:
    columns = ("start", "end", "deviceId", "correlationId", "globalPid", "graphId")
    tables = {**TABLES, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (columns, [(7600, 7900, 0, 15, PROCESS, 1)])}
    (profile,) = nsight.read(export(tmp_path, tables))
    assert profile.events[-1].name == "[CUDA graph]"
    assert "--cuda-graph-trace=node" in profile.notes[0]


@pytest.mark.parametrize("packed", [gzip.compress, lambda data: data])
def test_the_export_may_be_packed(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    data = export(tmp_path).read_bytes()
    path = tmp_path / "packed"
    path.write_bytes(packed(data))
    assert len(files.read(path)[0].events) == 4
    path.write_bytes(packed(data)[:-100])
    with pytest.raises(ProfileError, match="damaged gzip file|not a SQLite export"):
        files.read(path)


def test_columns_that_an_older_version_lacks_are_unknown(tmp_path: Path) -> None:
    rows = [(2000, 5000, 0, 2)]
    columns = ("start", "end", "deviceId", "shortName")
    tables = {"StringIds": TABLES["StringIds"], "CUPTI_ACTIVITY_KIND_KERNEL": (columns, rows)}
    (profile,) = nsight.read(export(tmp_path, tables))
    (event,) = profile.events
    assert (event.name, event.grid, event.launched, profile.device, profile.steps) == ("gemm", None, None, "GPU 0", ())


def test_rows_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    rows = [("x", 5, 0, 2), (5, 4, 0, 2), (1, 2, 0, 99), (1, 2, 0, 2), (1, None, 0, 2)]
    columns = ("start", "end", "deviceId", "shortName")
    tables = {"StringIds": TABLES["StringIds"], "CUPTI_ACTIVITY_KIND_KERNEL": (columns, rows)}
    (profile,) = nsight.read(export(tmp_path, tables))
    assert (len(profile.events), profile.skipped) == (1, 4)


def test_other_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no table CUPTI_ACTIVITY_KIND_KERNEL"):
        nsight.read(export(tmp_path, {"StringIds": TABLES["StringIds"]}))
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"SQLite format 3\x00" + b"x" * 5000)
    with pytest.raises(ProfileError, match="not a SQLite export"):
        files.read(broken)


def test_a_view_is_not_a_table(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS start FROM n"
    path = export(tmp_path, {}, f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
    with pytest.raises(ProfileError, match="no table CUPTI_ACTIVITY_KIND_KERNEL"):
        nsight.read(path)


def test_long_texts_and_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(tmp_path, TABLES, f"INSERT INTO StringIds VALUES (9, zeroblob({nsight.MOST_TEXT + 1}))")
    with pytest.raises(ProfileError, match="too big"):
        nsight.read(path)
    monkeypatch.setattr(nsight, "MOST_ROWS", 1)
    with pytest.raises(ProfileError, match="more than 1 rows in"):
        nsight.read(path)


def test_the_file_is_not_changed(tmp_path: Path) -> None:
    path = export(tmp_path)
    before = path.read_bytes()
    nsight.read(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["report.sqlite"]
