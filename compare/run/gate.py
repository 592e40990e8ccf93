"""Who uses the GPU beside others waits at a gate while somebody is timed, between two requests to its workers; of those
that compile, which takes the host, a few go on; who tunes waits at the lock under which it times kernels."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from ..workers import autotune_lock
from ..workers.client import WorkerDied


class Gate:
    """Open at first. lock: see compare.workers.autotune_lock. beside: how many of each framework may compile while it
    is shut: of Inductor's, most come to where they time kernels, and wait there."""

    def __init__(self, lock: Path, beside: int = 0) -> None:
        self._lock, self._locked = lock, ExitStack()
        self._beside = beside
        self._changed = threading.Condition()
        self._inside = Counter[str]()  # by framework, of those that compile; of all others ""
        self._shut = self._stopped = False

    def passed(self) -> AbstractContextManager[None]:
        """Wait until the gate is open, and keep who wants to shut it waiting. Raises WorkerDied once the run was
        stopped."""
        return self._enter("", lambda: not self._shut)

    def compiling(self, framework: str) -> AbstractContextManager[None]:
        """As `passed`, but a few may while it is shut."""
        return self._enter(framework, lambda: not self._shut or self._inside[framework] < self._beside)

    @contextmanager
    def _enter(self, framework: str, may: Callable[[], bool]) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or may())
            if self._stopped:
                raise WorkerDied("the run was stopped")
            self._inside[framework] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[framework] -= 1
                self._changed.notify_all()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Let nobody use the GPU from now on, and nobody tune; begins when all that do are done, and few compile."""
        with self._changed:
            self._shut = True
            self._changed.wait_for(
                lambda: all(count <= (self._beside if framework else 0) for framework, count in self._inside.items())
            )
        self._locked.enter_context(autotune_lock.alone(self._lock))
        try:
            yield
        finally:
            self._locked.close()
            with self._changed:
                self._shut = False
                self._changed.notify_all()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While it is shut, for what was timed and has to be compiled again: let that tune."""
        self._locked.close()
        try:
            yield
        finally:
            self._locked.enter_context(autotune_lock.alone(self._lock))

    def stop(self) -> None:
        """Whoever waits, and whoever comes, is refused."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
