"""The modules in a dump folder or archive."""

import gzip
import os
import time
import zipfile
from pathlib import Path

import pytest

from xlafuse.dumps import dump_folder
from xlafuse.dumps.dump_folder import modules

DATA = Path(__file__).parents[2] / "data" / "xla_reasons"


def write(folder: Path, *names: str, size: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("x" * size)


def test_names_of_every_backend(tmp_path: Path) -> None:
    write(tmp_path, "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt", size=30)
    write(tmp_path, "module_0001.jit_f.before_optimizations.txt", "module_0001.jit_f.1.ptx", size=90)
    write(tmp_path, "module_0002.jit_g.cpu_after_optimizations.txt", size=20)
    write(tmp_path, "module_0003.jit__lambda_.after_optimizations.txt", size=15)
    write(tmp_path, "module_0004.cluster_0__.12.gfx90a:sramecc+_gpu_after_optimizations.txt", size=12)
    write(tmp_path, "module_0005.jit_h.before_optimizations.txt", size=5)
    write(tmp_path, "module_0006.jit_t.cl_1000038190.after_optimizations.txt", size=4)
    write(tmp_path, "module_0006.jit_t.cl_1000038190.0008.Main_fusion.after_pipeline-start.before_tpu_fusion.txt")
    write(tmp_path, "notes.txt")
    found = modules(tmp_path)
    assert [(module.name, module.id, module.cost) for module in found] == [
        ("jit_f", 1, 30), ("jit_g", 2, 20), ("jit__lambda_", 3, 15), ("cluster_0__.12", 4, 12), ("jit_h", 5, 5),
        ("jit_t", 6, 4),  # XLA for TPUs writes the number of its version after the name
    ]
    assert sorted(found[0].artifacts.files) == [
        "1.ptx", "before_optimizations.txt", "sm_9.0a_gpu_after_optimizations.txt",
    ]
    assert found[4].artifacts.find("hlo") is None
    assert [snapshot.before for snapshot in found[5].artifacts.snapshots()] == ["tpu_fusion"]


def test_numbers_repeat_between_processes_and_folders(tmp_path: Path) -> None:
    write(tmp_path, "module_0001.jit_f.cpu_after_optimizations.txt", "module_0001.jit_f.1.ptx")
    write(tmp_path, "module_0001.jit_f.x.cpu_after_optimizations.txt", "module_0001.jit_f.x.2.ptx")
    write(tmp_path / "rank1", "module_0001.jit_f.cpu_after_optimizations.txt")
    found = modules(tmp_path)
    assert {(module.name, Path(module.artifacts.where)) for module in found} == {
        ("jit_f", tmp_path), ("jit_f", tmp_path / "rank1"), ("jit_f.x", tmp_path),
    }
    assert {"2.ptx"} <= next(module for module in found if module.name == "jit_f.x").artifacts.files.keys()


def test_timestamps_before_the_name(tmp_path: Path) -> None:
    write(tmp_path, "1700000000.module_0001.jit_f.cpu_after_optimizations.txt")
    write(tmp_path, "1700000099.module_0001.jit_f.cpu_after_optimizations.txt")
    assert [module.name for module in modules(tmp_path)] == ["jit_f", "jit_f"]


def test_a_visualisation_belongs_to_its_module() -> None:
    (module,) = modules(DATA / "jax-0.10.2" / "mlp")
    assert (module.name, module.id) == ("jit_f", 1)
    assert [file.name for file in module.artifacts.find_all("fusion_frames")] == [
        "main.9.module_0001.jit_f._fusion.html"
    ]
    (module,) = modules(DATA / "jax-0.11.2" / "scan")
    assert len(module.artifacts.find_all("fusion_frames")) == 3  # the entry and two loops' bodies


def test_gzipped_texts_are_found_and_read() -> None:
    (module,) = modules(DATA / "jax-0.11.2" / "mlp")
    file = module.artifacts.find("hlo")
    assert file is not None and file.name.endswith(".gz")
    with file.open() as lines:
        assert next(lines).startswith("HloModule jit_f")
    with file.local() as path:
        assert path.read_text().startswith("HloModule jit_f")
    assert not path.exists()


def test_snapshots_have_the_order_of_the_compile() -> None:
    (module,) = modules(DATA / "jax-0.11.2" / "mlp")
    snapshots = module.artifacts.snapshots()
    assert [s.number for s in snapshots] == sorted(s.number for s in snapshots)
    assert ("sort-iota-fusion", "priority-fusion") in [(s.after, s.before) for s in snapshots]


def test_the_name_of_a_pipeline_is_not_a_pass(tmp_path: Path) -> None:
    rest = "0031.reshape_mover_after_conv.after_pipeline-start.before_reshape-mover"
    write(tmp_path, f"module_0001.jit_f.{rest}.txt", f"module_0001.jit_f.{rest}.hlo.pb")
    write(tmp_path, "module_0001.jit_f.0032.copy-insertion.after_adding_copies.hlo.pb")
    first, second = modules(tmp_path)[0].artifacts.snapshots()
    assert (first.after, first.before) == ("pipeline-start", "reshape-mover")
    assert first.file.name.endswith(".txt") and first.proto is not None
    assert (second.after, second.before) == ("adding_copies", "") and second.file == second.proto


def test_a_records_archive_lists_its_parts(artifacts: Path) -> None:
    found = modules(artifacts / "swiglu_mlp-llama-8b-bf16-train-xla.zip")
    assert [module.name for module in found] == ["backward", "forward"]
    assert all(found[0].artifacts.find(name) for name in ("hlo", "hlo_proto", "hlo_before", "priority_fusion"))
    snapshots = [(s.number, s.after, s.before) for s in found[0].artifacts.snapshots()]
    assert (6, "", "priority-fusion") in snapshots and (6, "priority-fusion", "") in snapshots
    assert next(s for s in found[0].artifacts.snapshots() if s.after == "priority-fusion").proto is not None


def _list_modules(folder: Path, count: int) -> float:
    """Return the processor time, in seconds, that listing this many modules of ten files takes."""
    kinds = ("before_optimizations.txt", "sm_9.0a_gpu_after_optimizations.txt", "0001.fusion.after_a.before_b.txt")
    kinds += tuple(f"{number}.ptx" for number in range(7))
    folder.mkdir()
    for number in range(count):
        for kind in kinds:
            descriptor = os.open(folder / f"module_{number:04d}.jit_f.{kind}", os.O_WRONLY | os.O_CREAT)
            os.ftruncate(descriptor, 250_000)  # a sparse file
            os.close(descriptor)
    started = time.process_time()
    listed = modules(folder)
    duration = time.process_time() - started
    assert len(listed) == count and all(len(module.artifacts.files) == 10 for module in listed)
    return duration


@pytest.mark.full
def test_listing_time_grows_linearly(tmp_path: Path) -> None:
    small = min(_list_modules(tmp_path / f"small-{attempt}", 50) for attempt in range(3))
    assert _list_modules(tmp_path / "large", 1000) < 60 * small


def test_nothing_is_read_while_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "module_0001.jit_f.cpu_after_optimizations.txt")
    monkeypatch.setattr(Path, "open", lambda *_, **__: pytest.fail("a file was opened"))
    assert len(modules(tmp_path)) == 1


