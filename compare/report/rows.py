"""Records to rows: one flat dict of numbers a record, `None` wherever nothing was measured or is known.

What the numbers are:

    forward_us, backward_us   median over all samples of all rounds of that part's device time
    device_time_us            their sum: the part alone for fwd, both for train
    device_time_us_spread     half the interquartile range of a whole call's device time (train: forward and backward of
                              one call added) over all samples of all rounds: the noise within a round and the drift
                              between rounds; None below four samples
    busy_time_us              the same median for the time in which some kernel ran; None, as launch_gap, where the
                              timer sees no single kernels (CUDA events)
    wall_time_us              median over rounds of host time a call, in a pass without the timer
    time_vs_xla               device_time_us over that of `xla` on the same case, in the same segment, by the same
                              timer, and only where the workers' clocks were seen to agree
    (compare.measure.clock_calibration) verdict_vs_xla, _low, _high, _word   that ratio from the medians of paired
                              rounds, its 95% interval, and "faster", "slower", "tie" or "unresolved"
                              (compare.plan.speedup), or "depends on the timer" where two timers name opposite winners;
    the text says it in words warm_time_us, graph_time_us, launches_time_us   device_time_us in the other modes
    (compare.plan.timing_modes) cold_vs_xla, warm_vs_xla, graph_vs_xla, launches_vs_xla, wall_vs_xla, each with _word  
                              ratio of paired rounds and verdict by that timer alone
    modes_unavailable         why a mode that was asked for has no times
    in_command_buffers        launches that XLA by its default replays from CUDA graphs; None of what is not XLA's
    launch_gap                share of device_time_us in which nothing ran
    throttled_rounds, unsettled_rounds   rounds after which the GPU said that it was throttled, and before which the
                              warm-up ended with times still changing; None where nothing is known of that
    processes                 in how many fresh processes, one after the other, the rounds were taken
    rate, rate_unit           compulsory bytes (GB/s) or model FLOPs (TFLOP/s, for blocks whose work is flops) over
                              device_time_us
    share_of_ceiling          rate over the ceiling measured in the same segment: of a stream of the case's mix of reads
                              and writes, or of a product in its dtype and precision
    kernels, kernel_source    kernels, copies and memsets of one measured call ("measured launches"), else what the
                              compiler listed ("compiler"), as where the timer sees none
    bytes_moved               what the fusion graph's kernels read and write in one call; None where one's is not known
    fusion_efficiency         bytes_compulsory over bytes_moved
    dram_bytes, l2_bytes      what crossed the memory bus, and what passed the L2, as ncu counted it (compare.run.ncu),
                              every kernel from an empty L2; copies and memsets are not in it
    dram_bytes_call           the same for the whole call from a cold L2, where kernels find what earlier ones left
    traffic_unavailable       why there are none of a record of which they were asked
    intensity_flop_per_byte, intensity_measured   model FLOPs over bytes_moved, and over dram_bytes_call
    floor_us                  what the kernels take at least, one by one: the larger of bytes over bandwidth and FLOPs
                              over product rate (compare.graph.analyse.roofline), at the ceilings of the segment or the
    target share_of_attainable       floor_us over device_time_us
    gflop_per_s, attainable_gflop_per_s   model FLOPs over device_time_us, and over floor_us
    recoverable_us            what the kernels took above their floors; one below its floor (it read from L2) is zero
    bound                     what bounds the kernels that take most of the time: "memory", "compute" or "launch", which
                              has the gaps between kernels, too; None where that cannot be said
    max_error, tolerance      of the output or gradient that is nearest to, or furthest beyond, its tolerance
    peak_memory_bytes         the larger of the parts' measured peaks above their inputs; peak_memory_reason: why it is
                              None, as it always is of XLA (older records have a measured one)
    peak_memory_planned_bytes then the same, of XLA, with its compiler's plan for the parts that were not measured; else
                              None
    trace                     the timeline's file, relative to the run folder (compare.measure.timeline)

Only a record that is `ok` has times: how long a wrong result takes is not a result.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.usage import one_of
from ..graph.analyse.roofline import Ceilings, intensity
from ..measure.clock_calibration import AGREEMENT, disagreement
from ..numerics.errors import ErrorCheck
from ..plan import paired_rounds
from ..record.record import Record, record_id
from ..record.run_folder import read_records, read_run
from ..spec.blocks import BLOCKS
from ..spec.case import Case

Row = dict[str, Any]
BASELINE = paired_rounds.BASELINE


@dataclass(frozen=True)
class Rows:
    rows: list[Row]
    warnings: list[str]


def read(folder: Path, *, from_graphs: bool = False) -> Rows:
    """The rows of a run folder. Raises RunFolderError where it has no run.json.

    from_graphs: read from its graph what a record does not say of the roofline; records of older versions do not.

    A record whose fields are not what they should be costs its own row, and a warning that names it; ceilings that are
    not cost the shares of them.
    """
    run = read_run(folder)
    records, warnings = read_records(folder)
    found = of_records(folder, run, records, from_graphs=from_graphs)
    return Rows(found.rows, [*warnings, *found.warnings])


def of_records(
    folder: Path, run: Mapping[str, Any], records: Iterable[Record], *, from_graphs: bool = False
) -> Rows:
    """As `read`, of what was read of the folder before."""
    warnings = []
    try:
        ceilings, apart = ceilings_of(run), segments_that_disagree(run)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as problem:
        ceilings, apart = {}, {}
        warnings.append(f"{folder / 'run.json'}: its segments cannot be read: {problem!r}")
    for id, words in apart.items():
        warnings.append(f"{folder / 'run.json'}: segment {id}: {words}: no ratio between workers is given")
    rows, rounds = [], []
    for record in records:
        try:
            if from_graphs:
                record = _with_roofline(record, folder, ceilings)
            row, times = row_of(record, ceilings), paired_rounds.rounds_of(record)
            rows.append(row)
            rounds.append(times)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as problem:
            warnings.append(
                f"{folder / 'records.jsonl'}: {record.id} left out, its fields are not as written by this version: "
                f"{type(problem).__name__}: {problem}"
            )
    paired_rounds.add(rows, rounds, apart)
    return Rows(rows, warnings)


def _with_roofline(record: Record, folder: Path, ceilings: Mapping[str, Ceilings]) -> Record:
    """The record with what its graph comes to; as it is where it says that itself, or nobody can."""
    reached = ceilings.get(record.segment or "")
    if record.graph is None or reached is None or all("roofline" in part for part in record.kernels.values()):
        return record
    from ..graph import store
    from ..graph.analyse import summary
    from ..sources import graph_sources

    graph = store.load(graph_sources.recorded_file(folder, record, record.graph))
    found = summary.summary(graph, record.case.parts, reached.at(record.case.precision))
    return replace(record, kernels={part: {**made, **record.kernels.get(part, {})} for part, made in found.items()})


def only(rows: list[Row], **wanted: Iterable[str]) -> list[Row]:
    """The rows whose field is among the wanted ones. Raises UsageError for what no row has."""
    for field, names in wanted.items():
        present = list(dict.fromkeys(row[field] for row in rows))
        names = [one_of(field, name, present, where="among these records") for name in names]
        rows = [row for row in rows if not names or row[field] in names]
    return rows


def id_of(row: Row) -> str:
    """The id of the record that it is a row of."""
    case = Case(row["block"], row["case"], {}, row["dtype"], row["direction"], row["precision"])
    return record_id(case, row["implementation"])


def row_of(record: Record, ceilings: Mapping[str, Ceilings]) -> Row:
    """The row of one record, `ceilings` by segment; `time_vs_xla` needs the others and comes from `verdicts.add`.

    Raises one of the exceptions that `read` turns into a warning for a record that is not as this version writes it.
    """
    case = record.case
    parts = paired_rounds.measured_parts(record)
    medians = {part: _microseconds(_median(_pooled(data["device_time"]))) for part, data in parts.items()}
    device_time = _sum(medians.get(part) for part in case.parts)
    bytes_compulsory = _sum(record.bytes_compulsory.get(part) for part in case.parts)
    busy_time = _sum(_busy_us(parts[part]) if part in parts else None for part in case.parts)
    rate, unit = _rate(record, device_time, bytes_compulsory)
    ceiling = _ceiling(case, ceilings.get(record.segment or ""))
    measurement = record.measurement if record.status == "ok" and record.measurement else {}
    kernels, kernel_source = _kernels(record, parts)
    bytes_moved = _sum(record.kernels[part]["bytes_moved"] if part in record.kernels else None for part in case.parts)
    worst = max(record.errors, key=_severity, default={"error": None, "tolerance": None})
    row = {
        "block": case.block,
        "case": case.name,
        "direction": case.direction,
        "dtype": case.dtype,
        "precision": case.precision,
        "implementation": record.implementation,
        "compiler": record.compiler,
        "status": record.status,
        "detail": record.detail,
        "checked": record.checked,
        "target": record.target,
        "segment": record.segment,
        "timer": measurement.get("timer") if parts else None,
        "kernels": kernels,
        "kernel_source": kernel_source,
        "device_time_us": device_time,
        "device_time_us_spread": _spread(case, parts),
        "forward_us": medians.get("forward"),
        "backward_us": medians.get("backward"),
        "busy_time_us": busy_time,
        "wall_time_us": _microseconds(_median(measurement.get("wall_time") or [])),
        "time_vs_xla": None,
        "verdict_vs_xla": None,
        "verdict_vs_xla_low": None,
        "verdict_vs_xla_high": None,
        "verdict_vs_xla_word": None,
        **paired_rounds.fields(record, device_time, busy_time),
        "rate": rate,
        "rate_unit": unit,
        "share_of_ceiling": rate * _UNITS[unit] / ceiling if rate and unit and ceiling else None,
        "compile_s": record.compile_s,
        "max_error": worst["error"],
        "tolerance": worst["tolerance"],
        "bytes_compulsory": bytes_compulsory,
        "bytes_moved": bytes_moved,
        "fusion_efficiency": bytes_compulsory / bytes_moved if bytes_compulsory and bytes_moved else None,
        **_traffic(record),
        **_roofline(record, bytes_moved, device_time, busy_time),
        "peak_memory_bytes": _peak(case, measurement),
        "peak_memory_reason": _why_no_peak(measurement),
        "peak_memory_planned_bytes": _planned_peak(case, measurement),
        "trace": record.trace.get("file") if record.trace else None,
        "provenance": _provenance(record),
        "products": _products(record),
    }
    _require_types(row)
    return row


def ceilings_of(run: Mapping[str, Any]) -> dict[str, Ceilings]:
    """The ceilings of a run.json, by segment; a segment without a GPU has none."""
    result = {}
    for segment in run.get("segments", []):
        found = segment["ceilings"]
        if found:
            result[segment["id"]] = Ceilings.from_json(found)
    return result


def segments_that_disagree(run: Mapping[str, Any]) -> dict[str, str]:
    """Ids of the segments in which the workers' clocks disagree, or one of them could not be held against the others,
    with words of that: nothing of one worker is held against another there."""
    found = {}
    for segment in run.get("segments", []):
        if without := segment.get("uncalibrated"):
            found[segment["id"]] = f"the clock of the worker {' and '.join(without)} could not be calibrated"
        elif (apart := disagreement(segment.get("clocks") or {})) > AGREEMENT:
            found[segment["id"]] = f"the workers' clocks differ by {apart:.1%}"
    return found


_IDENTITY = ("block", "case", "direction", "dtype", "precision", "implementation", "compiler", "status")
_TEXTS = (
    "detail", "target", "segment", "timer", "kernel_source", "rate_unit", "provenance", "products", "verdict_vs_xla",
    "verdict_vs_xla_word", "modes_unavailable", "peak_memory_reason", "trace", "bound",
    "traffic_unavailable", *(f"{timer}_vs_xla_word" for timer in paired_rounds.TIMERS),
)


def _require_types(row: Row) -> None:
    for name, value in row.items():
        if name in _IDENTITY:
            right = isinstance(value, str)
        elif name in _TEXTS:
            right = value is None or isinstance(value, str)
        elif name == "checked":
            right = value is None or isinstance(value, dict)
        else:
            right = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if not right:
            raise ValueError(f"{name} is of type {type(value).__name__}")


_UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}


def _pooled(rounds: list[list[float]]) -> list[float]:
    return [sample for samples in rounds for sample in samples]


def _median(samples: list[float]) -> float | None:
    return statistics.median(samples) if samples else None


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _sum(values: Iterable[Any]) -> Any:
    """The sum, or None where one is missing: part of a sum is not a smaller sum."""
    values = list(values)
    return None if None in values else sum(values)


def _busy_us(part: Mapping[str, Any]) -> float | None:
    return None if part["busy_time"] is None else _microseconds(_median(_pooled(part["busy_time"])))


def _spread(case: Case, parts: dict[str, dict[str, Any]]) -> float | None:
    if not all(part in parts for part in case.parts):
        return None
    samples = [_pooled(parts[part]["device_time"]) for part in case.parts]
    calls = [sum(call) for call in zip(*samples, strict=True)]
    if len(calls) < 4:
        return None
    low, _, high = statistics.quantiles(calls, n=4, method="inclusive")
    return (high - low) / 2 * 1e6


def _rate(record: Record, device_time: float | None, bytes_compulsory: int | None) -> tuple[float | None, str | None]:
    block = BLOCKS.get(record.case.block)
    if block is None or not device_time:
        return None, None
    work, unit = bytes_compulsory, "GB/s"
    if block.work == "flops":
        work, unit = _sum(record.flops.get(part) for part in record.case.parts), "TFLOP/s"
    return (None, None) if work is None else (work / (device_time * 1e-6) / _UNITS[unit], unit)


def _ceiling(case: Case, ceilings: Ceilings | None) -> float | None:
    """Bytes or FLOPs a second that the device reached in the case's segment at work of the case's sort."""
    block = BLOCKS.get(case.block)
    if block is None or ceilings is None:
        return None
    if block.work == "flops":
        return product_rate(case.block, case.dtype, case.precision, ceilings)
    traffic = block.compulsory_traffic(case).values()
    read, written = (sum(bytes) for bytes in zip(*traffic, strict=True))
    return ceilings.bandwidth(read, written) if ceilings.streams else None


def product_rate(block: str, dtype: str, precision: str, ceilings: Ceilings) -> float | None:
    """FLOP per second that products reached of the type that a block's are of in a case of `dtype`."""
    own = {tensor.dtype for tensor in BLOCKS[block].inputs} if block in BLOCKS else set()
    of = "float8_e4m3fn" if "float8_e4m3fn" in own else dtype
    return ceilings.products.get(f"{of}-{precision}" if of == "float32" else of)


