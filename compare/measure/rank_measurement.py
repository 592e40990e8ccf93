"""The measuring protocol of a case that spans several GPUs: each rank's worker checks its slices and times its GPU.

All ranks make the same calls in the same order, so the number of calls is fixed. Before each timed call the ranks meet
at a barrier on the host. A second program exchanges nothing; the difference of the two is the exposed communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..numerics import input_arrays
from ..numerics.errors import ErrorCheck, relative_error
from ..numerics.tolerance import Scale
from ..plan.timing_modes import ALONE
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.dtype import DTYPES
from ..spec.tensor import Tensor
from .clock import Clock
from .host_barrier import Rank
from .measurement import InputSet, MeasuredProgram
from .overlap import overlap
from .rounds import summary, timed_calls
from .warm_up import Timed
from .worker_backend import Arrays, Extent, Program, WorkerBackend

WARM_UP_CALLS = 3
CALLS = 6  # timed, of each program in each round


class RankBackend(WorkerBackend, Protocol):
    """A rank's framework."""

    def local(self, array: Any) -> Any:
        """Return this rank's slice of a result as a NumPy array."""
        ...


class RankProgram(MeasuredProgram):
    """A program over several GPUs on this rank's data. Its variant `ALONE` exchanges nothing, and is never checked.

    No call starts from poisoned memory, and results on another stream are not looked for.
    """

    backend: RankBackend

    def __init__(self, *args: Any, rank: Rank) -> None:
        super().__init__(*args)
        self.rank = rank

    def described(self) -> dict[str, Any]:
        """Return also the bytes that this rank sends in a call, and the fewest that it must send."""
        least = least_sent(self.rank, self.case, self.folders[0])
        return super().described() | {"sent": self.program.sent, "least_sent": least}

    def call_as_timed(self) -> None:
        """Make no call: each round begins with a warm-up of a fixed length."""

    def measure_round(self, clock: Clock | None, seconds: float, first: bool, input_set: int) -> dict[str, Any]:
        """Time a fixed number of calls; see `_timed`."""
        assert clock is not None, "ranks are timed by CUPTI"
        return self._timed(self.program, clock, input_set)

    def measure_mode(self, mode: str, clock: Clock, seconds: float, input_set: int = 0) -> dict[str, Any]:
        """Time the variant in the same way. It is compiled at its first use; raises Skip where there is none."""
        return self._timed(self.program.variants[mode](), clock, input_set)

    def _timed(self, program: Program, clock: Clock, input_set: int) -> dict[str, Any]:
        """Return the samples of one round, as in `MeasuredProgram.measure`. All ranks' lists are about the same calls.

        Each call also has `communication`, `compute` and `both` in seconds (compare.measure.overlap).
        """
        arrays = self._input_set(input_set)
        for _ in range(WARM_UP_CALLS):
            self.backend.synchronize(program.forward(arrays.inputs))

        def call(timed: Timed) -> None:
            self.backend.flush_l2()
            timed(partial(program.forward, arrays.inputs), self._waiting())

        clock.start()
        samples = timed_calls(clock, call, CALLS)
        overlaps = [asdict(overlap(sample.records or ())) for sample in samples]
        times = {name: [one[name] for one in overlaps] for name in overlaps[0]}
        return {"phases": {"forward": summary(samples) | times}, "warm_up": None}

    def _call(self, arrays: InputSet) -> tuple[Arrays, Arrays]:
        results = super()._call(arrays)
        self.backend.synchronize(results)
        return results

    def _check_stream_order(self) -> None:
        """Make no call: ranks exchange on streams of their own, and `_call` waits for all of them."""

    def _error_check(self, label: str, role: str, name: str, values: Any, scale: Scale, folder: Path) -> ErrorCheck:
        """Compare this rank's slice on the host, which bounds the GPU's memory."""
        tensor = BLOCKS[self.case.block].tensor(name)
        whole = np.load(input_arrays.path_of(folder, role, name), mmap_mode="r")
        reference = tensor.of_rank(whole, self.rank.number, self.rank.count)
        error = relative_error(self.backend.local(values), reference, scale.rms, _largest_difference)
        return ErrorCheck(label, error, scale.tolerance(DTYPES[tensor.dtype_in(self.case)].eps))

    def _before_call(self, program: Program, phase: str) -> list[Extent]:
        self.backend.flush_l2()
        return []

    def _waiting(self) -> Callable[..., None]:
        """Return `synchronize` for one call of a clock, which waits before the call and after it.

        Before the call, the ranks also meet, when the clock has done all else.
        """
        has_met = False

        def synchronize(results: Any = None) -> None:
            nonlocal has_met
            self.backend.synchronize(results)
            if not has_met:
                has_met = True
                self.rank.barrier.wait()

        return synchronize


def with_alone(compiled: Callable[..., Program], dumps: Path) -> Program:
    """Return a compiled program whose variant `ALONE` is compiled at its first use.

    compiled: takes the folder for artifacts and whether to communicate.
    """
    program = compiled(dumps, communicate=True)
    program.variants[ALONE] = cache(partial(compiled, Path(f"{dumps}-alone"), communicate=False))
    return program


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
