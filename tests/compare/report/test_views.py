"""Roofline and traffic of a run, as rows and as tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from made_rows import rows_shown, written, xlafuse
from made_rows import timed_record as measured

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.report import roofline, table, traffic
from xlafuse.compare.report.columns import as_data
from xlafuse.compare.report.views import rows_of
from xlafuse.compare.sources.row import Row
from xlafuse.compare.sources.run_source import ceilings_of, open_run, results_of
from xlafuse.compare.sources.source import Source
from xlafuse.compare.spec.blocks import BLOCKS

CASE = next(case for case in BLOCKS["vector_add"].cases("quick") if case.name == "64Mi")
MOVED = 3 * 2 * CASE.sizes["elements"]
CEILINGS = {"streams": {"1:1": 4.0e12, "2:1": 4.2e12}, "products": {"bfloat16": 8e14}, "launch": {"device_s": 1e-6}}
LEAST = MOVED / CEILINGS["streams"]["2:1"] * 1e6  # microseconds, at the bandwidth of two reads a write
SEGMENTS = ceilings_of({"segments": [{"id": "s1", "ceilings": CEILINGS}]})


def counted(read: int, written: int) -> dict[str, Any]:
    counts = {"dram_read": read, "dram_written": written, "l2": read + written + 1}
    part = {**counts, "launches": 1, "kernels": [{"kernel": 0, "launches": 1, **counts}], "unjoined": []}
    return {"cache_control": "all", "phases": {"forward": part}}


def graph(*kernels: Kernel) -> FusionGraph:
    """Return the graph of these kernels, or of one that takes 100 µs."""
    size = 2 * CASE.sizes["elements"]
    shape = (CASE.sizes["elements"],)
    buffers = tuple(Buffer(n, shape, "bf16", size, "output" if n == "out" else "input") for n in ("x", "y", "out"))
    return FusionGraph("add", "triton", kernels or (kernel(100.0),), buffers=buffers)


def kernel(us: float, **fields: Any) -> Kernel:
    size = 2 * CASE.sizes["elements"]
    adding = Kernel(
        "add_kernel", "elementwise", runtime_name="add_kernel", inputs=(Access("x", size), Access("y", size)),
        outputs=(Access("out", size),), flops=float(CASE.sizes["elements"]), device_time_us=us,
    )
    return replace(adding, **fields)


def row_of(record: Record, graph: FusionGraph | None = None) -> Row:
    """Return the row of a record with a graph, or without one."""
    (result,) = results_of([record], SEGMENTS, {})
    return result.row if graph is None else replace(result, read=lambda: graph).row


def on_roofline(*kernels: Kernel, **fields: Any) -> Row:
    """Return the row of a record of these kernels, or of the addition alone."""
    declared = {"forward": {"launches": 1, "bytes_declared": MOVED, "provenance": {}}}
    return row_of(measured(CASE, "triton", kernels=declared, **fields), graph(*kernels))


def test_vector_add_on_the_roofline() -> None:
    """One addition for three elements of 16 bits is 1/6 FLOP per byte, so memory bounds it."""
    row = on_roofline()
    assert row.intensity_flop_per_byte == pytest.approx(1 / 6)
    assert row.bound == "memory"
    assert row.gflop_per_s == pytest.approx(CASE.sizes["elements"] / 100e-6 / 1e9)
    assert row.roofline_gflop_per_s == pytest.approx(CASE.sizes["elements"] / LEAST / 1e3)
    assert row.share_of_roofline == pytest.approx(LEAST / 100)
    assert (row.roofline_time_us, row.recoverable_us) == (pytest.approx(LEAST), pytest.approx(100 - LEAST))


def test_fp16_has_the_same_intensity() -> None:
    declared = {"forward": {"launches": 1, "bytes_declared": MOVED, "provenance": {}}}
    row = row_of(measured(replace(CASE, dtype="float16"), kernels=declared))
    assert row.intensity_flop_per_byte == pytest.approx(1 / 6)


def test_measured_bytes_are_sums_of_reads_and_writes() -> None:
    row = on_roofline(traffic={"alone": counted(300, 60), "call": counted(200, 50)})
    (values,) = as_data([row])
    assert (values["dram_bytes"], values["dram_bytes_call"], values["l2_bytes"]) == (360, 250, 361)
    assert values["intensity_measured"] == pytest.approx(CASE.sizes["elements"] / 250)
    assert values["traffic_unavailable"] is None


def test_missing_traffic_has_a_reason() -> None:
    row = on_roofline(traffic={"alone": counted(1, 1), "call": {"unavailable": "the torch worker died"}})
    assert (row.dram_bytes, row.dram_bytes_call) == (2, None)
    assert row.traffic_unavailable == "the torch worker died"
    assert "\n  triton: the torch worker died" in traffic.render([row])
    assert "\n\n- triton: the torch worker died" in traffic.render([row], markdown=True)
    unasked = row_of(measured(CASE, "triton"))
    assert unasked.dram_bytes is unasked.traffic("alone", "l2") is unasked.traffic_unavailable is unasked.bound is None


def test_the_bound_is_that_of_most_of_the_time() -> None:
    product = {"kind": "gemm", "flops": 1e12}
    assert on_roofline(kernel(40.0), kernel(60.0, **product)).bound == "compute"
    assert on_roofline(kernel(60.0), kernel(40.0, **product)).bound == "memory"
    assert on_roofline(kernel(40.0), kernel(60.0, inputs=None)).bound is None  # its bytes are unknown
    assert on_roofline(kernel(0.0)).bound is None
    gaps = measured(CASE, "triton")
    assert gaps.measurement is not None
    gaps.times["forward"].busy_time = [[30e-6] * 5] * 2
    assert row_of(gaps, graph(kernel(30.0))).bound == "launch"  # nothing ran in 70 of its 100 us
    gaps.times["forward"].busy_time = None
    assert row_of(gaps, graph(kernel(30.0))).bound is None  # gaps may bound it


def test_a_record_without_times_has_no_recoverable_time() -> None:
    row = on_roofline(status="compiled")
    assert row.roofline_time_us == pytest.approx(LEAST)
    assert row.recoverable_us is row.share_of_roofline is row.gflop_per_s is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with two records that have a graph, one of them with ncu's counts, and one without."""
    run_folder.create(tmp_path, {"segments": [{"id": "s1", "ceilings": CEILINGS}]})
    store.save(graph(), tmp_path / "graphs" / "add.json.gz")
    ways = {"alone": counted(268, 134), "call": counted(200, 100)}
    kernels = {"forward": {"launches": 1, "bytes_declared": MOVED, "provenance": {}}}
    for each in (
        measured(CASE, "triton", kernels=kernels, graph="graphs/add.json.gz", traffic=ways),
        measured(CASE, "cuda", kernels=kernels, graph="graphs/add.json.gz"),
        measured(CASE, "eager", kernels={}),
    ):
        run_folder.append(tmp_path, each)
    return tmp_path


