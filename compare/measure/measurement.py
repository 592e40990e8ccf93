"""The measuring protocol, the same for every framework: a worker checks a compiled case, then times it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from ..graph import store
from ..numerics import input_arrays
from ..numerics.errors import ErrorCheck, relative_error, worst_of_each, worst_row
from ..numerics.tolerance import Scale
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.dtype import DTYPES
from .clock import CallTrace, Clock, CuptiClock
from .profiler_marks import bounded
from .rounds import summary, timed_round
from .warm_up import Timed, untimed
from .worker_backend import Arrays, Extent, PeakMemory, Program, WorkerBackend

_LEAST_WALL_CALLS, _MOST_WALL_CALLS = 2, 200


class WrongResult(Exception):
    """A result that must not be timed; the message says what is wrong."""


@dataclass(frozen=True)
class InputSet:
    """One input set on the device."""

    index: int
    inputs: Arrays
    cotangents: Arrays


class MeasuredProgram:
    """A program on its case's data.

    folders: two input sets, so that a cached result is caught. scales: for each set, the scale of each reference.
    rounded_sums: as in compare.spec.implementation.Implementation.
    """

    def __init__(
        self, backend: WorkerBackend, program: Program, case: Case, folders: list[Path],
        scales: list[dict[str, dict[str, Any]]], rounded_sums: tuple[str, ...] = (),
    ) -> None:
        self.backend, self.program, self.case = backend, program, case
        self.folders, self.rounded_sums = folders, rounded_sums
        self._persisting_l2 = 0  # the most bytes that a flush between timed calls gave back
        self.set_scales(scales)

    def set_scales(self, scales: list[dict[str, dict[str, Any]]]) -> None:
        """Take the scales of the references that are stored for each input set."""
        self.scales = [{name: Scale(**scale) for name, scale in group.items()} for group in scales]

    def described(self) -> dict[str, Any]:
        """Return compile time, fusion graph, command buffers, and how CUDA graphs get their inputs, as JSON data."""
        program = self.program
        return {
            "compile_s": program.compile_s, "graph": None if program.graph is None else store.to_json(program.graph),
            "command_buffers": program.command_buffers, "cuda_graph": to_builtins(program.graph_inputs),
        }

    def check(self) -> list[ErrorCheck]:
        """Return the worst error check of each output and gradient over the input sets.

        Raises WrongResult on a missing, misshapen or late result, and where a call changed its inputs. The caller
        decides about an error above its tolerance.
        """
        self._check_stream_order()
        checks: list[ErrorCheck] = []
        for index in range(len(self.folders)):
            arrays = self._input_set(index)
            checks += self._error_checks(index, *self._call(arrays), arrays.inputs)
        return worst_of_each(checks)

    def call_as_timed(self) -> None:
        """Make one call as it will be timed, before the GPU is reserved for timing.

        The first such call sets up more than a round takes: XLA compiles a program for each size that it poisons.
        """
        self._timed_call(self.program, untimed, self._input_set(0), dict.fromkeys(self.case.phases, True))

    def measure_round(self, clock: Clock | None, seconds: float, first: bool, input_set: int) -> dict[str, Any]:
        """Measure one round on an input set: device time by the clock, then wall time without it.

        Each of the two takes `seconds`. The first round also measures peak memory.
        """
        result: dict[str, Any] = {"phases": None, "warm_up": None}
        if clock:
            result |= self.measure(clock, seconds, input_set)
        result |= self.measure_wall(seconds, input_set)
        if first:
            result["peak_memory"] = to_builtins(self.peak_memory())
        if clock:
            self.backend.flush_l2()  # the next program, of any process, gets an L2 of which this one keeps no share
        return result

    def measure(self, clock: Clock, seconds: float, input_set: int = 0) -> dict[str, Any]:
        """Time calls for about `seconds` on one input set, each on poisoned outputs and a cold L2; check the last.

        With `Program.renew_inputs`, each of these calls gets inputs of its own, and one more on the other input set is
        checked instead.

        Returns {"phases", "warm_up": {"seconds", "settled"}, "persisting_l2"}. Each phase has `device_time` and
        `busy_time` samples in seconds, the records of a median call, their number as `launches`, and whether every
        call's outputs lay in poisoned memory. Values that a clock without kernel records cannot know are None.
        `persisting_l2` is the most bytes of L2 that a call reserved for persisting accesses and kept.
        """
        return self._measure(self.program, clock, seconds, self._input_set(input_set), cold=True)

    def measure_mode(self, mode: str, clock: Clock, seconds: float, input_set: int = 0) -> dict[str, Any] | None:
        """Measure in another mode (compare.plan.timing_modes); None where the main mode runs the program so."""
        arrays = self._input_set(input_set)
        if mode == "warm":
            measured = self._measure(self.program, clock, seconds, arrays, cold=False)
            self.backend.flush_l2()
            return measured
        with self.backend.in_mode(self.program, mode, arrays.inputs, arrays.cotangents) as program:
            if program is None:
                return None
            measured = self._measure(program, clock, seconds, arrays, cold=True)
            self.backend.flush_l2()
            return measured | {"command_buffers": program.command_buffers}

    def measure_wall(self, seconds: float, input_set: int = 0) -> dict[str, Any]:
        """Return the steady-state host time of a call (train: forward and backward), without clock and L2 flush."""
        arrays = self._input_set(input_set)

        def call() -> Any:
            outputs, saved = self.program.forward(arrays.inputs)
            return self.program.backward(saved, arrays.cotangents) if self.program.backward else outputs

        count = max(_LEAST_WALL_CALLS, min(_MOST_WALL_CALLS, int(seconds / self._seconds_of(call))))
        start = time.perf_counter()
        for _ in range(count):
            results = call()
        self.backend.synchronize(results)
        return {"wall_time": (time.perf_counter() - start) / count, "calls": count}

    def profile(self, mark: str) -> None:
        """Make one call for a profiler, after an unprofiled one.

        Each phase starts from a cold L2, as when timed, and is marked "<mark>_<phase>".
        """
        arrays = self._input_set(0)
        self._call(arrays)
        self.backend.flush_l2()
        forward = partial(self.program.forward, arrays.inputs)
        _, saved = bounded(forward, self.backend.synchronize, f"{mark}_forward")
        if self.program.backward:
            self.backend.flush_l2()
            backward = partial(self.program.backward, saved, arrays.cotangents)
            bounded(backward, self.backend.synchronize, f"{mark}_backward")

    def trace(self, clock: CuptiClock) -> dict[str, CallTrace]:
        """Return what host and device did in one call from a cold L2, by phase. Its times are for a timeline only."""
        arrays = self._input_set(0)
        self._call(arrays)
        self._before_call(self.program, "forward")
        (_, saved), forward = clock.trace(partial(self.program.forward, arrays.inputs), self._waiting())
        if not self.program.backward:
            return {"forward": forward}
        self._before_call(self.program, "backward")
        _, backward = clock.trace(partial(self.program.backward, saved, arrays.cotangents), self._waiting())
        return {"forward": forward, "backward": backward}

    def peak_memory(self) -> dict[str, PeakMemory]:
        """Return the peak of each phase. Its inputs, and backward's saved tensors, are in memory before it."""
        arrays = self._input_set(0)
        kept: list[Any] = []

        def forward() -> Any:
            outputs, saved = self.program.forward(arrays.inputs)
            kept[:] = [saved]
            return outputs, saved

        peaks = {"forward": self.backend.peak_memory(self.program, "forward", forward)}
        if self.program.backward:
            backward = self.program.backward
            if not kept:  # a backend that does not measure the peak did not call it
                forward()
            peaks["backward"] = self.backend.peak_memory(
                self.program, "backward", lambda: backward(kept[0], arrays.cotangents)
            )
        return peaks

    def _input_set(self, number: int) -> InputSet:
        index = number % len(self.folders)
        folder = self.folders[index]
        return InputSet(index, self.backend.inputs(folder, self.case), self.backend.cotangents(folder, self.case))

    def _measure(
        self, program: Program, clock: Clock, seconds: float, arrays: InputSet, *, cold: bool
    ) -> dict[str, Any]:
        phases = self.case.phases
        poisoned = dict.fromkeys(phases, cold)
        results: tuple[Arrays, Arrays] = {}, {}
        renew_inputs = self.program.renew_inputs if cold else None
        if cold:
            self.backend.flush_l2()  # what other calls reserved is not this program's
        self._persisting_l2 = 0

        def call(timed: Timed) -> None:
            nonlocal results
            results = {}, {}  # frees their memory for this call
            if renew_inputs is not None:
                renew_inputs()
            results = self._timed_call(program, timed, arrays, poisoned if cold else None)

        warm, samples = timed_round(
            clock, call, phases=len(phases), seconds=seconds,
            settled=lambda: poisoned.update(dict.fromkeys(phases, cold)),
        )
        if renew_inputs is not None:
            results = {}, {}
            arrays = self._input_set(arrays.index + 1)  # a CUDA graph may hold results of the set of its capture
            results = self._timed_call(program, untimed, arrays, dict(poisoned))
        wrong = [c for c in self._error_checks(arrays.index, *results, arrays.inputs) if not c.passes]
        if wrong:
            raise WrongResult("timed call: " + "; ".join(f"{c.name}: error {c.error:.3g}" for c in wrong))
        return {
            "phases": {
                phase: summary(samples[i :: len(phases)]) | {"poisoned": poisoned[phase]}
                for i, phase in enumerate(phases)
            },
            "warm_up": {"seconds": warm.seconds, "settled": warm.settled}, "persisting_l2": self._persisting_l2,
        }

    def _timed_call(
        self, program: Program, timed: Timed, arrays: InputSet, poisoned: dict[str, bool] | None
    ) -> tuple[Arrays, Arrays]:
        """Return outputs and gradients of one call with each phase timed.

        poisoned: None for a warm call. Else each phase starts from poisoned memory and a cold L2, and a phase whose
        results lie elsewhere becomes False in it.
        """
        gradients: Arrays = {}
        filled = [] if poisoned is None else self._before_call(program, "forward")
        outputs, saved = timed(partial(program.forward, arrays.inputs), self.backend.synchronize)
        if poisoned is not None:
            poisoned["forward"] &= self.backend.was_poisoned(filled, outputs)
        if program.backward:
            if poisoned is not None:
                # Backward may reuse memory that was poisoned before forward, too.
                filled = filled + self._before_call(program, "backward")
            call = partial(program.backward, saved, arrays.cotangents)
            del saved
            gradients = timed(call, self.backend.synchronize)
            if poisoned is not None:
                passed_on = BLOCKS[self.case.block].passes_on
                computed = {name: gradient for name, gradient in gradients.items() if name not in passed_on}
                poisoned["backward"] &= self.backend.was_poisoned(filled, computed)
        return outputs, gradients

    def _call(self, arrays: InputSet) -> tuple[Arrays, Arrays]:
        with self.backend.poisoned_allocations(self.program):
            outputs, saved = self.program.forward(arrays.inputs)
            if self.program.backward:
                return outputs, self.program.backward(saved, arrays.cotangents)
            return outputs, {}

    def _check_stream_order(self) -> None:
        arrays = self._input_set(0)
        self._call(arrays)  # the setup of a first call would make the host wait for the device
        kept: list[Any] = []

        def forward() -> Arrays:
            outputs, saved = self.program.forward(arrays.inputs)
            kept.append(saved)
            return outputs

        late = self.backend.late_results(self.program, "forward", forward)
        if self.program.backward:
            late += self.backend.late_results(
                self.program, "backward", partial(self.program.backward, kept.pop(), arrays.cotangents)
            )
        if late:
            raise WrongResult(
                f"{', '.join(late)} is written on another stream, and the caller's stream does not wait for it"
            )

    def _error_checks(self, index: int, outputs: Arrays, gradients: Arrays, inputs: Arrays) -> list[ErrorCheck]:
        folder, scales = self.folders[index], self.scales[index]
        results = [("output", name, name, outputs) for name in scales if not name.startswith("d_")]
        if self.case.direction == "joint":
            gradients = {name.removeprefix("d_"): x for name, x in outputs.items() if name.startswith("d_")}
        if self.case.differentiates:
            results += [("gradient", n, n.removeprefix("d_"), gradients) for n in scales if n.startswith("d_")]
        checks = []
        for role, label, name, arrays in results:
            if name not in arrays:
                raise WrongResult(f"no {role} {name!r}; got {sorted(arrays)}")
            try:
                checks.append(self._error_check(label, role, name, arrays[name], scales[label], folder))
            except ValueError as problem:
                raise WrongResult(f"{role} {name!r}: {problem}") from problem
        changed = self.backend.changed_inputs(inputs, folder, self.case)
        if changed:
            raise WrongResult(f"the call changed its inputs: {', '.join(changed)}")
        return checks

    def _error_check(self, label: str, role: str, name: str, values: Any, scale: Scale, folder: Path) -> ErrorCheck:
        """Return the check; the tolerance is that of rounded sums where the program declares them."""
        reference = self.backend.reference(folder, role, name)
        dtype = BLOCKS[self.case.block].tensor(name).dtype_in(self.case)
        error = relative_error(values, reference, scale.rms, self.backend.largest_difference)
        declared = label == f"d_{name}" and name in self.rounded_sums
        by_row = input_arrays.path_of(folder, "tolerance", name)
        if declared and by_row.exists():
            differences = self.backend.largest_differences_by_row(values, reference)
            error, tolerance = worst_row(differences, np.load(by_row).tolist(), scale.rms)
            return ErrorCheck(label, error, tolerance, dtype)
        rounded = declared and scale.rounded_error is not None
        return ErrorCheck(label, error, scale.tolerance(DTYPES[dtype].eps, rounded), dtype if rounded else None)

    def _waiting(self) -> Callable[..., None]:
        """Return the function with which a clock waits for the device before a call and after it."""
        return self.backend.synchronize

    def _before_call(self, program: Program, phase: str) -> list[Extent]:
        filled = (program.poison or partial(self.backend.poison, program))(phase)
        self._persisting_l2 = max(self._persisting_l2, self.backend.flush_l2())
        return filled

    def _seconds_of(self, call: Callable[[], Any]) -> float:
        self.backend.synchronize()
        start = time.perf_counter()
        self.backend.synchronize(call())
        return time.perf_counter() - start
