"""A rank group: the worker processes of a case that spans several GPUs, used like one worker.

Each request goes to all ranks, and their answers are joined to one, as of one worker. Collectives hang easily, so
every request has a short time limit. A group in which a rank failed, died or was late is killed as a whole: its ranks
may wait for each other inside an exchange.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins

from ..measure.host_barrier import HostBarrier, Rank
from ..numerics.errors import worst_of_each
from ..record.record_fields import ErrorCheck
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from .client import WORKER_FAILURES, Worker, WorkerDied, WorkerError, WorkerTimeout

SUFFIX = "-ranks-"
START = "start"
SECONDS = 60.0  # the time limit of a request
# XLA times candidate kernels while it compiles. `measure_mode` compiles the program without exchanges.
SECONDS_OF = {"prepare": 150.0, "measure_mode": 150.0 + SECONDS, "graph": 30.0, "trace": 30.0, "release": 30.0}
_GRACE = 2.0  # seconds in which the other ranks of a failed one may answer, too
# NVLink multicast stays off in every rank.
_WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}


def role_of(worker: str, case: Case) -> str:
    """Return the role that runs a case: "xla", or for two GPUs "xla-ranks-2", two processes of program "xla-ranks"."""
    return f"{worker}{SUFFIX}{case.ranks}" if BLOCKS[case.block].spans_gpus else worker


def rank_of_environment() -> tuple[Rank, str]:
    """Return this process's place, and the address at which the ranks meet, as `RankGroup` gives them."""
    number, count = int(os.environ["XLAFUSE_RANK"]), int(os.environ["XLAFUSE_RANKS"])
    barrier = HostBarrier(Path(os.environ["XLAFUSE_BARRIER"]), number, count)
    return Rank(number, count, barrier), os.environ["XLAFUSE_COORDINATOR"]


class RankGroup:
    """Running workers of all ranks. Not thread-safe: one request at a time. It has the methods of a Worker."""

    def __init__(self, role: str, log: Path, environment: Mapping[str, str]) -> None:
        """Start the workers of `role`. log: its stem begins the names of the ranks' logs."""
        worker, _, count = role.rpartition(SUFFIX)
        program = f"{worker}-ranks"
        self._ranks = int(count)
        meeting = Path(tempfile.mkdtemp(prefix="ranks-", dir=environment.get("XLAFUSE_SCRATCH")))
        place = {"XLAFUSE_RANKS": count, "XLAFUSE_COORDINATOR": f"127.0.0.1:{_free_port()}"}
        place["XLAFUSE_BARRIER"] = str(meeting / "barrier")
        self._workers = [
            Worker(
                program, log.with_name(f"{log.stem}-rank-{rank}.log"),
                {**environment, **_WITHOUT_MULTICAST, **place, "XLAFUSE_RANK": str(rank)},
            )
            for rank in range(self._ranks)
        ]
        self._threads = ThreadPoolExecutor(self._ranks)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until every rank has imported its framework and met the others. Raises the first failure."""
        self._all(START, [self._threads.submit(worker.wait_ready, timeout) for worker in self._workers])

    def ask(self, method: str, *, timeout: float = 900.0, **params: Any) -> Any:
        """Return the joined answers of all ranks. Raises the failure of a rank, with its number.

        The group stays where every rank answered, with a refusal or a wrong result at worst; else it is killed.
        """
        timeout = min(timeout, SECONDS_OF.get(method, SECONDS))
        asked = [
            self._threads.submit(worker.ask, method, timeout=timeout, **_params_of(rank, params))
            for rank, worker in enumerate(self._workers)
        ]
        return joined(method, self._all(method, asked))

    @property
    def alive(self) -> bool:
        return all(worker.alive for worker in self._workers)

    def stop(self) -> None:
        self._end(lambda worker: worker.stop())

    def kill(self) -> None:
        self._end(lambda worker: worker.kill())

    def _end(self, end: Callable[[Worker], None]) -> None:
        with ThreadPoolExecutor(self._ranks) as threads:
            list(threads.map(end, self._workers))
        self._threads.shutdown(wait=True)

    def _all(self, method: str, answers: list[Future[Any]]) -> list[Any]:
        waiting = set(answers)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            if any(future.exception() for future in done):
                wait(waiting, timeout=_GRACE)
                break
        known = {rank: answer.exception() for rank, answer in enumerate(answers) if answer.done()}
        failed = {rank: problem for rank, problem in known.items() if problem}
        if not failed:
            return [answer.result() for answer in answers]
        rank, problem = min(failed.items(), key=lambda each: (_severity(each[1]), each[0]))
        if not isinstance(problem, WORKER_FAILURES):
            raise problem
        if len(known) == self._ranks and all(_refusal(each) for each in failed.values()):
            raise problem
        self.kill()
        raise _of_rank(problem, rank, self._ranks, method) from problem


def joined(method: str, answers: Sequence[Any]) -> Any:
    """Return the answer of a group, as of one worker: the first rank's, and with numbers of each rank all as `ranks`.

    A compile takes as long as on its slowest rank, and so does each call; a result is as wrong as on its worst rank.
    """
    first = answers[0]
    if method == "prepare":
        return {**first, "compile_s": max(one["compile_s"] for one in answers), "ranks": answers}
    if method == "check":
        errors = (error for one in answers for error in convert(one["errors"], list[ErrorCheck]))
        return {**first, "errors": to_builtins(worst_of_each(errors))}
    if method in ("measure", "measure_mode"):
        slowest = _slowest([one["phases"]["forward"] for one in answers])
        return {**first, "phases": {"forward": slowest}, "ranks": answers}
    return {"ranks": answers} if method == "trace" else first


def _slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first rank's samples of a round, with each call's device and busy time on its slowest rank."""
    times = [list(zip(*(rank[name] for rank in ranks), strict=True)) for name in ("device_time", "busy_time")]
    slowest = [max(range(len(call)), key=call.__getitem__) for call in times[0]]
    device_time, busy_time = ([call[rank] for call, rank in zip(each, slowest, strict=True)] for each in times)
    return {**ranks[0], "device_time": device_time, "busy_time": busy_time}


def _params_of(rank: int, params: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's request. Only the first one's artifacts are kept: the others' differ in nothing but their number.
    """
    return {**params, "dumps": f"{params['dumps']}-rank-{rank}"} if rank and "dumps" in params else params


def _severity(problem: BaseException) -> int:
    """Return a sort key: the rank that says why it failed comes before those that died or waited for it."""
    return next(place for place, kind in enumerate((WorkerError, WorkerDied, WorkerTimeout, BaseException))
                if isinstance(problem, kind))


def _refusal(problem: BaseException) -> bool:
    return isinstance(problem, WorkerError) and problem.kind in ("skipped", "wrong")


def _of_rank(problem: BaseException, rank: int, ranks: int, method: str) -> Exception:
    text = f"rank {rank} of {ranks}, {method}: {problem}"
    if isinstance(problem, WorkerTimeout):
        return WorkerTimeout(text)
    if isinstance(problem, WorkerError) and method == START:
        return WorkerError(problem.kind, text)  # it would fail again
    return WorkerDied(text)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
