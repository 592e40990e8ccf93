"""Roofline and traffic of a run, as rows and as tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.report import roofline, rows, traffic
from xlafuse.compare.sources.graph_sources import contents
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case

CASE = next(case for case in BLOCKS["vector_add"].cases("quick") if case.name == "64Mi")
MOVED = 3 * 2 * CASE.sizes["elements"]
CEILINGS = {"streams": {"1:1": 4.0e12, "2:1": 4.2e12}, "products": {"bfloat16": 8e14}, "launch": {"device_s": 1e-6}}
SEGMENTS = rows.ceilings_of({"segments": [{"id": "s1", "ceilings": CEILINGS}]})


def xlafuse(*words: object) -> Result:
    return CliRunner().invoke(main.cli, [str(word) for word in words])


def measured(case: Case, implementation: str = "xla", **fields: Any) -> Record:
    """An `ok` record that took 100 µs."""
    samples = [[100e-6] * 5] * 2
    parts = {part: {"device_time": samples, "busy_time": samples, "launches": 1, "records": []} for part in case.phases}
    block = BLOCKS[case.block]
    defaults: dict[str, Any] = {
        "status": "ok", "compiler": "xla", "segment": "s1", "flops": block.phase_flops(case),
        "bytes_compulsory": block.bytes_compulsory(case),
        "measurement": {"timer": "cupti", "parts": parts, "wall_time": [2e-4]},
    }
    return Record(case=case, implementation=implementation, **(defaults | fields))


def counted(read: int, written: int) -> dict[str, Any]:
    counts = {"dram_read": read, "dram_written": written, "l2": read + written + 1}
    part = {**counts, "launches": 1, "kernels": [{"kernel": 0, "launches": 1, **counts}], "unjoined": []}
    return {"cache_control": "all", "parts": {"forward": part}}


def with_roofline(**bound_us: float) -> dict[str, Any]:
    found = {"roofline_time_us": 80.0, "recoverable_us": 15.0, "bound_us": bound_us}
    return {"forward": {"launches": 1, "bytes_declared": MOVED, "provenance": {}, "roofline": found}}


def row_of(record: Record) -> dict[str, Any]:
    return rows.with_comparisons([record], SEGMENTS)[0]


def row(**fields: Any) -> dict[str, Any]:
    return row_of(measured(CASE, "triton", **fields))


def test_vector_add_on_the_roofline() -> None:
    """One addition for three elements of 16 bits is 1/6 FLOP per byte, so memory bounds it."""
    found = row(kernels=with_roofline(memory=100.0))
    assert found["intensity_flop_per_byte"] == pytest.approx(1 / 6)
    assert found["bound"] == "memory"
    assert found["gflop_per_s"] == pytest.approx(CASE.sizes["elements"] / 100e-6 / 1e9)
    assert found["roofline_gflop_per_s"] == pytest.approx(CASE.sizes["elements"] / 80e-6 / 1e9)
    assert found["share_of_roofline"] == pytest.approx(0.8)
    assert (found["roofline_time_us"], found["recoverable_us"]) == (80.0, 15.0)


def test_fp16_has_the_same_intensity() -> None:
    found = measured(replace(CASE, dtype="float16"), kernels=with_roofline(memory=1.0))
    assert row_of(found)["intensity_flop_per_byte"] == pytest.approx(1 / 6)


def test_measured_bytes_are_sums_of_reads_and_writes() -> None:
    found = row(kernels=with_roofline(memory=100.0), traffic={"alone": counted(300, 60), "call": counted(200, 50)})
    assert (found["dram_bytes"], found["dram_bytes_call"], found["l2_bytes"]) == (360, 250, 361)
    assert found["intensity_measured"] == pytest.approx(CASE.sizes["elements"] / 250)
    assert found["traffic_unavailable"] is None


def test_missing_traffic_has_a_reason() -> None:
    found = row(traffic={"alone": counted(1, 1), "call": {"unavailable": "the torch worker died"}})
    assert (found["dram_bytes"], found["dram_bytes_call"]) == (2, None)
    assert found["traffic_unavailable"] == "the torch worker died"
    assert "\n  triton: the torch worker died" in traffic.render([found])
    assert "\n\n- triton: the torch worker died" in traffic.render([found], markdown=True)
    nobody = row()
    assert nobody["dram_bytes"] is nobody["l2_bytes"] is nobody["traffic_unavailable"] is nobody["bound"] is None


def test_the_bound_is_that_of_most_of_the_time() -> None:
    assert row(kernels=with_roofline(memory=40.0, compute=60.0))["bound"] == "compute"
    assert row(kernels=with_roofline(memory=40.0, unknown=60.0))["bound"] is None
    assert row(kernels=with_roofline(memory=0.0))["bound"] is None
    gaps = measured(CASE, "triton", kernels=with_roofline(memory=30.0))
    assert gaps.measurement is not None
    gaps.measurement["parts"]["forward"]["busy_time"] = [[30e-6] * 5] * 2
    assert row_of(gaps)["bound"] == "launch"  # nothing ran in 70 of its 100 us


def test_a_record_without_times_has_no_recoverable_time() -> None:
    found = row(status="compiled", kernels=with_roofline(memory=80.0))
    assert found["roofline_time_us"] == 80.0
    assert found["recoverable_us"] is found["share_of_roofline"] is found["gflop_per_s"] is None


def graph() -> FusionGraph:
    each = 2 * CASE.sizes["elements"]
    inputs = (Access("x", each), Access("y", each))
    kernel = Kernel(
        "add_kernel", "elementwise", runtime_name="add_kernel", inputs=inputs, outputs=(Access("out", each),),
        flops=float(CASE.sizes["elements"]), device_time_us=100.0,
    )
    shape = (CASE.sizes["elements"],)
    buffers = tuple(Buffer(n, shape, "bf16", each, "output" if n == "out" else "input") for n in ("x", "y", "out"))
    return FusionGraph("add", "triton", (kernel,), buffers=buffers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with a record of this version, and one of an older version without its roofline."""
    run_folder.create(tmp_path, {"segments": [{"id": "s1", "ceilings": CEILINGS}]})
    store.save(graph(), tmp_path / "graphs" / "add.json.gz")
    ways = {"alone": counted(268, 134), "call": counted(200, 100)}
    old = {"forward": {"launches": 1, "bytes_declared": MOVED, "provenance": {}}}
    for each in (
        measured(CASE, "triton", kernels=with_roofline(memory=100.0), graph="graphs/add.json.gz", traffic=ways),
        measured(CASE, "cuda", kernels=old, graph="graphs/add.json.gz"),
        measured(CASE, "eager", kernels={}),
    ):
        run_folder.append(tmp_path, each)
    return tmp_path


