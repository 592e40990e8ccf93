"""A shard of a run on a node of a cluster: the driver's request comes as bytes, and the finished run goes back so.

The request is a run's folder with its plan and without records, which is resumed here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..base import folder_bytes, host
from ..base.usage import UsageError
from ..plan.plan import Plan
from ..record import run_folder
from .run import execute

WAKE_S = 0.5


def run_shard(request: bytes, cores: int | None) -> bytes:
    """Run the requested plan; return the packed folder of its run. After an interrupt, it has the finished records.

    cores: with a GPU, the number of cores for each of this machine's GPUs; None leaves all.
    """
    with tempfile.TemporaryDirectory(prefix="xlafuse-shard-") as scratch, _woken():
        if cores:
            take_cores(cores)
        folder = Path(scratch) / "run"
        folder_bytes.unpack(request, folder)
        run = run_folder.read_run(folder)
        if run["target"] is None and not host.gpu_present():
            raise UsageError("Ray gave this task a GPU, and CUDA sees none: check the driver of the node")
        execute(Plan.from_json(run["plan"]), folder=folder, target=run["target"], resume=True, verbose=True)
        return folder_bytes.pack(folder)


@contextlib.contextmanager
def _woken() -> Iterator[None]:
    """Let Ray's cancellation interrupt the main thread also while it waits for a lock.

    Ray calls `_thread.interrupt_main`, which sends no signal. A periodic signal ends each wait for a moment, and Python
    then raises KeyboardInterrupt.
    """
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, WAKE_S, WAKE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def take_cores(count: int) -> None:
    """Bind this process to its GPU's share of the cores, as `taskset` does for shards.

    Ray names the GPU by its number in CUDA_VISIBLE_DEVICES. Several tasks of one machine then measure on cores of their
    own.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    cores = sorted(os.sched_getaffinity(0))
    if gpu.isdecimal() and len(own := cores[int(gpu) * count : (int(gpu) + 1) * count]) == count:
        os.sched_setaffinity(0, own)