def _kernels(record: Record, parts: dict[str, dict[str, Any]]) -> tuple[int | None, str | None]:
    if parts and not any(part["launches"] is None for part in parts.values()):
        launches = _sum(parts[part]["launches"] if part in parts else None for part in record.case.parts)
        return launches, "measured launches"
    if record.kernels:
        return _sum(part["launches"] for part in record.kernels.values()), "compiler"
    return None, None


def _traffic(record: Record) -> dict[str, Any]:
    """Sums over the parts; None where nobody counted, or could."""
    unavailable = [way["unavailable"] for way in (record.traffic or {}).values() if "unavailable" in way]

    def total(way: str, *counts: str) -> Any:
        parts = ((record.traffic or {}).get(way) or {}).get("parts") or {}
        return _sum(parts[part][count] if part in parts else None for part in record.case.parts for count in counts)

    return {
        "dram_bytes": total("alone", "dram_read", "dram_written"),
        "dram_bytes_call": total("call", "dram_read", "dram_written"),
        "l2_bytes": total("alone", "l2"),
        "traffic_unavailable": unavailable[0] if unavailable else None,
    }


def _roofline(
    record: Record, bytes_moved: int | None, device_time: float | None, busy_time: float | None
) -> dict[str, Any]:
    flops = _sum(record.flops.get(part) for part in record.case.parts)
    counted = _traffic(record)["dram_bytes_call"]
    parts = [record.kernels.get(part, {}).get("roofline") for part in record.case.parts]
    known = [part for part in parts if part is not None]
    whole = len(known) == len(parts)
    floor = _sum(part["floor_us"] for part in known) if whole else None
    gaps = None if device_time and busy_time is None else (device_time or 0) - (busy_time or 0)
    return {
        "intensity_flop_per_byte": intensity(flops, bytes_moved),
        "intensity_measured": intensity(flops, counted),
        "floor_us": floor,
        "share_of_attainable": floor / device_time if floor is not None and device_time else None,
        "gflop_per_s": flops / device_time / 1e3 if flops is not None and device_time else None,
        "attainable_gflop_per_s": flops / floor / 1e3 if flops is not None and floor else None,
        "recoverable_us": _sum(part["recoverable_us"] for part in known) if whole and device_time else None,
        "bound": None if gaps is None or not whole else _bound([part["bound_us"] for part in known], gaps),
    }


