"""Implementations in real workers, prepared, checked and timed as a run does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.pool import WorkerPool


def quick_compiles() -> str:
    """Return XLA_FLAGS that have LLVM optimize little: code for a CPU compiles for seconds and runs briefly."""
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    return f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def produce(case: Case, folder: Path) -> tuple[list[str], list[Any]]:
    """Write inputs and references of two seeds. Return their folders, and the scales of the references."""
    from xlafuse.compare.numerics import reference  # imports torch

    folders = [str(folder / case.id.replace("/", "-") / str(seed)) for seed in (0, 1)]
    produce_one = reference.methods()["produce"]
    return folders, [produce_one(case.to_json(), seed, path) for seed, path in enumerate(folders)]


class WorkerProgram:
    """One implementation of a case in its backend's worker. As a context, it is released at the end."""

    def __init__(self, pool: WorkerPool, folder: Path, case: Case, implementation: str) -> None:
        self._pool, self._name = pool, implementation
        self._role = BLOCKS[case.block].implementation(implementation).backend.worker
        folders, scales = produce(case, folder)
        self.prepared = self.ask(
            "prepare", case=case.to_json(), implementation=implementation, folders=folders, scales=scales,
            dumps=str(folder / "dumps" / implementation),
        )

    def ask(self, method: str, **params: Any) -> Any:
        return self._pool.ask(self._role, method, id=self._name, **params)

    def measure(self, input_set: int = 0, *, first: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("measure", seconds=0.01, first=first, input_set=input_set)
        return found

    def measure_mode(self, mode: str, input_set: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("measure_mode", mode=mode, seconds=0.01, input_set=input_set)
        return found

    def __enter__(self) -> WorkerProgram:
        return self

    def __exit__(self, *error: object) -> None:
        self.ask("release")
