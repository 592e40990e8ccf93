"""A run: a plan becomes a folder of records.

On a machine with the GPU every implementation is executed and timed. For a target GPU that is not there, every
implementation is compiled, and checked on the CPU where it has a CPU path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from msgspec import convert

from .. import targets
from ..base import host, program
from ..base.scratch import scratch_in
from ..base.usage import UsageError
from ..measure import machine_remarks
from ..plan.plan import Plan, with_added
from ..record import packing, run_folder
from ..record.record import BAD, SCHEMA, Record, record_id
from ..record.run_folder import RunFolderError
from ..spec.case import Case
from ..spec.implementation import Implementation, OwnFunction
from ..workers.pool import WorkerPool
from . import autotune_results, count_traffic, for_target, on_cluster, on_gpu
from .progress import Progress
from .ray_cluster import Cluster, ConnectionLost
from .session import Session, TimeIsUp


def execute(
    plan: Plan, *, folder: Path, target: str | None, resume: bool, traffic: bool = False,
    recorded: Sequence[Path] = (), stop_after: float | None = None, verbose: bool = False,
    cluster: Cluster | None = None, again: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run the plan into `folder`; `target` None means this machine's GPU, or an H200 where there is none.

    again: cases of a resumed run whose records are all made anew, by id, with the reason, which the run keeps.

    cluster: run the plan on its nodes; `target` None then means their GPUs.

    traffic: afterwards, count the bytes that each kernel moves, under ncu. recorded: files of XLA's autotune results to
    replay. stop_after: seconds after which a run on a GPU, or on a cluster, ends; finished records stay. verbose: print
    a line for each record, not for each block.

    Return 0 when nothing of the plan is wrong, failed or timed out, 1 when something is, 3 when `stop_after` ended the
    run before its last record, 130 after Ctrl-C. Every finished record is on the disk by then. Raises RunFolderError
    where the folder cannot be read or written, UsageError where a run's processes cannot share the GPU.
    """
    if target is None and cluster is None and not host.gpu_present():
        target = targets.DEFAULT
    if target is None and cluster is None and (problem := machine_remarks.problem()):
        raise UsageError(problem)
    with _lock(folder, resume), scratch_folder() as scratch:
        try:
            done = _open(plan, folder, target, resume, again)
            code = _execute(plan, done, folder, scratch, target, traffic, recorded, stop_after, verbose, cluster, again)
            packing.pack(folder)
            return code
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RunFolderError(
                f"{problem.filename or folder}: {problem.strerror}; every finished record is kept: "
                f"make room, then --out {folder} --resume goes on"
            ) from problem


def _execute(
    plan: Plan, done: dict[str, Record], folder: Path, scratch: Path, target: str | None, traffic: bool,
    recorded: Sequence[Path], stop_after: float | None, verbose: bool, cluster: Cluster | None,
    again: Mapping[str, str],
) -> int:
    if recorded:
        autotune_results.copy_into(folder, recorded)
    plan = plan if target else with_whole_cases(plan, done)
    wanted = plan.record_ids
    if wanted <= done.keys() and not (traffic and count_traffic.missing(plan, folder)):
        print(f"{folder} already has every record of this selection", file=sys.stderr)
        return 0
    environment = for_target.environment(target) if target else on_gpu.environment(folder)
    workers = WorkerPool(folder / "logs", environment | {"XLAFUSE_SCRATCH": str(scratch)})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job scheduler's stop ends a run as Ctrl-C does
    before = {segment["id"] for segment in run_folder.read_run(folder).get("segments", [])}

    def statuses() -> dict[str, str]:
        records = run_folder.read_records(folder)[0]
        return {r.id: r.status for r in records if r.case.id not in again or r.segment not in before}

    def to_go_on() -> str:
        left = dict.fromkeys(id.rpartition("/")[0] for id in sorted(wanted - statuses().keys()))
        anew = [word for case in left if case in again for word in ("--again", f"{case}={again[case]}")]
        words = ["--out", str(folder), *(anew or ["--resume"])]
        return f"{shlex.join([*words, *['--traffic'][:traffic]])} goes on"

    try:
        by_block = Counter(case.block for case, implementations in plan.work for _ in implementations)
        with Progress(by_block, verbose=verbose) as progress:
            if cluster:
                on_cluster.run(plan, folder, cluster, done, target, progress, stop_after)
            elif not wanted <= done.keys():
                session = Session(folder, scratch, workers, progress, done, target)
                if target:
                    for_target.run(plan, session)
                else:
                    on_gpu.run(plan, session, stop_after)
            if traffic:
                workers.stop()  # ncu's workers need the GPU's memory
                print(count_traffic.measure(plan, folder, progress.announce), file=sys.stderr)
    except TimeIsUp:
        print(f"stopped by --stop-after; every finished record is kept, and {to_go_on()}", file=sys.stderr)
        return 3
    except ConnectionLost as problem:
        print(f"{problem}; every finished record is kept, and {to_go_on()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; every finished record is kept, and {to_go_on()}", file=sys.stderr)
        return 130
    finally:
        workers.stop()
        if again:
            _note_again(folder, again, {id.rpartition("/")[0] for id in statuses()})
    found = statuses()
    if lost := len(wanted - found.keys()):
        print(f"{lost} records are missing, and {to_go_on()}", file=sys.stderr)
    return 1 if lost or any(found[id] in BAD for id in wanted) else 0


