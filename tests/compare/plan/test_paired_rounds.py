"""Comparisons from records by every timer: modes, wall time, restarts, contradicting timers, two runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from commands import xlafuse
from made_records import made_record, measurement_of

from xlafuse.compare.plan import paired_rounds
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.record.record_fields import GraphInputs, PeakMemory
from xlafuse.compare.report import matrix, table
from xlafuse.compare.report.columns import as_data
from xlafuse.compare.sources.row import Row
from xlafuse.compare.sources.run_source import open_run, results_of
from xlafuse.compare.spec.blocks import BLOCKS

CASE = next(c for c in BLOCKS["softmax"].cases("quick") if c.direction == "train")
JITTER = (1.0, 1.001, 0.999, 1.0005, 0.9995, 1.0)


def timed(microseconds: float, rounds: int = 5) -> dict[str, Any]:
    """Return both parts with half of the time each."""
    samples = [[microseconds / 2e6 * jitter] * 5 for jitter in JITTER[:rounds]]
    part = {"device_time": samples, "busy_time": [[s * 0.9 for s in r] for r in samples], "launches": 2}
    return {"forward": part | {"records": []}, "backward": part | {"records": []}}


def measured(
    implementation: str, cold: float, wall: float | None = None, rounds: int = 5,
    processes: list[int] | None = None, modes: dict[str, Any] | None = None, **fields: Any,
) -> Record:
    wall = cold if wall is None else wall
    return made_record(
        CASE, implementation, "xla" if implementation == "xla" else "triton", "ok", segment="s1",
        measurement={
            "timer": "cupti", "phases": timed(cold, rounds), "wall_time": [wall * 1e-6 * j for j in JITTER[:rounds]],
            "processes": processes or [0] * rounds, "modes": modes or {}, **fields,
        },
    )


def mode(microseconds: float, rounds: int = 5) -> dict[str, Any]:
    return {"phases": timed(microseconds, rounds), "settled": [True] * rounds, "command_buffers": None}


def rows_of(*records: Record) -> list[Row]:
    return [result.row for result in results_of(records, {}, {})]


def judged(*records: Record) -> list[dict[str, Any]]:
    """Return the values of each record by column."""
    return as_data(rows_of(*records))


def test_opposite_winners_by_two_timers_are_no_verdict() -> None:
    records = measured("xla", 100, wall=100), measured("triton", 68, wall=112)
    _, row = judged(*records)
    assert row["verdict_vs_xla_word"] == "depends on the timer"
    assert row["verdict_vs_xla"] == "depends on the timer: 1.47x faster by cold device time, 1.12x slower by wall time"
    assert row["time_vs_xla"] == pytest.approx(0.68) and row["verdict_vs_xla_high"] == pytest.approx(0.68, rel=0.01)
    assert (row["wall_vs_xla"], row["wall_vs_xla_word"]) == (pytest.approx(1.12), "slower")
    assert "depends on the timer" in table.render(rows_of(*records))


@pytest.mark.parametrize("wall", [100.0, 100.5, 67.0])
def test_a_tie_or_the_same_winner_contradicts_nothing(wall: float) -> None:
    _, row = judged(measured("xla", 100, wall=100), measured("triton", 68, wall=wall))
    assert row["verdict_vs_xla_word"] == "faster"


def test_a_timer_that_resolves_nothing_contradicts_nothing() -> None:
    noisy = measured("triton", 68, wall=112)
    measurement_of(noisy).wall_time = [50e-6, 200e-6, 90e-6, 300e-6, 60e-6]
    assert judged(measured("xla", 100), noisy)[1]["verdict_vs_xla_word"] == "faster"


def test_each_mode_is_compared_with_the_same_mode() -> None:
    xla = measured("xla", 100, modes={"warm": mode(50), "graph": {"same_as": "cold"}, "no-graph": mode(130)})
    triton = measured("triton", 90, modes={"warm": mode(60), "graph": mode(80), "no-graph": {"same_as": "cold"}})
    eager = measured("eager", 200, modes={"graph": {"unavailable": "no CUDA graph could be captured"}})
    one, two, three = judged(xla, triton, eager)
    assert (one["graph_time_us"], one["no_graph_time_us"]) == (pytest.approx(100), pytest.approx(130))
    assert two["warm_vs_xla"] == pytest.approx(1.2) and two["warm_vs_xla_word"] == "slower"
    assert two["graph_vs_xla"] == pytest.approx(0.8)
    assert two["no_graph_vs_xla"] == pytest.approx(90 / 130, rel=0.01)
    assert two["verdict_vs_xla"] == "depends on the timer: 1.44x faster by device time without graphs, " \
        "1.20x slower by warm device time"
    assert three["warm_vs_xla"] is three["graph_vs_xla"] is three["graph_time_us"] is None
    assert three["modes_unavailable"] == "graph: no CUDA graph could be captured"
    text = table.render(rows_of(xla, triton, eager))
    assert "eager: graph: no CUDA graph could be captured" in text
    for column in ("warm", "graph", "no graph"):
        assert column in text.splitlines()[3]


def test_a_replay_of_graphs_says_how_it_gets_its_inputs() -> None:
    replayed = measured("inductor-cudagraphs", 90, command_buffers={"forward": [3, 4], "backward": [5, 6]})
    replayed.cuda_graph = GraphInputs(("weight",), ("x", "d_y"))
    records = measured("xla", 100), Record.from_json(replayed.to_json())
    one, two = judged(*records)
    assert one["graph_inputs"] is None and two["graph_inputs"] == "static weight; copied x, d_y"
    assert two["command_buffer_launches"] == 8 and two["verdict_vs_xla_word"] == "faster"
    text = table.render(rows_of(*records))
    assert "inductor-cudagraphs: inputs of its CUDA graphs: static weight; copied x, d_y" in text


def test_rounds_of_several_processes_are_resampled_by_process() -> None:
    """A lead in two of three processes is unresolved; the same six rounds in one process are faster."""
    three = [0, 0, 1, 1, 2, 2]

    def with_times(implementation: str, processes: list[int]) -> Record:
        made = measured(implementation, 100, rounds=6, processes=processes)
        scale = [1.0] * 6 if implementation == "xla" else [0.9, 0.9, 0.9, 0.9, 1.0, 1.0]
        for times in made.times.values():
            times.device_time = [[s * k for s in r] for r, k in zip(times.device_time, scale, strict=True)]
        return made

    together = judged(with_times("xla", [0] * 6), with_times("triton", [0] * 6))[1]
    apart = judged(with_times("xla", three), with_times("triton", three))[1]
    assert (together["verdict_vs_xla_word"], apart["verdict_vs_xla_word"]) == ("faster", "unresolved")
    assert (together["processes"], apart["processes"]) == (1, 3)
    assert judged(with_times("xla", three), with_times("triton", [0] * 6))[1]["verdict_vs_xla"] is None


def test_rows_count_throttled_and_unsettled_rounds() -> None:
    calm, hot = {"sm_mhz": 1980, "throttled": []}, {"sm_mhz": 900, "throttled": ["power cap"]}
    made = measured(
        "triton", 100, conditions=[calm, hot, None, hot, calm],
        command_buffers={"forward": [3, 4], "backward": [0, 1]},
        warm_up={"seconds": [0.01] * 5, "settled": [True, False, True, True, True]},
    )
    (row,) = judged(made)
    assert (row["throttled_rounds"], row["unsettled_rounds"], row["command_buffer_launches"]) == (2, 1, 3)
    assert row["launch_gap"] == pytest.approx(0.1)
    line = next(line for line in table.render(rows_of(made)).splitlines() if line.startswith("triton"))
    assert "100 !^" in line and "10%" in line


def test_marks_follow_times_and_the_legend_explains_them() -> None:
    hot = [{"sm_mhz": 900, "throttled": ["power cap"]}] * 5
    restless = {"seconds": [0.01] * 5, "settled": [True] * 4 + [False]}
    calm = measured("xla", 100)
    for made, mark in (
        (measured("triton", 80, conditions=hot), "!"), (measured("triton", 80, warm_up=restless), "^"),
        (measured("triton", 80, conditions=hot, warm_up=restless), "!^"),
    ):
        found = rows_of(calm, made)
        full, brief = table.render(found), matrix.render(found)
        assert f" 80.0 {mark} " in full and f" 80.0 *{mark}" in brief
        for text in (full, brief):
            assert ("\n!: " in text, "\n^: " in text) == ("!" in mark, "^" in mark)
        assert f" 80.0 \\*{mark} |" in matrix.render(found, markdown=True)
    assert "\n!: " not in matrix.render(rows_of(calm))


def test_the_legend_explains_blank_memory() -> None:
    known, blank = measured("xla", 100), measured("triton", 80)
    assert "memory is blank" not in table.render(rows_of(known, blank))
    measurement_of(blank).peak_memory = {"forward": PeakMemory(None, 1, "no room")}
    assert table.NO_MEMORY in table.render(rows_of(known, blank))


def test_a_record_without_processes_and_modes_is_compared_by_the_fields_it_has() -> None:
    xla, triton = measured("xla", 100), measured("triton", 50)
    for made in (xla, triton):
        measurement_of(made).processes, measurement_of(made).modes = [], {}
    row = judged(xla, triton)[1]
    assert row["verdict_vs_xla_word"] == "faster"
    for name in ("processes", "throttled_rounds", "unsettled_rounds", "command_buffer_launches", "warm_time_us"):
        assert row[name] is None


def run_of(folder: Path, triton: float, wall: float) -> Path:
    run_folder.create(folder, {"segments": [{"id": "s1", "ceilings": None}]})
    run_folder.append(folder, measured("xla", 100))
    run_folder.append(folder, measured("triton", triton, wall=wall))
    return folder


def test_opposite_winners_of_two_runs_are_found(tmp_path: Path) -> None:
    runs = {
        name: run_of(tmp_path / name, *times)
        for name, times in {"fast": (80, 80), "slow": (120, 80), "tied": (100, 100), "flips": (80, 120)}.items()
    }
    speedups = {
        name: {result.id: result.row.speedups for result in open_run(folder).results} for name, folder in runs.items()
    }
    found = {
        (one, other): paired_rounds.opposite_winners(speedups[one], speedups[other])
        for one, other in itertools.product(runs, runs)
    }
    assert found["fast", "fast"] == found["fast", "tied"] == found["tied", "slow"] == []
    assert found["slow", "tied"] == found["flips", "flips"] == []
    what = f"{CASE.id}/triton"
    assert found["fast", "slow"] == [f"{what}: faster in the one, slower in the other, by cold device time"]
    assert found["fast", "flips"] == [f"{what}: faster in the one, slower in the other, by wall time"]
    assert len(found["slow", "flips"]) == 2  # neither names a winner, yet they differ by both timers


def test_selftest_of_two_runs(tmp_path: Path) -> None:
    fast, flips = run_of(tmp_path / "fast", 80, 80), run_of(tmp_path / "flips", 80, 120)
    again = run_of(tmp_path / "again", 80, 80)
    agreeing = xlafuse("doctor", "--clock", fast, again)
    assert agreeing.exit_code == 0 and "no opposite winners in 1 rows" in agreeing.output
    contradicting = xlafuse("doctor", "--clock", fast, flips)
    assert contradicting.exit_code == 1 and "1 of 1 rows: opposite winners" in contradicting.output
    same = xlafuse("doctor", "--clock", fast, f"{fast}/../fast")
    assert same.exit_code == 2 and "are the same run; name two" in same.output and same.output.count("\n") == 1
    alone = xlafuse("doctor", "--clock", fast)
    assert alone.exit_code == 2 and "compares two runs, got 1" in alone.output
    run_folder.create(tmp_path / "empty", {"segments": []})
    nothing = xlafuse("doctor", "--clock", fast, tmp_path / "empty")
    assert nothing.exit_code == 2 and str(tmp_path / "empty") in nothing.output
