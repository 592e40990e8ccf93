"""The nested fields of a record. Times are in seconds and sizes in bytes. A phase is "forward" or "backward".

Records and their fields are written without the fields that have their default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

Phase = str


class Fields(msgspec.Struct, omit_defaults=True):
    """Fields that JSON has without those of a default value."""


class Checked(Fields):
    """Where a record's numbers were checked. case: the names of the checked cases."""

    device: str
    backend: str
    dtype: str
    case: str


class ErrorCheck(Fields):
    """The error of one output, or of a gradient named d_<input>, and its tolerance; both are dimensionless.

    sums: the dtype to which the program rounds the sums that it consists of, where the tolerance is derived from that
    (compare.numerics.rounded_sums); None for the tolerance of everybody.
    """

    name: str
    error: float
    tolerance: float
    sums: str | None = None

    @property
    def passes(self) -> bool:
        return self.error <= self.tolerance and math.isfinite(self.error)  # an overflow of plain code allows nothing

    @property
    def severity(self) -> tuple[bool, float]:
        """Return a sort key that puts the worst check last: failed checks, then the ratio of error to tolerance.

        Two input sets have different tolerances, so the smaller of two errors may be the one that fails.
        """
        if not math.isfinite(self.error):
            return True, math.inf
        return not self.passes, self.error / self.tolerance if self.tolerance else self.error


class KernelsOfPhase(Fields):
    """Summary of one phase of the fusion graph, which the tables of times show without reading graphs.

    launches, bytes_declared: None where one kernel's are not known.
    provenance: word -> number of kernels.
    unjoined: names of device records that belong to no kernel of the graph.
    products: for a hand-written implementation, "cuBLAS", "triton" or "cuda" -> stages whose products it computes.
    """

    launches: int | None
    bytes_declared: int | None
    provenance: dict[str, int]
    unjoined: list[str] = []
    products: dict[str, list[str]] = {}


class RecordedTimeFields(Fields):
    """A time that the target's GPU took for the same kernels, or the reason why none is shown (compare.targets)."""

    device_time_us: float | None = None
    unavailable: str | None = None

    def __post_init__(self) -> None:
        require_one(device_time_us=self.device_time_us, unavailable=self.unavailable)


@dataclass(frozen=True)
class DeviceRecord:
    """One kernel, copy or memset as the GPU ran it; times on CUPTI's clock.

    bytes: the size of a copy or memset. The other fields are a kernel's, as in compare.graph.model.Launch.
    """

    name: str
    start: float
    end: float
    grid: tuple[int, int, int] | None = None
    bytes: int | None = None
    registers: int | None = field(default=None, kw_only=True)
    shared_bytes: int | None = field(default=None, kw_only=True)
    block: tuple[int, int, int] | None = field(default=None, kw_only=True)
    local_bytes: int | None = field(default=None, kw_only=True)


class TimesOfPhase(Fields):
    """Samples of one phase, a list a round.

    busy_time, launches and records are None where the timer sees no single kernels, as with CUDA events.
    records: of a median call; only of the main mode.
    poisoned: every call's outputs lay in memory that was filled with NaN before.
    """

    device_time: list[list[float]]
    busy_time: list[list[float]] | None
    launches: int | None
    records: list[DeviceRecord] | None = None
    poisoned: bool = False


