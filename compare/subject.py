"""One implementation of one case inside its worker: checked, then measured, through what its framework provides.

The same code drives every framework, so that all are checked and timed by one protocol. A framework's module gives a
`Side`; the compiled block is a `Program`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from compare.check import Scale, Verdict, relative_error
from compare.clock import Clock
from compare.graph.model import FusionGraph
from compare.profiled import bounded, profiling
from compare.spec import DTYPES, Case

Arrays = dict[str, Any]
Extent = tuple[int, int]  # first and one-past-last device address


@dataclass
class Program:
    """A compiled block: `forward(inputs) -> (outputs, saved)`, `backward(saved, cotangents) -> gradients by input`."""

    forward: Callable[[Arrays], tuple[Arrays, Any]]
    backward: Callable[[Any, Arrays], Arrays] | None
    compile_s: float
    graph: FusionGraph | None
    intercepts_allocations: bool = True  # its allocations go through the framework's Python-visible dispatch
    allocations: dict[str, list[int]] = field(default_factory=dict)  # bytes of each buffer a call of a part allocates


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
        """A stored float64 reference on this device."""
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

    def flush_cache(self) -> None:
        """Leave the L2 cache full of other data, clean."""
        ...

    def synchronize(self, results: Any = None) -> None:
        """Wait until the device is done, and `results` are there."""
        ...

    def peak_memory(self, program: Program, part: str, call: Callable[[], Any]) -> int | None:
        """Bytes that one call needs at most above its inputs."""
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


class WrongResult(Exception):
    """A result that must not be timed; the message says what is wrong."""


class Subject:
    """A program on its case's data. `folders` hold two input sets, so that a cached result is caught."""

    def __init__(
        self, side: Side, program: Program, case: Case, folders: list[Path], scales: list[dict[str, dict[str, float]]]
    ) -> None:
        self.side, self.program, self.case = side, program, case
        self.folders = folders
        self.scales = [{name: Scale(**scale) for name, scale in group.items()} for group in scales]

    def check(self) -> list[Verdict]:
        """Errors of outputs and gradients on every input set, the worst of each; inputs must be unchanged after.

        Raises WrongResult on a missing, misshapen, late or input-changing result; too large an error is left to the
        caller.
        """
        self._check_order()
        worst: dict[str, Verdict] = {}
        for index, folder in enumerate(self.folders):
            inputs = self.side.inputs(folder, self.case)
            outputs, gradients = self._call(inputs, folder)
            for verdict in self._verdicts(index, outputs, gradients, inputs):
                if verdict.name not in worst or not verdict.error <= worst[verdict.name].error:
                    worst[verdict.name] = verdict
        return list(worst.values())

    def measure(self, clock: Clock, seconds: float, least: int = 5) -> dict[str, Any]:
        """Timed calls for about `seconds`, each on poisoned outputs and a cold L2; the last results are checked.

        Returns, per part, `device_time` and `busy_time` samples in seconds, the records of a median call, and whether
        every call's outputs lay in poisoned memory.
        """
        folder = self.folders[0]
        inputs, cotangents = self.side.inputs(folder, self.case), self.side.cotangents(folder, self.case)
        count = self._samples_for(seconds, least, inputs, cotangents)
        poisoned = dict.fromkeys(self.case.parts, True)
        outputs: Arrays = {}
        gradients: Arrays = {}
        clock.start()
        for _ in range(count):
            outputs, gradients = {}, {}
            token = self._before_call("forward")
            outputs, saved = clock.time(partial(self.program.forward, inputs), self.side.synchronize)
            poisoned["forward"] &= self.side.was_poisoned(token, outputs)
            if self.program.backward:
                # Backward may also reuse what forward was given and saved: poisoned before this very step, too.
                token = token + self._before_call("backward")
                call = partial(self.program.backward, saved, cotangents)
                gradients = clock.time(call, self.side.synchronize)
                del call
                poisoned["backward"] &= self.side.was_poisoned(token, gradients)
            del saved
        samples = clock.collect()
        wrong = [v for v in self._verdicts(0, outputs, gradients, inputs) if not v.right]
        if wrong:
            raise WrongResult("timed call: " + "; ".join(f"{v.name}: error {v.error:.3g}" for v in wrong))
        if not all(sample.records for sample in samples):
            raise RuntimeError(f"the {clock.name} clock saw no device work in a timed call")
        parts = self.case.parts
        return {part: self._summary(samples[i :: len(parts)], poisoned[part]) for i, part in enumerate(parts)}

    def measure_wall(self, seconds: float) -> dict[str, Any]:
        """Steady-state host time of a call (train: forward and backward), no clock attached, caches as they fall."""
        folder = self.folders[0]
        inputs, cotangents = self.side.inputs(folder, self.case), self.side.cotangents(folder, self.case)

        def call() -> Any:
            outputs, saved = self.program.forward(inputs)
            return self.program.backward(saved, cotangents) if self.program.backward else outputs

        count = max(3, min(200, int(seconds / self._seconds_of(call))))
        start = time.perf_counter()
        for _ in range(count):
            results = call()
        self.side.synchronize(results)
        return {"wall_time": (time.perf_counter() - start) / count, "calls": count}

    def profile(self) -> None:
        """One call, its parts marked for a profiler, after one that is not profiled."""
        folder = self.folders[0]
        inputs, cotangents = self.side.inputs(folder, self.case), self.side.cotangents(folder, self.case)
        self._call(inputs, folder)
        self.side.synchronize()
        with profiling():
            _, saved = bounded(partial(self.program.forward, inputs), self.side.synchronize)
            if self.program.backward:
                bounded(partial(self.program.backward, saved, cotangents), self.side.synchronize)

    def peak_memory(self) -> dict[str, int | None]:
        """Peak bytes above the inputs of each part."""
        folder = self.folders[0]
        inputs, cotangents = self.side.inputs(folder, self.case), self.side.cotangents(folder, self.case)
        kept: list[Any] = []
        peak = {
            "forward": self.side.peak_memory(
                self.program, "forward", lambda: kept.append(self.program.forward(inputs)[1])
            )
        }
        if self.program.backward:
            backward = self.program.backward
            peak["backward"] = self.side.peak_memory(
                self.program, "backward", lambda: backward(kept.pop(), cotangents)
            )
        return peak

    def _call(self, inputs: Arrays, folder: Path) -> tuple[Arrays, Arrays]:
        with self.side.poisoned_allocations(self.program):
            outputs, saved = self.program.forward(inputs)
            if self.program.backward:
                return outputs, self.program.backward(saved, self.side.cotangents(folder, self.case))
            return outputs, {}

    def _check_order(self) -> None:
        folder = self.folders[0]
        inputs, cotangents = self.side.inputs(folder, self.case), self.side.cotangents(folder, self.case)
        self._call(inputs, folder)  # what a first call sets up would make the host wait for the device
        kept: list[Any] = []

        def forward() -> Arrays:
            outputs, saved = self.program.forward(inputs)
            kept.append(saved)
            return outputs

        late = self.side.written_late(self.program, "forward", forward)
        if self.program.backward:
            late += self.side.written_late(
                self.program, "backward", partial(self.program.backward, kept.pop(), cotangents)
            )
        if late:
            raise WrongResult(
                f"{', '.join(late)} is written on another stream, for which the caller's stream was not made to wait"
            )

    def _verdicts(self, index: int, outputs: Arrays, gradients: Arrays, inputs: Arrays) -> list[Verdict]:
        folder, scales = self.folders[index], self.scales[index]
        eps = DTYPES[self.case.dtype].eps
        results = [("output", name, name, outputs) for name in scales if not name.startswith("d_")]
        if self.program.backward:
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
            verdicts.append(Verdict(label, error, scales[label].tolerance(eps)))
        changed = self.side.changed(inputs, folder, self.case)
        if changed:
            raise WrongResult(f"the call changed its inputs: {', '.join(changed)}")
        return verdicts

    def _before_call(self, part: str) -> list[Extent]:
        token = self.side.poison(self.program, part)
        self.side.flush_cache()
        return token

    def _seconds_of(self, call: Callable[[], Any]) -> float:
        self.side.synchronize()
        start = time.perf_counter()
        self.side.synchronize(call())
        return time.perf_counter() - start

    def _samples_for(self, seconds: float, least: int, inputs: Arrays, cotangents: Arrays) -> int:
        def once() -> Any:
            self._before_call("forward")
            outputs, saved = self.program.forward(inputs)
            if not self.program.backward:
                return outputs
            self._before_call("backward")
            return self.program.backward(saved, cotangents)

        once()  # the first call after another implementation's pays for its caches
        return max(least, min(100, int(seconds / self._seconds_of(once))))

    @staticmethod
    def _summary(samples: list[Any], poisoned: bool) -> dict[str, Any]:
        middle = statistics.median_low(s.device_time for s in samples)
        typical = next(s for s in samples if s.device_time == middle)
        return {
            "device_time": [s.device_time for s in samples],
            "busy_time": [s.busy_time for s in samples],
            "launches": len(typical.records),
            "records": [asdict(record) for record in typical.records],
            "poisoned": poisoned,
        }
