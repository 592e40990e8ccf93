"""Measured bytes: ncu's counts are shown with a record's kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_records import append_malformed, made_record
from msgspec import convert

from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel
from xlafuse.compare.graph.render.measured_bytes import lines, with_measured_bytes
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record_fields import Traffic
from xlafuse.compare.spec.case import Case

GRAPH = FusionGraph(
    "add", "triton",
    tuple(
        Kernel(name, "elementwise", inputs=(Access("x", 8_000_000),), outputs=(Access("y", 4_000_000),))
        for name in ("one", "two")
    ),
    buffers=(
        Buffer("x", (2_000_000,), "f32", 8_000_000, "input"), Buffer("y", (1_000_000,), "f32", 4_000_000, "output"),
    ),
)
COUNTS = {"dram_read": 8_100_000, "dram_written": 4_000_000, "l2": None}


def traffic(way: str = "alone") -> dict[str, Any]:
    kernels = [{"kernel": 1, "launches": 1, **COUNTS}]
    return {way: {"cache_control": "all", "phases": {"forward": {"launches": 1, **COUNTS, "kernels": kernels}}}}


def read(counts: dict[str, Any]) -> dict[str, Traffic]:
    return convert(counts, dict[str, Traffic])


def test_counts_go_to_the_kernel_that_was_launched() -> None:
    found = with_measured_bytes(GRAPH, read({**traffic(), "call": {"unavailable": "the worker died"}}))
    assert found.kernels and not lines(found.kernels[0])
    assert lines(found.kernels[1]) == ["measured alone: reads 8.10 MB, writes 4.00 MB, ? through L2"]
    assert lines(with_measured_bytes(GRAPH, read(traffic("call"))).kernels[1])[0].startswith("measured in the call: ")  # type: ignore[index]
    assert with_measured_bytes(GRAPH, read({"alone": {"unavailable": "no"}})) is GRAPH


@pytest.mark.parametrize("arguments", [[], ["--kernel", "two"]], ids=["overview", "kernel"])
def test_inspect_shows_them(tmp_path: Path, arguments: list[str]) -> None:
    run_folder.create(tmp_path, {"segments": []})
    case = Case("vector_add", "large", {"elements": 2_000_000}, "float32", "fwd")
    store.save(GRAPH, tmp_path / "graphs" / "g.json.gz")
    run_folder.append(tmp_path, made_record(case, "triton", graph="graphs/g.json.gz", traffic=traffic()))
    result = CliRunner().invoke(main.cli, ["inspect", str(tmp_path), *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.output.count("measured alone: reads 8.10 MB, writes 4.00 MB") == 1


def test_a_record_with_other_traffic_costs_itself(tmp_path: Path) -> None:
    run_folder.create(tmp_path, {"segments": []})
    case = Case("vector_add", "large", {"elements": 2_000_000}, "float32", "fwd")
    store.save(GRAPH, tmp_path / "graphs" / "g.json.gz")
    broken = {"alone": {"phases": {"forward": {}}}}
    append_malformed(tmp_path, made_record(case, "triton", graph="graphs/g.json.gz"), traffic=broken)
    run_folder.append(tmp_path, made_record(case, "cuda", graph="graphs/g.json.gz"))
    result = CliRunner().invoke(main.cli, ["inspect", str(tmp_path), "--json"])
    assert result.exit_code == 0 and "$.traffic" in result.output
    assert json.loads(result.stdout)["records"][0]["graph"]["kernels"]
