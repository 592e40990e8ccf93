"""A run, from a plan to a folder of records. On a machine with the GPU everything is executed and timed; for a target,
everything is compiled and what has a CPU path is checked on the CPU."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from compare import machine, record, run_device, run_target, targets
from compare.crew import Crew
from compare.progress import Progress
from compare.record import Record, RunFolderError
from compare.selection import Plan
from compare.session import Session

BAD = ("wrong", "failed", "timeout")


def execute(plan: Plan, *, folder: Path, target: str | None, resume: bool) -> int:
    """Run the plan into `folder`; `target` None means this machine's GPU, or an H200 where there is none.

    Returns 0 when nothing of the plan is wrong, failed or timed out, 1 when something is, 130 after Ctrl-C. Every
    finished record is on the disk before the next begins. Raises RunFolderError where the folder cannot be read or
    written.
    """
    if target is None and not machine.gpu_present():
        target = targets.DEFAULT
    done = _open(plan, folder, target, resume)
    wanted = {record.record_id(case, i.name) for case, implementations in plan.work for i in implementations}
    if wanted <= done.keys():
        print(f"{folder} already has every record of this selection", file=sys.stderr)
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="xlafuse-", dir=machine.scratch_root()))
    crew = Crew(folder / "logs", run_target.environment(target) if target else run_device.environment(folder))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job scheduler's stop ends a run as Ctrl-C does
    try:
        with Progress(len(wanted)) as progress:
            session = Session(folder, scratch, crew, progress, done, target)
            (run_target.run if target else run_device.run)(plan, session)
    except KeyboardInterrupt:
        print(f"stopped; every finished record is kept, and --out {folder} --resume goes on", file=sys.stderr)
        return 130
    finally:
        crew.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if any(r.status in BAD and r.id in wanted for r in record.read_records(folder)[0]) else 0


def _open(plan: Plan, folder: Path, target: str | None, resume: bool) -> dict[str, Record]:
    """Make or re-open the run folder; returns the records that need not be made again, by id."""
    if resume:
        run = record.read_run(folder)
        if run.get("target") != target:
            raise RunFolderError(
                f"{folder} was run for target {run.get('target') or 'its own GPU'}, not {target or 'this GPU'}; "
                "resume with the same target, or give another --out"
            )
        records, warnings = record.read_records(folder)
        for warning in warnings:
            print(warning, file=sys.stderr)
        return {r.id: r for r in records if r.status not in BAD}
    record.create(
        folder,
        {
            "schema": record.SCHEMA, "xlafuse": machine.xlafuse_version(), "suite": plan.suite, "target": target,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["xlafuse", *sys.argv[1:]]), "plan": plan.to_json(), "segments": [],
        },
    )
    return {}
