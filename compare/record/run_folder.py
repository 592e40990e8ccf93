"""A run's folder: `run.json` (request and machine) and `records.jsonl` (a line a record, in order of finishing).

At the end of a run, many records are compressed (`records.jsonl.gz`). A resumed run writes `records.jsonl` again; its
records are newer. `run_files` has the other files.

Each record has the status of one implementation of one case:

- `ok`: the code described was executed on the device described, and its numbers were checked.
- `compiled`: compiled for a target and never run.
- `wrong`: executed, with wrong numbers, changed inputs or a missing output.
- `failed`: an error of the compiler, the framework or the worker.
- `skipped`: this machine or implementation cannot run the case; the detail says what would help.
- `timeout`: no answer within the time limit.

Records that are neither `ok` nor `compiled` give the reason in `detail`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlafuse.hlo.regular_file import require_regular

from ..base import atomic_write
from ..base.text import printable
from ..spec.case import Case
from .record import SCHEMA, NewerSchema, Record

LARGE = 1_000_000  # bytes from which records are compressed
MAX_BYTES = 1 << 32  # of unpacked records


class RunFolderError(Exception):
    """A run folder cannot be read or written; the message names the file and the remedy."""


def create(folder: Path, run: Mapping[str, Any]) -> None:
    """Make the folder and write run.json. Raises RunFolderError where that fails."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunFolderError(f"{folder}: cannot be written: {problem.strerror}") from problem
    write_run(folder, run)


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Replace run.json in one step. Raises RunFolderError where that fails."""
    path = folder / "run.json"
    try:
        atomic_write.write(path, f"{json.dumps(run, indent=1)}\n".encode(), sync=True)
    except OSError as problem:
        raise RunFolderError(f"{path}: cannot be written: {problem.strerror}") from problem


def append(folder: Path, record: Record) -> None:
    """Write one record and wait until it is on the disk.

    A partial line left by a killed run is ended first. Raises RunFolderError where the line cannot be written, as on a
    full disk: the file then keeps the earlier records and nothing of this one.
    """
    path = folder / "records.jsonl"
    line = json.dumps(record.to_json(), allow_nan=True).encode() + b"\n"
    try:
        with path.open("a+b", buffering=0) as file:  # closing a file writes its buffer again after an error
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
    """Write all data: a write to a nearly full disk may be partial, and only the next one raises the error."""
    while data:
        data = data[file.write(data) :]


def _sync_name(folder: Path) -> None:
    """Write the folder's entry: a new file survives a power failure only after that (fsync(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def repair(folder: Path) -> str | None:
    """Mend the last line of a run that was stopped while writing: cut off a partial record, or end a complete one.

    Return a message for the user, or None where nothing was wrong. Only the run that holds the folder's lock may call
    this (compare.run.run). Raises RunFolderError where the file cannot be changed.
    """
    path = folder / "records.jsonl"
    try:
        require_regular(path)
        with path.open("r+b", buffering=0) as file:
            content = file.readall()
            good = content.rfind(b"\n") + 1
            tail = content[good:]
            if not tail:
                return None
            try:
                record = _parse(tail)
            except NewerSchema as problem:
                raise RunFolderError(f"{path}: its last record: {problem}") from None
            except ValueError:
                file.truncate(good)
                done = f"a partial record at the end, {len(tail)} bytes, was cut off; the run makes it again"
            else:
                _write_all(file, b"\n")
                done = f"the last record, {record.id}, is complete; its line was ended"
            os.fsync(file.fileno())
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise RunFolderError(f"{path}: cannot be repaired: {problem.strerror}") from problem
    return f"{path}: {done}"


def read_run(folder: Path) -> dict[str, Any]:
    """Return run.json. Raises RunFolderError where it is missing, malformed or of another schema."""
    path = folder / "run.json"
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder}: a file; expected a run's folder, the one that holds its run.json")
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such run folder; `xlafuse run --out {folder}` makes one")
    try:
        require_regular(path)
        run = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunFolderError(f"{path}: missing, so this is not a run folder") from None
    except (OSError, ValueError) as problem:
        raise RunFolderError(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from problem
    if not isinstance(run, dict):
        raise RunFolderError(f"{path}: expected a JSON object, got {type(run).__name__}")
    if (schema := run.get("schema", SCHEMA)) != SCHEMA:
        wrote = printable(f"xlafuse {run['xlafuse']}" if "xlafuse" in run else "the xlafuse that wrote it", 60)
        shown = printable(repr(schema), 60)
        raise RunFolderError(f"{path}: schema {shown}, and this version reads {SCHEMA}: use {wrote}")
    return run


def read_records(folder: Path) -> tuple[list[Record], list[str]]:
    """Return the valid records, the newest of each id, and a warning for each bad line.

    Cases are in the order of the run's plan, which may differ from the order in the file. Cases outside the plan follow
    in the file's order. Raises RunFolderError for an unreadable file, and for records of a later version.
    """
    records: dict[str, Record] = {}
    warnings: list[str] = []
    found = {path: content for path in _record_files(folder) if (content := _contents(path)) is not None}
    if not found:
        return [], [f"{folder / 'records.jsonl'}: missing: no record was written yet"]
    for path, content in found.items():
        for number, line in enumerate(content.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                record = _parse(line)
            except NewerSchema as problem:
                raise RunFolderError(f"{path}:{number}: {problem}") from None
            except ValueError as problem:
                warnings.append(f"{path}:{number}: line skipped: {problem}")
                continue
            records[record.id] = record
    positions = _positions(folder)
    return sorted(records.values(), key=lambda each: positions.get(each.case.id, len(positions))), warnings


def pack_records(folder: Path) -> None:
    """Compress a run's records where they are many. Raises OSError; every record is then still in one of the files."""
    packed, loose = _record_files(folder)
    fresh = _contents(loose)
    if fresh is None or (len(fresh) < LARGE and not packed.is_file()):
        return
    earlier = _contents(packed) or b""
    atomic_write.write(packed, gzip.compress(earlier + fresh, mtime=0), sync=True)
    loose.unlink()


def _record_files(folder: Path) -> tuple[Path, Path]:
    """Return the files of earlier, compressed records and of newer ones; either may be missing."""
    return folder / "records.jsonl.gz", folder / "records.jsonl"


def _contents(path: Path) -> bytes | None:
    """Return a file's content, unpacked; None for a missing file. Raises RunFolderError for an unreadable one."""
    try:
        require_regular(path)
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except (EOFError, OSError, zlib.error) as problem:
        raise RunFolderError(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from problem
    if len(content) > MAX_BYTES:
        raise RunFolderError(f"{path}: more than {MAX_BYTES >> 30} GiB of records")
    return content


def _positions(folder: Path) -> dict[str, int]:
    """Position of each case in the run's plan; empty where run.json has no plan, which `read_run` reports."""
    try:
        work = json.loads((folder / "run.json").read_bytes())["plan"]["work"]
        return {Case.from_json(entry["case"]).id: position for position, entry in enumerate(work)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _parse(line: bytes) -> Record:
    """Return a line's record. Raises ValueError naming the first field that is wrong, and NewerSchema."""
    try:
        data = json.loads(line)
    except RecursionError as problem:
        raise ValueError(f"nested too deeply: {problem}") from None
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, got {type(data).__name__}")
    return Record.from_json(data)