def _note_again(folder: Path, again: Mapping[str, str], cases: Collection[str]) -> None:
    """Write into run.json that these cases were measured anew, by which program, and why."""
    run, now, mine = run_folder.read_run(folder), datetime.now(UTC).isoformat(timespec="seconds"), program.describe()
    entries = [{"case": case, "reason": again[case], "at": now, **mine} for case in again if case in cases]
    run_folder.write_run(folder, {**run, "again": [*run.get("again", []), *entries]})


def with_whole_cases(plan: Plan, done: Collection[str]) -> Plan:
    """Return the plan with every unfinished case whole: beside the named implementations, those that have records.

    Times are compared within one segment, and a resumed run is another segment.
    """

    def whole(case: Case, named: tuple[Implementation, ...]) -> tuple[Implementation, ...]:
        if all(record_id(case, i.name) in done for i in named):
            return named
        every = plan.implementations(case.block)
        return (*named, *(i for i in every if i not in named and record_id(case, i.name) in done))

    return replace(plan, work=tuple((case, whole(case, named)) for case, named in plan.work))


def _open(
    plan: Plan, folder: Path, target: str | None, resume: bool,
    again: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Record]:
    """Make or re-open the run folder; return its finished records by id.

    A record counts only where its case has the same sizes as here, and is not made again.
    """
    mine = program.describe()
    if resume:
        run = run_folder.read_run(folder)
        if run.get("target") != target:
            raise RunFolderError(
                f"{folder} was run for target {run.get('target') or 'its own GPU'}, not {target or 'this GPU'}; "
                "resume with the same target, or give another --out"
            )
        if run.get("sources", mine["sources"]) != mine["sources"] and not again:
            raise RunFolderError(
                f"{folder} was made by {program.in_words(run)}, and this is {program.in_words(mine)}: a run is of one "
                "program; resume with that one, or give another --out"
            )
        recorded = with_added(run.get("plan", plan.to_json()), plan.to_json())
        for own in convert(recorded.get("with", []), list[OwnFunction]):
            if changed := own.changed_file:
                raise RunFolderError(
                    f"{changed} is not what {folder} was made with: a run is of one function of a name; name a changed "
                    "one differently, or give another --out"
                )
        run_folder.write_run(folder, run := {**run, "plan": recorded})
        repaired = run_folder.repair(folder)
        records, warnings = run_folder.read_records(folder)
        for warning in [repaired, *warnings] if repaired else warnings:
            print(warning, file=sys.stderr)
        sizes = {case.id: case.sizes for case, _ in plan.work}
        return {
            r.id: r for r in records
            if r.status not in BAD and r.case.id not in again and r.case.sizes == sizes.get(r.case.id, r.case.sizes)
        }
    if (folder / "run.json").exists():
        raise RunFolderError(f"{folder} exists already: --resume goes on with it, or name another --out")
    run_folder.create(
        folder,
        {
            "schema": SCHEMA, "xlafuse": host.xlafuse_version(), **mine, "suite": plan.suite, "target": target,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["xlafuse", *sys.argv[1:]]), "plan": plan.to_json(), "segments": [],
        },
    )
    return {}


def _lock(folder: Path, resume: bool) -> BinaryIO:
    """Return the open lock of the run folder, making a new folder. The kernel releases the lock with this process.

    Raises RunFolderError where another run holds it, or where the folder cannot be written or locked.
    """
    path = folder / "logs" / "lock"
    try:
        if not resume or folder.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        remedy = "wait for its end, or name another --out"
        raise RunFolderError(f"{folder}: another run is writing there; {remedy}") from None
    except OSError as problem:
        raise RunFolderError(f"{folder}: cannot be written and locked: {problem.strerror}") from problem
    return file


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A scratch folder for arrays and artifacts, removed when the run ends."""
    root = host.scratch_root() or Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_in(root))
        except OSError as problem:
            raise RunFolderError(f"{root}: no scratch folder can be made there: {problem.strerror}") from problem
        yield folder
