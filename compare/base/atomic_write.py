"""Files that are replaced as a whole: who is killed while it writes leaves the old one."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Make or replace a file, and its folder where there is none: a run that is resumed makes some anew that records of
    it name already. A link goes on pointing where it points, and the file there is replaced; a pipe or a device is
    written to. sync: not before the content is on the disk, or a power failure can leave the new name on an empty file.
    Raises OSError."""
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