def view(folder: Path, name: str, *words: object) -> Result:
    return xlafuse("inspect", folder, "--view", name, *words)


@pytest.mark.parametrize("name", ["roofline", "times"])
def test_rooflines_come_from_the_graphs(folder: Path, name: str) -> None:
    rows = {row["implementation"]: row for row in rows_shown(folder, name)}
    for implementation in ("cuda", "triton"):
        assert rows[implementation]["roofline_time_us"] == pytest.approx(LEAST)
        assert rows[implementation]["recoverable_us"] == pytest.approx(100 - LEAST)
    assert rows["eager"]["roofline_time_us"] is None


def test_an_unreadable_graph_leaves_no_roofline_and_a_warning(folder: Path) -> None:
    (folder / "graphs" / "add.json.gz").write_bytes(b"{")
    result = view(folder, "times", "--json")
    assert result.stderr.count("warning: ") == result.stderr.count("add.json.gz") == 2
    assert [row["roofline_time_us"] for row in json.loads(result.stdout)["rows"]] == [None, None, None]


def test_tables(folder: Path) -> None:
    text = view(folder, "roofline").output
    assert "recoverable µs" in text and "0.167" in text and "memory" in text and "96%" in text
    assert "## vector\\_add / 64Mi / bf16 / fwd" in written(folder, folder.parent / "roofline.md", "--view", "roofline")
    text = view(folder, "traffic").output
    assert "DRAM, alone MB" in text and "declared MB" in text
    text = view(folder, "authorship").output
    assert "kernel lines" in text and "speedup" in text


def test_kernels_each_have_a_row(folder: Path) -> None:
    rows = rows_shown(folder, "kernel-roofline")
    assert [(row["implementation"], row["kernel"], row["index"]) for row in rows] == [
        ("triton", "add_kernel", 0), ("cuda", "add_kernel", 0),
    ]
    first, second = rows
    assert first["intensity_flop_per_byte"] == pytest.approx(1 / 6) and first["bound"] == "memory"
    assert (first["dram_bytes"], first["dram_bytes_call"]) == (402, 300)
    assert first["intensity_measured"] == pytest.approx(CASE.sizes["elements"] / 300)
    assert second["dram_bytes"] is None
    assert first["recoverable_us"] == pytest.approx(100 - first["roofline_time_us"])
    assert "1. add_kernel" in view(folder, "kernel-roofline").output
    nothing = view(folder, "kernel-roofline", "--block", "gelu")
    assert nothing.exit_code == 2 and "no block 'gelu'" in nothing.output


