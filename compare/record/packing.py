"""The end of a run: its folder becomes a handful of files."""

from __future__ import annotations

from pathlib import Path

from ..base import atomic_write
from . import run_files, run_folder, run_readme
from .run_folder import RunFolderError


def pack(folder: Path) -> None:
    """Move the run's files into archives, compress many records, and write README.md.

    Raises RunFolderError where that fails; every record and file is then still there, loose or packed.
    """
    try:
        run_files.pack_files(folder)
        run_folder.pack_records(folder)
        atomic_write.write(folder / "README.md", run_readme.text(folder).encode())
    except OSError as problem:
        raise RunFolderError(
            f"{problem.filename or folder}: {problem.strerror or problem}; the run's records and files are kept, and "
            f"xlafuse run --out {folder} --resume packs them"
        ) from problem
