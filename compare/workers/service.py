"""The requests that a framework's worker serves: prepare, check, measure and release programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from ..base import host
from ..base.worker_protocol import Skip
from ..graph import store
from ..measure import clock_calibration
from ..measure import copy_bandwidth as stream
from ..measure.clock import CuptiClock
from ..measure.measurement import MeasuredProgram
from ..measure.worker_backend import WorkerBackend
from ..plan import timing_modes
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation

Requested = str | dict[str, Any]  # compare.spec.implementation.Implementation.request


def requested(case: dict[str, Any], implementation: Requested) -> tuple[Case, Implementation]:
    """Return the case and the implementation of a request.

    Raises Skip if this worker's interpreter lacks a package that the implementation needs.
    """
    spec = Case.from_json(case)
    row = BLOCKS[spec.block].implementation(implementation)
    if problem := host.missing(row.requires):
        raise Skip(problem)
    return spec, row


class Service:
    """Holds the programs of one worker, by record id. program_on_data: how a rank measures its program, for ranks."""

    def __init__(
        self, backend: WorkerBackend, program_on_data: Callable[..., MeasuredProgram] = MeasuredProgram
    ) -> None:
        self._backend, self._program_on_data = backend, program_on_data
        self._programs: dict[str, MeasuredProgram] = {}
        self.clock = backend.clock()  # one per process, because CUPTI has one subscriber

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {
            "environment": self.environment, "calibrate": self.calibrate, "stream": self.stream,
            "prepare": self.prepare, "check": self.check, "measure": self.measure, "measure_mode": self.measure_mode,
            "profile": self.profile, "graph": self.graph, "trace": self.trace,
            "release": self.release, "device_works": self._backend.device_works,
            "needs_restart": self._backend.needs_restart,
        }

    def environment(self) -> dict[str, Any]:
        return self._backend.environment() | {"timer": self.clock.name if self.clock else None}

    def calibrate(self) -> float | None:
        """Return the seconds of the calibration kernel by this worker's clock; None without CUPTI."""
        if self.clock is None or self.clock.name != CuptiClock.name:
            return None
        return clock_calibration.measure(self.clock, self._backend.synchronize)

    def stream(self, slower: float, samples: int) -> list[float]:
        """Return device seconds of a copy kernel that moves `1 + slower` times the bytes of the base one."""
        assert self.clock is not None, "a worker without a GPU times nothing"
        return stream.measure(self.clock, self._backend.synchronize, self._backend.flush_l2, slower, samples)

    def prepare(
        self, id: str, case: dict[str, Any], implementation: Requested, folders: list[str], dumps: str,
        scales: list[Any] | None = None, autotune: bool = True,
    ) -> dict[str, Any]:
        """Compile on the stored inputs, and keep the program until it is released.

        Return what `MeasuredProgram.described` says of it. Artifacts may still be written until `check`.

        scales: the scales of each input set's references, if they are stored already.
        autotune: whether the compile may autotune (compare.workers.autotune_lock).
        Raises NotAutotuned if the compile has to autotune and may not.
        """
        spec, row = requested(case, implementation)
        paths = [Path(f) for f in folders]
        program = self._backend.build(spec, row, paths[0], Path(dumps), autotune)
        measured = self._program_on_data(self._backend, program, spec, paths, scales or [], row.rounded_sums)
        self._programs[id] = measured
        described = measured.described()
        self._backend.release_memory(idle=False)
        return described

    def check(self, id: str, scales: list[Any] | None = None) -> dict[str, Any]:
        """Return the errors and tolerances of outputs and gradients, with the device and backend that computed them.

        Waits until the program's artifacts are written, and raises the error of a failed write. scales: the scales of
        the references, if `prepare` did not get them.
        """
        measured = self._programs[id]
        if measured.program.artifacts is not None:
            measured.program.artifacts.result()
        if scales is not None:
            measured.set_scales(scales)
        checks = measured.check()
        if self.clock and all(check.passes for check in checks):
            measured.call_as_timed()
        self._backend.release_memory(idle=False)
        return {
            "errors": to_builtins(checks),
            "device": self._backend.device, "backend": self._backend.name,
        }

    def measure(self, id: str, seconds: float, first: bool, input_set: int) -> dict[str, Any]:
        """Measure one round on an input set by this worker's clock; see `MeasuredProgram.measure_round`."""
        return self._programs[id].measure_round(self.clock, seconds, first, input_set)

    def measure_mode(self, id: str, mode: str, seconds: float, input_set: int) -> dict[str, Any]:
        """Measure one round in another mode (compare.plan.timing_modes).

        Return {"same_as": "cold"} if the main mode launches the program in the same way. Raises the framework's own
        error if the program cannot run in the mode.
        """
        if self.clock is None:
            raise Skip("this worker has no clock")
        return self._programs[id].measure_mode(mode, self.clock, seconds, input_set) or {"same_as": timing_modes.MAIN}

    def graph(self, id: str) -> dict[str, Any] | None:
        """Return the fusion graph that is made after the measurement (`Program.late_graph`), if there is one."""
        make = self._programs[id].program.late_graph
        return None if make is None else store.to_json(make())

    def trace(self, id: str) -> dict[str, Any]:
        """Trace one call for a timeline (compare.measure.timeline): each phase's CallTrace as JSON data."""
        assert isinstance(self.clock, CuptiClock), "only CUPTI sees what the host launches"
        return dict(to_builtins(self._programs[id].trace(self.clock)))

    def profile(self, id: str, mark: str) -> None:
        """Make one call for a profiler that watches this process (compare.run.ncu)."""
        self._programs[id].profile(mark)

    def release(self, id: str) -> None:
        self._programs.pop(id, None)
        self._backend.release_memory(idle=not self._programs)
