"""Files that are replaced as a whole: who is killed while it writes leaves the old one."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """A run that is resumed makes some files anew that records of it name already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(content)
    fresh.replace(path)
