"""Each number of a page, computed again from records.jsonl, the graphs' JSON and run.json."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections.abc import Callable
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.base.text import number
from xlafuse.compare.cli import main
from xlafuse.compare.graph import formats
from xlafuse.compare.graph.analyse import missed_fusions
from xlafuse.compare.plan.timing_modes import OTHER_MODES
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record_fields import TimedMode
from xlafuse.compare.record.run_files import RunFile
from xlafuse.compare.report import table
from xlafuse.compare.report.columns import percent
from xlafuse.compare.report.page import page
from xlafuse.compare.report.page.content import case as case_page
from xlafuse.compare.sources.case_results import BASELINES, CaseResults
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.run_source import ceilings_of, results_of
from xlafuse.compare.sources.source import Source

QUICK = PROJECT / "tests" / "data" / "runs" / "h200-small"
CASE = "softmax/gpt2-scores/bf16/train"
PRODUCTS = {"bf16": "bfloat16", "f16": "float16"}

Record = dict[str, Any]


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """Return the records of the case by implementation."""
    newest = {r["id"]: r for r in map(json.loads, (QUICK / "records.jsonl").read_text().splitlines())}
    return {r["implementation"]: r for id, r in newest.items() if id.rsplit("/", 1)[0] == CASE}


@pytest.fixture(scope="module")
def ceilings() -> dict[str, Any]:
    return {segment["id"]: segment["ceilings"] for segment in json.loads((QUICK / "run.json").read_text())["segments"]}


@pytest.fixture(scope="module")
def case(report: Path, embedded: Any, tables: Any) -> tuple[dict[str, Any], list[list[list[str]]]]:
    """Return the case's embedded data and the tables of its page."""
    data = embedded(report, "case", number_of(report, embedded, CASE))
    return data, tables(data["html"])


def number_of(report: Path, embedded: Any, address: str) -> int:
    place: int = embedded(report, "settings")["cases"].index(address)
    return place


def graph_of(record: Record) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RunFile(QUICK, record["graph"]).read_bytes())
    return loaded


def counted(rounds: list[list[float]]) -> list[list[float]]:
    """Return the rounds without the first call of each."""
    return [samples[1:] if len(samples) > 2 else samples for samples in rounds]


def medians(record: Record) -> dict[str, float]:
    """Return the median time of each phase in µs."""
    parts = record["measurement"]["phases"]
    return {p: statistics.median([s for r in counted(d["device_time"]) for s in r]) * 1e6 for p, d in parts.items()}


def time_of(record: Record) -> float:
    return sum(medians(record).values())


def bandwidth(found: dict[str, Any], read: float, written: float) -> float:
    """Interpolate linearly between the two nearest measured mixes of reads and writes."""
    mixes = [(*map(float, mix.split(":")), rate) for mix, rate in found["streams"].items()]
    points = sorted((reads / (reads + writes), rate) for reads, writes, rate in mixes)
    share = read / (read + written)
    low = max(point for point in points if point[0] <= share)
    high = min(point for point in points if point[0] >= share)
    along = 0.0 if high == low else (share - low[0]) / (high[0] - low[0])
    return low[1] + along * (high[1] - low[1])


def roofline_times(record: Record, ceilings: dict[str, Any]) -> list[float]:
    """Return the roofline time of each kernel in µs."""
    graph, found = graph_of(record), ceilings[record["segment"]]
    result = []
    for kernel in graph["kernels"]:
        read, written = kernel["bytes_read"], kernel["bytes_written"]
        memory = (read + written) / bandwidth(found, read, written)
        types = {b["name"]: b for b in graph["buffers"]}
        largest = max((types[a["buffer"]] for a in kernel["inputs"]), key=lambda b: b["bytes"], default=None)
        rate = found["products"].get(PRODUCTS.get(largest["dtype"], "")) if largest else None
        if largest and largest["dtype"] == "f32":
            rate = max(v for k, v in found["products"].items() if k.startswith("float32"))
        compute = (kernel["flops"] or 0.0) / rate if rate else 0.0
        result.append(max(memory, compute) * kernel["launches"] * 1e6)
    return result


