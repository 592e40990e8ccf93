"""A run on several machines: shards of the plan go to the nodes of a cluster, and their records come into one folder.

1. The groups of the plan are divided into shards of about equal work, several for each task that can run at once.
2. A node runs a shard as a run of its own (`shard_on_node`), so a case is measured on one node and in one segment.
3. A finished shard is added to the run's folder at once, records last: a killed driver loses no shard that was added.
4. A shard that is lost with its node is done again elsewhere, as far as its records are missing.
5. After Ctrl-C or --stop-after, the nodes are interrupted and send their finished records.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base import folder_bytes
from ..plan.plan import Plan
from ..record import run_files, run_folder
from ..record.record import Record
from . import merge, shards
from .progress import Progress
from .ray_cluster import Cluster, TaskLost
from .session import TimeIsUp, stays, unfinished

SHARDS_PER_SLOT = 3  # more shards lose less with a node; fewer start fewer workers
ATTEMPTS = 3
STOP_S = 60  # for interrupted nodes to end their workers and send their records


@dataclass(frozen=True)
class _Shard:
    """A shard of the run's plan. attempt: counts from 1."""

    number: int
    plan: Plan
    attempt: int = 1


def run(
    plan: Plan, folder: Path, cluster: Cluster, done: dict[str, Record], target: str | None, progress: Progress,
    stop_after: float | None,
) -> None:
    """Add a record for each case and implementation of the plan to the run's folder; `done` has earlier ones.

    A shard that is lost ATTEMPTS times costs its records and a warning. Raises TimeIsUp after `stop_after` seconds, and
    ConnectionLost.
    """
    deadline = None if stop_after is None else time.monotonic() + stop_after
    run_files.pack_files(folder)  # loose files of a killed run would hide newer ones of the same name
    pending = _pending(plan, done, target)
    for case, found in plan.work:
        for _ in range(len(found) - len(unfinished(case, found, done, target))):
            progress.skip(case.block)
    divided = [_Shard(n, each) for n, each in enumerate(shards.divide(pending, SHARDS_PER_SLOT * cluster.slots), 1)]
    progress.announce(f"{len(divided)} shards for {cluster.slots} tasks at once on {cluster.nodes} nodes")
    waiting = {cluster.submit(_request(shard, folder)): shard for shard in divided}
    try:
        while waiting:
            progress.say(f"waiting for {len(waiting)} shards")
            ended = cluster.ready(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ended:
                raise TimeIsUp
            for reference in ended:
                shard = waiting.pop(reference)
                if again := _take(reference, shard, folder, cluster, done, target, progress):
                    waiting[cluster.submit(_request(again, folder))] = again
    except (KeyboardInterrupt, TimeIsUp):
        progress.announce("stopping the nodes; their finished records are being fetched")
        _collect(waiting, folder, cluster, done, progress)
        raise


def _take(
    reference: Any, shard: _Shard, folder: Path, cluster: Cluster, done: dict[str, Record], target: str | None,
    progress: Progress,
) -> _Shard | None:
    """Add an ended task's records to the run; return the rest of its shard where it is to be done again."""
    reason = "it ended early"
    try:
        added = _add(cluster.result(reference), folder, done, progress)
    except TaskLost as problem:
        added, reason = set(), str(problem)
    left = _pending(shard.plan, added, target)
    if not left.work:
        return None
    lost = f"shard {shard.number}, {len(left.record_ids)} records, was lost: {reason}"
    if shard.attempt == ATTEMPTS:
        progress.warn(f"{lost}; given up after {ATTEMPTS} attempts")
        return None
    progress.warn(f"{lost}; it is done again")
    return replace(shard, plan=left, attempt=shard.attempt + 1)


def _collect(
    waiting: dict[Any, _Shard], folder: Path, cluster: Cluster, done: dict[str, Record], progress: Progress
) -> None:
    """Interrupt the tasks and add the records that they had finished."""
    cluster.cancel(waiting)
    until = time.monotonic() + STOP_S
    while waiting and (ended := cluster.ready(list(waiting), max(0.0, until - time.monotonic()))):
        for reference in ended:
            del waiting[reference]
            with contextlib.suppress(TaskLost):
                _add(cluster.result(reference), folder, done, progress)


def _add(content: bytes, folder: Path, done: dict[str, Record], progress: Progress) -> set[str]:
    """Add a finished shard to the run's folder; return the ids of its records.

    An earlier `ok` record stays where the node skipped the implementation, as for a missing package.
    """
    with tempfile.TemporaryDirectory(prefix="xlafuse-shard-") as scratch:
        finished = Path(scratch) / "run"
        folder_bytes.unpack(content, finished)
        found = merge.add(finished, folder, without={id for id, record in done.items() if record.status == "ok"})
    for record in found:
        if stays(done.get(record.id), record):
            progress.kept(done[record.id], record.detail)
        else:
            progress.done(record)
    return {record.id for record in found}


def _request(shard: _Shard, folder: Path) -> bytes:
    """Return the shard as a packed folder of a run without records, with XLA's autotune results of this run."""
    with tempfile.TemporaryDirectory(prefix="xlafuse-shard-") as scratch:
        request = Path(scratch)
        run_folder.create(request, {**run_folder.read_run(folder), "plan": shard.plan.to_json(), "segments": []})
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(folder / "target" / "xla", request / "target" / "xla")
        return folder_bytes.pack(request)


def _pending(plan: Plan, done: Collection[str], target: str | None) -> Plan:
    """Return the plan without finished records, on a GPU without finished cases."""
    left = ((case, unfinished(case, found, done, target)) for case, found in plan.work)
    return replace(plan, work=tuple((case, found) for case, found in left if found))
