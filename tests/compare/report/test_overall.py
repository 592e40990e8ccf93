"""The overall result: its candidates, the times and bytes that it compares, and its sentence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from compare.base.paths import PROJECT
from compare.report import run_results
from compare.report.overall import Lead, leads, overall


def test_geometric_means_over_the_cases_that_both_ran() -> None:
    costs = [
        {"triton": ("s1", 1.0), "xla": ("s1", 2.0)}, {"triton": ("s1", 1.0), "xla": ("s1", 8.0)},
        {"triton": ("s1", 5.0)},
    ]
    (lead,) = leads(costs)
    assert (lead.winner, lead.other, lead.cases) == ("triton", "xla", 2) and lead.ratio == pytest.approx(4.0)


def test_other_segments_and_clocks_are_not_compared() -> None:
    costs = [{"triton": ("s1", 1.0), "xla": ("s2", 100.0)}, {"triton": ("s1", 2.0), "xla": ("s1", 1.0)}]
    assert [(lead.winner, lead.cases, lead.ratio) for lead in leads(costs)] == [("xla", 1, 2.0)]
    assert leads(costs[:1]) == []


def test_candidates_are_what_a_user_would_choose() -> None:
    fast = {"eager": ("s1", 1.0), "xla-unfused": ("s1", 1.0), "cuda": ("s1", 1.0)}
    costs = [{**fast, "xla": ("s1", 4.0), "inductor": ("s1", 2.0)}, {"xla": ("s1", 4.0), "inductor": ("s1", 2.0)}]
    assert leads(costs) == [Lead("inductor", "xla", pytest.approx(2.0), 2)]


def test_a_rare_implementation_does_not_win() -> None:
    costs = [{"xla": ("s1", 2.0), "inductor": ("s1", 4.0)}] * 3 + [{"fa4": ("s1", 1.0), "xla": ("s1", 9.0)}]
    assert {lead.winner for lead in leads(costs)} == {"xla"}


def test_no_winner_where_each_loses_to_another() -> None:
    ring = [{"a": (1, 1.0), "b": (1, 2.0)}, {"b": (1, 1.0), "c": (1, 2.0)}, {"c": (1, 1.0), "a": (1, 2.0)}]
    assert leads(ring) == []


def test_a_committed_run() -> None:
    """The sentence has the ratios that the rows give."""
    run = run_results.read(PROJECT / "reports" / "h200-quick", {})
    logs = []
    for case in run.cases:
        times = {result.name: result.row["device_time_us"] for result in case.results}
        logs.append(math.log(times["xla"] / times["triton"]))
    ratio = math.exp(sum(logs) / len(logs))
    assert f"{ratio:.2f} times as fast as XLA ({len(logs)} cases)" in overall(run)
    assert overall(run).startswith("Triton is the fastest overall.")


def test_without_times_bytes_and_kernels_are_compared(tmp_path: Path) -> None:
    run = run_results.read(PROJECT / "tests" / "data" / "runs" / "jax-0.11", {})
    assert "no times" in overall(run)


def test_one_graph() -> None:
    text = overall(run_results.read(PROJECT / "tests" / "data" / "xla" / "softmax.hlo.txt", {}))
    assert "XLA makes" in text and "B" in text