def recoverable(record: Record, ceilings: dict[str, Any]) -> float:
    times = [kernel["device_time_us"] for kernel in graph_of(record)["kernels"]]
    return sum(max(0.0, time - bound) for time, bound in zip(times, roofline_times(record, ceilings), strict=True))


def spread(record: Record) -> float:
    parts = [[s for r in counted(data["device_time"]) for s in r] for data in record["measurement"]["phases"].values()]
    low, _, high = statistics.quantiles([sum(call) for call in zip(*parts, strict=True)], n=4, method="inclusive")
    return (high - low) / 2 * 1e6


def declared(record: Record) -> int:
    return sum((k["bytes_read"] + k["bytes_written"]) * k["launches"] for k in graph_of(record)["kernels"])


def measured(record: Record, way: str, *names: str) -> int | None:
    parts = record.get("traffic", {}).get(way, {}).get("phases")
    return None if parts is None else sum(part[name] for part in parts.values() for name in names)


def columns(table: list[list[str]], count: int) -> dict[str, dict[str, str]]:
    """Return the cells of each row by column header, by the row's first cell."""
    heads = table[0]
    assert len(table) == count + 1
    return {row[0]: dict(zip(heads, row, strict=True)) for row in table[1:]}


def titled(case: Any, *heads: str) -> list[list[str]]:
    return next(table for table in case[1] if set(heads) <= set(table[0]))


def round_marks(record: Record) -> list[str]:
    """Return the marks of a record: throttled in a round, or not settled after the warm-up."""
    measured = record["measurement"]
    throttled = any(after["throttled"] for after in measured["conditions"] if after is not None)
    found = {"!": throttled, "^": not all(measured["warm_up"]["settled"])}
    said = "".join(mark for mark, true in found.items() if true)
    return [said] if said else []


def test_summary(case: Any, records: dict[str, Record], ceilings: dict[str, Any]) -> None:
    shown = columns(titled(case, "largest array between kernels"), len(records))
    best = min(map(time_of, records.values()))
    assert list(shown) == sorted(records, key=lambda name: time_of(records[name]))
    for name, record in records.items():
        row, time = shown[name], time_of(record)
        assert row["time µs"] == " ".join([number(time), "±", number(spread(record)), *round_marks(record)])
        assert row["/ best"].split(" ")[0] == number(time / best)
        assert row["recoverable µs"] == number(recoverable(record, ceilings))
        assert row["roofline µs"] == number(sum(roofline_times(record, ceilings)))
        assert row["kernels"] == str(len(graph_of(record)["kernels"]))
        assert row["launches"] == str(sum(d["launches"] for d in record["measurement"]["phases"].values()))
        passed = [
            b for b in graph_of(record)["buffers"]
            if b["role"] in ("intermediate", "saved") and b["producer"] is not None and b["consumers"]
        ]
        largest = max(passed, key=lambda b: b["bytes"], default=None)
        assert row["largest array between kernels"] == "none" or largest is not None
        if largest is not None:
            assert f"], {formats.size(largest['bytes'])}" in row["largest array between kernels"]


def test_times(case: Any, records: dict[str, Record], ceilings: dict[str, Any]) -> None:
    shown = columns(titled(case, "wall µs", "launch gap"), len(records))
    for name, record in records.items():
        row, parts, time = shown[name], medians(record), time_of(record)
        data = record["measurement"]["phases"].values()
        busy = sum(statistics.median([s for r in counted(d["busy_time"]) for s in r]) for d in data) * 1e6
        assert row["time µs"] == " ".join([number(time), *round_marks(record)])
        assert row["±"] == number(spread(record))
        assert (row["forward"], row["backward"]) == (number(parts["forward"]), number(parts["backward"]))
        assert row["wall µs"] == number(statistics.median(record["measurement"]["wall_time"]) * 1e6)
        assert row["launch gap"] == percent(max(0.0, (time - busy) / time))
        assert row["recoverable µs"] == number(recoverable(record, ceilings))
        assert row["of roofline"] == percent(sum(roofline_times(record, ceilings)) / time)
        assert row["compile s"] == number(record["compile_s"])
        peaks = record["measurement"]["peak_memory"].values()
        known = [p.get("planned") if p["bytes"] is None else p["bytes"] for p in peaks]
        mark = " p" if None in [p["bytes"] for p in peaks] else ""
        assert row["memory MB"] == ("" if None in known else number(max(known) / 1e6) + mark)


