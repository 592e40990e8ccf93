"""A rank group: the worker processes of a case that spans several GPUs, used like one worker.

Each request goes to all ranks, and the answer is the list of theirs. A group in which a rank failed, died or was
late is killed as a whole: its ranks may wait for each other inside an exchange.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from .client import WORKER_FAILURES, Worker, WorkerDied, WorkerError, WorkerTimeout

SUFFIX = "-ranks-"
START = "start"
_GRACE = 2.0  # seconds in which the other ranks of a failed one may answer, too
# NVLink multicast stays off in every rank.
_WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}


def rank_role(worker: str, ranks: int) -> str:
    """Return the role of a group: "xla-ranks-2" has two processes of the program "xla-ranks"."""
    return f"{worker}{SUFFIX}{ranks}"


class RankGroup:
    """Running workers of all ranks. Not thread-safe: one request at a time. It has the methods of a Worker."""

    def __init__(self, role: str, log: Path, environment: Mapping[str, str]) -> None:
        """Start the workers of `role`. log: its stem begins the names of the ranks' logs."""
        worker, _, count = role.rpartition(SUFFIX)
        program = f"{worker}-ranks"
        self._role, self._ranks = role, int(count)
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

    def ask(self, method: str, *, timeout: float = 900.0, **params: Any) -> list[Any]:
        """Return the answers by rank. Raises the failure of a rank, with its number.

        The group stays where every rank answered, with a refusal or a wrong result at worst; else it is killed.
        """
        return self._all(
            method, [self._threads.submit(worker.ask, method, timeout=timeout, **params) for worker in self._workers]
        )

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
