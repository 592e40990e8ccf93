"""A folder as bytes, for another machine: its files in a zip without compression, as most are compressed already."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path


def pack(folder: Path, files: Iterable[Path] | None = None) -> bytes:
    """Return the files under `folder`, or only these of them, as bytes."""
    chosen = sorted(folder.rglob("*")) if files is None else files
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as packed:
        for file in chosen:
            if file.is_file():
                packed.write(file, file.relative_to(folder))
    return content.getvalue()


def unpack(content: bytes, folder: Path) -> None:
    """Write the packed files into `folder`."""
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        packed.extractall(folder)