def test_a_case_has_every_column_of_the_terminal(tables: Any) -> None:
    """Each heading of the page's tables says what its column means."""
    records, run = run_folder.read_records(QUICK)[0], run_folder.read_run(QUICK)
    timed = [record for record in records if record.case.id == CASE and record.measurement is not None]
    for record in timed:
        record.measurement.modes = {mode: TimedMode(record.measurement.phases) for mode in OTHER_MODES}  # type: ignore
    results = results_of(timed, ceilings_of(run), {}, QUICK)
    (case,) = Source("run", QUICK, tuple(results), run=run).cases
    html = page.render("case.html", **case_page.values(case), drawn_kernels=True)
    shown = {head for each in tables(html) for head in each[0]}
    text = table.render([result.row for result in results], markdown=True, every=True)
    line = next(line for line in text.split("\n") if line.startswith("| "))
    heads = {head.strip() for head in line.strip("|").split("|")}
    assert {"triton launch", "warm", "wall µs", "checked on"} <= heads
    assert heads - shown == {"status", "compulsory MB", "provenance"}  # not in a column, but on the page
    for name in ("times", "bytes", "roofline"):
        section = html.partition(f'id="c-{name}"')[2].partition("</section>")[0]
        assert all("title=" in head for head in re.findall(r"<th(?!ead| scope)[^>]*>", section))


def rounds(record: Record) -> list[float]:
    phases = record["measurement"]["phases"].values()
    medians = [[statistics.median(s) for s in counted(times["device_time"])] for times in phases]
    return [sum(times) for times in zip(*medians, strict=True)]


@pytest.mark.parametrize("address", ["softmax/prime/fp32/fwd", "attention/llama-8b/bf16/fwd"])
def test_marks_are_explained_once(
    report: Path, embedded: Callable[..., Any], tables: Any, address: str
) -> None:
    """Both tables of times show marks of rounds, and ? for unknown roofline times; a note explains each once."""
    lines = map(json.loads, (QUICK / "records.jsonl").read_text().splitlines())
    mine = {r["implementation"]: r for r in lines if r["id"].rsplit("/", 1)[0] == address}
    html = embedded(report, "case", number_of(report, embedded, address))["html"]
    heads = ("largest array between kernels", "wall µs")
    glance, times = (next(t for t in tables(html) if head in t[0]) for head in heads)
    first, second = columns(glance, len(mine)), columns(times, len(mine))
    said = {name: round_marks(record) for name, record in mine.items()}
    for name, marks in said.items():
        assert [word for word in first[name]["time µs"].split() if word in ("!", "^", "!^")] == marks
        assert second[name]["time µs"].split()[1:] == marks
    unknown = {name for name, row in first.items() if row["roofline µs"] == "?"}
    assert unknown == ({"flex"} if address.startswith("attention") else set())
    assert unknown == {name for name, row in second.items() if row["recoverable µs"] == "?"}
    assert html.count("the bytes or FLOPs of some kernel are unknown.") == bool(unknown)
    for mark, words in {"!": "in some round the GPU", "^": "in some round the times still changed"}.items():
        assert html.count(words) == any(mark in "".join(marks) for marks in said.values())
    assert unknown or any(said.values())


def test_ratios_and_their_intervals(case: Any, records: dict[str, Record]) -> None:
    values = case[0]["charts"]["ratios"]["data"]["values"]
    assert {value["implementation"] for value in values} == records.keys() - {"xla", *BASELINES}
    for value in values:
        pairs = zip(rounds(records[value["implementation"]]), rounds(records["xla"]), strict=True)
        ratio = math.exp(statistics.fmean(math.log(a / b) for a, b in pairs))
        assert value["ratio"] == pytest.approx(ratio)
        assert value["low"] <= ratio <= value["high"]


