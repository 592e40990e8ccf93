"""`xlafuse merge`: the runs of several GPUs, or machines, as one run.

A suite too long for one GPU runs on several at once, each with a shard of its own (`CUDA_VISIBLE_DEVICES=1 xlafuse run
--shard 2/4 --out shard2`). All records of a case come from one run and keep its segment, with its ceilings and clocks,
so no ratio compares numbers of two GPUs. A run that was stopped may be followed by another one with its other cases.

A run may also go on elsewhere: `--resume` needs no more of its folder than `run.json`, the records and `target/`. The
folder of each stretch then has the files of its own records, and merged they are the run with all of them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from xlafuse.compile.autotune import merge_results

from ..base import atomic_write, program
from ..base.usage import UsageError
from ..plan.plan import own_functions
from ..record import packing, run_files, run_folder
from ..record.record import Record, record_id
from ..record.run_files import RunFile
from ..record.run_folder import RunFolderError
from ..spec.blocks import BLOCKS
from ..spec.case import Case

Warn = Callable[[Iterable[str]], object]
_SAME = ("schema", "xlafuse", "sources", "suite", "target")


@dataclass(frozen=True)
class _Run:
    """One run to merge: its folder, its run.json, its records, and warnings of unreadable lines.

    earlier: the folders of the stretches that it goes on with, the latest first.
    """

    folder: Path
    json: dict[str, Any]
    records: list[Record]
    warnings: list[str]
    earlier: tuple[Path, ...] = ()


def merge(
    folders: Sequence[Path], out: Path, *, partial: bool = False,
    warn: Warn = lambda lines: None,
) -> tuple[int, int]:
    """Write the records of all runs, their files and their target packs into `out`, a new folder.

    The merged runs stay as they are. Return the number of records, and the number of planned records that are missing,
    as after a run that was stopped. warn gets the lines that cannot be read, where no planned record is missing.

    Raises UsageError where the runs differ in kind, share a case, or are one folder, and, unless
    `partial`, where a shard is missing. Raises RunFolderError where a run cannot be read or `out` cannot be written.
    """
    if out.exists():
        raise UsageError(f"{str(out)!r} exists already: name another --out")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError("a run is named twice: name each once")
    runs = [_read(folder) for folder in folders]
    for run in runs[1:]:
        for name in _SAME:
            if run.json.get(name) != runs[0].json.get(name):
                shown = [
                    program.in_words(one.json) if name == "sources" else repr(one.json.get(name))
                    for one in (run, runs[0])
                ]
                raise UsageError(
                    f"{run.folder} has {name} {shown[0]} and {runs[0].folder} {shown[1]}: only runs with the same "
                    f"{name} can be merged"
                )
    runs = _without_earlier_stretches(runs)
    plan = _plan(runs, _owners(runs))
    missing = _planned(plan) - {record.id for run in runs for record in run.records}
    for run in runs:
        if run.warnings and missing:
            raise RunFolderError(f"{run.warnings[0]}; --out {run.folder} --resume makes its record again; then merge")
        warn(run.warnings)
    if problem := _missing_shards(plan):
        if not partial:
            raise UsageError(f"{problem}; name them, too, or --partial for a run without them")
    else:
        plan.pop("shard")
    try:
        _write(runs, plan, out)
    except OSError as problem:
        where = f"{problem.filename or out}: {problem.strerror or problem}"
        raise RunFolderError(f"{where}; {out} is not complete") from problem
    return sum(len(run.records) for run in runs), len(missing)


def _read(folder: Path) -> _Run:
    """Return a run. Raises RunFolderError for one without a plan, or of another schema."""
    run = run_folder.read_run(folder)
    if "plan" not in run:
        raise RunFolderError(f"{folder / 'run.json'}: does not say what was selected")
    return _Run(folder, run, *run_folder.read_records(folder))


def _without_earlier_stretches(runs: Sequence[_Run]) -> list[_Run]:
    """Return the runs without those with which another one goes on; that one has their records."""
    joined: list[_Run] = []
    for run in sorted(runs, key=lambda run: len(run.json.get("segments", [])), reverse=True):
        begun = run.json.get("created"), run.json.get("segments", [])
        place = next((place for place, later in enumerate(joined) if _goes_on(later, *begun)), None)
        if place is None:
            joined.append(run)
        else:
            joined[place] = replace(joined[place], earlier=(*joined[place].earlier, run.folder))
    return sorted(joined, key=lambda run: next(place for place, other in enumerate(runs) if other.folder == run.folder))


def _goes_on(later: _Run, created: str | None, segments: Sequence[Any]) -> bool:
    """Return whether a run is the one that began at `created`, with further segments."""
    own = later.json.get("segments", [])
    return created is not None and later.json.get("created") == created and own[: len(segments)] == [*segments]


def _owners(runs: Iterable[_Run]) -> dict[str, _Run]:
    """Return the run that has each case's records. Raises UsageError where two runs have records of one case."""
    owners: dict[str, _Run] = {}
    for run in runs:
        for record in run.records:
            if (owner := owners.setdefault(record.case.id, run)) is not run:
                raise UsageError(
                    f"{owner.folder} and {run.folder} both have case {record.case.id}: its numbers are of two "
                    "segments; xlafuse run --again CASE=REASON --out RUN measures a case anew"
                )
    return owners


