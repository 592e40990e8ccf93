"""`scripted_run.py ACKNOWLEDGED OUTPUT PROCESS`: runs on a simulated GPU, each in a process that can be killed.

Each line of standard input is one run, as JSON: `arguments` of the command line; `pace`, seconds for each answer of a
worker; `kill_after`, seconds of CPU time until SIGKILL, or null; `file_limit`, the largest size of a file in bytes, or
null. The reply is the exit status as subprocess gives it. ACKNOWLEDGED gets the id of each written record, OUTPUT the
run's output, PROCESS the number of its process. Processes are forked, because imports take longer than the test.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.base import host
from xlafuse.compare.cli import main as cli
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.run import run

sys.path[:0] = [str(Path(__file__).parents[1] / "run"), str(Path(__file__).parents[2] / "helpers")]
from test_on_gpu import ScriptedPool  # noqa: E402


class PacedPool(ScriptedPool):
    """Workers that give each answer after `pace` seconds."""

    def __init__(self, pace: float) -> None:
        super().__init__({})
        self.pace = pace

    def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
        time.sleep(self.pace)
        return super().ask(role, method, timeout=timeout, **params)

    def stop(self) -> None: ...


def one_run(request: dict[str, Any], acknowledged: Path, output: Path) -> int:
    append = run_folder.append

    def append_and_acknowledge(folder: Path, finished: Record) -> None:
        append(folder, finished)
        with acknowledged.open("a") as file:
            file.write(f"{finished.id}\n")

    patch = pytest.MonkeyPatch()  # never undone: the process ends with the run
    patch.setattr(run_folder, "append", append_and_acknowledge)
    patch.setattr(host, "gpu_present", lambda: True)
    patch.setattr(run, "WorkerPool", lambda logs, environment: PacedPool(request["pace"]))
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if request["file_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], resource.RLIM_INFINITY))
    try:
        cli.cli.main(request["arguments"], prog_name="xlafuse")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main() -> None:
    acknowledged, output, process = map(Path, sys.argv[1:])
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 70  # a traceback: no exit code of the command line
            try:
                code = one_run(request, acknowledged, output)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        process.write_text(str(child))
        print(os.waitstatus_to_exitcode(status_of(child, request["kill_after"])), flush=True)


def status_of(child: int, kill_after: float | None) -> int:
    """Wait for the process. Kill it after so much CPU time, which other load on the machine does not change."""
    while kill_after is not None:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.clock_gettime(~child << 3 | 2) >= kill_after:  # the clock of another process, as clock_getcpuclockid(3)
            os.kill(child, signal.SIGKILL)
            break
        time.sleep(0.001)
    return os.waitpid(child, 0)[1]


if __name__ == "__main__":
    main()
