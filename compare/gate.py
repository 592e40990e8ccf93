"""Who compiles or checks beside others waits at a gate while somebody is timed, between two requests to its workers;
who tunes waits at the lock under which it times kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from compare import tuning
from compare.client import WorkerDied


class Gate:
    """Open at first. lock: see compare.tuning."""

    def __init__(self, lock: Path) -> None:
        self._lock, self._locked = lock, ExitStack()
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = self._stopped = False

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Wait until the gate is open, and keep who wants to shut it waiting. Raises WorkerDied once the run was
        stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._shut)
            if self._stopped:
                raise WorkerDied("the run was stopped")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Let nobody pass from now on, and nobody tune; begins when all that had passed are done."""
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: self._inside == 0)
        self._locked.enter_context(tuning.alone(self._lock))
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
            self._locked.enter_context(tuning.alone(self._lock))

    def stop(self) -> None:
        """Whoever waits, and whoever comes, is refused."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
