"""What a framework's worker serves: programs are prepared, checked, measured in rounds and released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from compare import calibration, stream
from compare.blocks import BLOCKS
from compare.clock import Clock, CuptiClock
from compare.graph import store
from compare.spec import Case, Implementation
from compare.subject import Program, Side, Subject


class Framework(Side, Protocol):
    """A side that can also build programs and say what it is."""

    def build(self, case: Case, implementation: Implementation, folder: Path, dumps: Path) -> Program:
        """Compile the implementation for this case; `folder` has inputs for compilers that need a first call; artifacts
        go to `dumps`."""
        ...

    def clock(self) -> Clock | None:
        """The clock of this process, or None where the framework has none here."""
        ...

    def environment(self) -> dict[str, Any]: ...

    def device_works(self) -> bool:
        """Whether this process can still use its device. An illegal access by a kernel ends that: every later CUDA call
        of the process fails with the same error (CUDA Runtime API, cudaErrorIllegalAddress)."""
        ...


class Service:
    """Holds the programs of one worker, by record id."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._subjects: dict[str, Subject] = {}
        self.clock = framework.clock()  # one a process: CUPTI has one subscriber

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {
            "environment": self.environment, "calibrate": self.calibrate, "stream": self.stream,
            "prepare": self.prepare, "check": self.check, "measure": self.measure, "profile": self.profile,
            "release": self.release, "device_works": self._framework.device_works,
        }

    def environment(self) -> dict[str, Any]:
        return self._framework.environment() | {"timer": self.clock.name if self.clock else None}

    def calibrate(self) -> float | None:
        """Seconds of the calibration kernel by this worker's clock; None without CUPTI."""
        if self.clock is None or self.clock.name != CuptiClock.name:
            return None
        return calibration.measure(self.clock, self._framework.synchronize)

    def stream(self, slower: float, samples: int) -> list[float]:
        """Device seconds of a copy kernel that moves `1 + slower` times as much as the base one; for the selftest."""
        assert self.clock is not None, "a worker without a GPU times nothing"
        return stream.measure(self.clock, self._framework.synchronize, self._framework.flush_cache, slower, samples)

    def prepare(
        self, id: str, case: dict[str, Any], implementation: str, folders: list[str], scales: list[Any], dumps: str
    ) -> dict[str, Any]:
        """Compile; the program stays until released. Returns compile time and the fusion graph."""
        spec = Case.from_json(case)
        paths = [Path(f) for f in folders]
        program = self._framework.build(spec, BLOCKS[spec.block].implementation(implementation), paths[0], Path(dumps))
        self._subjects[id] = Subject(self._framework, program, spec, paths, scales)
        graph = None if program.graph is None else store.to_json(program.graph)
        return {"compile_s": program.compile_s, "graph": graph}

    def check(self, id: str) -> dict[str, Any]:
        """Errors beside tolerances of outputs and gradients, and the device and backend they were computed on."""
        verdicts = self._subjects[id].check()
        return {
            "errors": [v.to_json() for v in verdicts],
            "device": self._framework.device, "backend": self._framework.backend,
        }

    def measure(self, id: str, seconds: float, first: bool) -> dict[str, Any]:
        """One round: device time by this worker's clock, then wall time with the clock off; the first round also
        measures peak memory."""
        subject = self._subjects[id]
        result: dict[str, Any] = {"parts": None}
        if self.clock:
            result["parts"] = subject.measure(self.clock, seconds)
        result |= subject.measure_wall(seconds / 2)
        if first:
            result["peak_memory_bytes"] = subject.peak_memory()
        return result

    def profile(self, id: str) -> None:
        """One call for a profiler that watches this process (compare.traffic)."""
        self._subjects[id].profile()

    def release(self, id: str) -> None:
        self._subjects.pop(id, None)
