"""A worker that misbehaves on request, and a pool of such workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from xlafuse.compare.workers import pool as pools
from xlafuse.compare.workers.client import Worker
from xlafuse.compare.workers.pool import WorkerPool

ODD = [sys.executable, str(Path(__file__).with_name("odd_worker.py"))]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker("odd", tmp_path / "odd.log", command=ODD)
    worker.wait_ready(30)
    yield worker
    worker.kill()


@pytest.fixture
def odd_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    monkeypatch.setattr(pools, "Worker", partial(Worker, command=ODD))
    pool = WorkerPool(tmp_path, {})
    yield pool
    pool.stop()
