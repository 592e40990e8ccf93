"""A worker pool: one worker process per role, started on the first request, and again after it died."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .client import Worker, WorkerDied, WorkerError, WorkerTimeout
from .rank_group import SUFFIX, RankGroup


class WorkerPool:
    """One worker, or one group of ranks, per role.

    Requests to one role wait for each other; requests to different roles run in parallel.
    """

    def __init__(self, logs: Path, environment: dict[str, str]) -> None:
        """Create a pool that has no workers yet.

        logs: the folder for one log per role. environment: variables of the workers, in addition to this process's own.
        """
        self._logs, self._environment = logs, environment
        self._siblings: list[WorkerPool] = []
        self._workers: dict[str, Worker | RankGroup] = {}
        self._unavailable: dict[str, WorkerError] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._guard = threading.Lock()
        self._stopped = False

    def start(self, roles: Iterable[str]) -> None:
        """Start several workers in parallel, because each spends seconds on imports. A failure is raised by `ask`."""

        def start(role: str) -> None:
            with self._lock(role), contextlib.suppress(WorkerError, WorkerDied, WorkerTimeout):
                self._worker(role)

        with ThreadPoolExecutor() as threads:
            list(threads.map(start, roles))

    def running(self) -> list[str]:
        """Return the roles that have a worker."""
        return sorted(self._workers)

    def ask(self, role: str, method: str, *, timeout: float = 900.0, **params: Any) -> Any:
        """Return a worker's answer. Raises WorkerError, WorkerDied or WorkerTimeout.

        After WorkerDied and WorkerTimeout, the next request starts a new process.
        """
        with self._lock(role):
            try:
                return self._worker(role).ask(method, timeout=timeout, **params)
            except (WorkerDied, WorkerTimeout):
                with self._guard:
                    dead = self._workers.pop(role, None)
                if dead:
                    dead.kill()
                raise

    def restart(self, roles: Collection[str] | None = None) -> None:
        """End the workers of these roles, or all. The next request to a role starts a new process."""
        with self._guard:
            wanted = list(self._workers) if roles is None else roles
            leaving = [worker for role in wanted if (worker := self._workers.pop(role, None))]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda worker: worker.stop(), leaving))

    def sibling(self) -> WorkerPool:
        """Return a new pool with the same environment and its own logs. `stop` of this pool stops it, too."""
        logs = self._logs / f"pool-{len(self._siblings) + 2}"
        logs.mkdir(exist_ok=True)
        sibling = type(self)(logs, self._environment)
        with self._guard:
            self._siblings.append(sibling)
            sibling._stopped = self._stopped
        return sibling

    def stop(self) -> None:
        """End all workers of this pool and its siblings. Later requests raise WorkerDied."""
        with self._guard:
            self._stopped = True
            workers, self._workers = list(self._workers.values()), {}
            siblings = list(self._siblings)
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda end: end(), [*(w.stop for w in workers), *(s.stop for s in siblings)]))

    def _lock(self, role: str) -> threading.RLock:
        with self._guard:
            return self._locks.setdefault(role, threading.RLock())

    def _worker(self, role: str) -> Worker | RankGroup:
        if role in self._unavailable:
            raise self._unavailable[role]
        if role not in self._workers:
            try:
                with self._guard:
                    if self._stopped:
                        raise WorkerDied("the run was stopped")
                    # Registered before it is ready, so that a `stop` during its start ends it.
                    kind = RankGroup if SUFFIX in role else Worker
                    worker = self._workers[role] = kind(role, self._logs / f"{role}.log", self._environment)
                worker.wait_ready()
            except WorkerError as problem:
                with self._guard:
                    refused = self._workers.pop(role, None)
                if refused:
                    refused.kill()
                self._unavailable[role] = problem  # a framework that cannot be imported now cannot be imported later
                raise
        return self._workers[role]