def _plan(runs: Sequence[_Run], owners: dict[str, _Run]) -> dict[str, Any]:
    """Return the joint plan, in the order of the table of blocks; records are read in that order, too.

    Each case is taken from the run that has its records, else from the first that planned it. `shard` joins the shards
    that the runs are, and the cases of their common plans.
    """
    work: dict[str, tuple[Case, Any]] = {}
    for run in runs:
        for entry in run.json["plan"]["work"]:
            case = Case.from_json(entry["case"])
            if case.id not in work or owners.get(case.id) is run:
                work[case.id] = case, entry
    suite = runs[0].json.get("suite") or ""
    places = {case.id: place for place, case in enumerate(c for block in BLOCKS.values() for c in block.cases(suite))}
    blocks = {name: place for place, name in enumerate(BLOCKS)}

    def place(case: Case) -> tuple[int, int]:
        return blocks.get(case.block, len(blocks)), places.get(case.id, len(places))

    ordered = [entry for _, entry in sorted(work.values(), key=lambda found: place(found[0]))]
    shards = [run.json["plan"]["shard"] for run in runs if "shard" in run.json["plan"]]
    joint = {key: list(dict.fromkeys(name for shard in shards for name in shard[key])) for key in ("names", "cases")}
    functions = own_functions(run.json["plan"] for run in runs)
    return {**runs[0].json["plan"], "work": ordered, "shard": joint, **functions}


def _missing_shards(plan: dict[str, Any]) -> str | None:
    """Return a sentence that names the missing shards and their cases; None where every case is planned."""
    there = {Case.from_json(entry["case"]).id for entry in plan["work"]}
    left = [case for case in plan["shard"]["cases"] if case not in there]
    if not left:
        return None
    named = plan["shard"]["names"]
    counts = dict.fromkeys(int(shard.partition("/")[2]) for shard in named)
    shards = [f"{n}/{count}" for count in counts for n in range(1, count + 1) if f"{n}/{count}" not in named]
    of = f"shard{'s' * (len(shards) > 1)} {', '.join(shards)} missing: " if shards else ""
    cases = "1 case" if len(left) == 1 else f"{len(left)} cases"
    return f"{of}{cases} of the shared plan, such as {left[0]}, in none of these runs"


def _planned(plan: dict[str, Any]) -> set[str]:
    """Return the ids of the planned records."""
    return {record_id(Case.from_json(e["case"]), name) for e in plan["work"] for name in e["implementations"]}


