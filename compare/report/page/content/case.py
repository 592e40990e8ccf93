"""One case's page: the values of its template and the specifications of its pictures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ....base.text import printable
from ....graph import formats
from ....graph.analyse import missed_fusions
from ....graph.analyse.causes import cause_text
from ....graph.analyse.totals import totals
from ....graph.findings.finding import Finding
from ....graph.model import REASONS
from ....spec.blocks import BLOCKS
from ...rows import BASELINE, Row, product_rate
from ...table import checked_on, marks, marks_explained, memory
from . import charts, kernels
from .overview import label, level_of, mark_of
from .reading import BASELINES, CaseOf, Member

MOST_MISSED = 40  # fusions in the table of a case
MOST_TOLD = 8


def values(case: CaseOf, told: Sequence[Finding]) -> dict[str, Any]:
    """For templates/case.html. Numbers are as in compare.report.rows; None where nothing is known."""
    block = BLOCKS.get(case.case.block)
    missed, unlisted = _missed(case)
    members = [_member(case, member) for member in case.ranked]
    return {
        "selects": _selects(case), "block": printable(case.case.block, 100),
        "label": label(case), "summary": block.summary if block else "", "timed": case.timed,
        "sizes": ", ".join(f"{printable(str(k), 40)} {v}" for k, v in case.case.sizes.items()),
        "members": members, "marks": marks_explained([member.row for member in case.members]),
        "some_unknown": any(m["unknown_least"] or m["unknown_recoverable"] for m in members)
        or any(row["floor_us"] is None for member in case.members for row in member.kernels),
        "told": [str(finding) for finding in told[:MOST_TOLD]],
        "missed": missed, "missed_unlisted": unlisted,
        "words": {m["code"]: REASONS[m["code"]] for m in missed if m["code"] in REASONS and m["code"] != "other"},
        "numerics": [line for member in case.ranked for line in _numerics(member)],
        "notes": [note for member in case.ranked for note in _notes(member)],
        "remarks": [remark for member in case.ranked for remark in _remarks(member)],
        "some_planned": any(member.row["peak_memory_planned_bytes"] is not None for member in case.members),
        "whose": next((m.whose for m in case.members if m.whose), ""),
    }


def _selects(case: CaseOf) -> str:
    """The options of `xlafuse inspect` that choose the case's records."""
    it = case.case
    return printable(shlex.join(["--block", it.block, "--case", it.name, "--direction", it.direction]), 300)


def pictures(case: CaseOf, palette: Mapping[str, str], bars: Sequence[Mapping[str, Any]]) -> dict[str, charts.Spec]:
    """By the name that the template gives their places; what there is nothing to draw of is left out."""
    found: dict[str, charts.Spec] = {}
    timed = [member for member in case.ranked if member.time_us is not None]
    if timed:
        found["times"] = charts.times([_time(member) for member in timed], [m.name for m in timed])
    if ratios := [_ratio(member.row) for member in timed if member.row["verdict_vs_xla_low"] is not None]:
        found["ratios"] = charts.ratios(ratios, [r["implementation"] for r in ratios], BASELINE)
    if bars:
        ends = [kernels.end_us(each) for each in bars]
        names = [each["implementation"] for each in bars]
        found["kernels"] = charts.kernels(names, max(ends), min(max(ends), 6 * min(ends)))
    if roofline := _roofline(case, palette):
        found["roofline"] = roofline
    if traffic := [line for member in case.ranked for line in _traffic(member.row)]:
        least = case.ranked[0].row["bytes_compulsory"]
        drawn = list(dict.fromkeys(line["implementation"] for line in traffic))
        found["traffic"] = charts.traffic(traffic, drawn, None if least is None else least / 1e6)
    return found


def _member(case: CaseOf, member: Member) -> dict[str, Any]:
    """A line of the tables. lost: the kernels that lose most above their least times, costliest first."""
    best = case.best(member)
    ratio = None if best is None or not best.time_us else (member.time_us or 0.0) / best.time_us
    judged = case.judged.get(member.name)
    least = _least(member)
    lost = sorted((r for r in member.kernels if r["recoverable_us"]), key=lambda r: -r["recoverable_us"])[:2]
    return {
        "name": member.name, "row": member.row, "best": best is member and len(case.rivals(member)) > 1,
        "rivals": len(case.rivals(member)),
        "ratio": ratio, "level": None if ratio is None or len(case.rivals(member)) < 2 else level_of(ratio),
        "mark": "" if best is None or best is member else mark_of(judged), "judged": judged.text if judged else "",
        "kernels": None if member.graph is None or member.graph.kernels is None else len(member.graph.kernels),
        "rounds": marks(member.row), "memory": memory(member.row),
        "least": least, "unknown_least": least is None and bool(member.kernels),
        "unknown_recoverable": member.row["recoverable_us"] is None and member.time_us is not None,
        "lost": [_lost(member, row) for row in lost],
        "largest": _largest(member), "origin": formats.origin(member.graph) if member.graph else "",
    }


def _least(member: Member) -> float | None:
    """What its kernels take at least: as the row has it, else, of a run for a target, at that target's ceilings."""
    least: float | None = member.row["floor_us"]
    if least is None and member.graph is not None and member.ceilings is not None:
        found = totals(member.graph, ceilings=member.ceilings).roofline_time_us
        return None if found is None or member.graph.kernels is None else found.exact
    return least