class TimedMode(Fields):
    """Times in another mode than the main one; or the mode that the program already runs in; or why there are none.

    settled: one entry a round. command_buffers: as in Measurement.
    """

    phases: dict[Phase, TimesOfPhase] | None = None
    same_as: str | None = None
    unavailable: str | None = None
    settled: list[bool] = []
    command_buffers: dict[Phase, tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        require_one(phases=self.phases, same_as=self.same_as, unavailable=self.unavailable)


class WarmUp(Fields):
    """One entry a round."""

    seconds: list[float]
    settled: list[bool]


class PeakMemory(Fields):
    """The most bytes that one call needs beyond those in use before it: outputs, temporaries, workspaces.

    bytes: measured by the allocator's statistics, rounded as it rounds; None for the `reason`, always for XLA.
    planned: the compiler's own plan of outputs and temporaries, where it has one; this is XLA's number.
    """

    bytes: int | None
    planned: int | None = None
    reason: str | None = None


class Condition(Fields):
    """State of the GPU right after a round (compare.measure.gpu_conditions). throttled: the reasons."""

    throttled: list[str]
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None


class Measurement(Fields):
    """Times of one implementation of one case.

    phases: None where no device clock ran.
    wall_time: one entry a round.
    modes: by name of another timing mode (compare.plan.timing_modes).
    processes: number of the worker process of each round.
    command_buffers: phase -> (launches replayed from XLA's command buffers or from CUDA graphs, all launches) in the
    main mode; None for implementations that replay none, and without CUPTI.
    conditions: one entry a round, None where the GPU did not answer.
    """

    timer: str | None
    phases: dict[Phase, TimesOfPhase] | None
    wall_time: list[float] = []
    modes: dict[str, TimedMode] = {}
    processes: list[int] = []
    warm_up: WarmUp | None = None
    command_buffers: dict[Phase, tuple[int, int]] | None = None
    peak_memory: dict[Phase, PeakMemory] | None = None
    conditions: list[Condition | None] = []

    def __post_init__(self) -> None:
        """Raise ValueError where the rounds do not fit together, or hold a time that is not positive."""
        counts = {len(self.wall_time)} if self.wall_time else set()
        for phases in (self.phases or {}, *(mode.phases for mode in self.modes.values() if mode.phases)):
            rounds = [times.device_time for times in phases.values()]
            if any(list(map(len, others)) != list(map(len, rounds[0])) for others in rounds):
                raise ValueError("forward and backward have different numbers of samples")
            busy = [times.busy_time for times in phases.values() if times.busy_time is not None]
            if not all(samples and min(samples) > 0 for of_phase in [*rounds, *busy] for samples in of_phase):
                raise ValueError("a round has no sample, or a sample that is not positive")
            counts |= {len(of_phase) for of_phase in rounds}
        if not all(time > 0 for time in self.wall_time):
            raise ValueError("a wall time is not positive")
        if self.processes and counts - {len(self.processes)}:
            raise ValueError(f"processes are given for {len(self.processes)} rounds of {max(counts)}")


class RankFields(Fields):
    """One GPU's median call of a case that spans several (compare.measure.rank_measurement).

    communication: communication kernels ran. compute: other kernels ran. overlap: both ran. alone_device_time and
    alone_compute: of the program without exchanges, None where there is none. sent_bytes: by the shapes of the
    exchanges, None where they are not known. least_sent_bytes: what the routing makes this rank send.
    """

    device_time: float
    busy_time: float
    communication: float
    compute: float
    overlap: float
    alone_device_time: float | None
    alone_compute: float | None
    sent_bytes: int | None
    least_sent_bytes: int


class ParallelFields(Fields):
    """A case that spans several GPUs. ranks: by rank. alone_unavailable: why no program without exchanges was timed."""

    ranks: list[RankFields]
    alone_unavailable: str | None = None


class GraphInputs(Fields):
    """How the CUDA graphs of a call get their inputs, by name; the gradient of output y is d_y.

    static: a graph reads them where the caller keeps them. copied: each call first copies them into a graph's memory,
    and that time counts.
    """

    static: tuple[str, ...]
    copied: tuple[str, ...]


class TrafficOfKernel(Fields):
    """Bytes over all launches of one kernel. kernel: its index in the graph. l2: None where it is not known."""

    kernel: int
    dram_read: int
    dram_written: int
    l2: int | None
    launches: int | None = None


class UncountedTraffic(Fields):
    """Copies and memsets, which ncu does not count."""

    launches: int
    bytes: int


class TrafficOfPhase(Fields):
    """Sums over one phase, and each kernel's bytes. unjoined: names of launches outside the graph's kernels."""

    launches: int
    dram_read: int | None
    dram_written: int | None
    l2: int | None
    kernels: list[TrafficOfKernel]
    uncounted: UncountedTraffic | None = None
    unjoined: list[str] = []


class Traffic(Fields):
    """Bytes that ncu counted in one way, or the reason why there is no count.

    cache_control: ncu's option of that name. final: another try would fail in the same way.
    """

    phases: dict[Phase, TrafficOfPhase] | None = None
    cache_control: str = ""
    unavailable: str | None = None
    final: bool = False

    def __post_init__(self) -> None:
        require_one(phases=self.phases, unavailable=self.unavailable)


class TimelineFields(Fields):
    """The file of the timeline of one call, relative to the run folder (compare.measure.timeline), or why none exists.
    """

    file: str | None = None
    unavailable: str | None = None

    def __post_init__(self) -> None:
        require_one(file=self.file, unavailable=self.unavailable)


def require_one(**fields: object) -> None:
    """Raise ValueError unless exactly one of the fields has a value."""
    if sum(value is not None for value in fields.values()) != 1:
        raise ValueError(f"expected a value of one of {', '.join(fields)}")
