"""Who compiles or checks beside others waits at a gate while somebody is timed, between two requests to its workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from compare.client import WorkerDied


class Gate:
    """Open at first."""

    def __init__(self) -> None:
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
        """Let nobody pass from now on; begins when all that had passed are done."""
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()

    def stop(self) -> None:
        """Whoever waits, and whoever comes, is refused."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
