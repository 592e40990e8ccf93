"""The strongest findings of a run: their sentences, their times, and the choice among them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_records import with_fields
from made_rows import timed_record

from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp
from xlafuse.compare.record import run_folder
from xlafuse.compare.report import strongest_findings
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.source import Source
from xlafuse.compare.spec.case import Case

SIZE = 2 * 4096 * 2048
CEILINGS = {"streams": {"1:0": 4.4e12, "1:1": 4e12, "0:1": 3e12}, "products": {"bfloat16": 8e14}}
CASE = Case("softmax", "tiny", {"rows": 4096, "columns": 2048}, "bfloat16", "fwd")


def buffer(name: str, role: Any) -> Buffer:
    return Buffer(name, (4096, 2048), "bf16", SIZE, role)


def kernel(read: str, written: str, us: float, *stages: str) -> Kernel:
    ops = tuple(SourceOp("exp", stage, f"model.py:{len(stage)}", site=stage) for stage in stages)
    ends = {"inputs": (Access(read, SIZE),), "outputs": (Access(written, SIZE),)}
    return Kernel(f"{written}_kernel", "reduction", runtime_name=written, source_ops=ops, device_time_us=us, **ends)


IN, OUT = buffer("x", "input"), buffer("y", "output")
APART = FusionGraph(
    "apart", "xla", (kernel("x", "s", 30.0, "scores"), kernel("s", "y", 40.0, "softmax")),
    (IN, buffer("s", "intermediate"), OUT),
)
TOGETHER = FusionGraph("one", "triton", (kernel("x", "y", 20.0, "scores", "softmax"),), (IN, OUT))


DOT = SourceOp("dot", "experts", "model.py:7", site="dot")


def chosen(
    folder: Path, times: dict[str, float | None], graphs: dict[str, FusionGraph]
) -> list[strongest_findings.StrongFinding]:
    run_folder.create(folder, {"segments": [{"id": "s1", "environment": {}, "ceilings": CEILINGS}]})
    for name, us in times.items():
        store.save(graphs[name], folder / f"{name}.json")
        each = timed_record(CASE, name, us or 1.0, graph=f"{name}.json")
        if us is None:
            each = with_fields(each, status="compiled", measurement=None, target="h200")
        run_folder.append(folder, each)
    return strongest_findings.strongest(open_source(folder))


def test_an_array_that_another_implementation_keeps_on_chip(tmp_path: Path) -> None:
    first, *_ = chosen(tmp_path, {"xla": 75.0, "triton": 21.0}, {"xla": APART, "triton": TOGETHER})
    times = ("take 70.0 µs.", "XLA takes 75.0 µs, Triton 21.0 µs.")
    for part in ("16.8 MB", "scores (model.py:6)", "Triton keeps it on chip", *times):
        assert part in first.headline
    assert first.at_stake_us == pytest.approx(75.0 - 21.0)  # less than the 70 µs of its kernels
    assert first.case_id == "softmax/tiny/bf16/fwd"


def test_a_comparison_needs_different_times(tmp_path: Path) -> None:
    found = chosen(tmp_path, {"xla": 20.9, "triton": 21.0}, {"xla": APART, "triton": TOGETHER})
    assert not any("on chip" in one.headline or "Triton writes" in one.headline for one in found)


def test_without_times_bytes_give_the_time(tmp_path: Path) -> None:
    found = chosen(tmp_path, {"xla": None, "triton": None}, {"xla": APART, "triton": TOGETHER})
    first = next(one for one in found if one.kind == "kept on chip")
    assert first.headline.endswith("At memory bandwidth, that takes 8.39 µs.")
    assert first.at_stake_us == pytest.approx(2 * SIZE / 4e12 * 1e6)


def test_baselines_are_left_out(tmp_path: Path) -> None:
    found = chosen(tmp_path, {"eager": 75.0, "triton": 21.0}, {"eager": APART, "triton": TOGETHER})
    assert not any("ager" in one.headline for one in found)


def test_a_replay_of_graphs_repeats_no_finding(tmp_path: Path) -> None:
    graphs = {"xla": APART, "triton": APART, "triton-cudagraphs": APART}
    times: dict[str, float | None] = {"xla": 75.0, "triton": 90.0}
    once = chosen(tmp_path / "once", times, graphs)
    assert once and chosen(tmp_path / "again", times | {"triton-cudagraphs": 75.0}, graphs) == once


def test_time_in_which_nothing_runs(tmp_path: Path) -> None:
    """The kernels run for 60 of 90 µs; a replay as a CUDA graph, without gaps, is named beside them."""
    run_folder.create(tmp_path, {"segments": [{"id": "s1", "environment": {}, "ceilings": CEILINGS}]})
    for name, busy in (("xla", 80.0), ("triton", 60.0), ("triton-cudagraphs", 64.0)):
        store.save(APART, tmp_path / f"{name}.json")
        us = 90.0 if name == "triton" else busy
        run_folder.append(tmp_path, timed_record(CASE, name, us, busy=busy, graph=f"{name}.json"))
    (found,) = [f for f in strongest_findings.strongest(open_source(tmp_path)) if f.kind == "launch gaps"]
    assert found.implementation == "triton" and found.at_stake_us == pytest.approx(30.0)
    assert found.headline == "Triton waits for launches in 30.0 µs of 90.0 µs; triton-cudagraphs takes 64.0 µs."


def test_a_committed_run(committed_run: Source) -> None:
    times = {(c.number, m.name): m.time_us for c in committed_run.cases for m in c.results}
    found = strongest_findings.strongest(committed_run)
    assert len(found) == strongest_findings.MOST
    at_stake = [one.at_stake_us or 0.0 for one in found]
    assert at_stake == sorted(at_stake, reverse=True)
    assert len({one.block for one in found}) == len(found)
    longest = max(time for time in times.values() if time is not None)
    assert all(0 < us < longest for us in at_stake)
    assert all(re.search(r"B|FLOP|launches", one.headline) and re.search(r"[µm]s", one.headline) for one in found)


def test_all_findings_hold_the_strongest(committed_run: Source) -> None:
    assert set(strongest_findings.strongest(committed_run)) < set(strongest_findings.every_finding(committed_run))


def test_more_flops_than_necessary(tmp_path: Path) -> None:
    def multiplying(flops: float, us: float) -> FusionGraph:
        dot = kernel("x", "y", us, "experts")
        return FusionGraph("f", "xla", (replace(dot, kind="gemm", source_ops=(DOT,), flops=flops),), (IN, OUT))

    graphs = {"xla": multiplying(8e10, 150.0), "triton": multiplying(1e10, 30.0)}
    (one,) = [s for s in chosen(tmp_path / "a", {"xla": 150.0, "triton": 30.0}, graphs) if s.kind == "more FLOPs"]
    for part in ("80.0 GFLOP", "8.0 times", "10.0 GFLOP", "87.5 µs", "XLA takes 150 µs, Triton 30.0 µs."):
        assert part in one.headline
    assert one.at_stake_us == pytest.approx(87.5)
    tied = chosen(tmp_path / "b", {"xla": 150.0, "triton": 149.9}, graphs)
    assert not [s for s in tied if s.kind == "more FLOPs"]
    (one,) = [s for s in chosen(tmp_path / "c", {"xla": None, "triton": None}, graphs) if s.kind == "more FLOPs"]
    assert one.headline.endswith("the extra FLOPs take 87.5 µs.")


def test_more_flops_in_a_committed_run(committed_run: Source) -> None:
    found: dict[str, dict[str, str]] = {}
    for case in committed_run.cases:
        for one in strongest_findings.of_case(case):
            if one.kind == "more FLOPs":
                found.setdefault(case.case.id, {})[one.implementation] = one.headline
    # Recomputed scores of flash attention, of chunked losses and of checkpoints are no findings.
    assert {id.partition("/")[0] for id in found} == {"moe", "attention", "attention_packed"}
    assert not any(name in ("triton", "xla+triton", "fa4") for case in found.values() for name in case)
    dense = found["moe/mixtral-small/bf16/train"]
    assert "8.0 times" in dense["xla"] and "1.08 TFLOP" in dense["xla"]
    assert "4.0 times" in dense["xla-dense"] and "2.89 TFLOP" in dense["xla-remat"]
    assert "275 GFLOP" in found["attention/llama-8b/bf16/fwd"]["xla"]  # all scores instead of half of them


def test_teaching_kernels_come_last(tmp_path: Path) -> None:
    slow = replace(APART, kernels=tuple(replace(k, device_time_us=1000.0) for k in APART.kernels or ()))
    times = {"cuda": 2100.0, "xla": 75.0, "triton": 21.0}
    found = chosen(tmp_path, times, {"cuda": slow, "xla": APART, "triton": TOGETHER})
    names = [one.implementation for one in found]
    assert names[0] != "cuda" and "cuda" in names and names == sorted(names, key=lambda name: name == "cuda")


def test_a_fusion_that_was_made_is_listed_last_without_a_price(tmp_path: Path) -> None:
    ops = (DOT, SourceOp("add", "bias", "model.py:8", site="add"))
    fused = FusionGraph("f", "xla", (Kernel("dot", "gemm", source_ops=ops, inputs=(Access("x", SIZE),),
                                           outputs=(Access("y", SIZE),)),), (IN, OUT))
    for graphs in ({"xla": fused}, {"xla": fused, "triton": APART}):
        found = chosen(tmp_path / str(len(graphs)), dict.fromkeys(graphs, 75.0), graphs)
        assert not any("inside the product" in one.headline for one in found)
        read = open_source(tmp_path / str(len(graphs)))
        last = strongest_findings.every_finding(read)[-1]
        assert "XLA computes bias (add) inside the product of experts" in last.headline and last.at_stake_us is None
