"""Tables are read, written and found by GPU; errors name the file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from xlafuse.triton_side.configs import table as tables
from xlafuse.triton_side.configs.table import Entry, Gpu, Table, TableError

H200 = Gpu("NVIDIA H200", (9, 0), 132, 232448)
CLASS = {"rows": 8192, "columns": 4096, "element_bytes": 2}
ENTRY = Entry({"block_rows": 2}, 16384, 33.1, 35.0)


def table(gpu: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), multiprocessors: int = 132) -> Table:
    made = Table(gpu, capability, multiprocessors, "3.6.0")
    made.put("rmsnorm.configure_forward", CLASS, ENTRY)
    return made


def test_a_written_table_is_found_by_its_gpu(tmp_path: Path) -> None:
    written = table()
    written.put("adamw.configure", {}, Entry({"block": 512, "num_warps": 4}, 0, 1.0, None))
    written.write(tables.file_of("NVIDIA H200", tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tables.of_gpu(H200, tmp_path)
    assert found is not None and found.entries == written.entries and found.text() == written.text()
    assert found.find("rmsnorm.configure_forward", dict(reversed(CLASS.items()))) == ENTRY
    assert found.find("rmsnorm.configure_forward", CLASS | {"rows": 4096}) is None
    assert [path.name for path in tmp_path.iterdir()] == ["h200.json"]


def test_a_gpu_without_tables_has_none(tmp_path: Path) -> None:
    assert tables.of_gpu(H200, tmp_path) is None


def test_an_empty_table_of_another_gpu_does_not_count(tmp_path: Path) -> None:
    Table("NVIDIA A100-SXM4-80GB", (8, 0), 108).write(tmp_path / "a100-sxm4-80gb.json")
    assert tables.of_gpu(H200, tmp_path) is None


@pytest.mark.parametrize(
    ("gpu", "nearest"),
    [
        (Gpu("NVIDIA H100 PCIe", (9, 0), 114, 232448), "NVIDIA H200"),
        (Gpu("NVIDIA H100 SXM", (9, 0), 132, 232448), "NVIDIA H200"),
        (Gpu("NVIDIA RTX 3090", (8, 6), 82, 101376), "NVIDIA A100"),
        (Gpu("NVIDIA B200", (10, 0), 148, 232448), "NVIDIA H200"),
    ],
)
def test_an_unknown_gpu_takes_the_nearest_table_and_says_how_to_make_its_own(
    tmp_path: Path, gpu: Gpu, nearest: str
) -> None:
    for made in (table(), table("NVIDIA A100", (8, 0), 108), table("NVIDIA H100 MIG", (9, 0), 16)):
        made.write(tables.file_of(made.gpu, tmp_path))
    with pytest.warns(UserWarning, match="xlafuse tune") as caught:
        found = tables.of_gpu(gpu, tmp_path)
    assert found is not None and found.gpu == nearest
    assert gpu.name in str(caught[0].message) and nearest in str(caught[0].message)


def test_the_table_of_another_gpu_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    table("NVIDIA A100").write(tmp_path / "h200.json")
    with pytest.raises(TableError, match=r"h200\.json.*NVIDIA A100.*NVIDIA H200"):
        tables.of_gpu(H200, tmp_path)


GOOD: dict[str, Any] = json.loads(table().text())


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", "null", json.dumps(GOOD | {"entries": []}), json.dumps(GOOD | {"capability": "9.0"[:1]}),
        json.dumps({name: value for name, value in GOOD.items() if name != "gpu"}),
        json.dumps(GOOD | {"entries": {"rmsnorm.configure_forward": [{"class": CLASS}]}}),
        json.dumps(GOOD | {"entries": {"rmsnorm.configure_forward": [{"class": {"rows": []}, "config": {}}]}}),
        json.dumps(GOOD | {"entries": {"rmsnorm.configure_forward": 3}}),
    ],
)
def test_a_broken_table_is_an_error_that_names_the_file_and_the_remedy(tmp_path: Path, content: str) -> None:
    path = tmp_path / "h200.json"
    path.write_text(content)
    with pytest.raises(TableError, match=r"h200\.json.*xlafuse tune"):
        tables.of_gpu(H200, tmp_path)


def test_the_shipped_tables_are_whole_and_named_like_their_gpu() -> None:
    for path in tables.FOLDER.glob("*.json"):
        assert tables.file_of(tables.read(path).gpu, tables.FOLDER) == path
