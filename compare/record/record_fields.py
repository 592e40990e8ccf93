"""Types of a record's nested fields, and the check that loaded data has them.

Times are in seconds and sizes in bytes. A part is "forward" or "backward". Older records lack the fields that are
`NotRequired`.
"""

# No `from __future__ import annotations` here: with it, TypedDict would not know which keys are required.
import types
from functools import cache
from typing import Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

Part = str


class ErrorField(TypedDict):
    """Error of one output, or of a gradient named d_<input>; dimensionless (compare.numerics.errors).

    sums: the dtype to which the program rounds its sums; its tolerance follows from it.
    """

    name: str
    error: float
    tolerance: float
    sums: NotRequired[str]


class RooflineFields(TypedDict):
    """One part's kernels against the device's ceilings (compare.graph.analyse.summary)."""

    roofline_time_us: float | None
    recoverable_us: float | None
    bound_us: dict[str, float]


class KernelsOfPart(TypedDict):
    """Summary of one part of the fusion graph.

    bytes_declared: null where one kernel's bytes are not known.
    provenance: word -> number of kernels.
    unjoined: names of device records that belong to no kernel of the graph.
    products: for a hand-written implementation, "cuBLAS", "triton" or "cuda" -> stages whose products it computes.
    """

    launches: int | None
    bytes_declared: int | None
    provenance: dict[str, int]
    unjoined: NotRequired[list[str]]
    products: NotRequired[dict[str, list[str]]]
    roofline: NotRequired[RooflineFields]


class RecordedTimeFields(TypedDict):
    """A time that the target's GPU took for the same kernels, or the reason why none is shown (compare.targets)."""

    device_time_us: NotRequired[float]
    unavailable: NotRequired[str]


class DeviceRecordFields(TypedDict):
    """One kernel, copy or memset of a median call.

    The other fields are as in compare.graph.model.Launch: null for copies and memsets, and absent in older records.
    """

    name: str
    start: float
    end: float
    grid: NotRequired[list[int] | None]
    block: NotRequired[list[int] | None]
    registers: NotRequired[int | None]
    shared_bytes: NotRequired[int | None]
    local_bytes: NotRequired[int | None]


class TimesOfPart(TypedDict):
    """Samples of one part, a list a round.

    busy_time, launches and records are null where the timer sees no single kernels, as with CUDA events.
    poisoned: every call's outputs lay in memory that was filled with NaN before.
    """

    device_time: list[list[float]]
    busy_time: list[list[float]] | None
    launches: int | None
    records: NotRequired[list[DeviceRecordFields] | None]
    poisoned: NotRequired[bool]


class TimedMode(TypedDict):
    """Times in another mode than the main one. settled: one entry a round. command_buffers: as in Measurement."""

    parts: dict[Part, TimesOfPart]
    settled: NotRequired[list[bool]]
    command_buffers: NotRequired[dict[Part, list[int]] | None]


class SameMode(TypedDict):
    """The program already runs in this mode by default."""

    same_as: Literal["cold"]


class UnavailableMode(TypedDict):
    """The reason why the mode has no times."""

    unavailable: str


class WarmUp(TypedDict):
    """One entry a round."""

    seconds: list[float]
    settled: list[bool]


class PeakMemory(TypedDict):
    """As compare.measure.measurement.Peak."""

    bytes: int | None
    planned: int | None
    reason: str | None


class Condition(TypedDict):
    """State of the GPU right after a round (compare.measure.gpu_conditions)."""

    throttled: list[str]
    sm_mhz: NotRequired[float | None]


class Measurement(TypedDict):
    """Times of one implementation of one case.

    parts: null where no device clock ran.
    wall_time: one entry a round.
    modes: by name of another timing mode (compare.plan.timing_modes).
    processes: number of the worker process of each round.
    command_buffers: part -> [launches replayed from XLA's command buffers or from CUDA graphs, all launches] in the
    main mode; null for implementations that replay none, and without CUPTI.
    conditions: one entry a round, null where the GPU did not answer.
    """

    timer: str | None
    parts: dict[Part, TimesOfPart] | None
    wall_time: NotRequired[list[float]]
    modes: NotRequired[dict[str, TimedMode | SameMode | UnavailableMode]]
    processes: NotRequired[list[int]]
    warm_up: NotRequired[WarmUp]
    command_buffers: NotRequired[dict[Part, list[int]] | None]
    peak_memory_bytes: NotRequired[dict[Part, int | None] | None]
    peak_memory: NotRequired[dict[Part, PeakMemory] | None]
    conditions: NotRequired[list[Condition | None]]


class RankFields(TypedDict):
    """One GPU's median call of a case that spans several (compare.measure.rank_measurement); times in seconds.

    communication: communication kernels ran. compute: other kernels ran. overlap: both ran. alone_device_time and
    alone_compute: of the program without exchanges, null where there is none. sent_bytes: by the shapes of the
    exchanges, null where they are not known. least_sent_bytes: what the routing makes this rank send.
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


class ParallelFields(TypedDict):
    """A case that spans several GPUs. ranks: by rank. alone_unavailable: why no program without exchanges was timed."""

    ranks: list[RankFields]
    alone_unavailable: NotRequired[str]


class CudaGraphFields(TypedDict):
    """How the CUDA graphs that every call replays get its inputs, by name; the gradient of output y is d_y.

    static: read where the caller keeps them. copied: each call first copies them into a graph's memory, and that time
    counts.
    """

    static: list[str]
    copied: list[str]


class TrafficOfKernel(TypedDict):
    """Bytes over all launches of one kernel. kernel: its index in the graph. l2: null where it is not known."""

    kernel: int
    launches: NotRequired[int]
    dram_read: int
    dram_written: int
    l2: int | None


class UncountedTraffic(TypedDict):
    """Copies and memsets, which ncu does not count."""

    launches: int
    bytes: int


class TrafficOfPart(TypedDict):
    """Sums over one part, and each kernel's bytes. unjoined: names of launches outside the graph's kernels."""

    launches: int
    dram_read: int
    dram_written: int
    l2: int | None
    kernels: list[TrafficOfKernel]
    uncounted: NotRequired[UncountedTraffic]
    unjoined: NotRequired[list[str]]


class MeasuredTraffic(TypedDict):
    """ncu's counts, and its option --cache-control."""

    cache_control: str
    parts: dict[Part, TrafficOfPart]


