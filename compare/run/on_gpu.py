"""A run on this machine's GPU: batch by batch, prepare all cases in parallel, then measure them one by one.

1. The directions of one shape form a group, because they share inputs and references.
2. Groups that fit the GPU's memory together form a batch; each gets a case runner with worker processes of its own.
3. All runners of a batch prepare in parallel: they draw inputs, compile, evaluate references and check results.
4. Implementations that autotune compile after that, because autotuning measures, too; a lock keeps them apart.
5. Then each group is measured while nothing else runs on the GPU or the host, and its records are written.
6. With restarts, all workers of the batch are ended, everything is compiled again, and the next rounds follow.
7. A worker that crashes or hangs costs its own record; its runner compiles the other programs again.
8. A group that finds too little memory is done again at the end, alone, in fresh workers.
9. Between batches, workers that keep much of the GPU's memory are restarted.
10. After `stop_after` seconds the run ends; finished records stay, and --resume goes on.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..base import host
from ..measure import gpu_conditions, machine_remarks
from ..measure.clock_calibration import AGREEMENT, disagreement
from ..plan.plan import Plan
from ..plan.timing_modes import ALONE, Timing
from ..spec.blocks import BLOCKS
from ..workers import autotune_lock
from ..workers.client import WORKER_FAILURES
from ..workers.rank_group import role_of
from . import autotune_results
from .batches import RUNNER_BYTES, Group, batches, groups_of, name_of
from .case_runner import CaseRunner, too_few_gpus
from .session import Session, TimeIsUp

CORES_PER_RUNNER = 1.5  # on the 16 cores of an H200's host, 12 runners compiled no faster than 10
MOST_RUNNERS = 12
KEPT_BYTES = 2 << 30  # of the GPU's memory, which a worker may keep between batches
INDUCTOR_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"  # by default one a core, for each runner


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of this run's workers: where XLA records its choices, the autotune lock, compile threads."""
    lock = autotune_lock.lock_of(folder)
    lock.parent.mkdir(parents=True, exist_ok=True)
    pack = autotune_results.folder_of(folder).parent
    return {
        "XLAFUSE_TARGET_PACK": str(pack.resolve()), autotune_lock.VARIABLE: str(lock.resolve()),
        INDUCTOR_THREADS: os.environ.get(INDUCTOR_THREADS, str(min(4, host.usable_cores()))),
    }


def run(plan: Plan, session: Session, stop_after: float | None = None) -> None:
    """Write one record for each case and implementation of the plan.

    Cases that span several GPUs come last, one by one. Raises TimeIsUp after `stop_after` seconds, or before a batch
    that would probably not be prepared by then.
    """
    deadline = math.inf if stop_after is None else time.monotonic() + stop_after
    pending = [(case, left) for case, found in plan.work if (left := session.pending(case, found))]
    groups = list(groups_of(pending))
    single = [group for group in groups if not BLOCKS[group[0][0].block].spans_gpus]
    spanning = [group for group in groups if group not in single]
    run = _Run(plan, session, deadline)
    if single:
        run.single(single)
    else:
        session.begin_segment({}, None)
    if spanning:
        run.spanning(spanning)
    autotune_results.join(session.folder)


