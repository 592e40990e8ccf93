"""A pool of real workers for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xlafuse.compare.workers.pool import WorkerPool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    pool = WorkerPool(tmp_path_factory.mktemp("workers"), {})
    yield pool
    pool.stop()
