"""Atomic writes: a process that is killed while it writes leaves the old file."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write or replace a file, and create its folder. Raises OSError.

    A symbolic link stays, and its target is replaced. A pipe or a device is written to. sync: flush to disk first;
    otherwise a power failure can leave an empty file.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    fresh.replace(path)
