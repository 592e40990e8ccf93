"""The folder of a new or resumed run, checked before any work."""

from __future__ import annotations

import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from ..base.usage import UsageError
from ..record.run_folder import read_run

FREE_BYTES = 200_000_000  # a quick run with its dumps stays well below


def output_folder(out: Path | None, *, suite: str, now: datetime) -> Path:
    """Return the folder of a new run; nothing is created yet.

    Raises UsageError where it exists, cannot be written, or the disk is nearly full: before any work, not after.
    """
    folder = out or Path("runs") / f"{now:%Y%m%d-%H%M%S}-{suite}"
    try:
        if folder.exists():
            resume = "--resume goes on with it, or " if (folder / "run.json").exists() else ""
            raise UsageError(f"{str(folder)!r} exists already: {resume}name another --out")
        _writable(next(parent for parent in folder.absolute().parents if parent.exists()), folder)
    except OSError as problem:
        raise UsageError(f"{str(folder)!r} cannot be made: {problem.strerror}; name another --out") from None
    return folder


def resumed_folder(out: Path | None) -> tuple[Path, dict[str, Any]]:
    """Return an existing run's folder and its run.json. Raises UsageError or RunFolderError where there is none."""
    if out is None:
        raise UsageError("--resume needs --out DIR, the folder of the run to go on with")
    try:
        if not out.exists():
            raise UsageError(f"{str(out)!r}: no run to resume; leave --resume out to start one there")
        run = read_run(out)
        _writable(out, out)
    except OSError as problem:
        raise UsageError(f"{str(out)!r} cannot be written: {problem.strerror}") from None
    return out, run


def _writable(parent: Path, folder: Path) -> None:
    """Write a test file into `parent`. Raises OSError or UsageError where that fails."""
    if not parent.is_dir():
        raise UsageError(f"{str(folder)!r} cannot be made: {str(parent)!r} is a file; name another --out")
    with tempfile.TemporaryFile(dir=parent) as probe:
        probe.write(b"\0" * 4096)
    free = shutil.disk_usage(parent).free
    if free < FREE_BYTES:
        raise UsageError(
            f"{str(folder)!r}: {free / 1e6:.0f} MB free on its disk, a run needs {FREE_BYTES / 1e6:.0f} MB; "
            "free some or name another --out"
        )