def test_pictures_show_the_same_numbers(case: Any, records: dict[str, Record], ceilings: dict[str, Any]) -> None:
    charts = case[0]["charts"]
    for value in charts["times"]["data"]["values"]:
        record = records[value["implementation"]]
        assert value["time"] == pytest.approx(time_of(record))
        assert value["recoverable"] == pytest.approx(recoverable(record, ceilings))
        assert value["high"] == pytest.approx(time_of(record) + spread(record))
        assert value["low"] == pytest.approx(time_of(record) - spread(record))
    for value in charts["roofline"]["layer"][1]["data"]["values"]:
        record = records[value["implementation"]]
        flops, size = sum(record["flops"].values()), declared(record)
        if value["kind"] == "measured, by measured bytes":
            size = measured(record, "call", "dram_read", "dram_written") or 0
        below = sum(roofline_times(record, ceilings)) if value["kind"] == "roofline" else time_of(record)
        assert value["intensity"] == pytest.approx(flops / size)
        assert value["gflops"] == pytest.approx(flops / below / 1e3)


def test_bars_are_the_launches(case: Any, records: dict[str, Record]) -> None:
    shown = {bars["implementation"]: bars for bars in case[0]["bars"]}
    assert shown.keys() == records.keys()
    for name, record in records.items():
        mine = shown[name]
        parts = [data["records"] for data in record["measurement"]["phases"].values()]
        ran = [r for part in parts for r in part]
        assert mine["took"] == pytest.approx([(r["end"] - r["start"]) * 1e9 for r in ran], abs=1)
        gaps = [b["start"] - a["end"] for a, b in pairwise(parts[0])]
        assert mine["gap"][: len(gaps) + 1] == pytest.approx([0, *(gap * 1e9 for gap in gaps)], abs=2)
        assert {int(place) for place in mine["helpers"]} == {i for i, own in enumerate(mine["index"]) if own is None}
        for index, kernel in enumerate(graph_of(record)["kernels"]):
            took = sum(took for took, own in zip(mine["took"], mine["index"], strict=True) if own == index)
            assert took == pytest.approx(kernel["device_time_us"] * 1e3, rel=0.05)


def test_kernels(
    report: Path, embedded: Callable[..., Any], records: dict[str, Record], ceilings: dict[str, Any]
) -> None:
    """The tables and the drawing use one set of data (static/kernels.js, static/drawing.js)."""
    drawn = embedded(report, "drawing", number_of(report, embedded, CASE))
    shown = {column["name"]: column["kernels"] for column in drawn["columns"]}
    assert shown.keys() == records.keys()
    for name, record in records.items():
        bounds = roofline_times(record, ceilings)
        for index, (kernel, own) in enumerate(zip(graph_of(record)["kernels"], shown[name], strict=True)):
            assert own["read"] == formats.size(kernel["bytes_read"])
            assert own["written"] == formats.size(kernel["bytes_written"])
            assert own["time"] == number(kernel["device_time_us"])
            assert own["roofline_time"] == number(bounds[index])
            assert own["recoverable"] == number(max(0.0, kernel["device_time_us"] - bounds[index]))


def test_bytes(case: Any, records: dict[str, Record]) -> None:
    shown = columns(titled(case, "efficiency"), len(records))
    for name, record in records.items():
        compulsory = sum(record["bytes_compulsory"].values())
        row = shown[name]
        assert row["declared MB"] == number(declared(record) / 1e6)
        assert row["efficiency"] == percent(compulsory / declared(record))
        for head, way, names in (
            ("measured MB", "call", ("dram_read", "dram_written")),
            ("DRAM, alone MB", "alone", ("dram_read", "dram_written")), ("L2 MB", "alone", ("l2",)),
        ):
            size = measured(record, way, *names)
            assert row[head] == ("" if size is None else number(size / 1e6))


def test_missed_fusions(case: Any, records: dict[str, Record], ceilings: dict[str, Any]) -> None:
    shown = titled(case, "saves µs")[1:]
    expected = []
    for name in records.keys() - {"eager", "xla-unfused"}:  # they fuse nothing on purpose
        record = records[name]
        found = ceilings[record["segment"]]
        graph = graph_of(record)
        for reason in graph["reasons"]:
            if reason["bytes_saved"]:
                size = reason["bytes_saved"] + read_twice(graph, reason)
                expected.append(((size / found["streams"]["1:1"] + found["launch"]["device_s"]) * 1e6, size, name))
    expected.sort(key=lambda one: -one[0])
    assert shown
    assert [row[:2] for row in shown] == [[number(cost), formats.size(size)] for cost, size, _ in expected]
    assert sorted(row[2] for row in shown) == sorted(name for _, _, name in expected)