@pytest.mark.parametrize("words", [("--roofline", "--json"), ("--json",)])
def test_rooflines_come_from_the_graphs(folder: Path, words: tuple[str, ...]) -> None:
    """A record's own roofline is that of the version which made it."""
    found = {r["implementation"]: r for r in json.loads(xlafuse("report", folder, *words).output)}
    least = MOVED / CEILINGS["streams"]["2:1"] * 1e6
    for name in ("cuda", "triton"):
        assert found[name]["roofline_time_us"] == pytest.approx(least)
        assert found[name]["recoverable_us"] == pytest.approx(100 - least)
    assert found["eager"]["roofline_time_us"] is None
    recorded = {r["implementation"]: r["roofline_time_us"] for r in rows.read(folder).rows}
    assert recorded == {"triton": 80.0, "cuda": None, "eager": None}


def test_an_unreadable_graph_leaves_the_recorded_roofline(folder: Path) -> None:
    (folder / "graphs" / "add.json.gz").write_bytes(b"{")
    result = xlafuse("report", folder, "--json")
    assert result.exit_code == 0 and result.stderr.count("the recorded one") == 2
    assert [r["roofline_time_us"] for r in json.loads(result.stdout)] == [80.0, None, None]


def test_tables(folder: Path) -> None:
    text = xlafuse("report", folder, "--roofline").output
    assert "recoverable µs" in text and "0.167" in text and "memory" in text and "96%" in text
    assert "## vector\\_add / 64Mi / bf16 / fwd" in xlafuse("report", folder, "--roofline", "--markdown").output
    text = xlafuse("report", folder, "--traffic").output
    assert "DRAM, alone MB" in text and "declared MB" in text
    text = xlafuse("report", folder, "--authorship").output
    assert "kernel lines" in text and "speedup" in text


