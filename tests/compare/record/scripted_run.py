"""`scripted_run.py ACKNOWLEDGED OUTPUT PROCESS`: runs on a pretended GPU, each in a process that can be killed.

A line of standard input is one run, as JSON: `arguments` of the command line; `pace`, seconds that a worker takes to
answer; `kill_after`, seconds until SIGKILL, or null; `file_limit`, bytes at which a file can grow no more, or null. The
reply is its exit status as subprocess gives it. The id of each record goes to ACKNOWLEDGED once it counts as written;
what the run says goes to OUTPUT, its process's number to PROCESS. The process is forked, not started: imports take
longer than what is tested.
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

from compare.base import host
from compare.cli import main as cli
from compare.record import run_folder
from compare.record.record import Record
from compare.run import run

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from test_on_gpu import ScriptedPool  # noqa: E402


class PacedPool(ScriptedPool):
    """Answers as workers would, each answer after `pace` seconds."""

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
        if request["kill_after"] is not None:
            time.sleep(request["kill_after"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
