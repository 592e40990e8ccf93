"""One implementation of one case inside its worker: checked, then measured, through what its framework provides.

The same code drives every framework, so that all are checked and timed by one protocol. A framework's module gives a
`Side`; the compiled block is a `Program`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..graph.model import FusionGraph
from ..numerics.errors import Verdict, relative_error
from ..numerics.tolerance import Scale
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.dtype import DTYPES
from .clock import CallTrace, Clock, CuptiClock, Sample
from .profiler_marks import bounded

Arrays = dict[str, Any]
Extent = tuple[int, int]  # first and one-past-last device address
Timed = Callable[[Callable[[], Any], Callable[..., None]], Any]  # Clock.time, or what stands for it


@dataclass
class Program:
    """A compiled block: `forward(inputs) -> (outputs, saved)`, `backward(saved, cotangents) -> gradients by input`."""

    forward: Callable[[Arrays], tuple[Arrays, Any]]
    backward: Callable[[Any, Arrays], Arrays] | None
    compile_s: float
    graph: FusionGraph | None
    intercepts_allocations: bool = True  # its allocations go through the framework's Python-visible dispatch
    allocations: dict[str, list[int]] = field(default_factory=dict)  # bytes of each buffer a call of a part allocates
    # Of each part: (launches inside XLA's command buffers, all launches); None where there is no such thing.
    command_buffers: dict[str, tuple[int, int]] | None = None
    # The same block compiled so that it launches as a mode asks; a mode that is missing is how this one launches.
    variants: dict[str, Callable[[], Program]] = field(default_factory=dict)
    # Its artifacts as they are written, beside what the worker does next: machine code is disassembled.
    artifacts: Future[None] | None = None
    # Instead of Side.poison, where results stay where they are: fills them, returns where they are.
    poison: Callable[[str], list[Extent]] | None = None


@dataclass(frozen=True)
class Peak:
    """Bytes that one call needs at most above what is there before it: its outputs, temporaries, workspaces.

    bytes: the measurement by the allocator's statistics, rounded as it rounds; None for the `reason`. XLA's is always
    None. planned: the compiler's own plan of outputs and temporaries, where it has one; this is XLA's number.
    """

    bytes: int | None
    planned: int | None = None
    reason: str | None = None


class Side(Protocol):
    """What a framework provides on its device. Arrays are the framework's own."""

    device: str
    backend: str

    def inputs(self, folder: Path, case: Case) -> Arrays:
        """The case's inputs with the bits stored in `folder`, in buffers that stay the same from call to call where
        the framework allows it, so that a result cached by address is stale and noticed."""
        ...

    def cotangents(self, folder: Path, case: Case) -> Arrays: ...

    def changed(self, inputs: Arrays, folder: Path, case: Case) -> list[str]:
        """Names of inputs whose bits differ from the stored ones."""
        ...

    def reference(self, folder: Path, role: str, name: str) -> Any:
        """A stored reference on this device."""
        ...

    def largest_difference(self, values: Any, reference: Any) -> float:
        """max|values - reference| in float64, nan where a value is."""
        ...

    def poisoned_allocations(self, program: Program) -> AbstractContextManager[Any]:
        """Within it, uninitialised memory that the framework's Python code asks for comes filled with NaN; does nothing
        for programs whose allocations cannot be intercepted."""
        ...

    def poison(self, program: Program, part: str) -> list[Extent]:
        """Fill the memory that the next call will get with NaN; returns where that is."""
        ...

    def was_poisoned(self, poisoned: list[Extent], arrays: Arrays) -> bool:
        """Whether all of `arrays` lie in poisoned memory."""
        ...

    def variant(
        self, program: Program, mode: str, inputs: Arrays, cotangents: Arrays
    ) -> AbstractContextManager[Program | None]:
        """The program launched as `mode` asks ("graph", "launches"; see compare.plan.timing_modes), on these very
        arrays; None where `program` is launched so already. Raises whatever the framework does where that cannot be
        had."""
        ...

    def flush_cache(self) -> None:
        """Leave the L2 cache full of other data, clean."""
        ...

    def synchronize(self, results: Any = None) -> None:
        """Wait until the device is done, and `results` are there."""
        ...

    def peak_memory(self, program: Program, part: str, call: Callable[[], Any]) -> Peak:
        """The peak of one call, measured in `call`, which returns its results, or planned by the compiler."""
        ...

    def written_late(self, program: Program, part: str, call: Callable[[], Arrays]) -> list[str]:
        """Names of those results of `call` that are not yet there for what its caller enqueues next."""
        ...


def lies_within(extent: Extent, ranges: list[Extent]) -> bool:
    """Whether every address of `extent` lies in the union of `ranges`.

    An allocator may merge what neighbouring ranges gave back, so the extent may cross from one into the next.
    """
    at, end = extent
    for first, past in sorted(ranges):
        if first <= at < past:
            at = past
    return at >= end


