"""One archive a record: the compiler's artifacts, with source paths that mean the same on any machine."""

from __future__ import annotations

import io
import os
import re
import zipfile
from pathlib import Path

from . import atomic_write
from .paths import PROJECT

# Compilers write absolute source paths into their text: below the project they become relative to it, below an
# environment's packages, a folder of PYTHONPATH, or the folder where Inductor writes its code, relative to those.
_FOLDERS = (
    re.escape(str(PROJECT).encode()), rb"/[^\s\"'<>|:]*/site-packages", rb"/[^\s\"'<>|:]*/torchinductor_[^/]+",
    *(
        re.escape(folder.rstrip("/").encode())
        for folder in sorted(os.environ.get("PYTHONPATH", "").split(os.pathsep), key=len, reverse=True)
        if folder.startswith("/") and folder.strip("/")
    ),
)
_PREFIXES = re.compile(rb"(?:" + rb"|".join(_FOLDERS) + rb")/(?:tmp[^/\s]+/)?")
_BINARY = {".pb"}  # serialized protos: a changed length would break them; XLA is told to write relative paths
_LEFT_OUT = {".cubin"}  # SASS and PTX say what it holds, and its debug sections name absolute paths


def pack(source: Path, archive: Path) -> bool:
    """Pack the files under `source` into the zip `archive`; False, and no archive, where there are none."""
    files = sorted(p for p in source.rglob("*") if p.is_file() and p.suffix not in _LEFT_OUT) if source.is_dir() else []
    if not files:
        return False
    # LZMA: compiler text shrinks to well under half of what deflate leaves.
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_LZMA) as packed:
        for file in files:
            data = file.read_bytes()
            packed.writestr(str(file.relative_to(source)), data if file.suffix in _BINARY else portable(data))
    atomic_write.write(archive, content.getvalue())
    return True


def portable(text: bytes) -> bytes:
    """Text with the project's and its packages' folders cut off the front of paths."""
    return _PREFIXES.sub(b"", text)


def relative(line: str) -> str:
    """`file:line` with the file below the project's folder or its environment's packages shortened."""
    return portable(line.encode()).decode()
