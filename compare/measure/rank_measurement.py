"""The measuring protocol of a case that spans several GPUs: each rank's worker checks its slices and times its GPU.

All ranks make the same calls in the same order, so the number of calls is fixed. Before each timed call the ranks meet
at a barrier on the host. A second program exchanges nothing; the difference of the two is the exposed communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..graph.model import FusionGraph
from ..numerics import input_arrays
from ..numerics.errors import ErrorCheck, relative_error
from ..numerics.tolerance import Scale
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.dtype import DTYPES
from ..spec.tensor import Tensor
from .clock import CallTrace, CuptiClock, Sample
from .host_barrier import HostBarrier
from .measurement import WrongResult
from .overlap import overlap
from .rounds import summary, timed_calls
from .warm_up import Timed
from .worker_backend import Arrays, Program

WARM_UP_CALLS = 3
CALLS = 6  # timed, of each program in each round


@dataclass(frozen=True)
class Rank:
    """This process's place among the ranks."""

    number: int
    count: int
    barrier: HostBarrier


class RankBackend(Protocol):
    """A rank's framework. Arrays are the framework's own; `local` makes this rank's slice of one a NumPy array."""

    device: str
    name: str

    def inputs(self, folder: Path, case: Case) -> Arrays: ...

    def poisoned_allocations(self, program: Program) -> AbstractContextManager[Any]: ...

    def local(self, array: Any) -> Any: ...

    def flush_l2(self) -> None: ...

    def synchronize(self, results: Any = None) -> None: ...


@dataclass
class RankProgram:
    """A compiled case on this rank.

    alone: the program without exchanges; None where there is none. graph: makes the fusion graph, on all ranks at once,
    because it may call the program; None where there is none. sent: the bytes that this rank sends in a call, by the
    shapes of its exchanges; None where they are not known.
    """

    case: Case
    program: Program
    folders: list[Path]
    alone: Program | None = None
    sent: int | None = None
    graph: Callable[[], FusionGraph] | None = None


def check(
    backend: RankBackend, rank: Rank, measured: RankProgram, scales: Sequence[dict[str, dict[str, Any]]]
) -> list[ErrorCheck]:
    """Return the worst error check of this rank's slice of each output and gradient over the input sets.

    Raises WrongResult on a missing or misshapen result.
    """
    worst: dict[str, ErrorCheck] = {}
    for folder, group in zip(measured.folders, scales, strict=True):
        found = _call(backend, measured.program, measured.case, folder)
        for one in _error_checks(backend, rank, measured.case, folder, group, found):
            if one.name not in worst or one.severity > worst[one.name].severity:
                worst[one.name] = one
    return list(worst.values())


def measure(backend: RankBackend, rank: Rank, measured: RankProgram, clock: CuptiClock, rounds: int) -> dict[str, Any]:
    """Time both programs in alternating rounds.

    Returns {"program", "alone"}: for each round, a list with one entry a call: `device_time`, `busy_time`,
    `communication`, `compute`, `both` (compare.measure.overlap) in seconds. `records` are those of a median call of the
    last round; `alone` is None without such a program. All ranks' lists are about the same calls.
    """
    programs = {"program": measured.program, **({"alone": measured.alone} if measured.alone else {})}
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in programs}
    records: list[dict[str, Any]] = []
    for number in range(rounds):
        folder = measured.folders[number % len(measured.folders)]
        for name, program in programs.items():
            samples = _round(backend, rank, program, measured.case, folder, clock)
            found[name].append([_summary(sample) for sample in samples])
            if name == "program":
                records = summary(samples)["records"]
    return {"program": found["program"], "alone": found.get("alone"), "records": records}


def trace(backend: RankBackend, rank: Rank, measured: RankProgram, clock: CuptiClock) -> CallTrace:
    """Return what host and device did in one call on this rank; its times are for a timeline only."""
    inputs = backend.inputs(measured.folders[0], measured.case)
    backend.synchronize(measured.program.forward(inputs))
    backend.flush_l2()
    _, found = clock.trace(partial(measured.program.forward, inputs), _meeting(backend, rank))
    return found