def read_twice(graph: dict[str, Any], reason: dict[str, Any]) -> int:
    """Return the bytes that both kernels read; each buffer of this case is written once."""
    named = {kernel["name"]: kernel for kernel in graph["kernels"]}
    ends = [named[reason[end]] for end in ("producer", "consumer")]
    one, other = ({access["buffer"]: access["bytes"] for access in kernel["inputs"]} for kernel in ends)
    sizes = {buffer["name"]: buffer["bytes"] for buffer in graph["buffers"]}
    return sum(max(0, one[name] + other[name] - sizes[name]) for name in one.keys() & other.keys())


@pytest.fixture(scope="module")
def shown() -> CaseResults:
    (case,) = (case for case in open_source(QUICK).select({"block": ["softmax"]}).cases if case.id == CASE)
    return case


def test_the_command_for_unlisted_fusions_works(shown: CaseResults, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the page selects the case."""
    monkeypatch.setattr(case_page, "MOST_MISSED", 1)
    html = page.render("case.html", **case_page.values(shown), drawn_kernels=True)
    (command,) = (unescape(command) for command in re.findall("<code>(xlafuse .*?)</code>", html))
    done = CliRunner().invoke(main.cli, [str(QUICK) if word == "RUN" else word for word in shlex.split(command)[1:]])
    assert done.exit_code == 0, done.output
    assert CASE in done.output


def test_prices_carry_their_measured_error(shown: CaseResults) -> None:
    html = page.render("case.html", **case_page.values(shown), drawn_kernels=True)
    assert unescape(html).count(missed_fusions.PRICE_ERRORS[False]) == 1


def test_numerics(case: Any, records: dict[str, Record]) -> None:
    shown = [row[:5] for row in titled(case, "error / tolerance")[1:]]
    errors = [(name, e) for name, record in records.items() for e in record["errors"]]
    expected = [
        [name, e["name"], f"{e['error']:.3g}", f"{e['tolerance']:.3g}", f"{e['error'] / e['tolerance']:.2f}"]
        for name, e in errors
    ]
    assert sorted(shown) == sorted(expected)


def test_the_table_of_records(report: Path, embedded: Callable[..., Any], records: dict[str, Record]) -> None:
    data = embedded(report, "rows")
    names = [column["title"] for column in data["columns"]]
    rows = [dict(zip(names, row, strict=True)) for row in data["rows"]]
    mine = {
        row["implementation"]: row for row in rows
        if f"{row['block']}/{row['case']}/{row['dtype']}/{row['direction']}" == CASE
    }
    assert mine.keys() == records.keys()
    best = min(map(time_of, records.values()))
    for name, record in records.items():
        row = mine[name]
        assert row["time µs"] == pytest.approx(time_of(record))
        assert row["/ best"] == pytest.approx(time_of(record) / best)
        assert row["declared MB"] == pytest.approx(declared(record) / 1e6)
        assert row["compulsory MB"] == pytest.approx(sum(record["bytes_compulsory"].values()) / 1e6)
        assert row["error"] == pytest.approx(max(e["error"] / e["tolerance"] for e in record["errors"]))


def test_the_matrix(report: Path, tables: Any, records: dict[str, Record]) -> None:
    matrix = next(table for table in tables(report.read_text()) if table[0][:2] == ["block", "case"])
    line = next(row for row in matrix if row[:2] == ["softmax", "gpt2-scores bf16 train"])
    shown = dict(zip(matrix[0], line, strict=True))
    best = min(map(time_of, records.values()))
    for name, record in records.items():
        assert shown[name].startswith(number(time_of(record) / best))
        assert number(time_of(record)) in shown[name]
    assert all(cell == "" for name, cell in shown.items() if name not in {"block", "case", *records})