def test_kernels_each_have_a_row(folder: Path) -> None:
    found = json.loads(xlafuse("report", folder, "--roofline", "--kernels", "--json").output)
    assert [(each["implementation"], each["kernel"], each["index"]) for each in found] == [
        ("triton", "add_kernel", 0), ("cuda", "add_kernel", 0),
    ]
    first, second = found
    assert first["intensity_flop_per_byte"] == pytest.approx(1 / 6) and first["bound"] == "memory"
    assert (first["dram_bytes"], first["dram_bytes_call"]) == (402, 300)
    assert first["intensity_measured"] == pytest.approx(CASE.sizes["elements"] / 300)
    assert second["dram_bytes"] is None
    assert first["recoverable_us"] == pytest.approx(100 - first["roofline_time_us"])
    assert "1. add_kernel" in xlafuse("report", folder, "--roofline", "--kernels").output
    nothing = xlafuse("report", folder, "--roofline", "--kernels", "--block", "gelu")
    assert nothing.exit_code == 2 and "no block 'gelu'" in nothing.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--roofline", "--traffic"], "--roofline and --traffic are different views; choose one"),
        (["--kernels"], "--kernels needs --roofline"),
        (["--matrix", "--json"], "--json without it has all of them"),
        (["--matrix", "--all"], "--all goes with"),
        (["--json", "--all"], "--all goes with"),
    ],
)
def test_contradicting_options_are_refused(folder: Path, words: list[str], message: str) -> None:
    result = xlafuse("report", folder, *words)
    assert result.exit_code == 2 and message in result.output


def test_a_run_without_traffic_says_how_to_measure_it(tmp_path: Path) -> None:
    run_folder.create(tmp_path, {"segments": []})
    run_folder.append(tmp_path, measured(CASE))
    result = xlafuse("report", tmp_path, "--traffic")
    assert result.exit_code == 2 and "--resume --traffic" in result.output


def test_vector_add_of_the_committed_run_is_near_its_roofline() -> None:
    """On an H200 it has 1/6 FLOP per byte, is memory-bound, and runs within 10% of a 2:1 stream's rate."""
    folder = PROJECT / "reports" / "h200"
    read = rows.read(folder)
    wanted = rows.only(read.rows, block=["vector_add"], case=["64Mi"])
    adds = [row for row in rows.with_rooflines(wanted, contents(folder))[0] if row["status"] == "ok"]
    assert len(adds) >= 5
    ceilings = next(iter(rows.ceilings_of(run_folder.read_run(folder)).values()))
    for each in adds:
        assert each["intensity_flop_per_byte"] == pytest.approx(1 / 6), each["implementation"]
        assert each["bound"] == "memory", each["implementation"]
        assert each["roofline_gflop_per_s"] == pytest.approx(ceilings.bandwidth(2, 1) / 6 / 1e9)
        assert 0.9 < each["share_of_roofline"] < 1.1, each["implementation"]


def test_five_thousand_rows_are_quick(tmp_path: Path) -> None:
    """Records hold their roofline times, so a plain report reads no graph."""
    run_folder.create(tmp_path, {"segments": [{"id": "s1", "ceilings": CEILINGS}]})
    subject = measured(CASE, "triton", kernels=with_roofline(memory=1.0), graph="graphs/missing.json.gz")
    line = json.dumps(subject.to_json())
    many = [line.replace('"name": "64Mi"', f'"name": "case{n}"') for n in range(5000)]
    (tmp_path / "records.jsonl").write_text("\n".join(many) + "\n")
    found = rows.read(tmp_path)
    assert len(found.rows) == 5000 and not found.warnings and {r["roofline_time_us"] for r in found.rows} == {80.0}


def test_views_without_records() -> None:
    assert roofline.render([]) == traffic.render([]) == "no records"


def test_findings_are_the_same_in_every_form() -> None:
    folder = PROJECT / "tests" / "data" / "runs" / "h200-small"
    wanted = ("report", folder, "--findings", "--block", "rmsnorm", "--block", "softmax")
    found = json.loads(xlafuse(*wanted, "--json").output)
    assert 2 <= len(found) <= 5 and [f["at_stake_us"] for f in found] == sorted(f["at_stake_us"] for f in found)[::-1]
    assert {f["case"].split()[0] for f in found} == {"rmsnorm", "softmax"}
    lines = xlafuse(*wanted).output.splitlines()
    for number, (line, each) in enumerate(zip(lines, found, strict=True), 1):
        assert line.startswith(f"{number}. {each['finding']} ({each['case']}: ")
    assert xlafuse(*wanted, "--csv").output.startswith("at_stake_us,finding,case,kind\n")
    every = json.loads(xlafuse("report", folder, "--findings", "--all", "--json").output)
    assert len(every) > 5 and all(each in every for each in found)
    markdown = xlafuse(*wanted, "--markdown").output
    assert "mean\\_square" in markdown and "mean_square" not in markdown


def test_a_run_without_graphs_has_no_findings(tmp_path: Path) -> None:
    run_folder.create(tmp_path, {"segments": []})
    run_folder.append(tmp_path, measured(CASE))
    result = xlafuse("report", tmp_path, "--findings")
    assert result.exit_code == 0 and "nothing in the graphs" in result.output
