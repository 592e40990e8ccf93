"""What takes no GPU and nobody waits for, done in order in a thread of its own: packing artifacts with LZMA, graphs,
timelines, and a record's line, which is waited for until the disk has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Clerk:
    """On leaving it, all that it was given is done, also after an error; what went wrong in that is raised then, or by
    `answer` before."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._given: deque[Future[None]] = deque()
        self._closed = False

    def __enter__(self) -> Clerk:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        try:
            self._thread.shutdown()
        except BaseException:  # a second interrupt
            self._thread.shutdown(wait=False, cancel_futures=True)
            raise
        if kind is None:
            self.answer()

    def do(self, task: Callable[[], None]) -> Future[None]:
        """After all that was given before; nothing once it is closed."""
        if self._closed:
            future = Future[None]()
            future.set_result(None)
            return future
        future = self._thread.submit(task)
        self._given.append(future)
        return future

    def close(self) -> None:
        """Take nothing more: lanes that a run gives up need no archives."""
        self._closed = True

    def answer(self) -> None:
        """Raise what went wrong in what is done by now."""
        while self._given and self._given[0].done():
            self._given.popleft().result()