def _lost(member: Member, row: Row) -> dict[str, Any]:
    assert member.graph is not None and member.graph.kernels is not None
    kernel = member.graph.kernels[row["index"]]
    return {
        "index": row["index"], "name": formats.name(row["kernel"], 44), "us": row["recoverable_us"],
        "where": kernels.where(kernel),
    }


def _largest(member: Member) -> str:
    """The largest array that one kernel writes for another: "bf16[64,4096,4096], 2.15 GB (softmax.py:19)"."""
    graph = member.graph
    if graph is None or graph.kernels is None:
        return ""
    passed = next((buffer for buffer in graph.materialized if graph.consumers.get(buffer.name)), None)
    if passed is None:
        return "none"
    where = cause_text(graph, passed.name)
    return f"{formats.shape(passed)}, {formats.size(passed.bytes)}{f' ({formats.place(where)})' if where else ''}"


def _missed(case: CaseOf) -> tuple[list[dict[str, Any]], int]:
    """Fusions that were not made, of all implementations that try, worth most first; and how many are not listed."""
    found: list[dict[str, Any]] = []
    for member in case.members:
        if member.graph is None or member.ceilings is None or member.name in BASELINES:
            continue
        places = {kernel.name: kernels.where(kernel) for kernel in member.graph.kernels or ()}
        for reason, us in missed_fusions.ranked(member.graph, member.ceilings.bandwidth(1, 1)):
            found.append({
                "implementation": member.name, "us": us, "bytes": reason.bytes_saved, "code": reason.code,
                "text": printable(reason.text, 400), "origin": printable(reason.origin, 60),
                "ends": [
                    {"name": formats.name(name, 44) if name else "?", "where": places.get(name, "")}
                    for name in (reason.producer, reason.consumer)
                ],
                "line": formats.place(reason.line) if reason.line else "",
            })
    found.sort(key=lambda one: -one["us"])
    return found[:MOST_MISSED], max(0, len(found) - MOST_MISSED)


def _numerics(member: Member) -> list[dict[str, Any]]:
    record = member.found.record
    assert record is not None
    device, case = checked_on(member.row), (record.checked or {}).get("case")
    where = printable(f"{device}, case {case}" if case not in (None, record.case.name) else device, 100)
    return [
        {"implementation": member.name, "name": printable(str(error.get("name", "")), 60), "error": error["error"],
         "tolerance": error["tolerance"], "checked": where}
        for error in record.errors
    ]


def _notes(member: Member) -> list[str]:
    """What has to be said of a record, with its reason."""
    row = member.row
    found = [f"{row['status']}: {row['detail']}"] if row["detail"] else []
    if member.why:
        found.append(f"its fusion graph cannot be read: {member.why}")
    elif member.found.read is None and row["status"] in ("ok", "compiled"):
        found.append("no fusion graph was recorded")
    if member.graph is not None and member.graph.unparsed:
        found.append(f"{formats.count(len(member.graph.unparsed), 'thing')} in its graph could not be read")
    return [printable(f"{member.name}: {note}", 1500) for note in found]


def _remarks(member: Member) -> list[str]:
    """Why a number beside its time is missing."""
    row = member.row
    reasons = {
        "not timed": row["modes_unavailable"], "no traffic": row["traffic_unavailable"],
        "no peak memory": row["peak_memory_reason"] if row["peak_memory_planned_bytes"] is None else None,
    }
    return [printable(f"{member.name}: {what}: {why}", 600) for what, why in reasons.items() if why]


def _time(member: Member) -> dict[str, Any]:
    row, spread = member.row, member.row["device_time_us_spread"]
    time = member.time_us or 0.0
    return {
        "implementation": member.name, "time": time, "recoverable": row["recoverable_us"],
        "low": time if spread is None else time - spread, "high": time if spread is None else time + spread,
        "label": formats.microseconds(time),
    }


def _ratio(row: Row) -> dict[str, Any]:
    return {
        "implementation": row["implementation"], "ratio": row["cold_vs_xla"], "low": row["verdict_vs_xla_low"],
        "high": row["verdict_vs_xla_high"], "word": row["verdict_vs_xla_word"],
    }


def _roofline(case: CaseOf, palette: Mapping[str, str]) -> charts.Spec | None:
    points = []
    for member in case.ranked:
        row = member.row
        for what, at, height in (
            ("reached", "intensity_flop_per_byte", "gflop_per_s"),
            ("reached, counted bytes", "intensity_measured", "gflop_per_s"),
            ("attainable", "intensity_flop_per_byte", "attainable_gflop_per_s"),
        ):
            if row[at] and row[height]:
                point = {"implementation": member.name, "intensity": row[at], "gflops": row[height], "what": what}
                points.append(point)
    ceilings = next((member.ceilings for member in case.ranked if member.ceilings is not None), None)
    if not points or ceilings is None:
        return None
    rate = product_rate(case.case.block, case.case.dtype, case.case.precision, ceilings)
    return charts.roofline(points, ceilings, rate, palette)


def _traffic(row: Row) -> list[dict[str, Any]]:
    kinds = {
        "declared by its kernels": row["bytes_moved"], "counted in the call": row["dram_bytes_call"],
        "counted, each kernel alone": row["dram_bytes"],
    }
    return [
        {"implementation": row["implementation"], "what": what, "mb": size / 1e6}
        for what, size in kinds.items() if size is not None
    ]
