"""`xlafuse merge`: the runs of several GPUs, or machines, as one run.

A suite too long for one GPU runs on several at once, each with a shard of its own (`CUDA_VISIBLE_DEVICES=1 xlafuse run
--shard 2/4 --out shard2`). All records of a case come from one run and keep its segment, with its ceilings and clocks,
so no ratio compares numbers of two GPUs. A run that was stopped may be followed by another one with its other cases.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xlafuse.compile.autotune import merge_results

from ..base import atomic_write
from ..base.usage import UsageError
from ..record import run_folder
from ..record.record import SCHEMA, Record, record_id
from ..record.run_folder import RunFolderError
from ..sources.graph_sources import recorded_file
from ..spec.blocks import BLOCKS
from ..spec.case import Case

Warn = Callable[[Iterable[str]], object]
_FILES = ("graph", "dumps")  # fields of a record that name a file of its run
_SAME = ("schema", "xlafuse", "suite", "target")


def merge(
    parts: Sequence[Path], out: Path, *, partial: bool = False, warn: Warn = lambda lines: None
) -> tuple[int, int]:
    """Write the records of all runs, their files and their target packs into `out`, a new folder.

    The merged runs stay as they are. Return the number of records, and the number of planned records that are missing,
    as after a run that was stopped. warn gets the lines that cannot be read, where no planned record is missing.

    Raises UsageError where the runs differ in kind, share a case, or are one folder, and, unless `partial`, where a
    shard is missing. Raises RunFolderError where a run cannot be read or `out` cannot be written.
    """
    if out.exists():
        raise UsageError(f"{str(out)!r} exists already: name another --out")
    _each_once(parts)
    runs = [run_folder.read_run(part) for part in parts]
    for part, run in zip(parts[1:], runs[1:], strict=True):
        for name in _SAME:
            if run.get(name) != runs[0].get(name):
                raise UsageError(
                    f"{part} has {name} {run.get(name)!r} and {parts[0]} {runs[0].get(name)!r}: only runs with "
                    f"the same {name} can be merged"
                )
    records = _read(parts, runs, warn)
    owners = _owners(parts, records)
    plan = _plan(parts, runs, owners)
    share = _share(runs)
    if left_out := _left_out(share, plan, owners):
        if not partial:
            raise UsageError(f"{left_out}; name them, too, or --partial for a run without them")
        plan["share"] = share
    try:
        return _write(parts, runs, records, plan, out)
    except OSError as problem:
        raise RunFolderError(f"{problem.filename or out}: {problem.strerror}; {out} is not complete") from problem


def _each_once(parts: Sequence[Path]) -> None:
    """Raises UsageError where one folder is named twice: its records would count twice."""
    named: dict[Path, Path] = {}
    for part in parts:
        if (other := named.get(part.resolve())) is not None:
            raise UsageError(f"{other} and {part} are one run: name each once")
        named[part.resolve()] = part


def _owners(parts: Sequence[Path], records: Sequence[list[Record]]) -> dict[str, Path]:
    """Return the run that has each case's records. Raises UsageError where two runs have records of one case."""
    owners: dict[str, Path] = {}
    for part, found in zip(parts, records, strict=True):
        for entry in found:
            if (owner := owners.setdefault(entry.case.id, part)) != part:
                raise UsageError(
                    f"{owner} and {part} both have case {entry.case.id}, whose numbers are of two segments"
                )
    return owners


def _plan(parts: Sequence[Path], runs: Sequence[dict[str, Any]], owners: dict[str, Path]) -> dict[str, Any]:
    """Return the joint plan, in the order of the table of blocks; records are read in that order, too.

    Each case is taken from the run that has its records, else from the first that planned it.
    """
    work: dict[str, tuple[Case, Any]] = {}
    for part, run in zip(parts, runs, strict=True):
        if "plan" not in run:
            raise RunFolderError(f"{part / 'run.json'}: does not say what was selected")
        for entry in run["plan"]["work"]:
            case = Case.from_json(entry["case"])
            if case.id not in work or owners.get(case.id) == part:
                work[case.id] = case, entry
    blocks = {name: place for place, name in enumerate(BLOCKS)}
    cases = {c.id: place for b in BLOCKS.values() for place, c in enumerate(b.cases(runs[0].get("suite") or ""))}

    def place(case: Case) -> tuple[int, int]:
        """Return the case's place in the table; unknown cases come last."""
        return blocks.get(case.block, len(blocks)), cases.get(case.id, len(cases))

    ordered = [entry for _, entry in sorted(work.values(), key=lambda found: place(found[0]))]
    return {name: value for name, value in runs[0]["plan"].items() if name != "share"} | {"work": ordered}


