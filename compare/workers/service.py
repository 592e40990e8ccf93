"""What a framework's worker serves: programs are prepared, checked, measured in rounds and released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from ..base import host
from ..base.worker_protocol import Skip
from ..graph import store
from ..measure import clock_calibration
from ..measure import copy_bandwidth as stream
from ..measure.clock import Clock, CuptiClock
from ..measure.measurement import Program, Side, Subject
from ..plan import timing_modes
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation


class Framework(Side, Protocol):
    """A side that can also build programs and say what it is."""

    def build(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, tune: bool = True
    ) -> Program:
        """Compile the implementation for this case; `folder` has inputs for compilers that need a first call; artifacts
        go to `dumps`. Raises compare.base.worker_protocol.NotAutotuned where that takes timing kernels, unless it is to
        `tune`."""
        ...

    def clock(self) -> Clock | None:
        """The clock of this process, or None where the framework has none here."""
        ...

    def environment(self) -> dict[str, Any]: ...

    def device_works(self) -> bool:
        """Whether this process can still use its device. An illegal access by a kernel ends that: every later CUDA call
        of the process fails with the same error (CUDA Runtime API, cudaErrorIllegalAddress)."""
        ...

    def needs_restart(self, kept: int) -> bool:
        """Return whether this process keeps more than `kept` bytes of the GPU's memory and cannot give them back."""
        ...

    def give_back(self, *, idle: bool) -> None:
        """Return memory that nothing holds to the GPU, which other workers share, where the framework can. idle: no
        program is left, and so no case's arrays are needed again."""
        ...


def require(implementation: Implementation) -> None:
    """Raise Skip where a package that the implementation needs is not in this worker's interpreter."""
    if problem := host.missing(implementation.requires):
        raise Skip(problem)


class Service:
    """Holds the programs of one worker, by record id."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._subjects: dict[str, Subject] = {}
        self.clock = framework.clock()  # one a process: CUPTI has one subscriber

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {
            "environment": self.environment, "calibrate": self.calibrate, "stream": self.stream,
            "prepare": self.prepare, "check": self.check, "measure": self.measure, "measure_mode": self.measure_mode,
            "profile": self.profile, "trace": self.trace,
            "release": self.release, "device_works": self._framework.device_works,
            "needs_restart": self._framework.needs_restart,
        }

    def environment(self) -> dict[str, Any]:
        return self._framework.environment() | {"timer": self.clock.name if self.clock else None}

    def calibrate(self) -> float | None:
        """Seconds of the calibration kernel by this worker's clock; None without CUPTI."""
        if self.clock is None or self.clock.name != CuptiClock.name:
            return None
        return clock_calibration.measure(self.clock, self._framework.synchronize)

    def stream(self, slower: float, samples: int) -> list[float]:
        """Device seconds of a copy kernel that moves `1 + slower` times as much as the base one; for the selftest."""
        assert self.clock is not None, "a worker without a GPU times nothing"
        return stream.measure(self.clock, self._framework.synchronize, self._framework.flush_cache, slower, samples)

    def prepare(
        self, id: str, case: dict[str, Any], implementation: str, folders: list[str], dumps: str,
        scales: list[Any] | None = None, autotune: bool = True,
    ) -> dict[str, Any]:
        """Compile on the stored inputs; the program stays until released. Returns compile time, the fusion graph, and
        how it is launched; its artifacts may still be written until it is checked. scales: of the references of each
        input set, if they are stored already. tune: whether it may tune; see compare.workers.autotune_lock."""
        spec = Case.from_json(case)
        paths = [Path(f) for f in folders]
        row = BLOCKS[spec.block].implementation(implementation)
        require(row)
        program = self._framework.build(spec, row, paths[0], Path(dumps), autotune)
        self._subjects[id] = Subject(self._framework, program, spec, paths, scales or [])
        graph = None if program.graph is None else store.to_json(program.graph)
        self._framework.give_back(idle=False)
        return {"compile_s": program.compile_s, "graph": graph, "command_buffers": program.command_buffers}

    def check(self, id: str, scales: list[Any] | None = None) -> dict[str, Any]:
        """Errors beside tolerances of outputs and gradients, and the device and backend they were computed on. Waits
        for the program's artifacts to be written, and raises why they cannot be. scales: of the references, where
        those were not stored yet when it was prepared."""
        subject = self._subjects[id]
        if subject.program.artifacts is not None:
            subject.program.artifacts.result()
        if scales is not None:
            subject.refer(scales)
        verdicts = subject.check()
        if self.clock and all(verdict.right for verdict in verdicts):
            subject.rehearse()
        self._framework.give_back(idle=False)
        return {
            "errors": [v.to_json() for v in verdicts],
            "device": self._framework.device, "backend": self._framework.backend,
        }

    def measure(self, id: str, seconds: float, first: bool, input_set: int) -> dict[str, Any]:
        """One round on inputs of that set: device time by this worker's clock, then wall time, as long, with the clock
        off; the first round also has the peak memory."""
        subject = self._subjects[id]
        result: dict[str, Any] = {"parts": None, "warm_up": None}
        if self.clock:
            result |= subject.measure(self.clock, seconds, input_set)
        result |= subject.measure_wall(seconds, input_set)
        if first:
            peaks = subject.peak_memory()
            result["peak_memory_bytes"] = {part: peak.bytes for part, peak in peaks.items()}
            result["peak_memory"] = {part: asdict(peak) for part, peak in peaks.items()}
        return result

    def measure_mode(self, id: str, mode: str, seconds: float, input_set: int) -> dict[str, Any]:
        """One round in another mode (compare.plan.timing_modes); {"same_as": "cold"} where the program runs so in the
        main one.

        Raises whatever the framework does where it cannot run the program so.
        """
        if self.clock is None:
            raise Skip("this worker has no clock")
        return self._subjects[id].measure_mode(mode, self.clock, seconds, input_set) or {"same_as": timing_modes.MAIN}

    def trace(self, id: str) -> dict[str, Any]:
        """One call for a timeline (compare.measure.timeline), by part what dataclasses.asdict makes of its
        CallTrace."""
        assert isinstance(self.clock, CuptiClock), "only CUPTI sees what the host launches"
        return {part: asdict(found) for part, found in self._subjects[id].trace(self.clock).items()}

    def profile(self, id: str, mark: str) -> None:
        """One call for a profiler that watches this process (compare.run.ncu)."""
        self._subjects[id].profile(mark)

    def release(self, id: str) -> None:
        self._subjects.pop(id, None)
        self._framework.give_back(idle=not self._subjects)
