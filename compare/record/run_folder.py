"""A run's folder: `run.json` (what was asked, on which machine) and `records.jsonl` (a line a result, as it finishes).

A record says what became of one implementation of one case. Its status:

    ok        the very code described was executed on the device described, its numbers checked
    compiled  compiled for a target and never run
    wrong     executed, and its numbers or its manners (inputs changed, output missing) were not right
    failed    an error of the compiler, the framework or the worker
    skipped   this machine, or this implementation, cannot take the case; the detail says what would help
    timeout   no answer within the time limit

What is neither `ok` nor `compiled` says why in `detail`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import atomic_write as whole
from ..spec.case import Case
from .record import Record


class RunFolderError(Exception):
    """A run folder that cannot be read or written; the message names the file and the remedy."""


def create(folder: Path, run: Mapping[str, Any]) -> None:
    """Make the folder and write run.json. Raises RunFolderError where it cannot be written."""
    try:
        (folder / "dumps").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as problem:
        raise RunFolderError(f"{folder}: cannot be written: {problem.strerror}") from problem
    write_run(folder, run)


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Replace run.json as a whole. Raises RunFolderError where it cannot be written."""
    path = folder / "run.json"
    try:
        whole.write(path, f"{json.dumps(run, indent=1)}\n".encode(), sync=True)
    except OSError as problem:
        raise RunFolderError(f"{path}: cannot be written: {problem.strerror}") from problem


def append(folder: Path, record: Record) -> None:
    """Write one record and wait until it is on the disk.

    A torn line left by a killed run is closed first. Raises RunFolderError where the whole line cannot be written, as
    on a full disk; nothing of it stays then, and every record before it does.
    """
    path = folder / "records.jsonl"
    line = json.dumps(record.to_json(), allow_nan=True).encode() + b"\n"
    try:
        with path.open("a+b", buffering=0) as file:  # a buffer would be written again when the file is closed
            end = file.seek(0, os.SEEK_END)
            if end and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                line = b"\n" + line
            try:
                _write_all(file, line)
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
        if end == 0:
            _sync_name(folder)
    except OSError as problem:
        raise RunFolderError(
            f"{path}: a record could not be written: {problem.strerror}; every record before it is kept: "
            f"make room, then --out {folder} --resume goes on"
        ) from problem


def _write_all(file: io.FileIO, data: bytes) -> None:
    """One write may take only a part, as on a nearly full disk; the next one then says why."""
    while data:
        data = data[file.write(data) :]


def _sync_name(folder: Path) -> None:
    """A new file survives a power failure once its folder is on the disk, too (fsync(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def repair(folder: Path) -> str | None:
    """Mend the last line where a run was stopped while it wrote: half a record is cut off, a whole one is ended.

    Returns what was done, for the user, or None. Only for the one run that holds the folder (compare.run.run). Raises
    RunFolderError where the file cannot be changed.
    """
    path = folder / "records.jsonl"
    try:
        with path.open("r+b", buffering=0) as file:
            content = file.readall()
            good = content.rfind(b"\n") + 1
            tail = content[good:]
            if not tail:
                return None
            try:
                whole = _parse(tail)
            except ValueError:
                file.truncate(good)
                done = f"half a record at the end, {len(tail)} bytes, was cut off; it is made again"
            else:
                _write_all(file, b"\n")
                done = f"the last record, {whole.id}, is whole; its line was ended"
            os.fsync(file.fileno())
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise RunFolderError(f"{path}: cannot be repaired: {problem.strerror}") from problem
    return f"{path}: {done}"


def read_run(folder: Path) -> dict[str, Any]:
    """run.json. Raises RunFolderError where it is missing or broken."""
    path = folder / "run.json"
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder}: a file; expected a run's folder, the one that holds its run.json")
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such run folder; `xlafuse run --out {folder}` makes one")
    try:
        run = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunFolderError(f"{path}: missing, so this is not a run folder") from None
    except (OSError, ValueError) as problem:
        raise RunFolderError(f"{path}: cannot be read: {problem}") from problem
    if not isinstance(run, dict):
        raise RunFolderError(f"{path}: expected a JSON object, got {type(run).__name__}")
    return run


def read_records(folder: Path) -> tuple[list[Record], list[str]]:
    """Every good record, the newest of each id, and a warning for each bad line. Cases are in the order of the run's
    plan, in which a run need not have done them; those of no plan follow as they were written."""
    path = folder / "records.jsonl"
    records: dict[str, Record] = {}
    warnings: list[str] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], [f"{path}: missing: no record was written yet"]
    except OSError as problem:
        raise RunFolderError(f"{path}: cannot be read: {problem.strerror}") from problem
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _parse(line)
        except ValueError as problem:
            warnings.append(f"{path}:{number}: line skipped: {problem}")
            continue
        records[record.id] = record
    places = _places(folder)
    return sorted(records.values(), key=lambda each: places.get(each.case.id, len(places))), warnings


def _places(folder: Path) -> dict[str, int]:
    """Of each case in the run's plan; none where run.json has no such plan, which who reads that says."""
    try:
        work = json.loads((folder / "run.json").read_bytes())["plan"]["work"]
        return {Case.from_json(entry["case"]).id: place for place, entry in enumerate(work)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _parse(line: bytes) -> Record:
    """A line's record. Raises ValueError naming the first thing that is wrong."""
    try:
        data = json.loads(line)
    except RecursionError as problem:
        raise ValueError(f"nested too deeply: {problem}") from None
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, got {type(data).__name__}")
    return Record.from_json(data)
