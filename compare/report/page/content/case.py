"""A case's page: the values of its template and the specifications of its charts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....base.text import printable
from ....graph import formats
from ....graph.analyse import missed_fusions
from ....graph.findings.finding import REMEDIES
from ....graph.model import REASONS
from ....plan.paired_rounds import Comparison
from ....sources.case_results import BASELINES, CaseResults
from ....sources.result import Result
from ....sources.row import Row, product_rate
from ....sources.source import recorded_on
from ....sources.target_ceilings import own_ceilings
from ....spec.blocks import BLOCKS
from ... import charts, ranks, roofline
from ...columns import BASELINE, checked_on, marks, marks_explained
from . import choices, kernels
from .overview import level_of, mark_of
from .tables import BYTES, RATES, TIMES, TIMES_OF_FORWARD, table, unknown_recoverable, unknown_roofline

MOST_MISSED = 40  # fusions in the table of a case
MOST_FINDINGS = 8


def values(case: CaseResults) -> dict[str, Any]:
    """Return the values for templates/case.html. Numbers are report columns; None if unknown."""
    block = None if case.case is None else BLOCKS.get(case.block)
    missed, unlisted, priced_by, error = _missed(case)
    results = [_result(case, result) for result in case.ranked]
    priced = any(result.ceilings is not None for result in case.results)
    rows = [result.row for result in case.ranked]
    both = any(row.phase_us("backward") is not None for row in rows)
    rated = any(row.intensity_flop_per_byte is not None for row in rows)
    kernel_lines = [line for result in case.results for line in roofline.kernels(result)]
    return {
        "selection": _selection(case), "block": printable(case.block, 100),
        "label": case.label, "summary": block.summary if block else "", "timed": case.timed,
        "sizes": ", ".join(f"{printable(str(k), 40)} {v}" for k, v in (case.case.sizes if case.case else {}).items()),
        "choices": choices.choices(case), "results": results,
        "times": table((row for row in rows if row.device_time_us is not None), TIMES if both else TIMES_OF_FORWARD),
        "bytes": table(rows, BYTES), "rates": table(rows if rated else (), RATES),
        "ranks": table(ranks.of(case.ranked), ranks.SHOWN), "ranks_legend": " ".join(ranks.LEGEND),
        "marks": marks_explained(rows),
        "some_unknown": priced and (
            any(unknown_roofline(row) or unknown_recoverable(row) for row in rows)
            or any(line.roofline_time_us is None for line in kernel_lines)
        ),
        "priced": priced,
        "predicted_kernels": kernels.predicted(case),
        "some_predicted": any(row.predicted_time_us is not None for row in rows),
        "timed_kernels": any(line.kernel.device_time_us is not None for line in kernel_lines),
        "recorded": case.case is not None, "recorded_on": recorded_on(case.results), "findings": _findings(case),
        "missed": missed, "missed_unlisted": unlisted,
        "price_error": error if priced_by else "",
        "reasons": {code: REASONS[code] for one in missed if (code := one["code"]) in REASONS and code != "other"},
        "numerics": [line for result in case.ranked for line in _numerics(result)],
        "notes": [note for result in case.ranked for note in _notes(result)],
        "remarks": [reason for result in case.ranked for reason in _remarks(result)],
        "some_planned": any(row.peak_memory_planned_bytes is not None for row in rows),
        "ceilings_of": _joined(r.ceilings_of for r in case.results), "priced_by": priced_by,
    }


def _selection(case: CaseResults) -> str:
    """Return the options of `xlafuse inspect` that select the case's records; "" without records."""
    if (it := case.case) is None:
        return ""
    return printable(shlex.join(["--block", it.block, "--case", it.name, "--direction", it.direction]), 300)


