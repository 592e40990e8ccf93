"""`open_source`: the only place that decides what a path is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..base.text import printable
from ..base.usage import UsageError
from ..profiles.files import capture_facts, capture_folders
from .dump_files import open_files
from .profile_source import UnreadableCapture, has_profile, open_profile
from .result import reading_errors_as_usage
from .run_source import is_run, open_run
from .source import Source

MOST_OF_A_MESSAGE = 300  # characters


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
            return _without_profile(path, rank)
        try:
            return open_profile(path, dump, rank)
        except UnreadableCapture as problem:  # its compilers' files may be there
            if dump is not None:
                raise UsageError(f"{problem}; without --dump, its own compilers' files are shown") from None
            opened = open_files(path, rank)
            return replace(opened, warnings=(str(problem), *opened.warnings), unprofiled=str(problem))


def _without_profile(path: Path, rank: int | None) -> Source:
    """Return the compilers' files; those of a capture with the reason why nothing was profiled."""
    reason = _unprofiled(path)
    try:
        opened = open_files(path, rank)
    except UsageError:
        if not reason:
            raise
        raise UsageError(f"{path}: no graph was captured, and {reason}") from None
    return replace(opened, warnings=(f"{path}: {reason}", *opened.warnings), unprofiled=reason) if reason else opened


def _unprofiled(path: Path) -> str:
    """Return what `xlafuse capture` said of a program of which it profiled nothing; "" for other paths."""
    for folder in capture_folders(path):
        facts = capture_facts(folder)
        if "profiled_steps" not in facts and isinstance(message := facts.get("message"), str):
            return printable(message, MOST_OF_A_MESSAGE)
    return ""


def _refuse_dump(path: Path, dump: Path | None) -> None:
    if dump is not None:
        raise UsageError(f"{path}: --dump goes with one profile, and this is none")