_SETTLED = 0.02  # relative: successive medians that close are taken for a steady state
_BATCH_SECONDS = 0.001  # of host time, the first batch of the warm-up; each further one takes twice as long
_WARM_UP_SECONDS = 0.1  # after which no further batch begins, for each implementation in each round and mode
_LEAST_SAMPLES, _MOST_SAMPLES = 3, 100  # calls
_LEAST_WALL_CALLS, _MOST_WALL_CALLS = 2, 200


@dataclass(frozen=True)
class _Arrays:
    """One input set on the device."""

    index: int
    inputs: Arrays
    cotangents: Arrays


@dataclass(frozen=True)
class _WarmUp:
    """seconds: all of it. seconds_a_call: of host time, what belongs to a timed call around it included."""

    seconds: float
    settled: bool
    seconds_a_call: float


def _untimed(call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
    result = call()
    synchronize(result)
    return result


class WrongResult(Exception):
    """A result that must not be timed; the message says what is wrong."""


class Subject:
    """A program on its case's data. `folders` hold two input sets, so that a cached result is caught."""

    def __init__(
        self, side: Side, program: Program, case: Case, folders: list[Path], scales: list[dict[str, dict[str, float]]]
    ) -> None:
        self.side, self.program, self.case = side, program, case
        self.folders = folders
        self.refer(scales)

    def refer(self, scales: list[dict[str, dict[str, float]]]) -> None:
        """What is stored as each input set's references has these scales."""
        self.scales = [{name: Scale(**scale) for name, scale in group.items()} for group in scales]

    def check(self) -> list[Verdict]:
        """Errors of outputs and gradients on every input set, of each the worst for its tolerance; inputs must be
        unchanged after.

        Raises WrongResult on a missing, misshapen, late or input-changing result; too large an error is left to the
        caller.
        """
        self._check_order()
        worst: dict[str, Verdict] = {}
        for index in range(len(self.folders)):
            arrays = self._arrays(index)
            for verdict in self._verdicts(index, *self._call(arrays), arrays.inputs):
                if verdict.name not in worst or verdict.severity > worst[verdict.name].severity:
                    worst[verdict.name] = verdict
        return list(worst.values())

    def rehearse(self) -> None:
        """A call as it will be timed: what that sets up, as XLA's programs that poison each size of memory, takes
        longer than a round, and no GPU of its own."""
        self._timed_call(self.program, _untimed, self._arrays(0), dict.fromkeys(self.case.parts, True))

    def measure(self, clock: Clock, seconds: float, input_set: int = 0) -> dict[str, Any]:
        """Timed calls for about `seconds`, each on poisoned outputs and a cold L2, on inputs of that set; the last
        results are checked.

        Returns `parts`, and of the warm-up before them how many `seconds` it took and whether times `settled`. Of each
        part: `device_time` and `busy_time` samples in seconds, the records of a median call and their number, and
        whether every call's outputs lay in poisoned memory; None of what a clock that sees no kernels cannot say.
        """
        return self._measure(self.program, clock, seconds, self._arrays(input_set), cold=True)

    def measure_mode(self, mode: str, clock: Clock, seconds: float, input_set: int = 0) -> dict[str, Any] | None:
        """As `measure`, in another mode (compare.plan.timing_modes); None where that is how the program runs in the
        main one."""
        arrays = self._arrays(input_set)
        if mode == "warm":
            return self._measure(self.program, clock, seconds, arrays, cold=False)
        with self.side.variant(self.program, mode, arrays.inputs, arrays.cotangents) as program:
            if program is None:
                return None
            measured = self._measure(program, clock, seconds, arrays, cold=True)
            return measured | {"command_buffers": program.command_buffers}

    def _arrays(self, input_set: int) -> _Arrays:
        index = input_set % len(self.folders)
        folder = self.folders[index]
        return _Arrays(index, self.side.inputs(folder, self.case), self.side.cotangents(folder, self.case))

    def _measure(
        self, program: Program, clock: Clock, seconds: float, arrays: _Arrays, *, cold: bool
    ) -> dict[str, Any]:
        poisoned = dict.fromkeys(self.case.parts, cold)
        results: tuple[Arrays, Arrays] = {}, {}

        def once(timed: Timed) -> None:
            nonlocal results
            results = {}, {}  # their memory is free for this call
            results = self._timed_call(program, timed, arrays, poisoned if cold else None)

        clock.start()  # once: a warm-up of two short calls took 8 to 12 ms on an H200 with a start and an end for each
        try:
            warm_up = self._warm_up(clock, once)
            poisoned.update(dict.fromkeys(self.case.parts, cold))
            for _ in range(max(_LEAST_SAMPLES, min(_MOST_SAMPLES, int(seconds / warm_up.seconds_a_call)))):
                once(clock.time)
            samples = clock.collect()
        except Exception:
            with contextlib.suppress(Exception):  # what went wrong first is told
                clock.collect()  # or what this process compiles next is recorded
            raise
        wrong = [v for v in self._verdicts(arrays.index, *results, arrays.inputs) if not v.right]
        if wrong:
            raise WrongResult("timed call: " + "; ".join(f"{v.name}: error {v.error:.3g}" for v in wrong))
        if any(sample.records == () for sample in samples):
            raise RuntimeError(f"the {clock.name} clock saw no device work in a timed call")
        parts = self.case.parts
        return {
            "parts": {part: self._summary(samples[i :: len(parts)], poisoned[part]) for i, part in enumerate(parts)},
            "warm_up": {"seconds": warm_up.seconds, "settled": warm_up.settled},
        }

    def _timed_call(
        self, program: Program, timed: Timed, arrays: _Arrays, poisoned: dict[str, bool] | None
    ) -> tuple[Arrays, Arrays]:
        """Outputs and gradients of one call, each part timed; from poisoned memory and a cold L2 if `poisoned`, which
        then loses the parts whose results lay elsewhere."""
        gradients: Arrays = {}
        token = [] if poisoned is None else self._before_call(program, "forward")
        outputs, saved = timed(partial(program.forward, arrays.inputs), self.side.synchronize)
        if poisoned is not None:
            poisoned["forward"] &= self.side.was_poisoned(token, outputs)
        if program.backward:
            if poisoned is not None:
                # Backward may also reuse what forward was given and saved: poisoned before this very step, too.
                token = token + self._before_call(program, "backward")
            call = partial(program.backward, saved, arrays.cotangents)
            del saved
            gradients = timed(call, self.side.synchronize)
            if poisoned is not None:
                passed_on = BLOCKS[self.case.block].passes_on
                computed = {name: gradient for name, gradient in gradients.items() if name not in passed_on}
                poisoned["backward"] &= self.side.was_poisoned(token, computed)
        return outputs, gradients

    def _warm_up(self, clock: Clock, once: Callable[[Timed], None]) -> _WarmUp:
        """Calls in batches until the medians of two successive ones agree, or until it has taken long enough. What must
        settle is the time in which the GPU is busy: the gaps between are the host's, whose medians over a few calls
        seldom agree, however long one waits (on an H200's host in 14% of rounds not within 0.1 s). Batches grow. A call
        before them, which nobody times, pays for what other implementations pushed out of every cache."""
        started = time.perf_counter()
        once(_untimed)
        seconds_a_call = time.perf_counter() - started
        before: float | None = None
        batch_seconds = _BATCH_SECONDS
        while True:
            size = max(1, min(_MOST_SAMPLES, int(batch_seconds / seconds_a_call)))
            batch_seconds *= 2
            median, seconds_a_call = self._batch(clock, once, size)
            seconds = time.perf_counter() - started
            settled = before is not None and abs(median - before) <= _SETTLED * before
            if settled or (before is not None and seconds >= _WARM_UP_SECONDS):
                return _WarmUp(seconds, settled, seconds_a_call)
            before = median

    def _batch(self, clock: Clock, once: Callable[[Timed], None], size: int) -> tuple[float, float]:
        """(median busy time, mean host time) of a whole call, in seconds; of a clock that sees no kernels the median
        device time, gaps and all."""
        started = time.perf_counter()
        for _ in range(size):
            once(clock.time)
        host = (time.perf_counter() - started) / size
        samples = [s.device_time if s.busy_time is None else s.busy_time for s in clock.collect(going_on=True)]
        parts = len(self.case.parts)
        return statistics.median(sum(samples[at : at + parts]) for at in range(0, len(samples), parts)), host

    def measure_wall(self, seconds: float, input_set: int = 0) -> dict[str, Any]:
        """Steady-state host time of a call (train: forward and backward), no clock attached, caches as they fall."""
        arrays = self._arrays(input_set)

        def call() -> Any:
            outputs, saved = self.program.forward(arrays.inputs)
            return self.program.backward(saved, arrays.cotangents) if self.program.backward else outputs

        count = max(_LEAST_WALL_CALLS, min(_MOST_WALL_CALLS, int(seconds / self._seconds_of(call))))
        start = time.perf_counter()
        for _ in range(count):
            results = call()
        self.side.synchronize(results)
        return {"wall_time": (time.perf_counter() - start) / count, "calls": count}

    def profile(self, mark: str) -> None:
        """One call for a profiler, after one that is not profiled; each part starts from a cold L2, as when timed, and
        is marked "<mark>_<part>"."""
        arrays = self._arrays(0)
        self._call(arrays)
        self.side.flush_cache()
        forward = partial(self.program.forward, arrays.inputs)
        _, saved = bounded(forward, self.side.synchronize, f"{mark}_forward")
        if self.program.backward:
            self.side.flush_cache()
            backward = partial(self.program.backward, saved, arrays.cotangents)
            bounded(backward, self.side.synchronize, f"{mark}_backward")

    def trace(self, clock: CuptiClock) -> dict[str, CallTrace]:
        """What host and device did in one call, by part, from a cold L2 as when timed; its times are for looking at."""
        arrays = self._arrays(0)
        self._call(arrays)
        self._before_call(self.program, "forward")
        (_, saved), forward = clock.trace(partial(self.program.forward, arrays.inputs), self.side.synchronize)
        if not self.program.backward:
            return {"forward": forward}
        self._before_call(self.program, "backward")
        _, backward = clock.trace(partial(self.program.backward, saved, arrays.cotangents), self.side.synchronize)
        return {"forward": forward, "backward": backward}

    def peak_memory(self) -> dict[str, Peak]:
        """Of each part. Its inputs, and in a training step what forward saved for backward, are there before it."""
        arrays = self._arrays(0)
        kept: list[Any] = []

        def forward() -> Any:
            outputs, saved = self.program.forward(arrays.inputs)
            kept[:] = [saved]
            return outputs, saved

        peaks = {"forward": self.side.peak_memory(self.program, "forward", forward)}
        if self.program.backward:
            backward = self.program.backward
            if not kept:  # a side that does not measure it did not call it
                forward()
            peaks["backward"] = self.side.peak_memory(
                self.program, "backward", lambda: backward(kept[0], arrays.cotangents)
            )
        return peaks

    def _call(self, arrays: _Arrays) -> tuple[Arrays, Arrays]:
        with self.side.poisoned_allocations(self.program):
            outputs, saved = self.program.forward(arrays.inputs)
            if self.program.backward:
                return outputs, self.program.backward(saved, arrays.cotangents)
            return outputs, {}

    def _check_order(self) -> None:
        arrays = self._arrays(0)
        self._call(arrays)  # what a first call sets up would make the host wait for the device
        kept: list[Any] = []

        def forward() -> Arrays:
            outputs, saved = self.program.forward(arrays.inputs)
            kept.append(saved)
            return outputs

        late = self.side.written_late(self.program, "forward", forward)
        if self.program.backward:
            late += self.side.written_late(
                self.program, "backward", partial(self.program.backward, kept.pop(), arrays.cotangents)
            )
        if late:
            raise WrongResult(
                f"{', '.join(late)} is written on another stream, for which the caller's stream was not made to wait"
            )

    def _verdicts(self, index: int, outputs: Arrays, gradients: Arrays, inputs: Arrays) -> list[Verdict]:
        folder, scales = self.folders[index], self.scales[index]
        results = [("output", name, name, outputs) for name in scales if not name.startswith("d_")]
        if self.case.direction == "joint":
            gradients = {name.removeprefix("d_"): x for name, x in outputs.items() if name.startswith("d_")}
        if self.case.differentiates:
            results += [("gradient", n, n.removeprefix("d_"), gradients) for n in scales if n.startswith("d_")]
        verdicts = []
        for role, label, name, arrays in results:
            if name not in arrays:
                raise WrongResult(f"no {role} {name!r}; got {sorted(arrays)}")
            reference = self.side.reference(folder, role, name)
            try:
                error = relative_error(arrays[name], reference, scales[label].rms, self.side.largest_difference)
            except ValueError as problem:
                raise WrongResult(f"{role} {name!r}: {problem}") from problem
            dtype = BLOCKS[self.case.block].tensor(name).dtype_in(self.case)
            verdicts.append(Verdict(label, error, scales[label].tolerance(DTYPES[dtype].eps)))
        changed = self.side.changed(inputs, folder, self.case)
        if changed:
            raise WrongResult(f"the call changed its inputs: {', '.join(changed)}")
        return verdicts

    def _before_call(self, program: Program, part: str) -> list[Extent]:
        token = (program.poison or partial(self.side.poison, program))(part)
        self.side.flush_cache()
        return token

    def _seconds_of(self, call: Callable[[], Any]) -> float:
        self.side.synchronize()
        start = time.perf_counter()
        self.side.synchronize(call())
        return time.perf_counter() - start

    @staticmethod
    def _summary(samples: list[Sample], poisoned: bool) -> dict[str, Any]:
        middle = statistics.median_low(s.device_time for s in samples)
        records = next(s.records for s in samples if s.device_time == middle)
        busy_times = [s.busy_time for s in samples]
        return {
            "device_time": [s.device_time for s in samples],
            "busy_time": None if None in busy_times else busy_times,
            "launches": None if records is None else len(records),
            "records": None if records is None else [asdict(record) for record in records],
            "poisoned": poisoned,
        }
