"""Values that a report's columns show of one record; None where a value was not measured or is not known.

Only a record that is `ok` has times: the time of a wrong result is not a result.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from ..graph.analyse.roofline import Ceilings
from ..numerics.errors import ErrorCheck
from ..plan.paired_rounds import measured_parts
from ..record.record import Record
from ..record.record_fields import ErrorField, Measurement, PeakMemory, RankFields
from ..spec.blocks import BLOCKS

_RATE_UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
_NOT_TIMED: Measurement = {"timer": None, "parts": None}


class RecordValues:
    """One record, and the ceilings of its segment where those are known.

    A sum over forward and backward is None where one of them is missing.
    """

    def __init__(self, record: Record, ceilings: Ceilings | None) -> None:
        self.record, self.case, self.ceilings = record, record.case, ceilings
        self.parts = measured_parts(record)
        self.measurement = (record.measurement if record.status == "ok" else None) or _NOT_TIMED

    @cached_property
    def device_time_us(self) -> float | None:
        return total(self.part_us(part) for part in self.case.phases)

    def part_us(self, part: str) -> float | None:
        return statistics.median(_pooled(self.parts[part]["device_time"])) * 1e6 if part in self.parts else None

    @cached_property
    def spread_us(self) -> float | None:
        """Half the interquartile range of a whole call's device time; None below four samples."""
        if not all(part in self.parts for part in self.case.phases):
            return None
        samples = [_pooled(self.parts[part]["device_time"]) for part in self.case.phases]
        calls = [sum(call) for call in zip(*samples, strict=True)]
        if len(calls) < 4:
            return None
        low, _, high = statistics.quantiles(calls, n=4, method="inclusive")
        return (high - low) / 2 * 1e6

    @cached_property
    def busy_time_us(self) -> float | None:
        busy = [self.parts[part]["busy_time"] if part in self.parts else None for part in self.case.phases]
        return total(None if rounds is None else statistics.median(_pooled(rounds)) * 1e6 for rounds in busy)

    @property
    def wall_time_us(self) -> float | None:
        rounds = self.measurement.get("wall_time")
        return statistics.median(rounds) * 1e6 if rounds else None

    @property
    def launch_gap(self) -> float | None:
        time, busy = self.device_time_us, self.busy_time_us
        return (time - busy) / time if time and busy is not None else None

    @property
    def modes_unavailable(self) -> str | None:
        modes: Mapping[str, Any] = self.measurement.get("modes", {})
        return "; ".join(f"{mode}: {m['unavailable']}" for mode, m in modes.items() if "unavailable" in m) or None

    @property
    def command_buffer_launches(self) -> int | None:
        buffers = self.measurement.get("command_buffers")
        return sum(inside for inside, _ in buffers.values()) if buffers else None

    @property
    def graph_inputs(self) -> str | None:
        """Each way with its names: "static weight; copied x, d_y"."""
        graphs = self.record.cuda_graph
        if graphs is None:
            return None
        ways = {"static": graphs["static"], "copied": graphs["copied"]}
        return "; ".join(f"{way} {', '.join(names)}" for way, names in ways.items() if names)

    @property
    def throttled_rounds(self) -> int | None:
        known = [found for found in self.measurement.get("conditions", []) if found is not None]
        return sum(bool(found["throttled"]) for found in known) if known else None

    @property
    def unsettled_rounds(self) -> int | None:
        warm_up = self.measurement.get("warm_up")
        return warm_up["settled"].count(False) if warm_up and warm_up["settled"] else None

    @property
    def processes(self) -> int | None:
        return len(set(self.measurement.get("processes", []))) or None

    @cached_property
    def flops(self) -> float | None:
        return total(self.record.flops.get(part) for part in self.case.phases)

    @cached_property
    def bytes_compulsory(self) -> int | None:
        return total(self.record.bytes_compulsory.get(part) for part in self.case.phases)

    @cached_property
    def bytes_declared(self) -> int | None:
        kernels = self.record.kernels
        return total(kernels[part]["bytes_declared"] if part in kernels else None for part in self.case.phases)

    @property
    def rate(self) -> float | None:
        return self._rate[0]

    @property
    def rate_unit(self) -> str | None:
        return self._rate[1]

    @cached_property
    def _rate(self) -> tuple[float | None, str | None]:
        block = BLOCKS.get(self.case.block)
        if block is None or not self.device_time_us:
            return None, None
        work, unit = (self.flops, "TFLOP/s") if block.work == "flops" else (self.bytes_compulsory, "GB/s")
        return (None, None) if work is None else (work / (self.device_time_us * 1e-6) / _RATE_UNITS[unit], unit)

    @property
    def share_of_ceiling(self) -> float | None:
        rate, unit = self._rate
        ceiling = self._ceiling() if rate and unit else None
        return rate * _RATE_UNITS[unit] / ceiling if rate and unit and ceiling else None

    def _ceiling(self) -> float | None:
        """Bytes or FLOPs per second that the device reached in the segment at the same kind of work."""
        case, ceilings = self.case, self.ceilings
        if ceilings is None:
            return None
        block = BLOCKS[case.block]
        if block.work == "flops":
            return product_rate(case.block, case.dtype, case.precision, ceilings)
        read, written = (sum(each) for each in zip(*block.compulsory_traffic(case).values(), strict=True))
        return ceilings.bandwidth(read, written) if ceilings.streams else None

    @property
    def kernels(self) -> int | None:
        if self.kernel_source == "measured launches":
            return total(self.parts[part]["launches"] if part in self.parts else None for part in self.case.phases)
        return total(part["launches"] for part in self.record.kernels.values()) if self.record.kernels else None

    @property
    def kernel_source(self) -> str | None:
        if self.parts and not any(part["launches"] is None for part in self.parts.values()):
            return "measured launches"
        return "compiler" if self.record.kernels else None

    @property
    def worst_error(self) -> ErrorField | None:
        """The error furthest beyond its tolerance, or nearest to it."""
        return max(self.record.errors, key=lambda e: ErrorCheck("", e["error"], e["tolerance"]).severity, default=None)

    def traffic(self, method: str, *counts: str) -> Any:
        """Sum of ncu's counts; method: "alone" or "call"."""
        found: Any = (self.record.traffic or {}).get(method, {})
        parts = found.get("parts", {})
        return total(parts[part][count] if part in parts else None for part in self.case.phases for count in counts)

    @property
    def traffic_unavailable(self) -> str | None:
        methods: Mapping[str, Any] = self.record.traffic or {}
        return next((found["unavailable"] for found in methods.values() if "unavailable" in found), None)

    @cached_property
    def _roofline(self) -> list[Any] | None:
        """By part, the summary against the roofline; None where one part has none."""
        found = [self.record.kernels[p].get("roofline") if p in self.record.kernels else None for p in self.case.phases]
        return None if None in found else found

    @cached_property
    def roofline_time_us(self) -> float | None:
        return None if self._roofline is None else total(part["roofline_time_us"] for part in self._roofline)

    @property
    def recoverable_us(self) -> float | None:
        if self._roofline is None or not self.device_time_us:
            return None
        return total(part["recoverable_us"] for part in self._roofline)

    @property
    def bound(self) -> str | None:
        """The bound of most of the time; None where that share of the time has no known bound."""
        if self._roofline is None or (self.device_time_us and self.busy_time_us is None):
            return None
        time = {"launch": (self.device_time_us or 0) - (self.busy_time_us or 0)}
        for part in self._roofline:
            for bound, microseconds in part["bound_us"].items():
                time[bound] = time.get(bound, 0.0) + microseconds
        longest = max(time, key=lambda bound: time[bound])
        return None if longest == "unknown" or not time[longest] else longest

    @property
    def peak_memory_bytes(self) -> int | None:
        found = self.measurement.get("peak_memory_bytes") or {}
        return _largest([found.get(part) for part in self.case.phases])

    @property
    def peak_memory_reason(self) -> str | None:
        return next((peak["reason"] for peak in self._peaks.values() if peak["bytes"] is None), None)

    @property
    def peak_memory_planned_bytes(self) -> int | None:
        if self.peak_memory_bytes is not None or not all(part in self._peaks for part in self.case.phases):
            return None
        peaks = [self._peaks[part] for part in self.case.phases]
        return _largest([peak["planned"] if peak["bytes"] is None else peak["bytes"] for peak in peaks])

    @property
    def _peaks(self) -> Mapping[str, PeakMemory]:
        return self.measurement.get("peak_memory") or {}

    def of_slowest_rank(self, value: Callable[[RankFields], float | None]) -> float | None:
        """Return a value of the GPU whose call took longest; None for a case of one GPU."""
        ranks = self.record.parallel["ranks"] if self.record.parallel and self.record.status == "ok" else []
        return value(max(ranks, key=lambda rank: rank["device_time"])) if ranks else None

    @property
    def provenance(self) -> str | None:
        """One word for all kernels, or each word with its count: "compiled 3, not autotuned 1"."""
        counts = Counter[str]()
        for part in self.record.kernels.values():
            counts.update(part["provenance"])
        if len(counts) < 2:
            return next(iter(counts), None) or None
        return ", ".join(f"{word or 'unknown'} {count}" for word, count in counts.most_common())

    @property
    def products(self) -> str | None:
        """Forward and backward together: "cuBLAS qkv, out; triton down"."""
        found: dict[str, dict[str, None]] = {}
        for part in self.record.kernels.values():
            for library, stages in part.get("products", {}).items():
                found.setdefault(library, {}).update(dict.fromkeys(stages))
        return "; ".join(f"{library} {', '.join(stages)}".rstrip() for library, stages in found.items()) or None


def product_rate(block: str, dtype: str, precision: str, ceilings: Ceilings) -> float | None:
    """Return the measured FLOP per second of products in the type that the block multiplies in a case of `dtype`."""
    own = {tensor.dtype for tensor in BLOCKS[block].inputs} if block in BLOCKS else set()
    multiplied = "float8_e4m3fn" if "float8_e4m3fn" in own else dtype
    return ceilings.products.get(f"{multiplied}-{precision}" if multiplied == "float32" else multiplied)


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def total(values: Iterable[Any]) -> Any:
    """Return the sum, or None where one value is missing."""
    values = list(values)
    return None if None in values else sum(values)


def _pooled(rounds: list[list[float]]) -> list[float]:
    return [sample for samples in rounds for sample in samples]


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
