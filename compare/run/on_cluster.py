"""A run on several machines: parts of the plan go to the nodes of a cluster, and their records come into one folder.

1. The groups of the plan are divided into parts of about equal work, several for each task that can run at once.
2. A node runs a part as a run of its own (`part`), so a case is measured on one node and in one segment.
3. A finished part is added to the run's folder at once, records last: a killed driver loses no part that was added.
4. A part that is lost with its node is done again elsewhere, as far as its records are missing.
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

PARTS_PER_SLOT = 3  # more parts lose less with a node; fewer start fewer workers
ATTEMPTS = 3
STOP_S = 60  # for interrupted nodes to end their workers and send their records


@dataclass(frozen=True)
class _Part:
    """A part of the run's plan. attempt: counts from 1."""

    number: int
    plan: Plan
    attempt: int = 1


def run(
    plan: Plan, folder: Path, cluster: Cluster, done: dict[str, Record], target: str | None, progress: Progress,
    stop_after: float | None,
) -> None:
    """Add a record for each case and implementation of the plan to the run's folder; `done` has earlier ones.

    A part that is lost ATTEMPTS times costs its records and a warning. Raises TimeIsUp after `stop_after` seconds, and
    ConnectionLost.
    """
    deadline = None if stop_after is None else time.monotonic() + stop_after
    run_files.pack_files(folder)  # loose files of a killed run would hide newer ones of the same name
    pending = _pending(plan, done, target)
    for case, found in plan.work:
        for _ in range(len(found) - len(unfinished(case, found, done, target))):
            progress.skip(case.block)
    parts = [_Part(n, each) for n, each in enumerate(shards.divide(pending, PARTS_PER_SLOT * cluster.slots), 1)]
    progress.announce(f"{len(parts)} parts for {cluster.slots} tasks at once on {cluster.nodes} nodes")
    waiting = {cluster.submit(_request(part, folder)): part for part in parts}
    try:
        while waiting:
            progress.say(f"waiting for {len(waiting)} parts")
            ended = cluster.ready(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ended:
                raise TimeIsUp
            for reference in ended:
                part = waiting.pop(reference)
                if again := _take(reference, part, folder, cluster, done, target, progress):
                    waiting[cluster.submit(_request(again, folder))] = again
    except (KeyboardInterrupt, TimeIsUp):
        progress.announce("stopping the nodes; their finished records are being fetched")
        _collect(waiting, folder, cluster, done, progress)
        raise


def _take(
    reference: Any, part: _Part, folder: Path, cluster: Cluster, done: dict[str, Record], target: str | None,
    progress: Progress,
) -> _Part | None:
    """Add an ended task's records to the run; return the rest of its part where it is to be done again."""
    reason = "it ended early"
    try:
        added = _add(cluster.result(reference), folder, done, progress)
    except TaskLost as problem:
        added, reason = set(), str(problem)
    left = _pending(part.plan, added, target)
    if not left.work:
        return None
    lost = f"part {part.number}, {len(left.record_ids)} records, was lost: {reason}"
    if part.attempt == ATTEMPTS:
        progress.warn(f"{lost}; given up after {ATTEMPTS} attempts")
        return None
    progress.warn(f"{lost}; it is done again")
    return replace(part, plan=left, attempt=part.attempt + 1)


def _collect(
    waiting: dict[Any, _Part], folder: Path, cluster: Cluster, done: dict[str, Record], progress: Progress
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
    """Add a finished part to the run's folder; return the ids of its records.

    An earlier `ok` record stays where the node skipped the implementation, as for a missing package.
    """
    with tempfile.TemporaryDirectory(prefix="xlafuse-part-") as scratch:
        finished = Path(scratch) / "run"
        folder_bytes.unpack(content, finished)
        found = merge.add(finished, folder, without={id for id, record in done.items() if record.status == "ok"})
    for record in found:
        if stays(done.get(record.id), record):
            progress.kept(done[record.id], record.detail)
        else:
            progress.done(record)
    return {record.id for record in found}


def _request(part: _Part, folder: Path) -> bytes:
    """Return the part as a packed folder of a run without records, with XLA's autotune results of this run."""
    with tempfile.TemporaryDirectory(prefix="xlafuse-part-") as scratch:
        request = Path(scratch)
        run_folder.create(request, {**run_folder.read_run(folder), "plan": part.plan.to_json(), "segments": []})
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(folder / "target" / "xla", request / "target" / "xla")
        return folder_bytes.pack(request)


def _pending(plan: Plan, done: Collection[str], target: str | None) -> Plan:
    """Return the plan without finished records, on a GPU without finished cases."""
    left = ((case, unfinished(case, found, done, target)) for case, found in plan.work)
    return replace(plan, work=tuple((case, found) for case, found in left if found))
