"""The workers of one run: started when first needed, restarted after a death, stopped together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from .client import Worker, WorkerDied, WorkerError, WorkerTimeout


class Asked(Protocol):
    """Passes requests on to workers, as a crew does."""

    def ask(self, role: str, method: str, **params: Any) -> Any: ...


class Crew:
    """One worker a role. A role is asked by one thread at a time; different roles may be asked at once."""

    def __init__(self, logs: Path, environment: dict[str, str]) -> None:
        self._logs, self._environment = logs, environment
        self._siblings: list[Crew] = []
        self._workers: dict[str, Worker] = {}
        self._unavailable: dict[str, WorkerError] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._guard = threading.Lock()
        self._stopped = False

    def start(self, roles: Iterable[str]) -> None:
        """Start several workers at once, for each spends seconds importing. What fails here fails again when asked."""

        def start(role: str) -> None:
            with self._lock(role), contextlib.suppress(WorkerError, WorkerDied, WorkerTimeout):
                self._worker(role)

        with ThreadPoolExecutor() as threads:
            list(threads.map(start, roles))

    def has(self, role: str) -> bool:
        """Whether a worker of this role was started and not ended since; asking another one would start it."""
        return role in self._workers

    @property
    def empty(self) -> bool:
        """Whether no worker was started, or all were ended since."""
        return not self._workers

    def ask(self, role: str, method: str, *, timeout: float = 900.0, **params: Any) -> Any:
        """Raises WorkerError, WorkerDied or WorkerTimeout; after the last two the next ask starts a fresh process."""
        with self._lock(role):
            try:
                worker = self._worker(role)
                return worker.ask(method, timeout=timeout, **params)
            except (WorkerDied, WorkerTimeout):
                with self._guard:
                    dead = self._forget(role)
                if dead:
                    dead.kill()
                raise

    def dismiss(self, roles: Collection[str] | None = None) -> None:
        """End these workers, or all: the next ask of each starts a fresh one."""
        with self._guard:
            wanted = list(self._workers) if roles is None else roles
            leaving = [worker for role in wanted if (worker := self._forget(role))]
        with ThreadPoolExecutor() as threads:
            list(threads.map(Worker.stop, leaving))

    def sibling(self) -> Crew:
        """Another crew of the same environment, with logs of its own, which ends with this one."""
        logs = self._logs / f"crew-{len(self._siblings) + 2}"
        logs.mkdir(exist_ok=True)
        sibling = type(self)(logs, self._environment)
        with self._guard:
            self._siblings.append(sibling)
            sibling._stopped = self._stopped
        return sibling

    def stop(self) -> None:
        """End every worker, and those of siblings; what is asked from now on is refused."""
        with self._guard:
            self._stopped = True
            workers, self._workers = list(self._workers.values()), {}
            siblings = list(self._siblings)
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda end: end(), [*(w.stop for w in workers), *(s.stop for s in siblings)]))

    def _forget(self, role: str) -> Worker | None:
        return self._workers.pop(role) if role in self._workers else None

    def _lock(self, role: str) -> threading.RLock:
        with self._guard:
            return self._locks.setdefault(role, threading.RLock())

    def _worker(self, role: str) -> Worker:
        if role in self._unavailable:
            raise self._unavailable[role]
        if role not in self._workers:
            try:
                with self._guard:
                    if self._stopped:
                        raise WorkerDied("the run was stopped")
                    # Known before it is ready, so that a stop meanwhile ends it, too.
                    worker = self._workers[role] = Worker(role, self._logs / f"{role}.log", self._environment)
                worker.wait_ready()
            except WorkerError as problem:
                with self._guard:
                    refused = self._forget(role)
                if refused:
                    refused.kill()
                self._unavailable[role] = problem  # a framework that cannot be imported will not be next time
                raise
        return self._workers[role]
