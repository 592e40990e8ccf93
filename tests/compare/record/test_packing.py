"""A packed run has the same records and files as the loose one; nothing is lost on the way."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pytest
from made_records import made_record

from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record import packing, run_files, run_folder, run_readme
from xlafuse.compare.record.record import Record
from xlafuse.compare.record.run_files import RunFile, recorded_file
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.spec.blocks import BLOCKS

CASE = BLOCKS["gelu"].cases("quick")[0]
NAMES = ("graphs/{}.json.gz", "traces/{}.json.gz", "dumps/{}.zip")


def add(folder: Path, implementation: str, *, version: str = "") -> Record:
    """Append a record and write its graph, timeline and archive, loose as a run does. version: a word in each."""
    graph, trace, dumps = (name.format(implementation) for name in NAMES)
    store.save(FusionGraph(f"{implementation}{version}", "xla", ()), folder / graph)
    (folder / "traces").mkdir(exist_ok=True)
    (folder / trace).write_bytes(gzip.compress(json.dumps({"of": f"{implementation}{version}"}).encode()))
    (folder / "dumps").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / dumps, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("forward/optimized.hlo.txt", f"HloModule {implementation}{version}")
    record = made_record(CASE, implementation, "xla", "ok", graph=graph, trace={"file": trace}, dumps=dumps)
    run_folder.append(folder, record)
    return record


def made(folder: Path, *implementations: str) -> Path:
    work = [{"case": CASE.to_json(), "implementations": ["xla", "triton", "cuda"]}]
    run_folder.create(folder, {"suite": "quick", "target": "h200", "plan": {"work": work}, "segments": []})
    for implementation in implementations:
        add(folder, implementation)
    return folder


def held(folder: Path) -> dict[str, list[str]]:
    """Return the words in the graph, timeline and archive of each record."""
    found = {}
    for record in run_folder.read_records(folder)[0]:
        graph, trace, dumps = (recorded_file(folder, record, name.format(record.implementation)) for name in NAMES)
        raw = trace.read_bytes()
        with zipfile.ZipFile(io.BytesIO(dumps.read_bytes())) as archive:
            hlo = archive.read("forward/optimized.hlo.txt").decode()
        timeline = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
        found[record.implementation] = [store.load(graph).name, timeline["of"], hlo.partition(" ")[2]]
    return found


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"logs"}


PACKED = {"run.json", "records.jsonl", "graphs.zip", "timelines.zip", "artifacts.zip", "README.md"}


def test_a_packed_run_reads_like_the_loose_one(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "xla", "triton")
    loose, records = held(folder), (folder / "records.jsonl").read_bytes()
    assert files(folder) == {"run.json", "records.jsonl", "graphs", "traces", "dumps"}
    packing.pack(folder)
    assert held(folder) == loose == {name: [name] * 3 for name in ("xla", "triton")}
    assert files(folder) == PACKED and (folder / "records.jsonl").read_bytes() == records


def test_a_resumed_run_goes_on_with_its_archives(tmp_path: Path) -> None:
    """New files are read before and after they are packed, and replace those of the same record."""
    folder = made(tmp_path / "run", "xla", "triton")
    packing.pack(folder)
    add(folder, "triton", version=" again")
    add(folder, "cuda")
    expected = {"xla": ["xla"] * 3, "triton": ["triton again"] * 3, "cuda": ["cuda"] * 3}
    assert held(folder) == expected
    packing.pack(folder)
    assert held(folder) == expected and files(folder) == PACKED
    with zipfile.ZipFile(folder / "graphs.zip") as archive:
        assert sorted(archive.namelist()) == ["cuda.json.xz", "triton.json.xz", "xla.json.xz"]


def test_many_records_are_compressed_and_a_resumed_run_appends_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LARGE", 100)
    folder = made(tmp_path / "run", "xla", "triton")
    records = (folder / "records.jsonl").read_bytes()
    packing.pack(folder)
    assert not (folder / "records.jsonl").exists()
    assert gzip.decompress((folder / "records.jsonl.gz").read_bytes()) == records
    assert run_folder.repair(folder) is None
    run_folder.append(folder, made_record(CASE, "xla", "xla", "wrong"))
    more = (folder / "records.jsonl").read_bytes()
    statuses = {"xla": "wrong", "triton": "ok"}
    for packed in (False, True):
        assert {r.implementation: r.status for r in run_folder.read_records(folder)[0]} == statuses
        if not packed:
            packing.pack(folder)
    assert gzip.decompress((folder / "records.jsonl.gz").read_bytes()) == records + more


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"PK\x03\x04 and no more"])
def test_a_damaged_archive_costs_its_own_files(tmp_path: Path, damage: object) -> None:
    folder = made(tmp_path / "run", "xla", "triton")
    packing.pack(folder)
    path = folder / "graphs.zip"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    records, warnings = run_folder.read_records(folder)
    assert len(records) == 2 and not warnings
    for record in records:
        with pytest.raises(OSError, match=r"graphs\.zip: damaged: .*; put an intact copy there"):
            store.load(recorded_file(folder, record, str(record.graph)))
        assert recorded_file(folder, record, str(record.dumps)).read_bytes()
    add(folder, "cuda")
    with pytest.raises(RunFolderError, match=r"graphs\.zip: damaged"):
        packing.pack(folder)
    assert store.load(RunFile(folder, "graphs/cuda.json.gz")).name == "cuda"  # still loose
    path.unlink()  # as the message says
    packing.pack(folder)
    assert [each.name for each in run_files.archived(folder, "graphs")] == ["graphs/cuda.json"]


def test_a_damaged_member_costs_itself(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "xla", "triton")
    packing.pack(folder)
    with zipfile.ZipFile(folder / "graphs.zip") as archive:
        content = archive.read("xla.json.xz")
    path = folder / "graphs.zip"
    path.write_bytes(path.read_bytes().replace(content, bytes(len(content)), 1))
    with pytest.raises(OSError, match=r"graphs\.zip!xla\.json\.xz: damaged"):
        RunFile(folder, "graphs/xla.json.gz").read_bytes()
    assert RunFile(folder, "graphs/triton.json.gz").read_bytes()


@pytest.mark.parametrize("content", [b"no xz", lzma.compress(b"x" * 2000)[:-8], lzma.compress(b"x" * 2000)])
def test_a_stream_that_is_cut_off_or_too_large_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(run_files, "MAX_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "graphs.zip", "w") as archive:
        archive.writestr("a.json.xz", content)
    with pytest.raises(OSError, match=r"graphs\.zip!a\.json\.xz: "):
        RunFile(tmp_path, "graphs/a.json.gz").read_bytes()


def test_a_member_that_the_zip_compresses_is_refused(tmp_path: Path) -> None:
    """Its size in the archive bounds no memory."""
    with zipfile.ZipFile(tmp_path / "graphs.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json.xz", lzma.compress(b"x"))
    with pytest.raises(OSError, match="stored as it is"):
        RunFile(tmp_path, "graphs/a.json.gz").read_bytes()


def test_missing_files_are_missing(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "xla")
    packing.pack(folder)
    for name in ("graphs/cuda.json.gz", "elsewhere/a.json", "b.json"):
        assert not RunFile(folder, name).exists()
        with pytest.raises(FileNotFoundError):
            RunFile(folder, name).read_bytes()
    assert RunFile(folder, "graphs/xla.json.gz").exists()


def test_a_full_disk_keeps_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "run", "xla", "triton")
    before = held(folder)

    def full(self: zipfile.ZipFile, name: object, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(self.filename))

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(RunFolderError, match=r"No space left on device; .*--resume packs them"):
        packing.pack(folder)
    assert held(folder) == before
    assert files(folder) == {"run.json", "records.jsonl", "graphs", "traces", "dumps"}


def test_a_damaged_loose_file_is_packed_as_it_is(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "xla")
    for name, content in (("graphs/xla.json.gz", b"\x1f\x8bdamaged"), ("dumps/xla.zip", b"PK\x03\x04damaged")):
        (folder / name).write_bytes(content)
    packing.pack(folder)
    assert RunFile(folder, "graphs/xla.json.gz").read_bytes() == b"\x1f\x8bdamaged"
    assert RunFile(folder, "dumps/xla.zip").read_bytes() == b"PK\x03\x04damaged"


def test_graphs_and_modules_of_a_packed_run_open(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "xla")
    packing.pack(folder)
    (source,) = open_source(folder).results
    assert source.load().name == "xla"
    ((name, module),) = source.compiled()
    assert name == source.id and module.find("hlo") is not None


def test_the_readme_says_what_the_run_holds_and_lacks(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "xla", "triton")
    run_folder.append(folder, made_record(CASE, "triton", "triton", "wrong", detail="y: error 2 exceeds tolerance 1"))
    packing.pack(folder)
    text = (folder / "README.md").read_text()
    assert "Records: 2 of 3 planned; 1 `ok`, 1 `wrong`." in text
    assert f"- {CASE.id}: cuda" in text  # missing
    assert f"- {CASE.id}/triton: wrong: y: error 2 exceeds tolerance 1" in text
    assert "`graphs.zip`: fusion graphs of 2 records" in text
    (folder / "artifacts.zip").unlink()
    assert "not kept: compiler artifacts of 1 record\n" in run_readme.text(folder)