def least_sent(rank: Rank, case: Case, folder: Path) -> int:
    """Return the fewest bytes that this rank must send in one call on an input set."""
    block = BLOCKS[case.block]
    assert block.least_sent is not None, "a block of one GPU sends nothing"

    def values(tensor: Tensor) -> Any:
        stored = np.load(input_arrays.path_of(folder, "input", tensor.name), mmap_mode="r")
        return as_float32(tensor.of_rank(stored, rank.number, rank.count), tensor.dtype_in(case))

    return block.least_sent(case, rank.number, {t.name: values(t) for t in block.inputs if t.name in ("x", "router")})


def as_float32(stored: Any, dtype: str) -> Any:
    """Return stored values in float32. NumPy has no bfloat16, whose bits are the upper half of a float32's."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(stored).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(stored).astype(np.float32)


def _call(backend: RankBackend, program: Program, case: Case, folder: Path) -> Arrays:
    inputs = backend.inputs(folder, case)
    with backend.poisoned_allocations(program):
        outputs, _ = program.forward(inputs)
    backend.synchronize(outputs)
    return outputs


def _error_checks(
    backend: RankBackend, rank: Rank, case: Case, folder: Path, scales: dict[str, dict[str, Any]], found: Arrays
) -> list[ErrorCheck]:
    block = BLOCKS[case.block]
    checks = []
    for label, scale in scales.items():
        role, name = ("gradient", label.removeprefix("d_")) if label.startswith("d_") else ("output", label)
        if role == "gradient" and not case.differentiates:
            continue
        if label not in found:
            raise WrongResult(f"no {role} {name!r}; got {sorted(found)}")
        whole = np.load(input_arrays.path_of(folder, role, name), mmap_mode="r")
        tensor = block.tensor(name)
        reference = tensor.of_rank(whole, rank.number, rank.count)
        known = Scale(**scale)
        try:
            error = relative_error(backend.local(found[label]), reference, known.rms, _largest_difference)
        except ValueError as problem:
            raise WrongResult(f"{role} {name!r}: {problem}") from problem
        checks.append(ErrorCheck(label, error, known.tolerance(DTYPES[tensor.dtype_in(case)].eps)))
    return checks


def _largest_difference(values: Any, reference: Any) -> float:
    """Return max|values - reference| in float64, row by row to bound the memory; nan where a value is."""
    rows = len(values) if values.ndim else 0
    if rows <= 1:
        return float(np.abs(values.astype(np.float64) - reference).max())
    step = max(1, rows // 16)
    return max_or_nan(
        float(np.abs(values[at : at + step].astype(np.float64) - reference[at : at + step]).max())
        for at in range(0, rows, step)
    )


def max_or_nan(values: Any) -> float:
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _round(
    backend: RankBackend, rank: Rank, program: Program, case: Case, folder: Path, clock: CuptiClock
) -> list[Sample]:
    inputs = backend.inputs(folder, case)
    for _ in range(WARM_UP_CALLS):
        backend.synchronize(program.forward(inputs))

    def call(timed: Timed) -> None:
        backend.flush_l2()
        timed(partial(program.forward, inputs), _meeting(backend, rank))

    clock.start()
    return timed_calls(clock, call, CALLS)


def _meeting(backend: RankBackend, rank: Rank) -> Callable[..., None]:
    """Return `synchronize` for one call of a clock, which waits before the call and after it.

    Before the call, the ranks also meet, when the clock has done all else.
    """
    has_met = False

    def synchronize(results: Any = None) -> None:
        nonlocal has_met
        backend.synchronize(results)
        if not has_met:
            has_met = True
            rank.barrier.wait()

    return synchronize


def _summary(sample: Sample) -> dict[str, float]:
    times = asdict(overlap(sample.records or ()))
    return {"device_time": sample.device_time, "busy_time": sample.busy_time or 0.0, **times}

