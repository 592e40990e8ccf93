"""`open_source`: the only place that decides what a path is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..base.usage import UsageError
from .dump_files import open_files
from .profile_source import UnreadableCapture, has_profile, open_profile
from .result import reading_errors_as_usage
from .run_source import is_run, open_run
from .source import Source


def open_source(path: Path, *, rank: int | None = None, dump: Path | None = None) -> Source:
    """Return the results of a path: a run's folder, a profile, a folder or archive of dumps, or one file.

    rank: one of several ranks of a TORCH_TRACE folder or a profile, or of several GPUs of a profile; by default the
    lowest. dump: the compilers' files of a profile, if they are not beside it.

    Raises UsageError where the path has no graph, or not what an option names, and RunFolderError for a broken run.
    """
    with reading_errors_as_usage(path):
        if is_run(path):
            if rank is not None:
                raise UsageError(f"{path}: --rank chooses among the ranks of a profile or of a TORCH_TRACE folder")
            _refuse_dump(path, dump)
            return open_run(path)
        if not has_profile(path):
            _refuse_dump(path, dump)
            return open_files(path, rank)
        try:
            return open_profile(path, dump, rank)
        except UnreadableCapture as problem:  # its compilers' files may be there
            if dump is not None:
                raise UsageError(f"{problem}; without --dump, its own compilers' files are shown") from None
            opened = open_files(path, rank)
            return replace(opened, warnings=(str(problem), *opened.warnings))


def _refuse_dump(path: Path, dump: Path | None) -> None:
    if dump is not None:
        raise UsageError(f"{path}: --dump goes with one profile, and this is none")