class UnavailableTraffic(TypedDict):
    """The reason why there is no count. final: another try would fail in the same way."""

    unavailable: str
    final: NotRequired[bool]


# "alone": every kernel from an empty L2. "call": the whole call from a cold L2. Both are ncu's counts.
Traffic = dict[str, MeasuredTraffic | UnavailableTraffic]

# Names that older records have -> names of today.
RENAMED_MODES = {"launches": "no-graph"}
_RENAMED_OF_KERNELS = {"bytes_moved": "bytes_declared"}
_RENAMED_OF_ROOFLINE = {"floor_us": "roofline_time_us"}


def _renamed(data: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in data.items()}


def with_current_names(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record's data with today's names for fields and modes; misshapen parts stay as they are."""
    result = dict(record)
    if isinstance(kernels := record.get("kernels"), dict):
        result["kernels"] = {part: _kernels_with_current_names(found) for part, found in kernels.items()}
    measurement = record.get("measurement")
    if isinstance(measurement, dict) and isinstance(modes := measurement.get("modes"), dict):
        result["measurement"] = measurement | {"modes": _renamed(modes, RENAMED_MODES)}
    return result


def _kernels_with_current_names(kernels: Any) -> Any:
    if not isinstance(kernels, dict):
        return kernels
    found = _renamed(kernels, _RENAMED_OF_KERNELS)
    if isinstance(roofline := found.get("roofline"), dict):
        found["roofline"] = _renamed(roofline, _RENAMED_OF_ROOFLINE)
    return found


_SCALARS: dict[Any, frozenset[type]] = {
    float: frozenset((float, int)), int: frozenset((int,)), str: frozenset((str,)), bool: frozenset((bool,)),
    types.NoneType: frozenset((types.NoneType,)),
}


def mismatch(value: Any, kind: Any) -> str | None:
    """Return where JSON data differs from a type, as in ".parts.forward.launches: expected int", or None.

    kind: a scalar, list, dict with names as keys, TypedDict, Literal, or a union of those. Unknown keys are allowed.
    """
    if kind in _SCALARS:
        return None if type(value) in _SCALARS[kind] else _expected(kind.__name__, value)
    if is_typeddict(kind):
        return _mismatch_of_object(value, kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        found = [mismatch(value, each) for each in arguments if value is not None or each is types.NoneType]
        return None if None in found else found[0] if found else _expected("a value", value)
    if origin is Literal:
        return None if value in arguments else _expected(repr(arguments[0]), value)
    if origin is list:
        (item,) = arguments
        if not isinstance(value, list):
            return _expected("a list", value)
        if item in _SCALARS and _SCALARS[item].issuperset(map(type, value)):
            return None
        return next((f"[{n}]{wrong}" for n, each in enumerate(value) if (wrong := mismatch(each, item))), None)
    if not isinstance(value, dict):
        return _expected("an object", value)
    return next((f".{name}{wrong}" for name, each in value.items() if (wrong := mismatch(each, arguments[1]))), None)


def _mismatch_of_object(value: Any, kind: Any) -> str | None:
    if not isinstance(value, dict):
        return _expected("an object", value)
    for name, hint in _fields(kind).items():
        if name not in value:
            if name in kind.__required_keys__:
                return f".{name}: missing"
        elif wrong := mismatch(value[name], hint):
            return f".{name}{wrong}"
    return None


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _expected(what: str, value: Any) -> str:
    return f": expected {what}, got {type(value).__name__}"


def check_times(measurement: Measurement) -> None:
    """Raise ValueError where the rounds of a measurement do not fit together, or hold a time that is not positive."""
    modes: dict[str, Any] = measurement.get("modes", {})
    timed: list[dict[Part, TimesOfPart]] = [measurement["parts"] or {}]
    timed += [mode["parts"] for mode in modes.values() if "parts" in mode]
    wall_time = measurement.get("wall_time", [])
    counts = {len(wall_time)} if wall_time else set()
    for parts in timed:
        rounds = [part["device_time"] for part in parts.values()]
        if any(list(map(len, each)) != list(map(len, rounds[0])) for each in rounds):
            raise ValueError("forward and backward have different numbers of samples")
        busy = [part["busy_time"] for part in parts.values() if part["busy_time"] is not None]
        if not all(samples and min(samples) > 0 for each in [*rounds, *busy] for samples in each):
            raise ValueError("a round has no sample, or a sample that is not positive")
        counts |= {len(each) for each in rounds}
    if not all(time > 0 for time in wall_time):
        raise ValueError("a wall time is not positive")
    processes = measurement.get("processes", [])
    if processes and counts - {len(processes)}:
        raise ValueError(f"processes are given for {len(processes)} rounds of {max(counts)}")
