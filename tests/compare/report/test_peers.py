"""The best peer of each case, and the project's own kernels against it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from made_rows import rows_of, timed_record

from xlafuse.compare.plan import peers as plan
from xlafuse.compare.record.record import Record
from xlafuse.compare.report import peers
from xlafuse.compare.report.columns import as_data
from xlafuse.compare.report.peers import Standing
from xlafuse.compare.report.views import rows_of as rows_of_run
from xlafuse.compare.sources.source import Source
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case


def case_of(block: str, name: str, dtype: str = "bfloat16") -> Case:
    return next(
        case for suite in ("full", "check") for case in BLOCKS[block].cases(suite)
        if (case.name, case.direction, case.dtype) == (name, "fwd", dtype)
    )


def record(
    case: Case, implementation: str, microseconds: float, *, busy: float | None = None, segment: str = "s1",
    status: str = "ok",
) -> Record:
    return timed_record(
        case, implementation, microseconds, busy=busy, rounds=(0.998, 0.999, 1.0, 1.001, 1.002), status=status,
        segment=segment, compiler=BLOCKS[case.block].implementation(implementation).backend_name,
    )


def values(*records: Record, **more: Any) -> dict[str, dict[str, Any]]:
    """Return the values of each record by column, by implementation."""
    return {row["implementation"]: row for row in as_data(rows_of(*records, **more))}


SOFTMAX = case_of("softmax", "gpt2-scores")


def test_own_rows_have_the_fastest_peer_and_the_interval_of_paired_rounds() -> None:
    found = values(
        record(SOFTMAX, "xla", 120), record(SOFTMAX, "library", 90), record(SOFTMAX, "quack", 60),
        record(SOFTMAX, "triton", 100), record(SOFTMAX, "cuda", 50), record(SOFTMAX, "xla+triton", 10),
    )
    triton = found["triton"]
    assert (triton["best_peer"], triton["ratio_to_best_peer"]) == ("quack", pytest.approx(0.6))
    assert (triton["best_stock_peer"], triton["ratio_to_best_stock_peer"]) == ("library", pytest.approx(0.9))
    assert triton["ratio_to_best_peer_low"] <= 0.6 <= triton["ratio_to_best_peer_high"] < 0.61
    assert triton["ratio_to_best_stock_peer_low"] <= 0.9 <= triton["ratio_to_best_stock_peer_high"] < 0.91
    assert found["cuda"]["ratio_to_best_peer"] == pytest.approx(1.2)
    assert {found[name]["best_peer"] for name in ("xla", "library", "quack", "xla+triton")} == {None}


def test_the_best_peer_by_kernels_may_be_another() -> None:
    triton = values(
        record(SOFTMAX, "xla", 80, busy=80), record(SOFTMAX, "inductor", 100, busy=40),
        record(SOFTMAX, "triton", 100, busy=50),
    )["triton"]
    assert (triton["best_peer"], triton["ratio_to_best_peer"]) == ("xla", pytest.approx(0.8))
    assert (triton["best_peer_by_kernels"], triton["ratio_to_best_peer_by_kernels"]) == ("inductor", pytest.approx(0.8))


def test_peers_are_of_the_same_segment_right_and_timed_by_an_agreeing_clock() -> None:
    found = values(
        record(SOFTMAX, "xla", 10, segment="s2"), record(SOFTMAX, "quack", 20, status="wrong"),
        record(SOFTMAX, "library", 200), record(SOFTMAX, "triton", 100),
    )
    assert (found["triton"]["best_peer"], found["triton"]["ratio_to_best_peer"]) == ("library", pytest.approx(2.0))
    clocks = values(
        record(SOFTMAX, "xla", 10), record(SOFTMAX, "library", 200), record(SOFTMAX, "triton", 100),
        uncalibrated={"s1": "the workers' clocks differ"},
    )
    assert clocks["triton"]["best_peer"] == "library"
    alone = values(record(SOFTMAX, "triton", 100))["triton"]
    assert alone["best_peer"] is alone["ratio_to_best_peer"] is alone["ratio_to_best_stock_peer_by_kernels"] is None


def test_stock_peers_need_no_special_library() -> None:
    by_name = {i.name: i for block in BLOCKS.values() for i in block.implementations}
    stock = {name for name, i in by_name.items() if i.is_stock}
    assert stock >= {"xla", "xla-remat", "xla-cudnn", "inductor", "inductor-max", "library", "sdpa-cudnn", "flex"}
    assert "inductor-remat" in stock  # needs a newer PyTorch
    assert {name for name, i in by_name.items() if i.is_peer} - stock == {"liger", "quack", "fa4", "tokamax"}
    assert {name for name, i in by_name.items() if not i.is_peer} >= {"triton", "cuda", "xla+triton"}


def test_a_record_of_another_release_is_no_peer() -> None:
    assert not plan.is_own("softmax", "gone") and not any(plan.is_a(kind, "softmax", "gone") for kind in plan.PEERS)
    assert not plan.is_own("gone", "triton")


def summed(*records: Record) -> dict[tuple[str, str, str, str], Standing]:
    return {(line.peers, line.time, line.own, line.dtype): line for line in peers.of(rows_of(*records))}


def test_the_summary_is_the_geometric_mean_and_the_worst_of_realistic_cases() -> None:
    gelu, edge = case_of("gelu", "llama-8b"), case_of("gelu", "odd")
    assert all(shape.edge for shape in BLOCKS["gelu"].shapes if shape.name == edge.name)
    found = summed(
        record(SOFTMAX, "xla", 80), record(SOFTMAX, "quack", 40), record(SOFTMAX, "triton", 100, busy=80),
        record(SOFTMAX, "cuda", 160),
        record(gelu, "xla", 180), record(gelu, "triton", 100), record(gelu, "cuda", 90),
        record(edge, "xla", 1), record(edge, "triton", 100),
    )
    stock = found["stock", "device time", peers.FASTEST, "all"]
    assert stock.cases == 2 and stock.slower == 1
    assert stock.geometric_mean == pytest.approx(math.sqrt(0.8 * 2.0))
    assert (stock.worst, stock.worst_case, stock.worst_peer) == (
        pytest.approx(0.8), "softmax/gpt2-scores/bf16/fwd", "xla"
    )
    assert found["all", "device time", peers.FASTEST, "all"].worst_peer == "quack"
    assert found["stock", "kernels alone", "triton", "all"].geometric_mean == pytest.approx(math.sqrt(1.0 * 1.8))
    assert found["stock", "device time", "cuda", "all"].geometric_mean == pytest.approx(math.sqrt(0.5 * 2.0))
    assert found["stock", "device time", peers.FASTEST, "bfloat16"] == replace(stock, dtype="bfloat16")


def test_a_run_without_peers_has_no_summary() -> None:
    assert peers.of(rows_of(record(SOFTMAX, "triton", 100))) == []
    assert "no realistic case" in peers.render([])


def test_the_committed_run_against_its_best_peers(committed_run: Source) -> None:
    """The figures follow from each row's ratio, and the best of all peers is at least as fast as the stock one."""
    every = rows_of_run(committed_run)
    own = [row for row in every if plan.is_own(row.block, row.implementation) and row.best_peer("stock_peer")]
    ratios = {row: (row.ratio_to_best("peer"), row.ratio_to_best("stock_peer")) for row in own}
    assert all(best is not None and stock is not None and best <= stock for best, stock in ratios.values())
    standings = {(line.peers, line.time, line.own, line.dtype): line for line in peers.of(every)}
    logs = [
        math.log(stock or math.nan) for row, (_, stock) in ratios.items()
        if row.implementation == "triton" and peers.is_realistic(row.block, row.case_name)
    ]
    mean = math.exp(sum(logs) / len(logs))
    of_triton = standings["stock", "device time", "triton", "all"]
    assert (of_triton.cases, of_triton.geometric_mean) == (len(logs), pytest.approx(mean))
    assert standings["stock", "device time", peers.FASTEST, "all"].geometric_mean >= mean
