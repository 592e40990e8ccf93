"""`xlafuse export --to xprof`: a record's artifacts for other tools. A bad archive writes nothing."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from click.testing import Result
from commands import xlafuse
from made_records import made_record

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record import run_folder
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.user import export_dumps, xplane

RUN = PROJECT / "tests" / "data" / "runs" / "h200-small"
CASE = next(case for case in BLOCKS["softmax"].cases("quick") if case.direction == "fwd")


def export(*words: object) -> Result:
    return xlafuse("export", *words, "--to", "xprof")


def run(folder: Path, files: dict[str, bytes] | None, **fields: object) -> Path:
    """Make a run of one record, whose archive has these files. None: no archive."""
    run_folder.create(folder, {"segments": []})
    if files is not None:
        (folder / "dumps").mkdir()
        with zipfile.ZipFile(folder / "dumps" / "it.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    run_folder.append(folder, made_record(CASE, "xla", "xla", "ok", **{"dumps": "dumps/it.zip", **fields}))  # type: ignore[arg-type]
    return folder


def of(path: Path) -> list[tuple[str, FusionGraph]]:
    return [(each.name, each.load()) for each in open_source(path).results]


def test_xla_files_get_xlas_names_and_hold_the_same_graphs(artifacts: Path, tmp_path: Path) -> None:
    id, out = "softmax/gpt2-scores/bf16/train/xla", tmp_path / "out"
    result = export(RUN, "--module", id, "-o", out)
    assert result.exit_code == 0, result.output
    assert "module_0001.jit_forward, module_0002.jit_backward" in result.stdout and "xprof --logdir" in result.stdout
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {
        "module_0001.jit_forward.before_optimizations.txt",
        "module_0001.jit_forward.sm_9.0_gpu_after_optimizations.txt",
        "module_0001.jit_forward.sm_9.0_gpu_after_optimizations.hlo.pb",
        "module_0002.jit_backward.sm_9.0_gpu_after_optimizations-buffer-assignment.txt",
        "module_0002.jit_backward.gpu_target_config.pbtxt", "module_0001.jit_forward.fusion_3.ptx",
        "module_0001.jit_forward.passes/06_before_priority-fusion.txt",
        "xprof/plugins/profile/softmax-gpt2-scores-bf16-train-xla/xlafuse.xplane.pb",
    } <= names
    with zipfile.ZipFile(artifacts / "softmax-gpt2-scores-bf16-train-xla.zip") as archive:
        original = archive.read("forward/optimized.hlo.txt")
        assert len(names) == len(archive.namelist()) + 1
    assert (out / "module_0001.jit_forward.sm_9.0_gpu_after_optimizations.txt").read_bytes() == original
    packed = dict(of(artifacts / "softmax-gpt2-scores-bf16-train-xla.zip"))
    unpacked = dict(of(out))
    assert set(unpacked) == {"jit_forward", "jit_backward"}
    for part in ("forward", "backward"):
        kernels = [(k.name, k.inputs, k.outputs, k.source_ops) for k in packed[part].kernels or ()]
        assert kernels == [(k.name, k.inputs, k.outputs, k.source_ops) for k in unpacked[f"jit_{part}"].kernels or ()]
        assert len(packed[part].reasons) == len(unpacked[f"jit_{part}"].reasons)


def test_other_compilers_files_keep_their_names(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = export(RUN, "--module", "softmax/gpt2-scores/bf16/train/inductor", "-o", out)
    assert result.exit_code == 0, result.output
    assert (out / "forward" / "output_code.py").is_file() and (out / "kernels.json").is_file()
    assert "not kept: the structured log that tlparse reads; TORCH_TRACE=DIR" in result.stdout
    assert "hlo-opt" not in result.stdout and not (out / "xprof").exists()
    (graph,) = of(out)
    assert graph[1].kernels


def test_the_profile_holds_the_protos() -> None:
    """protobuf reads the profile as unknown fields of an empty message."""
    pytest.importorskip("google.protobuf")
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    def fields(data: bytes) -> list[tuple[int, int | bytes]]:
        return [(each.field_number, each.data) for each in UnknownFieldSet(Empty.FromString(data))]

    protos = {"jit_f": b"\x0a" * 300, "jit_µ": b""}
    ((number, plane),) = fields(xplane.space(protos))
    assert number == 1 and isinstance(plane, bytes)
    parts = fields(plane)
    assert (2, b"/host:metadata") in parts
    found = {}
    for number, value in parts:
        if number == 4:
            assert isinstance(value, bytes)
            event = dict(fields(dict(fields(value))[2]))  # type: ignore[arg-type]
            found[event[2]] = dict(fields(event[5]))[6]  # type: ignore[arg-type]
    assert found == {b"jit_f(1)": protos["jit_f"], "jit_µ(2)".encode(): b""}


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "..\\evil", "C:/evil", "forward/../../x", "a\\..\\..\\b"]
)
def test_names_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = run(tmp_path / "run", {"forward/good.txt": b"x", name: b"evil"})
    result = export(folder, "--module", f"{CASE.id}/xla", "-o", tmp_path / "deep" / "out")
    assert result.exit_code == 2 and "names a file outside itself" in result.stderr, result.output
    assert not (tmp_path / "deep").exists() and not list(tmp_path.rglob("*evil*"))


def test_a_record_cannot_name_an_archive_elsewhere(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("secret.txt", b"x")
    folder = run(tmp_path / "run", None, dumps="../other.zip")
    result = export(folder, "--module", f"{CASE.id}/xla", "-o", tmp_path / "out")
    assert result.exit_code == 2 and "is not in the run's folder" in result.stderr
    assert not (tmp_path / "out").exists()


def test_bad_archives_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out, id = run(tmp_path / "run", {"a": b"x" * 1000, "b": b"y"}), tmp_path / "out", f"{CASE.id}/xla"
    path = folder / "dumps" / "it.zip"
    whole = path.read_bytes()
    for broken in (b"", b"PK\x03\x04", whole[:200], whole.replace(b"xxxx", b"zzzz", 1)):
        path.write_bytes(broken)
        result = export(folder, "--module", id, "-o", out)
        assert result.exit_code == 2 and "damaged" in result.stderr, (broken[:20], result.output)
    path.write_bytes(whole)
    monkeypatch.setattr(export_dumps, "MAX_BYTES", 500)
    assert "unpacked; nothing was written" in export(folder, "--module", id, "-o", out).stderr
    monkeypatch.undo()
    monkeypatch.setattr(export_dumps, "MOST_FILES", 1)
    assert "2 files, more than 1" in export(folder, "--module", id, "-o", out).stderr
    monkeypatch.undo()
    path.unlink()
    assert "it.zip: missing" in export(folder, "--module", id, "-o", out).stderr
    assert not out.exists()


def test_errors(tmp_path: Path) -> None:
    folder, id = run(tmp_path / "run", {"a": b"x"}), f"{CASE.id}/xla"
    assert "did you mean" in export(folder, "--module", f"{CASE.id}/xlaa", "-o", tmp_path / "out").stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in ("full", "file"):
        result = export(folder, "--module", id, "-o", tmp_path / place)
        assert result.exit_code == 2 and "not an empty folder" in result.stderr
    assert (tmp_path / "full" / "a").read_text() == "mine"
    assert "cannot be written" in export(folder, "--module", id, "-o", tmp_path / "file" / "x").stderr
    assert "no graph found" in export(tmp_path / "full", "--module", id, "-o", "x").stderr
    bare = run(tmp_path / "bare", None, dumps=None)
    result = export(bare, "--module", id, "-o", tmp_path / "out")
    assert result.exit_code == 2 and "no compiler artifacts were kept" in result.stderr
    assert export(folder, "--module", id, "-o", tmp_path / "out").exit_code == 0
    next((folder / "dumps").iterdir()).unlink()
    gone = export(folder, "--module", id, "-o", tmp_path / "none")
    assert gone.exit_code == 2 and "this run was kept without compiler artifacts" in gone.stderr