def test_unreadable_sources_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file.zip").write_text("no archive")
    with pytest.raises(ValueError, match=r"file\.zip is neither a folder nor a zip archive"):
        modules(tmp_path / "file.zip")
    with pytest.raises(FileNotFoundError):
        modules(tmp_path / "nowhere")
    assert modules(tmp_path) == []


def test_several_modules_need_a_choice(tmp_path: Path) -> None:
    write(tmp_path, "module_0001.jit_f.cpu_after_optimizations.txt", "module_0002.jit_g.cpu_after_optimizations.txt")
    with pytest.raises(ValueError, match=r"2 modules, not one: jit_f .*, jit_g .*Choose by name"):
        dump_folder.single_module(tmp_path)


def test_errors_on_damaged_files_name_them(tmp_path: Path) -> None:
    (tmp_path / "module_0001.jit_f.cpu_after_optimizations.txt.gz").write_bytes(gzip.compress(b"x" * 10_000)[:-20])
    file = modules(tmp_path)[0].artifacts.find("hlo")
    assert file is not None
    with pytest.raises(OSError, match="cpu_after_optimizations"), file.open() as lines:
        list(lines)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("forward/optimized.hlo.txt", "x" * 100_000)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[60:70] = b"\xff" * 10
    (tmp_path / "a.zip").write_bytes(data)
    (module,) = modules(tmp_path / "a.zip")
    file = module.artifacts.find("hlo")
    assert file is not None
    with pytest.raises(OSError, match=r"a\.zip!forward/optimized"), file.local():
        pass
