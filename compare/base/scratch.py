"""Scratch folders that a later process removes where a killed one left them."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PREFIX = "xlafuse-"


def locked_folder(root: Path) -> tuple[Path, BinaryIO]:
    """Return a new folder in `root`, and its lock, which is held until it is closed. Raises OSError.

    Folders of killed processes are removed first: their locks are free.
    """
    for left in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (left / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    lock = (folder / "making").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "making").rename(folder / "lock")  # never there without being held
    return folder, lock


@contextlib.contextmanager
def scratch_in(root: Path) -> Iterator[Path]:
    """A `locked_folder` for the time of a context. Raises OSError."""
    folder, lock = locked_folder(root)
    try:
        with lock:
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