def _bound(parts: Iterable[Mapping[str, float]], gaps: float) -> str | None:
    """The one with most of the time; None where nothing has any, or where that is of kernels of which it is not known.
    """
    time = {"launch": gaps}
    for part in parts:
        for bound, microseconds in part.items():
            time[bound] = time.get(bound, 0.0) + microseconds
    first = max(time, key=lambda bound: time[bound])
    return None if first == "unknown" or not time[first] else first


def _severity(error: Mapping[str, Any]) -> tuple[bool, float]:
    return ErrorCheck("", error["error"], error["tolerance"]).severity


def _peak(case: Case, measurement: Mapping[str, Any]) -> int | None:
    found = measurement.get("peak_memory_bytes") or {}
    peaks = [found[part] for part in case.parts if found.get(part) is not None]
    return max(peaks) if len(peaks) == len(case.parts) else None


def _planned_peak(case: Case, measurement: Mapping[str, Any]) -> int | None:
    if _peak(case, measurement) is not None:
        return None
    found = measurement.get("peak_memory") or {}
    known = [found.get(part, {}) for part in case.parts]
    peaks = [each["planned"] if each.get("bytes") is None else each["bytes"] for each in known if each]
    return None if len(peaks) < len(case.parts) or None in peaks else max(peaks)


def _why_no_peak(measurement: Mapping[str, Any]) -> str | None:
    found = measurement.get("peak_memory") or {}
    return next((peak["reason"] for peak in found.values() if peak["bytes"] is None), None)


def _provenance(record: Record) -> str | None:
    """Of all kernels: "replayed", or with counts where they differ: "compiled 3, not autotuned 1"."""
    counts = Counter[str]()
    for part in record.kernels.values():
        counts.update(part["provenance"])
    if not counts:
        return None
    if len(counts) == 1:
        return next(iter(counts)) or None
    return ", ".join(f"{name or 'unknown'} {count}" for name, count in counts.most_common())


def _products(record: Record) -> str | None:
    """Who computes the products of which stages, forward and backward: "cuBLAS qkv, out; triton down"."""
    found: dict[str, dict[str, None]] = {}
    for part in record.kernels.values():
        for who, stages in part.get("products", {}).items():
            found.setdefault(who, {}).update(dict.fromkeys(stages))
    return "; ".join(f"{who} {', '.join(stages)}".rstrip() for who, stages in found.items()) or None