def add(shard: Path, folder: Path, *, without: Collection[str]) -> list[Record]:
    """Add a finished run to the run in `folder`, and return its records. Its logs go to logs/<its segment>.

    Its skipped records of the ids in `without` are not written. Records are written last: a process that is killed
    before adds none. Raises RunFolderError where a run cannot be read or written.
    """
    whole, run = run_folder.read_run(folder), _read(shard)
    written = [record for record in run.records if record.status != "skipped" or record.id not in without]
    segments, written = _renumbered(replace(run, records=written), whole["segments"])
    for kind, archive in run_files.ARCHIVES.items():
        if named := [file for record in written for file in _files(record, shard) if file.kind == kind]:
            run_files.write(folder / archive, [*run_files.archived(folder, kind), *named])
    _copy_packs([folder, shard], folder)
    for segment in segments:
        logs = folder / "logs" / segment["id"]
        shutil.copytree(shard / "logs", logs, ignore=shutil.ignore_patterns("lock"), dirs_exist_ok=True)
    run_folder.write_run(folder, {**whole, "segments": [*whole["segments"], *segments]})
    for record in written:
        run_folder.append(folder, record)
    return run.records


def _renumbered(run: _Run, before: Sequence[Any]) -> tuple[list[dict[str, Any]], list[Record]]:
    """Return the run's segments and records, each segment under a new name that follows those `before`."""
    segments = run.json.get("segments", [])
    names = {segment["id"]: f"s{number}" for number, segment in enumerate(segments, len(before) + 1)}
    records = [
        msgspec.structs.replace(record, segment=names.get(record.segment or "", record.segment))
        for record in run.records
    ]
    return [{**segment, "id": names[segment["id"]]} for segment in segments], records


def _write(runs: Sequence[_Run], plan: dict[str, Any], out: Path) -> None:
    """Write the merged run, its records run by run, each with its segment under a new name."""
    segments: list[dict[str, Any]] = []
    lines: list[str] = []
    files: list[RunFile] = []
    for run in runs:
        its_segments, records = _renumbered(run, segments)
        segments += its_segments
        for record in records:
            lines.append(json.dumps(record.to_json(), allow_nan=True) + "\n")
            files += _files(record, run.folder, *run.earlier)
    for kind, archive in run_files.ARCHIVES.items():
        if named := [file for file in files if file.kind == kind]:
            run_files.write(out / archive, named)
    _copy_packs([folder for run in runs for folder in (run.folder, *run.earlier)], out)
    atomic_write.write(out / "records.jsonl", "".join(lines).encode(), sync=True)
    command = " ; ".join(run.json.get("command", "xlafuse run") for run in runs)
    again = [entry for run in runs for entry in run.json.get("again", [])]
    changed = {"command": command, "plan": plan, "segments": segments} | ({"again": again} if again else {})
    run_folder.create(out, {**runs[0].json, **changed})
    packing.pack(out)


def _files(record: Record, *folders: Path) -> list[RunFile]:
    """Return the files that a record names, each from the first folder that has it.

    A run may be kept without its artifacts.
    """
    names = [record.graph, record.dumps, record.trace and record.trace.file]
    try:
        places = [[run_files.recorded_file(folder, record, name) for folder in folders] for name in names if name]
        return [file for files in places for file in [file for file in files if file.exists()][:1]]
    except ValueError as problem:
        raise RunFolderError(f"a file outside its run: {problem}") from None


def _copy_packs(runs: Sequence[Path], out: Path) -> None:
    """Copy the target packs of runs: XLA's autotune results joined where their version can be joined, else the first
    run's."""
    texts: dict[str, list[str]] = {}
    for run in runs:
        for path in sorted((run / "target").rglob("*")):
            if path.is_file():
                texts.setdefault(str(path.relative_to(run)), []).append(path.read_text())
    for name, found in texts.items():
        text = found[0]
        if name.endswith(".textproto"):
            with contextlib.suppress(ValueError):
                text = merge_results(found)
        atomic_write.write(out / name, text.encode())
