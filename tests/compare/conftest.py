"""A pool of real workers, started once a session, on the CPU or on the GPU; and captured steps."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_programs import produce, quick_compiles

from xlafuse.compare import targets
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.client import WorkerError
from xlafuse.compare.workers.pool import WorkerPool

H200 = PROJECT / "reports" / "h200"
CAPTURES = PROJECT / "tests" / "data" / "captures"
Check = Callable[..., dict[str, Any]]


def _checker(folder: Path, environment: dict[str, str]) -> Iterator[Check]:
    pool = WorkerPool(folder, environment)
    data: dict[str, tuple[list[str], list[Any]]] = {}

    def check(case: Case, implementation: str, role: str, seeds: int = 2) -> dict[str, Any]:
        """Prepare and check one implementation in `role`'s worker, on inputs of so many seeds.

        Return the result of compare.workers.service.Service.check, with the graph.
        """
        if case.id not in data:
            data[case.id] = produce(case, folder)
        folders, scales = data[case.id]
        dumps = folder / "dumps" / f"{case.id}-{implementation}-{role}".replace("/", "-")
        try:
            prepared = pool.ask(
                role, "prepare", id="program", case=case.to_json(), implementation=implementation,
                folders=folders[:seeds], scales=scales[:seeds], dumps=str(dumps),
            )
        except WorkerError as problem:
            if problem.kind != "skipped" or not BLOCKS[case.block].implementation(implementation).requires:
                raise
            pytest.skip(str(problem))  # an optional package is missing
        outcome = pool.ask(role, "check", id="program")
        pool.ask(role, "release", id="program")
        json.dumps(prepared)  # a record must be able to hold it
        return dict(outcome) | {"graph": prepared["graph"]}

    yield check
    pool.stop()


@pytest.fixture(scope="session")
def committed_run() -> Any:
    """Return the committed run of all blocks, which takes seconds to read. Tests must not change it."""
    from xlafuse.compare.sources.run_source import open_run

    return open_run(H200)


@pytest.fixture(scope="session")
def check_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    yield from _checker(tmp_path_factory.mktemp("cpu"), {"CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": quick_compiles()})


@pytest.fixture(scope="session")
def check_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    # Half of XLA's 400 rows have products, which XLA would autotune. Runs check the autotuned code.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    yield from _checker(tmp_path_factory.mktemp("gpu"), {"XLA_FLAGS": flags})


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The captured steps of `tests/data/captures`, with their programs."""
    folder = tmp_path_factory.mktemp("captures")
    for file in CAPTURES.glob("*.tar.xz"):
        with lzma.open(file) as packed, tarfile.open(fileobj=packed) as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def nnx(captures: Path) -> Path:
    return captures / "nnx"


@pytest.fixture(scope="session")
def compiled(nnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of the step of `nnx`, as a compile for an H200 writes it, without its profile and sources."""
    folder = tmp_path_factory.mktemp("compiled") / "dump"
    shutil.copytree(nnx / "xla", folder)
    (module,) = folder.glob("*.hlo.pb")
    description = targets.FOLDER / "h200" / "xla" / "gpu_target_config-0.11.pbtxt"
    shutil.copy(description, folder / f"{module.name.partition('.sm_')[0]}.gpu_target_config.pbtxt")
    return folder


@pytest.fixture(scope="session")
def gpt(captures: Path) -> Path:
    return captures / "gpt"