class _Run:
    """The runners of one run, and its deadline."""

    def __init__(self, plan: Plan, session: Session, deadline: float) -> None:
        self.runners: list[CaseRunner] = []
        self._plan, self._session, self._deadline = plan, session, deadline
        self._slowest_preparation = 0.0  # seconds, of the batches so far

    def single(self, groups: Sequence[Group]) -> None:
        """Do the cases of one GPU, in batches."""
        free_bytes = self._begin(groups)
        short_of_memory: list[Group] = []
        for batch in batches(groups, free_bytes, len(self.runners)):
            short_of_memory += self._work_off(batch)
        for group in short_of_memory:
            self._session.progress.say(f"again, alone in fresh workers: {name_of(group)} found too little GPU memory")
            self._restart_workers()
            self._work_off([group])

    def spanning(self, groups: Sequence[Group]) -> None:
        """Do the cases over several GPUs one by one, in a process for each GPU.

        Ranks that do not start fail again, in their records.
        """
        session = self._session
        work = [(case, i) for group in groups for case, found in group for i in found if not too_few_gpus(case)]
        described = self._environments({role_of(i.backend.worker, case) for case, i in work})
        session.describe_workers({role.rpartition("-")[0]: found for role, found in described.items()})
        session.timers |= {role: found.get("timer") for role, found in described.items()}
        runner = CaseRunner(session, session.workers, replace(self._plan, timing=Timing((ALONE,))))
        for group in groups:
            runner.take(group, alone=True)
            runner.one_by_one(self._check_deadline)

    def _environments(self, roles: Collection[str]) -> dict[str, Any]:
        """Start workers; return the environment of each role, or why it has none, with a warning."""
        self._session.workers.start({*roles, "reference"})
        found: dict[str, Any] = {}
        for role in sorted(roles):
            try:
                found[role] = self._session.workers.ask(role, "environment")
            except WORKER_FAILURES as problem:
                found[role] = {"unavailable": str(problem)}
                self._session.progress.warn(f"the {role} worker is not available: {problem}")
        return found

    def _begin(self, groups: Sequence[Group]) -> int | None:
        """Start the runners and the segment: its workers' environments, the GPU's ceilings, each clock's calibration.

        Return the bytes of the GPU's memory that are free once workers have started, None where no worker knows them. A
        worker's failure costs a warning and the numbers that depend on its answer.
        """
        session = self._session
        for sentence in filter(None, (gpu_conditions.in_use(), *machine_remarks.different(host.gpus()))):
            session.progress.warn(sentence)
        # PyTorch's worker measures the ceilings, which no pack has of an unknown GPU.
        roles = sorted({"torch", *(i.backend.worker for group in groups for _, found in group for i in found)})
        autotune_results.join(session.folder)  # files of an earlier stretch
        session.progress.say("measuring this GPU's ceilings")
        described = self._environments(roles)
        ceilings = _record_gpu(session) if "unavailable" not in described.get("torch", {"unavailable": ""}) else None
        if warning := autotune_results.mismatch(session.folder, described.get("xla", {}).get("jax")):
            session.progress.warn(warning)
        available = [role for role in roles if "unavailable" not in described[role]]
        free_bytes = min((found for role in available if (found := described[role].get("free_bytes"))), default=None)
        most = min(MOST_RUNNERS, int(host.usable_cores() / CORES_PER_RUNNER), len(groups))
        # The runners' processes may take half of the memory, and their cases the other half.
        count = 1 if free_bytes is None else max(1, min(most, free_bytes // (2 * RUNNER_BYTES)))
        pools = [session.workers, *(session.workers.sibling() for _ in range(1, count))]
        self._in_parallel([partial(pool.start, {*roles, "reference"}) for pool in pools])
        clocks, uncalibrated = self._calibrate(pools, available)
        session.begin_segment(described, ceilings, clocks, runners=len(pools), uncalibrated=uncalibrated)
        self.runners = [CaseRunner(session, pool, self._plan, free_bytes) for pool in pools]
        return free_bytes

    def _calibrate(self, pools: Sequence[Any], roles: Sequence[str]) -> tuple[dict[str, float], list[str]]:
        """Return the calibration kernel's seconds by each worker's clock, and the roles whose clock gave none."""
        progress = self._session.progress
        clocks: dict[str, float] = {}
        uncalibrated: list[str] = []
        for number, pool in enumerate(pools, 1):
            for role in roles:
                try:
                    if (seconds := pool.ask(role, "calibrate")) is not None:
                        clocks[role if number == 1 else f"{role} {number}"] = seconds
                except WORKER_FAILURES as problem:
                    if number == 1:  # a later runner's worker that fails here fails again, in a record
                        uncalibrated.append(role)
                        progress.warn(
                            f"the {role} worker's clock could not be calibrated: no ratio between workers will be "
                            f"given: {problem}"
                        )
        if (apart := disagreement(clocks)) > AGREEMENT:
            progress.warn(f"the workers' clocks differ by {apart:.1%}: no ratio between them will be given")
        return clocks, uncalibrated

    def _work_off(self, batch: Sequence[Group]) -> list[Group]:
        """Prepare a batch, measure it and write its records; return the groups that found too little memory.

        A group alone in its batch gets its records in any case.
        """
        self._check_deadline(self._slowest_preparation)
        runners = self.runners[: len(batch)]
        for runner, group in zip(runners, batch, strict=True):
            runner.take(group, alone=len(batch) == 1)
        began = time.monotonic()
        self._prepare(runners)
        prepared = time.monotonic()
        self._slowest_preparation = max(self._slowest_preparation, prepared - began)
        self._measure(runners)
        self._session.progress.announce(
            f"{', '.join(map(name_of, batch))}: prepared in {prepared - began:.0f} s, "
            f"measured in {time.monotonic() - prepared:.0f} s"
        )
        self._restart_those_that_keep_memory()
        return [runner.group for runner in runners if runner.gives_up]

    def _prepare(self, runners: Sequence[CaseRunner]) -> None:
        self._in_parallel([runner.prepare for runner in runners])
        self._in_parallel([runner.autotune for runner in runners])
        self._in_parallel([runner.check for runner in runners])

    def _measure(self, runners: Sequence[CaseRunner]) -> None:
        """Measure group by group, once for each process number."""
        processes = self._plan.timing.restarts + 1 if self._plan.is_timed else 1
        for process in range(processes):
            if process:
                self._session.progress.say("compiling again in fresh workers")
                self._restart_workers()
                self._prepare(runners)
            for runner in runners:
                self._check_deadline()
                if self._plan.is_timed and not runner.gives_up:
                    runner.measure(process)
                if runner.gives_up or process == processes - 1:
                    runner.finish()
            runners = [runner for runner in runners if not runner.gives_up]

    def _restart_workers(self) -> None:
        """End all workers and join XLA's autotune results: the fresh workers of the next requests replay them."""
        self._in_parallel([runner.workers.restart for runner in self.runners])
        autotune_results.join(self._session.folder)

    def _restart_those_that_keep_memory(self) -> None:
        """End the workers that keep GPU memory which the next batch needs: XLA's allocator never gives any back."""
        keeping = []
        for runner in self.runners if len(self.runners) > 1 else ():
            for role in {"torch", "xla"} & set(runner.workers.running()):
                with suppress(*WORKER_FAILURES):  # it fails again, in a record
                    if runner.workers.ask(role, "needs_restart", kept=KEPT_BYTES):
                        keeping.append(partial(runner.workers.restart, {role}))
        if keeping:
            self._in_parallel(keeping)
            autotune_results.join(self._session.folder)

    def _check_deadline(self, needed: float = 0.0) -> None:
        """Raise TimeIsUp where less than `needed` seconds are left."""
        if time.monotonic() + needed > self._deadline:
            raise TimeIsUp

    def _in_parallel(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run each task in a thread. An interrupt does not wait for them, as the end of their workers ends them.

        Raises TimeIsUp at the deadline.
        """
        tasks = list(tasks)
        pool = ThreadPoolExecutor(max(1, len(tasks)))
        try:
            futures = [pool.submit(task) for task in tasks]
            left = min(max(0.0, self._deadline - time.monotonic()), threading.TIMEOUT_MAX)
            done, not_done = wait(futures, timeout=left, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not_done:
                raise TimeIsUp
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _record_gpu(session: Session) -> dict[str, Any] | None:
    """Return this GPU's ceilings, and leave them and its properties in the run's target pack."""
    pack = session.folder / "target"
    for gpu in host.gpus()[:1]:
        (pack / "cuda_device_properties.json").write_text(json.dumps(gpu.properties, indent=1, sort_keys=True) + "\n")
    try:
        ceilings: dict[str, Any] = session.workers.ask("torch", "ceilings")
    except WORKER_FAILURES as problem:
        session.progress.warn(f"this GPU's ceilings could not be measured: no share of them will be given: {problem}")
        return None
    (pack / "ceilings.json").write_text(json.dumps(ceilings, indent=1) + "\n")
    return ceilings