def chart_specs(
    case: CaseResults, palette: Mapping[str, str], bars: Sequence[Mapping[str, Any]]
) -> dict[str, charts.Spec]:
    """Return the charts by their name in the template, without charts that have no data."""
    found: dict[str, charts.Spec] = {}
    timed = [result for result in case.ranked if result.time_us is not None]
    timed = [result for result in timed if result.name not in BASELINES] or timed  # those would dwarf the others
    if timed:
        found["times"] = charts.times([_time(result) for result in timed], [r.name for r in timed])
    if ratios := [_ratio(result.row, result.row.comparison) for result in timed if result.row.comparison]:
        found["ratios"] = charts.ratios(ratios, [r["implementation"] for r in ratios], BASELINE)
    if bars:
        found["kernels"] = charts.kernels({bar["implementation"]: kernels.end_us(bar) for bar in bars})
    if rates := _roofline(case, palette):
        found["roofline"] = rates
    if traffic := [line for result in case.ranked for line in _traffic(result.row)]:
        compulsory = case.ranked[0].row.bytes_compulsory
        drawn = list(dict.fromkeys(line["implementation"] for line in traffic))
        found["traffic"] = charts.traffic(traffic, drawn, None if compulsory is None else compulsory / 1e6)
    return found


def _result(case: CaseResults, result: Result) -> dict[str, Any]:
    """Return a row of the tables. slow_kernels: those with most recoverable time."""
    best = case.best(result)
    ratio = None if best is None or not best.time_us else (result.time_us or 0.0) / best.time_us
    judged = case.judged.get(result.name)
    lines = (line for line in roofline.kernels(result) if line.recoverable_us)
    slow = sorted(lines, key=lambda line: -(line.recoverable_us or 0.0))[:2]
    return {
        "name": result.name, "row": result.row,
        "best": best is result and len(case.comparable(result)) > 1,
        "comparable": len(case.comparable(result)),
        "ratio": ratio, "level": None if ratio is None or len(case.comparable(result)) < 2 else level_of(ratio),
        "mark": "" if best is None or best is result else mark_of(judged), "judged": judged.text if judged else "",
        "kernels": None if result.graph is None or result.graph.kernels is None else len(result.graph.kernels),
        "rounds": marks(result.row), "unknown_roofline": unknown_roofline(result.row),
        "unknown_recoverable": unknown_recoverable(result.row),
        "slow_kernels": [_slow_kernel(line) for line in slow],
        "largest": choices.largest(result), "origin": formats.origin(result.graph) if result.graph else "",
    }


def _slow_kernel(line: roofline.KernelOnRoofline) -> dict[str, Any]:
    return {
        "index": line.index, "name": formats.name(line.kernel.name, 44), "us": line.recoverable_us,
        "where": kernels.where(line.kernel),
    }


def _findings(case: CaseResults) -> list[dict[str, str]]:
    """Return the findings in words. The first one that a remedy helps against has it."""
    shown: list[dict[str, str]] = []
    said: set[str] = set()
    for finding in case.findings[:MOST_FINDINGS]:
        remedy = REMEDIES.get(finding.kind, "")
        shown.append({"text": str(finding), "remedy": "" if remedy in said else remedy})
        said.add(remedy)
    return shown


def _missed(case: CaseResults) -> tuple[list[dict[str, Any]], int, str, str]:
    """Return the missed fusions of all implementations with kernels of their own, largest first.

    The second value is the number of those left out, the third the GPU whose ceilings price them, the last one how
    right the prices are.
    """
    found: list[dict[str, Any]] = []
    devices, prices = [], []
    for result in case.with_own_kernels:
        if result.graph is None or (graph := result.timed_graph) is None:
            continue
        own = result.ceilings, result.ceilings_of
        ceilings, whose = own if result.ceilings else own_ceilings(result.graph)
        devices.append(whose)
        places = {kernel.name: kernels.where(kernel) for kernel in result.graph.kernels or ()}
        for same in missed_fusions.folded(graph, missed_fusions.ranked(graph, ceilings)):
            reason, saved = same.first.reason, same.price
            prices.append(saved)
            found.append({
                "implementation": result.name, "us": saved.us, "about": "~" * saved.predicted, "bytes": saved.bytes,
                "code": reason.code,
                "others": len(same.fusions) - 1,
                "text": printable(reason.text, 400), "origin": printable(reason.origin, 60),
                "ends": [
                    {"name": formats.name(name, 44) if name else "?", "where": places.get(name, "")}
                    for name in (reason.producer, reason.consumer)
                ],
                "line": formats.place(reason.line) if reason.line else "",
            })
    found.sort(key=lambda one: (one["us"] or 0.0, one["bytes"]), reverse=True)
    return found[:MOST_MISSED], max(0, len(found) - MOST_MISSED), _joined(devices), missed_fusions.price_error(prices)


