"""The requests that a rank's worker serves: prepare, check, measure, trace and release programs over several GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from msgspec import to_builtins

from ..base.worker_protocol import Skip
from ..graph import store
from ..measure import rank_measurement
from ..measure.clock import CuptiClock
from ..measure.host_barrier import HostBarrier
from ..measure.rank_measurement import Rank, RankBackend, RankProgram
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation
from .service import Requested, requested


def rank_of_environment() -> tuple[Rank, str]:
    """Return this process's place, and the address at which the ranks meet (compare.workers.rank_group)."""
    number, count = int(os.environ["XLAFUSE_RANK"]), int(os.environ["XLAFUSE_RANKS"])
    barrier = HostBarrier(Path(os.environ["XLAFUSE_BARRIER"]), number, count)
    return Rank(number, count, barrier), os.environ["XLAFUSE_COORDINATOR"]


class PreparingBackend(RankBackend, Protocol):
    """A rank's framework that also compiles."""

    def environment(self) -> dict[str, Any]: ...

    def clock(self) -> CuptiClock | None: ...

    def build(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, *, communicate: bool
    ) -> RankProgram:
        """Compile for this rank. Raises Skip where the program has no form without exchanges and was asked for it."""
        ...

    def release_memory(self) -> None: ...

    def device_works(self) -> bool: ...


class RankService:
    """Holds the programs of one rank, by record id."""

    def __init__(self, backend: PreparingBackend, rank: Rank) -> None:
        self._backend, self._rank = backend, rank
        self._programs: dict[str, RankProgram] = {}
        self._clock = backend.clock()

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {
            "environment": self.environment, "prepare": self.prepare, "prepare_alone": self.prepare_alone,
            "check": self.check, "measure": self.measure, "graph": self.graph, "trace": self.trace,
            "release": self.release,
            "device_works": self._backend.device_works,
        }

    def environment(self) -> dict[str, Any]:
        return self._backend.environment() | {"timer": self._clock.name if self._clock else None}

    def prepare(
        self, id: str, case: dict[str, Any], implementation: Requested, folders: list[str], dumps: str
    ) -> dict[str, Any]:
        """Compile, and keep the program until it is released. Return compile time and the bytes to send.

        Only the first rank's artifacts are kept: the others' differ in nothing but their number.
        """
        spec, row = requested(case, implementation)
        paths = [Path(folder) for folder in folders]
        program = self._backend.build(spec, row, paths[0], self._dumps(dumps), communicate=True)
        program.folders = paths
        self._programs[id] = program
        return {
            "compile_s": program.program.compile_s, "sent": program.sent,
            "least_sent": rank_measurement.least_sent(self._rank, spec, paths[0]),
        }

    def prepare_alone(self, id: str, implementation: Requested, dumps: str) -> None:
        """Compile the program without exchanges beside the one that is held."""
        held = self._programs[id]
        row = BLOCKS[held.case.block].implementation(implementation)
        built = self._backend.build(held.case, row, held.folders[0], self._dumps(f"{dumps}-alone"), communicate=False)
        held.alone = built.program

    def check(self, id: str, scales: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the errors and tolerances of this rank's slices, with the device that computed them."""
        held = self._programs[id]
        if held.program.artifacts is not None:
            held.program.artifacts.result()
        found = rank_measurement.check(self._backend, self._rank, held, scales)
        return {
            "errors": to_builtins(found), "device": self._backend.device, "backend": self._backend.name,
        }

    def graph(self, id: str) -> dict[str, Any] | None:
        """Return the first rank's fusion graph; None from other ranks, and for a program without one."""
        make = self._programs[id].graph
        graph = None if make is None else make()
        return None if graph is None or self._rank.number else store.to_json(graph)

    def measure(self, id: str, rounds: int) -> dict[str, Any]:
        return rank_measurement.measure(self._backend, self._rank, self._programs[id], self._cupti(), rounds)

    def trace(self, id: str) -> dict[str, Any]:
        return dict(to_builtins(rank_measurement.trace(self._backend, self._rank, self._programs[id], self._cupti())))

    def release(self, id: str) -> None:
        self._programs.pop(id, None)
        self._backend.release_memory()

    def _cupti(self) -> CuptiClock:
        if self._clock is None:
            raise Skip('not timed: cupti-python is not installed (pip install "cupti-python==13.0.1")')
        return self._clock

    def _dumps(self, dumps: str) -> Path:
        return Path(dumps) if self._rank.number == 0 else Path(f"{dumps}-rank-{self._rank.number}")
