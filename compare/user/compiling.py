"""The processes that compile users' functions: started with a request, kept for the next one, ended when idle."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.frameworks import Framework
from ..base.host import installed
from ..base.paths import PACKAGE
from ..base.scratch import locked_folder, scratch_in
from ..functions.parcel import path_for
from ..graph import store
from ..measure.rounds import joined
from ..sources.explained import Explained
from ..workers.client import Worker, WorkerDied, WorkerError, interpreter
from . import forced_check
from .call import Call, ExplainError, Stays, packed, state_of

Progress = Callable[[str], None]

REFUSALS = ("UsageError", "NotForced")  # kinds of errors whose messages need no kind
IDLE_SECONDS = 120.0  # after which a process that waits for a request is ended
_PROGRESS_SECONDS = 30.0  # between two messages about a running compile
# Variables that pytest changes with each test, and that no compiler reads.
_PASSING = ("PYTEST_CURRENT_TEST",)


def compile_calls(
    framework: Framework, calls: Sequence[Call], asked: Mapping[str, Any], deadline: float, progress: Progress
) -> Explained:
    """Return the graphs of calls of one framework.

    JAX's functions are compiled by the Python of `workers.client.interpreter`. Where one cannot travel there, this
    Python compiles all of them, and a note says so. Raises ExplainError, and WorkerTimeout at the deadline.
    """
    python, note = sys.executable, ""
    if framework == "jax":
        python = interpreter("explain-jax")
    if python != sys.executable:
        try:
            return _compile_in(python, framework, calls, asked, deadline, progress)
        except Stays as problem:
            version = installed("jax")["jax"]
            note = f"compiled by this Python's jax {version} and not by {python}: {' '.join(str(problem).split())}"
            progress(note)
    try:
        found = _compile_in(sys.executable, framework, calls, asked, deadline, progress)
    except ExplainError as problem:
        if note and problem.kind == "Skip":
            problem.args = (f"{problem}; {note}",)
        raise
    return replace(found, notes=(*found.notes, *([note] if note else [])))


def _compile_in(
    python: str, framework: Framework, calls: Sequence[Call], asked: Mapping[str, Any], deadline: float,
    progress: Progress,
) -> Explained:
    """Compile in a process of a Python. Raises Stays where that is another one, to which a call cannot travel."""
    elsewhere = python != sys.executable
    path = path_for(elsewhere=elsewhere)
    request = {
        **asked, "path": [*path], "folder": os.getcwd(), "elsewhere": elsewhere, "state": state_of(framework),
        "calls": [packed(call, elsewhere=elsewhere) for call in calls],
    }
    environment = tuple(sorted((name, value) for name, value in os.environ.items() if name not in _PASSING))
    key = _Key(os.getpid(), python, framework, asked["target"], asked["devices"], path, environment)
    with scratch_in(Path(tempfile.gettempdir())) as folder:
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        process = _taken(key)
        reply = None if process is None else process.ask_again(folder, deadline, progress)
        if process is None or reply is None:
            process = _Process(key)
            reply = process.ask(folder, deadline, progress)
        if asked["timed"]:
            process.end()  # it holds the arrays of the timed calls on the GPU
        else:
            _keep(process)
        if "not_received" in reply:
            raise Stays(reply["not_received"])
        if error := reply.get("error"):
            raise _error_of(error)
        graphs = {entry["name"]: store.load(Path(entry["file"])) for entry in reply["graphs"]}
        times = {name: joined(rounds) for name, rounds in reply["rounds"].items()}
        checks = {name: forced_check.checked(name, found, graphs[name]) for name, found in reply["checks"].items()}
        notes = (*reply["notes"], *(found for found in checks.values() if isinstance(found, str)))
        return Explained(graphs, notes, tuple(f for f in checks.values() if not isinstance(f, str)), times)


def _error_of(error: Mapping[str, Any]) -> ExplainError:
    before = f"{error['name']}: " if error["name"] else ""
    where = f" ({error['line']})" if error["line"] else ""
    message = error["message"] or "no message"
    if error["kind"] not in REFUSALS:
        message = f"{error['kind']}: {message}"
    return ExplainError(
        f"{before}{message}{where}", kind=error["kind"], traceback=error["traceback"],
        frames=error["frames"],
    )


@dataclass(frozen=True)
class _Key:
    """All that a compiling process keeps from its start, and the caller's process."""

    caller: int
    python: str
    framework: Framework
    target: str | None
    devices: int
    path: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = field(repr=False)