def test_only_a_kernel_without_a_time_has_a_predicted_one_with_a_mark(tmp_path: Path) -> None:
    """Where one of a graph's kernels was measured, its time stands alone and unmarked."""
    compiled, timed = kernel(0.0, device_time_us=None), kernel(100.0)
    store.save(replace(graph(compiled, timed), target="h200"), tmp_path / "add.json")
    first, second = rows_shown(tmp_path / "add.json", "kernel-roofline")
    assert first["predicted_low_us"] < first["predicted_time_us"] < first["predicted_high_us"]
    assert first["device_time_us"] is None and first["recoverable_us"] is None
    assert second["device_time_us"] == 100 and second["predicted_time_us"] is None
    text = view(tmp_path / "add.json", "kernel-roofline").output
    assert text.count("~") == 2 and "predicted µs" in text and "~: predicted" in text
    store.save(graph(compiled), tmp_path / "untargeted.json")
    assert "predicted µs" not in view(tmp_path / "untargeted.json", "kernel-roofline").output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--view", "rooflin"], ["rooflin", "did you mean roofline"]),
        (["--view", "traffic", "--why"], ["--why", "--view traffic"]),
        (["--view", "times", "--kernel", "1"], ["--kernel", "--view times"]),
        (["--view", "times", "--price-as", "h200"], ["--price-as", "--view times"]),
    ],
)
def test_contradicting_options_are_refused(folder: Path, words: list[str], named: list[str]) -> None:
    result = xlafuse("inspect", folder, *words)
    assert result.exit_code == 2 and all(name in result.output for name in named), result.output


def test_a_run_without_traffic_says_how_to_measure_it(tmp_path: Path) -> None:
    run_folder.create(tmp_path, {"segments": []})
    run_folder.append(tmp_path, measured(CASE))
    result = view(tmp_path, "traffic")
    assert result.exit_code == 2 and "--resume --traffic" in result.output


def test_vector_add_of_the_committed_run_is_near_its_roofline(committed_run: Source) -> None:
    """On an H200 it has 1/6 FLOP per byte, is memory-bound, and runs within 10% of a 2:1 stream's rate."""
    source = committed_run.select({"block": ["vector_add"], "case": ["64Mi"]})
    adds = [row for row in rows_of(source) if row.status == "ok"]
    assert len(adds) >= 5
    (segment,) = {result.record.segment for result in source.results if result.record and result.record.status == "ok"}
    ceilings = source.ceilings[segment]
    for row in adds:
        assert row.intensity_flop_per_byte == pytest.approx(1 / 6), row.implementation
        assert row.bound == "memory", row.implementation
        assert row.roofline_gflop_per_s == pytest.approx(ceilings.bandwidth(2, 1) / 6 / 1e9)
        assert row.share_of_roofline is not None and 0.9 < row.share_of_roofline < 1.1, row.implementation


def test_five_thousand_rows_are_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of times shows nothing of the graphs, so it reads none."""
    run_folder.create(tmp_path, {"segments": [{"id": "s1", "ceilings": CEILINGS}]})
    line = json.dumps(measured(CASE, "triton", graph="graphs/missing.json.gz").to_json())
    many = [line.replace('"name": "64Mi"', f'"name": "case{n}"') for n in range(5000)]
    (tmp_path / "records.jsonl").write_text("\n".join(many) + "\n")
    source = open_run(tmp_path)
    assert len(source.results) == 5000 and not source.warnings
    monkeypatch.setattr(store, "load", lambda path: pytest.fail(f"{path} was read"))
    text = table.render(rows_of(source))
    assert text.startswith("5000 records: 5000 ok") and "case4999" in text


def test_views_without_records() -> None:
    assert roofline.render([]) == traffic.render([]) == "no records"


def test_findings_are_the_same_in_every_form(tmp_path: Path) -> None:
    folder = PROJECT / "tests" / "data" / "runs" / "h200-small"
    wanted = ("--block", "rmsnorm", "--block", "softmax")
    rows = rows_shown(folder, "findings", *wanted)
    assert 2 <= len(rows) <= 5 and [f["at_stake_us"] for f in rows] == sorted(f["at_stake_us"] for f in rows)[::-1]
    assert {f["case"].split()[0] for f in rows} == {"rmsnorm", "softmax"}
    lines = view(folder, "findings", *wanted).output.splitlines()
    for number, (line, row) in enumerate(zip(lines, rows, strict=True), 1):
        assert line.startswith(f"{number}. {row['finding']} ({row['case']}: ")
    as_csv = written(folder, tmp_path / "findings.csv", "--view", "findings", *wanted)
    assert as_csv.startswith("at_stake_us,finding,case,kind,predicted\n")
    every = rows_shown(folder, "findings", "--all")
    assert len(every) > 5 and all(row in every for row in rows)
    markdown = written(folder, tmp_path / "findings.md", "--view", "findings", *wanted)
    assert "mean\\_square" in markdown and "mean_square" not in markdown


def test_a_run_without_graphs_has_no_findings(tmp_path: Path) -> None:
    run_folder.create(tmp_path, {"segments": []})
    run_folder.append(tmp_path, measured(CASE))
    result = view(tmp_path, "findings")
    assert result.exit_code == 0 and "nothing in the graphs" in result.output
