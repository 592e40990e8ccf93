"""A target pack is recorded from a run, and a compile without the GPU shows the times of the same kernels."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_records import made_record, with_fields
from pretended_gpus import GPUS

from tools import record_target
from xlafuse.compare import targets
from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.summary import fingerprint
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp
from xlafuse.compare.record import run_folder
from xlafuse.compare.report import target_list
from xlafuse.compare.run import for_target
from xlafuse.compare.sources.target_ceilings import target_ceilings
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.targets import recorded_times

CASE = BLOCKS["gelu"].cases("tour")[0]
KERNEL = Kernel(
    "gelu", "elementwise", source_ops=(SourceOp("mul"),), inputs=(Access("x", 8),), outputs=(Access("y", 8),)
)
BUFFERS = (Buffer("x", (4,), "bf16", 8, "input"), Buffer("y", (4,), "bf16", 8, "output"))
STREAMS = dict.fromkeys(("1:0", "0:1", "1:1", "2:1", "3:1"), 2e11)
GRAPH = FusionGraph("triton", "triton", kernels=(KERNEL,), buffers=BUFFERS)


def made_run(
    folder: Path, created: str = "2030-01-02T03:04:05+00:00", properties: dict[str, Any] | None = None
) -> Path:
    workers = {"xla": {"jax": "0.11.2"}, "torch": {"torch": "2.11.0", "triton": "3.6.0", "device": "NVIDIA X1"}}
    segment = {"id": "s1", "environment": {"workers": workers}, "ceilings": None}
    run_folder.create(folder, {"created": created, "segments": [segment]})
    # Without the first call, the median is 65 us.
    times = {"forward": {"device_time": [[5e-5, 6e-5, 7e-5]], "busy_time": None, "launches": 1}}
    record = made_record(CASE, "triton", "triton", "ok", segment="s1", graph="graphs/gelu.json.gz")
    record.measurement = {"timer": "cupti", "phases": times}  # type: ignore[typeddict-item]
    (folder / "graphs").mkdir()
    store.save(GRAPH, folder / record.graph)  # type: ignore[operator]
    run_folder.append(folder, record)
    run_folder.append(folder, with_fields(record, implementation="xla", status="wrong", detail="y is wrong"))
    (folder / "target" / "xla").mkdir(parents=True)
    (folder / "target" / "ceilings.json").write_text(json.dumps({"streams": STREAMS, "products": {}}))
    (folder / "target" / "cuda_device_properties.json").write_text(json.dumps(properties or {"name": "NVIDIA X1"}))
    (folder / "target" / "xla" / "autotune-0.11.2.textproto").write_text("entries {\n}\n")
    (folder / "target" / "xla" / "autotune-0.11.2.4711.textproto").write_text("of a process that was killed")
    return folder


def test_a_pack_holds_the_runs_choices_and_times(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    record_target.record(made_run(tmp_path / "run"), pack)
    assert recorded_times.read(pack) == {
        f"{CASE.id}/triton": recorded_times.RecordedTime(65.0, 1, fingerprint(GRAPH) or "")
    }
    results = targets.autotune_results(pack / "xla", "0.11.2")
    assert results is not None and results.read_text() == "entries {\n}\n"
    assert results.name == "autotune-0.11.2.textproto"  # XLA reads text only from such names
    assert [path.name for path in (pack / "xla").iterdir()] == ["autotune-0.11.2.textproto.gz"]
    provenance = json.loads((pack / "provenance.json").read_text())
    assert provenance["recorded times"]["device"] == "NVIDIA X1" and provenance["recorded times"]["run"] == "run"


def test_a_run_on_a_gpu_of_a_data_sheet_makes_it_a_measured_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = targets.load("l4")
    shutil.copytree(targets.FOLDER, tmp_path / "targets", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(targets, "FOLDER", tmp_path / "targets")
    run = made_run(tmp_path / "run", properties=before.device_properties())
    assert record_target.main([str(run), "l4"]) == 0
    pack = targets.load("l4")
    assert targets.is_measured("l4") and pack.ceilings()["streams"] == STREAMS
    assert pack.device_properties() == before.device_properties() and pack.peak("bfloat16") == before.peak("bfloat16")
    assert "facts.json" not in json.loads((pack.folder / "provenance.json").read_text())
    assert target_ceilings("a100-80gb").products["float16"] > 0  # of the GPUs that have the rate
    assert {row["target"]: row["rates"] for row in target_list.rows()}["l4"] == "measured"


def test_a_run_on_a_gpu_that_no_target_is_makes_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(targets.FOLDER, tmp_path / "targets", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(targets, "FOLDER", tmp_path / "targets")
    gpu, ceilings_of_l4 = GPUS["sm_121"], target_ceilings("l4").products
    assert record_target.main([str(made_run(tmp_path / "run", properties=gpu.properties)), "pretended-121"]) == 0
    assert targets.of_device(gpu.name) == "pretended-121" and targets.is_measured("pretended-121")
    assert target_ceilings("pretended-121").bandwidth(1, 1) == 2e11
    assert target_ceilings("l4").products == ceilings_of_l4  # no share of a data sheet is known of the new one
    assert "pretended-121" in {row["target"] for row in target_list.rows()}


@pytest.mark.parametrize(
    ("name", "left_out", "problem"),
    [
        ("no/name", "", "is no name"), ("new", "ceilings.json", "no target/ceilings.json"),
        ("new", "cuda_device_properties.json", "no target/cuda_device_properties.json"),
        ("h200", "", "ran on a NVIDIA X1, and target h200 is a NVIDIA H200"),
    ],
)
def test_what_makes_no_target_is_refused_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, left_out: str, problem: str
) -> None:
    run, before = made_run(tmp_path / "run"), targets.names()
    if left_out:
        (run / "target" / left_out).unlink()
    assert record_target.main([str(run), name]) == 2
    assert problem in capsys.readouterr().err and targets.names() == before
    assert not (targets.FOLDER / name).exists() or name == "h200"


def test_times_of_records_that_the_run_lacks_are_kept(tmp_path: Path) -> None:
    pack, older = tmp_path / "pack", recorded_times.RecordedTime(9.0, 1, "older")
    run = made_run(tmp_path / "run")
    record_target.record(run, pack)
    recorded_times.write(pack, {"another": older, f"{CASE.id}/triton": older})
    record_target.record(run, pack)
    times = recorded_times.read(pack)
    assert times["another"] == older and times[f"{CASE.id}/triton"].device_time_us == 65.0
    provenance = json.loads((pack / "provenance.json").read_text())
    assert provenance["recorded times"]["entries"] == 1 and "recorded times, kept" not in provenance  # not known whose

    made_run(tmp_path / "later", created="2030-02-03T04:05:06+00:00")
    for _ in range(2):  # recording a run again changes nothing
        record_target.record(tmp_path / "later", pack)
        provenance = json.loads((pack / "provenance.json").read_text())
        assert provenance["recorded times"]["run"] == "later"
        assert (provenance["recorded times, kept"]["run"], provenance["recorded times, kept"]["entries"]) == ("run", 1)


def test_only_the_same_kernels_have_a_recorded_time(tmp_path: Path) -> None:
    record_target.record(made_run(tmp_path / "run"), tmp_path)
    known = recorded_times.read(tmp_path)[f"{CASE.id}/triton"]
    assert for_target._recorded(known, GRAPH).device_time_us == 65.0
    other = replace(GRAPH, kernels=(replace(KERNEL, launches=2),))
    assert for_target._recorded(known, other).unavailable
    assert for_target._recorded(None, GRAPH).unavailable


def test_a_pack_without_times_has_none(tmp_path: Path) -> None:
    assert recorded_times.read(tmp_path) == {}


def test_the_h200_has_times_of_the_tour() -> None:
    times = recorded_times.read(targets.FOLDER / "h200")
    rows = [f"{case.id}/{name}" for case in BLOCKS["gelu"].cases("tour") for name in ("xla", "inductor", "triton")]
    assert set(rows) <= times.keys()
    packed = (targets.FOLDER / "h200" / "xla" / "autotune-0.11.2.textproto.gz").read_bytes()
    assert gzip.decompress(packed).count(b"entries {") > 1000
