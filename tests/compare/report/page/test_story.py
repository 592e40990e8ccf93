"""The findings in words: what they say, what they are worth, and which of them are chosen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compare.base.paths import PROJECT
from compare.graph import store
from compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp
from compare.record import run_folder
from compare.record.record import Record
from compare.report.page.content import reading, story
from compare.spec.case import Case

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


def member(name: str, us: float) -> Record:
    samples = [[us * 1e-6] * 5] * 5
    part = {"device_time": samples, "busy_time": samples, "launches": 1, "records": []}
    measurement = {"timer": "cupti", "parts": {"forward": part}, "wall_time": [us * 1e-6] * 5}
    return Record(CASE, name, "xla", "ok", segment="s1", graph=f"{name}.json", measurement=measurement)


def told(folder: Path, times: dict[str, float | None], graphs: dict[str, FusionGraph]) -> list[story.Story]:
    run_folder.create(folder, {"segments": [{"id": "s1", "environment": {}, "ceilings": CEILINGS}]})
    for name, us in times.items():
        store.save(graphs[name], folder / f"{name}.json")
        each = member(name, us or 1.0)
        if us is None:
            each = replace(each, status="compiled", measurement=None, target="h200")
        run_folder.append(folder, each)
    run = reading.read(folder, {})
    return story.stories(run, {case.number: story.told(case) for case in run.cases})


def test_what_another_one_keeps_on_chip(tmp_path: Path) -> None:
    first, *_ = told(tmp_path, {"xla": 75.0, "triton": 21.0}, {"xla": APART, "triton": TOGETHER})
    assert first.headline == (
        "XLA materialises 16.8 MB of scores (model.py:6) that Triton keeps on chip: "
        "the kernels that touch it take 70.0 µs of its 75.0 µs; Triton takes 21.0 µs"
    )
    assert first.at_stake_us == pytest.approx(75.0 - 21.0)  # it cannot win more than it loses
    assert first.href == "#/case/softmax/tiny/bf16/fwd"


def test_a_comparison_that_the_times_do_not_bear_out_is_not_made(tmp_path: Path) -> None:
    found = told(tmp_path, {"xla": 20.9, "triton": 21.0}, {"xla": APART, "triton": TOGETHER})
    assert not any("keeps on chip" in one.headline or "Triton writes" in one.headline for one in found)


def test_without_times_bytes_are_priced(tmp_path: Path) -> None:
    found = told(tmp_path, {"xla": None, "triton": None}, {"xla": APART, "triton": TOGETHER})
    first = next(one for one in found if one.sort == "kept on chip")
    assert first.headline.endswith("keeps on chip: 8.39 µs at the speed of memory")
    assert first.at_stake_us == pytest.approx(2 * SIZE / 4e12 * 1e6)


def test_what_shows_the_price_of_no_fusion_is_left_out(tmp_path: Path) -> None:
    found = told(tmp_path, {"eager": 75.0, "triton": 21.0}, {"eager": APART, "triton": TOGETHER})
    assert not any("ager" in one.headline for one in found)


@pytest.mark.parametrize("name", ["h200-quick", "h200-blocks"])
def test_of_committed_runs(name: str) -> None:
    run = reading.read(PROJECT / "reports" / name, {})
    times = {(c.number, m.name): m.time_us for c in run.cases for m in c.members}
    found = story.stories(run, {case.number: story.told(case) for case in run.cases})
    assert len(found) == story.MOST
    assert [one.at_stake_us for one in found] == sorted((one.at_stake_us for one in found), reverse=True)
    assert len({one.block for one in found}) == len(found)
    longest = max(time for time in times.values() if time is not None)
    assert all(0 < one.at_stake_us < longest for one in found)
    assert all(re.search(r"B|FLOP", one.headline) and re.search(r"[µm]s", one.headline) for one in found)


def test_what_computes_more_than_it_must(tmp_path: Path) -> None:
    def multiplying(flops: float, us: float) -> FusionGraph:
        dot = kernel("x", "y", us, "experts")
        return FusionGraph("f", "xla", (replace(dot, kind="gemm", source_ops=(DOT,), flops=flops),), (IN, OUT))

    graphs = {"xla": multiplying(8e10, 150.0), "triton": multiplying(1e10, 30.0)}
    (one,) = [s for s in told(tmp_path / "a", {"xla": 150.0, "triton": 30.0}, graphs) if s.sort == "more FLOPs"]
    assert one.headline == (
        "XLA computes 80.0 GFLOP in the products of experts, 8.0 times as many as Triton (10.0 GFLOP): "
        "87.5 µs at the rate of products; XLA takes 150 µs; Triton takes 30.0 µs"
    )
    assert one.at_stake_us == pytest.approx(87.5)
    tied = told(tmp_path / "b", {"xla": 150.0, "triton": 149.9}, graphs)
    assert not [s for s in tied if s.sort == "more FLOPs"]
    (one,) = [s for s in told(tmp_path / "c", {"xla": None, "triton": None}, graphs) if s.sort == "more FLOPs"]
    assert one.headline.endswith("(10.0 GFLOP): 87.5 µs at the rate of products")


def test_who_computes_too_much_in_the_committed_runs() -> None:
    said = {}
    for name in ("h200-quick", "h200-blocks"):
        for case in reading.read(PROJECT / "reports" / name, {}).cases:
            for one in story.of_case(case, story.told(case)):
                if one.sort == "more FLOPs":
                    said.setdefault(case.case.id, {})[one.headline.split()[0]] = one.headline
    # Not flash attention's second computation of the scores, nor that of chunked losses or of checkpoints.
    assert {id.partition("/")[0] for id in said} == {"moe", "attention"}
    assert not any(name in ("Triton", "xla+triton", "fa4") for case in said.values() for name in case)
    dense = said["moe/mixtral-small/bf16/train"]
    assert "8.0 times as many as Triton (1.08 TFLOP)" in dense["XLA"]
    assert "4.0 times" in dense["xla-dense"] and "(2.89 TFLOP of them repeated)" in dense["xla-remat"]
    assert "(275 GFLOP)" in said["attention/llama-8b/bf16/fwd"]["XLA"]  # all scores, not half of them