class _Process:
    """A compiling process with a folder of its own for its log and what its compiler leaves."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self._folder, self._lock = locked_folder(Path(tempfile.gettempdir()))
        self._log = self._folder / "log"
        role = f"explain-{key.framework}"
        environment = {"XLAFUSE_SCRATCH": str(self._folder), "XLAFUSE_TARGET": key.target or ""}
        try:
            self._worker = Worker(
                role, self._log, environment, command=[key.python, "-m", f"{PACKAGE}.workers.main", role]
            )
        except WorkerError as problem:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ExplainError(problem.message) from None
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._worker.alive

    def ask(self, folder: Path, deadline: float, progress: Progress) -> dict[str, Any]:
        """Return the reply to the request in `folder`. The process is ended where there is none.

        Raises ExplainError where the process dies, and WorkerTimeout at the deadline.
        """
        started, before = time.monotonic(), self._log.stat().st_size
        answered = False

        def waiting() -> None:
            progress(f"still compiling after {time.monotonic() - started:.0f} s")

        try:
            if not self._ready:
                self._worker.wait_ready(deadline - time.monotonic())
                self._ready = True
            reply: dict[str, Any] = self._worker.ask(
                "explain", timeout=deadline - time.monotonic(), waiting=waiting, waiting_seconds=_PROGRESS_SECONDS,
                folder=str(folder),
            )
            answered = True
            return reply
        except WorkerDied as problem:
            log = self._log.read_bytes()[before:].decode(errors="replace")
            last = next((f"; its last line: {line.strip()}" for line in reversed(log.splitlines()) if line.strip()), "")
            raise ExplainError(f"the compiling process died ({problem.how}){last}", traceback=log) from None
        except WorkerError as problem:
            raise ExplainError(problem.message, kind="Skip" if problem.kind == "skipped" else "") from None
        finally:
            if not answered:
                self.end()

    def ask_again(self, folder: Path, deadline: float, progress: Progress) -> dict[str, Any] | None:
        """Return the reply of a process that was used before; None after a failure, which also ends the process.

        It may have died while it waited, or fail for what an earlier request left, as a name that is registered once.
        """
        try:
            reply = self.ask(folder, deadline, progress)
        except ExplainError:
            return None
        if "error" in reply and reply["error"]["kind"] not in REFUSALS:
            self.end()
            return None
        return reply

    def end(self) -> None:
        self._worker.kill()
        self._lock.close()
        shutil.rmtree(self._folder, ignore_errors=True)


# Processes that wait for a request, the last used one last, each with the timer that ends it.
_waiting: list[tuple[_Process, threading.Timer]] = []
_lock = threading.Lock()


def _taken(key: _Key) -> _Process | None:
    """Return a waiting process of that key, which no other request gets; None without one."""
    with _lock:
        for entry in reversed(_waiting):
            if entry[0].key == key and entry[0].alive:
                _waiting.remove(entry)
                entry[1].cancel()
                return entry[0]
    return None


def _keep(process: _Process) -> None:
    """Let a process wait for the next request, for IDLE_SECONDS. It takes the place of an earlier one of its kind."""
    timer = threading.Timer(IDLE_SECONDS, _end_waiting, [process])
    timer.daemon = True
    with _lock:
        replaced = [
            entry for entry in _waiting
            if (entry[0].key.framework, entry[0].key.target) == (process.key.framework, process.key.target)
        ]
        for entry in replaced:
            _waiting.remove(entry)
        _waiting.append((process, timer))
    timer.start()
    for former, its_timer in replaced:
        its_timer.cancel()
        if former.key.caller == os.getpid():  # a fork of this process has the table, too
            former.end()


def _end_waiting(process: _Process | None = None) -> None:
    """End a waiting process, or all of this process's."""
    with _lock:
        ending = [entry for entry in _waiting if process in (None, entry[0])]
        for entry in ending:
            _waiting.remove(entry)
    for ended, timer in ending:
        timer.cancel()
        if ended.key.caller == os.getpid():
            ended.end()


atexit.register(_end_waiting)