def _joined(devices: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(filter(None, devices)))


def _numerics(result: Result) -> list[dict[str, Any]]:
    if (record := result.record) is None:
        return []
    device, case = checked_on(result.row), record.checked and record.checked.case
    where = printable(f"{device}, case {case}" if case not in (None, record.case.name) else device, 100)
    return [
        {"implementation": result.name, "name": printable(error.name, 60), "error": error.error,
         "tolerance": error.tolerance, "checked": where}
        for error in record.errors
    ]


def _notes(result: Result) -> list[str]:
    """Return notes about a record's status and graph, with their reasons."""
    row = result.row
    found = [f"{row.status}: {row.detail}"] if row.detail else []
    if result.unreadable:
        found.append(f"the fusion graph cannot be read: {result.unreadable}")
    elif result.read is None and row.status in ("ok", "compiled"):
        found.append("no fusion graph was recorded")
    if result.graph is not None and result.graph.unparsed:
        found.append(f"{formats.count(len(result.graph.unparsed), 'item')} of the graph could not be read")
    return [printable(f"{result.name}: {note}", 1500) for note in found]


def _remarks(result: Result) -> list[str]:
    """Return the reasons for missing times, traffic and memory, and how CUDA graphs get their inputs."""
    row = result.row
    remarks = {
        "not timed": row.modes_unavailable, "no traffic": row.traffic_unavailable,
        "no peak memory": row.peak_memory_reason if row.peak_memory_planned_bytes is None else None,
        "inputs of its CUDA graphs": row.graph_inputs,
    }
    return [printable(f"{result.name}: {about}: {text}", 600) for about, text in remarks.items() if text]


def _time(result: Result) -> dict[str, Any]:
    row, spread = result.row, result.row.spread_us
    time = result.time_us or 0.0
    return {
        "implementation": result.name, "time": time, "recoverable": row.recoverable_us,
        "low": time if spread is None else time - spread, "high": time if spread is None else time + spread,
        "label": formats.microseconds(time),
    }


def _ratio(row: Row, comparison: Comparison) -> dict[str, Any]:
    main = comparison.main
    return {
        "implementation": row.implementation, "ratio": main.ratio, "low": main.low, "high": main.high,
        "word": comparison.word,
    }


def _roofline(case: CaseResults, palette: Mapping[str, str]) -> charts.Spec | None:
    points = []
    for result in case.ranked:
        row = result.row
        for kind, at, height in (
            ("measured", "intensity_flop_per_byte", "gflop_per_s"),
            ("measured, by measured bytes", "intensity_measured", "gflop_per_s"),
            ("roofline", "intensity_flop_per_byte", "roofline_gflop_per_s"),
        ):
            intensity, rate = getattr(row, at), getattr(row, height)
            if intensity and rate:
                points.append({
                    "implementation": result.name, "intensity": intensity, "gflops": rate, "kind": kind,
                })
    ceilings = next((result.ceilings for result in case.ranked if result.ceilings is not None), None)
    if not points or ceilings is None:
        return None
    it = case.case
    rate = None if it is None else product_rate(it.block, it.dtype, it.precision, ceilings)
    return charts.roofline(points, ceilings, rate, palette)


def _traffic(row: Row) -> list[dict[str, Any]]:
    kinds = {
        "declared": row.bytes_declared, "measured in the call": row.dram_bytes_call,
        "measured, each kernel alone": row.dram_bytes,
    }
    return [
        {"implementation": row.implementation, "kind": kind, "mb": size / 1e6}
        for kind, size in kinds.items() if size is not None
    ]
