"""`Row`: the values that reports show of one result; None where a value was not measured or is not known.

Only a record that is `ok` has times: the time of a wrong result is not a result. Each value is computed when it is
asked for. A result without a record has the values that its graph alone gives.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ..backends import worker_of
from ..graph.analyse import summary
from ..graph.analyse.call_time import call_time
from ..graph.analyse.roofline import Ceilings
from ..graph.analyse.totals import Tally, Totals, totals
from ..plan import paired_rounds
from ..plan.paired_rounds import BASELINE, Comparison, measured_phases, median_us
from ..plan.peers import PEERS, TIMES, is_a, is_own
from ..plan.speedup import Speedup
from ..record.record import Record
from ..record.record_fields import ErrorCheck, Measurement, PeakMemory, RankFields, TimesOfPhase
from ..spec.blocks import BLOCKS
from ..spec.case import Case

if TYPE_CHECKING:
    from ..graph.model import FusionGraph, PredictedTime

Group = tuple[Any, ...]

_RATE_UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
_NOT_TIMED = Measurement(timer=None, phases=None)


@dataclass(frozen=True, eq=False)
class Row:
    """The values of one result. A sum over forward and backward is None where one of them is missing.

    id, name, number, segment_ceilings, uncalibrated: of the result. record: None for a graph alone. groups: the rows of
    all results of the path by `group`. read_graph, read_ceilings, read_predicted: return the result's graph, the
    ceilings that price it, and the graph with predicted times; None where there is none.
    """

    id: str
    name: str
    number: int
    record: Record | None
    segment_ceilings: Ceilings | None
    uncalibrated: bool
    groups: Mapping[Group, list[Row]]
    read_graph: Callable[[], FusionGraph | None]
    read_ceilings: Callable[[], Ceilings | None]
    read_predicted: Callable[[], FusionGraph | None]

    @property
    def case(self) -> Case | None:
        return None if self.record is None else self.record.case

    @property
    def phases(self) -> tuple[str, ...]:
        return ("forward",) if self.case is None else tuple(self.case.phases)

    @cached_property
    def times(self) -> Mapping[str, TimesOfPhase]:
        """The times of each phase that count."""
        return {} if self.record is None else measured_phases(self.record)

    @property
    def measurement(self) -> Measurement:
        measured = self.record is not None and self.record.status == "ok"
        return (self.record.measurement if self.record is not None and measured else None) or _NOT_TIMED

    # Identity

    @property
    def block(self) -> str:
        return self.id if self.case is None else self.case.block

    @property
    def case_name(self) -> str:
        return "" if self.case is None else self.case.name

    @property
    def direction(self) -> str:
        return "" if self.case is None else self.case.direction

    @property
    def dtype(self) -> str:
        return "" if self.case is None else self.case.dtype

    @property
    def precision(self) -> str:
        return "" if self.case is None else self.case.precision

    @property
    def implementation(self) -> str:
        return self.name

    @property
    def compiler(self) -> str | None:
        if self.record is None:
            return None if self._graph is None else self._graph.compiler
        return self.record.compiler

    @property
    def status(self) -> str:
        return "compiled" if self.record is None else self.record.status

    @property
    def detail(self) -> str | None:
        return None if self.record is None else self.record.detail

    @property
    def target(self) -> str | None:
        if self.record is None:
            return None if self._graph is None else self._graph.target or None
        return self.record.target

    @property
    def segment(self) -> str | None:
        return None if self.record is None else self.record.segment

    @property
    def timer(self) -> str | None:
        return self.measurement.timer if self.times else None

    @property
    def compile_s(self) -> float | None:
        return None if self.record is None else self.record.compile_s

    @property
    def trace(self) -> str | None:
        return self.record.trace.file if self.record and self.record.trace else None

    def checked(self, about: str) -> str | None:
        """Return the "device", "backend", "dtype" or "case" of the check; None where nothing was checked."""
        return getattr(self.record.checked, about, None) if self.record else None

    @cached_property
    def _graph(self) -> FusionGraph | None:
        """The graph of a result that has no record; a record has what is needed of its graph."""
        return self.read_graph() if self.record is None else None

    @cached_property
    def _totals(self) -> Totals | None:
        return None if self._graph is None else totals(self._graph, ceilings=self.read_ceilings())

    # Times

    @cached_property
    def device_time_us(self) -> float | None:
        return total(self.phase_us(phase) for phase in self.phases)

    def phase_us(self, phase: str) -> float | None:
        return median_us(self.times[phase].device_time) if phase in self.times else None

    def time_us_in(self, mode: str) -> float | None:
        """Return the device time in a timing mode (compare.plan.timing_modes)."""
        return None if self.record is None else paired_rounds.device_time_us(self.record, mode)

    @property
    def recorded_time_us(self) -> float | None:
        return self.record.recorded.device_time_us if self.record and self.record.recorded else None

    @property
    def recorded_time_reason(self) -> str | None:
        return self.record.recorded.unavailable if self.record and self.record.recorded else None

    @cached_property
    def predicted(self) -> PredictedTime | None:
        """The predicted time of a call that was compiled, also where one is recorded; None where it was measured."""
        graph = self.read_predicted() if self.status == "compiled" else None
        return call_time(graph) if graph is not None and graph.kernels and not graph.measured else None

    @property
    def predicted_time_us(self) -> float | None:
        return None if self.predicted is None else self.predicted.us

    @cached_property
    def spread_us(self) -> float | None:
        """Half the interquartile range of a whole call's device time; None below four samples."""
        if not all(phase in self.times for phase in self.phases):
            return None
        samples = [_pooled(self.times[phase].device_time) for phase in self.phases]
        calls = [sum(call) for call in zip(*samples, strict=True)]
        if len(calls) < 4:
            return None
        low, _, high = statistics.quantiles(calls, n=4, method="inclusive")
        return (high - low) / 2 * 1e6

    @cached_property
    def busy_time_us(self) -> float | None:
        busy = [self.times[phase].busy_time if phase in self.times else None for phase in self.phases]
        return total(None if rounds is None else median_us(rounds) for rounds in busy)

    @property
    def wall_time_us(self) -> float | None:
        rounds = self.measurement.wall_time
        return statistics.median(rounds) * 1e6 if rounds else None

    @property
    def launch_gap(self) -> float | None:
        time, busy = self.device_time_us, self.busy_time_us
        return (time - busy) / time if time and busy is not None else None

    @property
    def modes_unavailable(self) -> str | None:
        modes = self.measurement.modes.items()
        return "; ".join(f"{name}: {mode.unavailable}" for name, mode in modes if mode.unavailable is not None) or None

    @property
    def command_buffer_launches(self) -> int | None:
        buffers = self.measurement.command_buffers
        return sum(inside for inside, _ in buffers.values()) if buffers else None

    @property
    def graph_inputs(self) -> str | None:
        """Each way with its names: "static weight; copied x, d_y"."""
        graphs = self.record.cuda_graph if self.record else None
        if graphs is None:
            return None
        ways = {"static": graphs.static, "copied": graphs.copied}
        return "; ".join(f"{way} {', '.join(names)}" for way, names in ways.items() if names)

    @property
    def throttled_rounds(self) -> int | None:
        known = [condition for condition in self.measurement.conditions if condition is not None]
        return sum(bool(condition.throttled) for condition in known) if known else None

    @property
    def unsettled_rounds(self) -> int | None:
        warm_up = self.measurement.warm_up
        return warm_up.settled.count(False) if warm_up and warm_up.settled else None

    @property
    def processes(self) -> int | None:
        return len(set(self.measurement.processes)) or None

    # Work

    @cached_property
    def flops(self) -> float | None:
        return total(self.record.flops.get(phase) for phase in self.phases) if self.record else None

    @cached_property
    def bytes_compulsory(self) -> float | None:
        if self.record is None:
            return None if self._totals is None else self._totals.compulsory_tally.exact or None
        return total(self.record.bytes_compulsory.get(phase) for phase in self.phases)

    @cached_property
    def bytes_declared(self) -> float | None:
        if self.record is None:
            return None if self._totals is None else self._totals.declared.exact
        kernels = self.record.kernels
        return total(kernels[phase].bytes_declared if phase in kernels else None for phase in self.phases)

    @property
    def fusion_efficiency(self) -> float | None:
        if self.record is None:
            return None if self._totals is None else self._totals.fusion_efficiency
        return ratio(self.bytes_compulsory, self.bytes_declared)

    @property
    def dram_bytes(self) -> int | None:
        return self.traffic("alone", "dram_read", "dram_written")

    @property
    def dram_bytes_call(self) -> int | None:
        return self.traffic("call", "dram_read", "dram_written")

    @property
    def intensity_flop_per_byte(self) -> float | None:
        return ratio(self.flops, self.bytes_declared)

    @property
    def intensity_measured(self) -> float | None:
        return ratio(self.flops, self.dram_bytes_call)

    @property
    def gflop_per_s(self) -> float | None:
        return None if self.flops is None or not self.device_time_us else self.flops / self.device_time_us / 1e3

    @property
    def rate(self) -> float | None:
        return self._rate[0]

    @property
    def rate_unit(self) -> str | None:
        return self._rate[1]

    @cached_property
    def _rate(self) -> tuple[float | None, str | None]:
        block = BLOCKS.get(self.case.block) if self.case else None
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
        case, ceilings = self.case, self.segment_ceilings
        if case is None or ceilings is None:
            return None
        block = BLOCKS[case.block]
        if block.work == "flops":
            return product_rate(case.block, case.dtype, case.precision, ceilings)
        read, written = (sum(each) for each in zip(*block.compulsory_traffic(case).values(), strict=True))
        return ceilings.bandwidth(read, written) if ceilings.streams else None

    @property
    def kernels(self) -> int | None:
        if self.kernel_source == "measured launches":
            return total(self.times[phase].launches if phase in self.times else None for phase in self.phases)
        if self.record is None:
            launches = [] if self._graph is None else [kernel.launches for kernel in self._graph.kernels or ()]
            return None if self._graph is None else total(launches)
        return total(phase.launches for phase in self.record.kernels.values()) if self.record.kernels else None

    @property
    def kernel_source(self) -> str | None:
        if self.times and not any(phase.launches is None for phase in self.times.values()):
            return "measured launches"
        return "compiler" if self._graph is not None or (self.record and self.record.kernels) else None

    @property
    def worst_error(self) -> ErrorCheck | None:
        """The error furthest beyond its tolerance, or nearest to it."""
        errors = self.record.errors if self.record else []
        return max(errors, key=lambda check: check.severity, default=None)

    @property
    def max_error(self) -> float | None:
        return None if self.worst_error is None else self.worst_error.error

    @property
    def tolerance(self) -> float | None:
        return None if self.worst_error is None else self.worst_error.tolerance

    def traffic(self, method: str, *counts: str) -> Any:
        """Sum of ncu's counts; method: "alone" or "call"."""
        counted = ((self.record.traffic if self.record else None) or {}).get(method)
        phases = (counted and counted.phases) or {}
        return total(
            getattr(phases[phase], count) if phase in phases else None for phase in self.phases for count in counts
        )

    @property
    def traffic_unavailable(self) -> str | None:
        methods = ((self.record.traffic if self.record else None) or {}).values()
        return next((counted.unavailable for counted in methods if counted.unavailable is not None), None)

    # The roofline

    @cached_property
    def _roofline(self) -> list[summary.RooflineOfPhase] | None:
        """By phase, the sums of the graph against the ceilings; None where there are none."""
        graph, ceilings = self.read_graph(), self.read_ceilings()
        if self.record is None or graph is None or ceilings is None:
            return None
        return summary.rooflines(graph, self.phases, ceilings)

    @cached_property
    def roofline_time_us(self) -> float | None:
        if self.record is None:
            return None if self._totals is None else _exact(self._totals.roofline_time_us)
        return None if self._roofline is None else total(phase.roofline_time_us for phase in self._roofline)

    @property
    def share_of_roofline(self) -> float | None:
        return ratio(self.roofline_time_us, self.device_time_us)

    @property
    def roofline_gflop_per_s(self) -> float | None:
        return None if self.flops is None or not self.roofline_time_us else self.flops / self.roofline_time_us / 1e3

    @property
    def recoverable_us(self) -> float | None:
        if self.record is None:
            return None if self._totals is None else _exact(self._totals.recoverable_us)
        if self._roofline is None or not self.device_time_us:
            return None
        return total(phase.recoverable_us for phase in self._roofline)

    @property
    def bound(self) -> str | None:
        """The bound of most of the time; None where that share of the time has no known bound."""
        if self._roofline is None or (self.device_time_us and self.busy_time_us is None):
            return None
        time = {"launch": (self.device_time_us or 0) - (self.busy_time_us or 0)}
        for phase in self._roofline:
            for bound, microseconds in phase.bound_us.items():
                time[bound] = time.get(bound, 0.0) + microseconds
        longest = max(time, key=lambda bound: time[bound])
        return None if longest == "unknown" or not time[longest] else longest

    @property
    def peak_memory_bytes(self) -> int | None:
        peaks = self._peaks
        return _largest([peaks[phase].bytes if phase in peaks else None for phase in self.phases])

    @property
    def peak_memory_reason(self) -> str | None:
        return next((peak.reason for peak in self._peaks.values() if peak.bytes is None), None)

    @property
    def peak_memory_planned_bytes(self) -> int | None:
        if self.peak_memory_bytes is not None or not all(phase in self._peaks for phase in self.phases):
            return None
        peaks = [self._peaks[phase] for phase in self.phases]
        return _largest([peak.planned if peak.bytes is None else peak.bytes for peak in peaks])

    @property
    def _peaks(self) -> Mapping[str, PeakMemory]:
        return self.measurement.peak_memory or {}

    def of_slowest_rank(self, value: Callable[[RankFields, Sequence[RankFields]], float | None]) -> float | None:
        """Return a value of the GPU whose call took longest, given all GPUs' times; None for a case of one GPU."""
        parallel = self.record.parallel if self.record and self.record.status == "ok" else None
        ranks = parallel.ranks if parallel else []
        return value(max(ranks, key=lambda rank: rank.device_time), ranks) if ranks else None

    # Configurations

    @property
    def provenance(self) -> str | None:
        """One word for all kernels, or each word with its count: "compiled 3, not autotuned 1"."""
        counts = Counter[str]()
        for phase in self._kernels_by_phase:
            counts.update(phase.provenance)
        if len(counts) < 2:
            return next(iter(counts), None) or None
        return ", ".join(f"{word or 'unknown'} {count}" for word, count in counts.most_common())

    @property
    def products(self) -> str | None:
        """Forward and backward together: "cuBLAS qkv, out; triton down"."""
        found: dict[str, dict[str, None]] = {}
        for phase in self._kernels_by_phase:
            for library, stages in phase.products.items():
                found.setdefault(library, {}).update(dict.fromkeys(stages))
        return "; ".join(f"{library} {', '.join(stages)}".rstrip() for library, stages in found.items()) or None

    @property
    def _kernels_by_phase(self) -> list[Any]:
        return list(self.record.kernels.values()) if self.record else []

    # Compared with other results

    @cached_property
    def speedups(self) -> Mapping[str, Speedup]:
        """The result against the baseline, by every timer that timed both; {} for the baseline itself."""
        baseline = self._baseline
        if not self.device_time_us or baseline is None or baseline is self:
            return {}
        return paired_rounds.speedups(self.rounds, baseline.rounds)

    @cached_property
    def comparison(self) -> Comparison | None:
        """The comparison with the baseline."""
        return paired_rounds.comparison(self.speedups)

    @property
    def time_vs_xla(self) -> float | None:
        baseline = self._baseline
        return None if baseline is None else ratio(self.device_time_us or None, baseline.device_time_us)

    @property
    def _baseline(self) -> Row | None:
        timed = (row for row in self._rivals if row.name == BASELINE and row.device_time_us)
        return max(timed, key=lambda row: row.number, default=None)

    @property
    def _rivals(self) -> list[Row]:
        """All rows of the path whose times may be compared with this one's."""
        return self.groups.get(self.group, [])

    @cached_property
    def group(self) -> Group:
        """A value that is equal for results whose times may be compared."""
        record = self.record
        if record is None:
            return (self.id, self.number)
        case = record.case
        same = (case.block, case.name, case.direction, case.dtype, case.precision, record.segment, self.timer)
        return (*same, record.target, self.uncalibrated and worker_of(record.compiler) == "xla")

    @cached_property
    def rounds(self) -> paired_rounds.Rounds:
        return paired_rounds.Rounds({}, []) if self.record is None else paired_rounds.rounds_of(self.record)

    @cached_property
    def best_peers(self) -> Mapping[tuple[str, str], Row]:
        """The fastest peer by kind of PEERS and suffix of TIMES; {} for a result that is not the project's own."""
        best: dict[tuple[str, str], Row] = {}
        if self.case is None or not is_own(self.block, self.implementation):
            return best
        for kind in PEERS:
            peers = [row for row in self._rivals if is_a(kind, row.block, row.name)]
            for suffix, time in TIMES.items():
                timed = [peer for peer in peers if getattr(peer, time)]
                if getattr(self, time) and timed:
                    best[kind, suffix] = min(timed, key=partial(_value, time))
        return best

    def best_peer(self, kind: str, suffix: str = "") -> str | None:
        """Return the name of the fastest peer of a kind by a time."""
        best = self.best_peers.get((kind, suffix))
        return None if best is None else best.name

    def ratio_to_best(self, kind: str, suffix: str = "") -> float | None:
        """Return that peer's time over the result's own; above 1 the result is faster."""
        best, time = self.best_peers.get((kind, suffix)), TIMES[suffix]
        return None if best is None else ratio(getattr(best, time), getattr(self, time))

    def interval_to_best(self, kind: str) -> Speedup | None:
        """Return the comparison of that peer with the result from paired rounds of device time."""
        best = self.best_peers.get((kind, ""))
        found = None if best is None else paired_rounds.compare_rounds(best.rounds, self.rounds)
        return None if found is None else found.main


def _value(name: str, row: Row) -> float:
    value: float = getattr(row, name)
    return value


def _exact(time: Tally | None) -> float | None:
    return None if time is None else time.exact


def product_rate(block: str, dtype: str, precision: str, ceilings: Ceilings) -> float | None:
    """Return the FLOP per second of products in the type that the block multiplies in a case of `dtype`."""
    own = {tensor.dtype for tensor in BLOCKS[block].inputs} if block in BLOCKS else set()
    multiplied = "float8_e4m3fn" if "float8_e4m3fn" in own else dtype
    return ceilings.at(precision).rate("f32") if multiplied == "float32" else ceilings.products.get(multiplied)


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
