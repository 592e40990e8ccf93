"""The overall result: its candidates, the times and bytes that it compares, and its sentence."""

from __future__ import annotations

import math

import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import formats
from xlafuse.compare.report.overall import Costs, Lead, leads, overall
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.source import Source

FAST = {"eager": ("s1", 1.0), "xla-unfused": ("s1", 1.0), "cuda": ("s1", 1.0)}
OTHER_SEGMENT = {"triton": ("s1", 1.0), "xla": ("s2", 100.0)}


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (
            [
                {"triton": ("s1", 1.0), "xla": ("s1", 2.0)}, {"triton": ("s1", 1.0), "xla": ("s1", 8.0)},
                {"triton": ("s1", 5.0)},
            ],
            [("triton", "xla", 4.0, 2)],  # a geometric mean over the cases that both ran
        ),
        ([OTHER_SEGMENT, {"triton": ("s1", 2.0), "xla": ("s1", 1.0)}], [("xla", "triton", 2.0, 1)]),
        ([OTHER_SEGMENT], []),
        # A candidate is what a user would choose.
        (
            [{**FAST, "xla": ("s1", 4.0), "inductor": ("s1", 2.0)}, {"xla": ("s1", 4.0), "inductor": ("s1", 2.0)}],
            [("inductor", "xla", 2.0, 2)],
        ),
        (  # a rare implementation does not win
            [{"xla": ("s1", 2.0), "inductor": ("s1", 4.0)}] * 3 + [{"fa4": ("s1", 1.0), "xla": ("s1", 9.0)}],
            [("xla", "inductor", 2.0, 3)],
        ),
        # Each loses to another.
        ([{"a": (1, 1.0), "b": (1, 2.0)}, {"b": (1, 1.0), "c": (1, 2.0)}, {"c": (1, 1.0), "a": (1, 2.0)}], []),
    ],
)
def test_leads(costs: Costs, expected: list[tuple[str, str, float, int]]) -> None:
    found = [Lead(winner, other, pytest.approx(ratio), cases) for winner, other, ratio, cases in expected]
    assert leads(costs) == found


def test_a_committed_run(committed_run: Source) -> None:
    """The sentence has the ratios that the rows give."""
    run = committed_run
    logs = []
    for case in run.cases:
        times = {result.name: result.row.device_time_us for result in case.results}
        if times.get("xla") and times.get("triton-cudagraphs"):
            logs.append(math.log(times["xla"] / times["triton-cudagraphs"]))
    ratio = math.exp(sum(logs) / len(logs))
    assert f"{ratio:.2f} times as fast as XLA ({len(logs)} cases)" in overall(run)
    assert overall(run).startswith("triton-cudagraphs is the fastest overall.")
    ahead = []
    for case in run.cases:
        own = [r for r in case.results if r.name == "triton-cudagraphs" and r.time_us]
        others = [r.time_us for r in case.results if own and r.time_us and r.group == own[0].group and r is not own[0]
                  and r.name not in ("eager", "xla-unfused")]
        ahead += [min(others) / own[0].time_us] if own and own[0].time_us else []
    wins, close = sum(each > 1.01 for each in ahead), sum(1 / 1.01 <= each <= 1.01 for each in ahead)
    expected = f"fastest of all in {wins} of {len(run.cases)} cases, and within 1% of the fastest other in {close} more"
    assert expected in overall(run)


def test_without_times_bytes_and_kernels_are_compared() -> None:
    run = open_source(PROJECT / "tests" / "data" / "runs" / "tour")
    rows = [{result.name: result.row for result in case.results if result.row.bytes_declared} for case in run.cases]
    rows = [found for found in rows if {"triton", "inductor", "xla"} <= found.keys()]
    logs = [math.log(found["xla"].bytes_declared / found["triton"].bytes_declared) for found in rows]
    text = overall(run)
    assert text.startswith("Triton moves the fewest bytes.") and text.endswith("recorded on an H200.")
    assert f"XLA moves {math.exp(sum(logs) / len(logs)):.2f} times as many" in text
    assert f"Triton {sum(found['triton'].kernels for found in rows)}, " in text


def test_one_implementation_without_times() -> None:
    run = open_source(PROJECT / "tests" / "data" / "runs" / "jax-0.11")
    assert overall(run) == "Nothing ran on a GPU, so there are no times."


def test_one_graph() -> None:
    run = open_source(PROJECT / "tests" / "data" / "xla" / "softmax.hlo.txt")
    moved = formats.size(run.results[0].row.bytes_declared)
    assert overall(run) == f"XLA makes 1 kernel, which moves {moved} (1.0 times the fewest possible)."
