"""The client of a worker process: start it, send it requests, and report how it ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.paths import PACKAGE, python_path

# Every other role runs in XLAFUSE_TORCH_PYTHON.
INTERPRETERS = dict.fromkeys(("xla", "xla-ranks", "explain-jax"), "XLAFUSE_XLA_PYTHON")


class WorkerError(Exception):
    """An error that the worker replied. `kind` is one of those in compare.base.worker_protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class WorkerDied(Exception):
    """The worker's process ended; the message gives its signal or exit code (`how`), and its log."""

    def __init__(self, message: str, how: str = "") -> None:
        super().__init__(message)
        self.how = how


class WorkerTimeout(Exception):
    """No answer in time; the worker was killed."""


WORKER_FAILURES = (WorkerError, WorkerDied, WorkerTimeout)


def interpreter(role: str) -> str:
    """Return the Python that runs `role`: XLAFUSE_XLA_PYTHON or XLAFUSE_TORCH_PYTHON, else the default.

    The default is this Python. For XLA's roles it is the environment next to this one's, .venv-xla next to .venv, if
    tools/setup_environment.py made it there and XLA's worker started in it.
    """
    beside = Path(f"{sys.prefix}-xla")
    prepared = role in INTERPRETERS and (beside / "xla-worker-starts").is_file()
    default = str(beside / "bin" / "python") if prepared else sys.executable
    return os.environ.get(INTERPRETERS.get(role, "XLAFUSE_TORCH_PYTHON")) or default


# Inductor's compile processes end after a minute without work. Starting them again during a compile can hang for ever
# (pytorch/pytorch#176968, #186136; seen once on an H200 with torch 2.11).
_UNLESS_SET = {"TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL": "0"}


class Worker:
    """A running worker process. Not thread-safe: one request at a time."""

    def __init__(
        self, role: str, log: Path, environment: Mapping[str, str] | None = None, command: Sequence[str] | None = None
    ) -> None:
        """Start the worker of `role`, or `command`, which must follow compare.base.worker_protocol.

        log: the file to which its output is appended.
        """
        self.role, self.log = role, log
        command = command or [interpreter(role), "-m", f"{PACKAGE}.workers.main", role]
        torch = {"XLAFUSE_TORCH_PYTHON": interpreter("torch")}  # XLA's worker starts one of PyTorch's (triton_calls)
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                    env={**_UNLESS_SET, **os.environ, "PYTHONPATH": python_path(), **torch, **(environment or {})},
                    start_new_session=True,  # Ctrl-C reaches the runner alone, which then stops its workers
                )
        except OSError as problem:
            variable = INTERPRETERS.get(role, "XLAFUSE_TORCH_PYTHON")
            raise WorkerError("skipped", f"{command[0]} does not start ({problem.strerror}); set {variable}") from None
        self._pending = b""
        self._application = self._process.pid

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Wait until the worker has imported its framework. Raises WorkerError with the reason if the import fails."""
        self._application = self._reply(timeout)

    def ask(
        self, method: str, *, timeout: float = 900.0, waiting: Callable[[], None] = lambda: None,
        waiting_seconds: float = math.inf, **params: Any,
    ) -> Any:
        """Return the reply to a request. Raises WorkerError, WorkerDied or WorkerTimeout.

        waiting: called each `waiting_seconds` in which there is no reply.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"method": method, "params": params}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        return self._reply(timeout, waiting, waiting_seconds)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process and its children. An idle worker cleans up and exits; a busy one is killed after 3 s."""
        try:
            if self._process.stdin:
                self._process.stdin.close()
            self._process.wait(timeout=3)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def finish(self, patience: float) -> None:
        """End the process as `stop` does, but give a busy worker `patience` seconds to end its work.

        After a kill, a profiler around the worker gets `patience` seconds, too. The worker's reply is read and dropped,
        because an unread reply would block its exit. So no other thread may wait for a reply.
        """
        try:
            self._process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._application, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=patience)
        self.kill()

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _reply(
        self, timeout: float, waiting: Callable[[], None] = lambda: None, waiting_seconds: float = math.inf
    ) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
                raise WorkerTimeout(f"no answer within {timeout:.0f} s; its process was killed")
            if not select.select([self._process.stdout], [], [], min(left, waiting_seconds))[0]:
                if time.monotonic() < deadline:
                    waiting()
                continue
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._death()
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            error = reply["error"]
            if error["kind"] == "lost":
                self.kill()
                raise WorkerDied(f"{error['message']}; after it the {self.role} worker could not use the GPU any more")
            raise WorkerError(error["kind"], error["message"])
        return reply["result"]

    def _death(self) -> WorkerDied:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerDied(f"the {self.role} worker died ({how}); see {self.log.name}", how)