def _share(runs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the shards that these runs are, and all cases of their common plan; as compare.plan.plan.Share."""
    shares = [run["plan"]["share"] for run in runs if "share" in run["plan"]]
    return {
        name: list(dict.fromkeys(each for share in shares for each in share[name])) for name in ("parts", "cases")
    }


def _left_out(share: dict[str, list[str]], plan: dict[str, Any], owners: Iterable[str]) -> str | None:
    """Return a sentence that names the cases in none of the runs and the missing shards; None where all are there."""
    there = {Case.from_json(entry["case"]).id for entry in plan["work"]} | set(owners)
    left = [case for case in share["cases"] if case not in there]
    if not left:
        return None
    counts = dict.fromkeys(int(part.partition("/")[2]) for part in share["parts"])
    parts = [f"{n}/{count}" for count in counts for n in range(1, count + 1) if f"{n}/{count}" not in share["parts"]]
    of = f"shard{'s' * (len(parts) > 1)} {', '.join(parts)} missing: " if parts else ""
    cases = "1 case" if len(left) == 1 else f"{len(left)} cases"
    return f"{of}{cases} of the shared plan, such as {left[0]}, in none of these runs"


def _write(
    parts: Sequence[Path], runs: Sequence[dict[str, Any]], found: Sequence[list[Record]], plan: dict[str, Any],
    out: Path,
) -> tuple[int, int]:
    """Write the merged run, its records run by run; a reader gets them in the order of the plan."""
    segments: list[dict[str, Any]] = []
    records: list[Record] = []
    for part, run, own in zip(parts, runs, found, strict=True):
        new_names = {}
        for segment in run.get("segments", []):
            new_names[segment["id"]] = f"s{len(segments) + 1}"
            segments.append({**segment, "id": new_names[segment["id"]]})
        for entry in own:
            records.append(replace(entry, segment=new_names.get(entry.segment or "", entry.segment)))
            _copy_files(entry, part, out)
    _copy_packs(parts, out)
    lines = [json.dumps(entry.to_json(), allow_nan=True) + "\n" for entry in records]
    atomic_write.write(out / "records.jsonl", "".join(lines).encode(), sync=True)
    command = " ; ".join(run.get("command", "xlafuse run") for run in runs)
    run_folder.create(out, {**runs[0], "command": command, "plan": plan, "segments": segments})
    return len(records), len(_planned(plan) - {entry.id for entry in records})


def _read(parts: Sequence[Path], runs: Sequence[Mapping[str, Any]], warn: Warn) -> list[list[Record]]:
    """Return the records of each run.

    An unreadable line may hold a record that no run has; resuming its run makes that record again. Raises
    RunFolderError where that was not done, and for a run of another schema.
    """
    for part, run in zip(parts, runs, strict=True):
        if (schema := run.get("schema", SCHEMA)) != SCHEMA:
            wrote = f"xlafuse {run['xlafuse']}" if "xlafuse" in run else "the version that wrote it"
            raise RunFolderError(
                f"{part} has schema {schema!r}, and this version reads {SCHEMA}: merge it with {wrote}"
            )
    read = [run_folder.read_records(part) for part in parts]
    there = {entry.id for found, _ in read for entry in found}
    for part, run, (_, warnings) in zip(parts, runs, read, strict=True):
        if warnings and (_torn(part) or _planned(run.get("plan", {"work": ()})) - there):
            raise RunFolderError(
                f"{warnings[0]}; after --out {part} --resume, which makes anew what is missing, it can be merged"
            )
        warn(warnings)
    return [found for found, _ in read]


def _torn(part: Path) -> bool:
    """Return whether the last line has no end, as after a run was killed, or while it writes."""
    path = part / "records.jsonl"
    return not (path.is_file() and path.read_bytes().endswith(b"\n"))


def _planned(plan: Mapping[str, Any]) -> set[str]:
    """Return the ids of the planned records."""
    return {record_id(Case.from_json(e["case"]), name) for e in plan["work"] for name in e["implementations"]}


def _copy_files(entry: Record, part: Path, out: Path) -> None:
    """Copy the files that a record names; a missing one, such as a deleted archive, stays missing in `out`."""
    names = [getattr(entry, field) for field in _FILES] + [(entry.trace or {}).get("file")]
    for name in filter(None, names):
        try:
            source, target = recorded_file(part, entry, name), recorded_file(out, entry, name)
        except ValueError as problem:
            raise RunFolderError(f"a file outside its run: {problem}") from None
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _copy_packs(parts: Sequence[Path], out: Path) -> None:
    """Copy the target packs: XLA's autotune results joined where their version can be joined, else the first run's."""
    texts: dict[str, list[str]] = {}
    for part in parts:
        for path in sorted((part / "target").rglob("*")):
            if path.is_file():
                texts.setdefault(str(path.relative_to(part)), []).append(path.read_text())
    for name, found in texts.items():
        text = found[0]
        if name.endswith(".textproto"):
            with contextlib.suppress(ValueError):
                text = merge_results(found)
        atomic_write.write(out / name, text.encode())
