"""Archives of compiler artifacts, one a record, without this machine's paths."""

from __future__ import annotations

import io
import os
import re
import zipfile
from pathlib import Path

from . import atomic_write
from .paths import PROJECT

# Compilers write absolute source paths. Paths in the project, an environment's packages, a folder of PYTHONPATH or
# Inductor's code folder become relative to that folder.
_FOLDERS = (
    re.escape(str(PROJECT).encode()), rb"/[^\s\"'<>|:]*/site-packages", rb"/[^\s\"'<>|:]*/torchinductor_[^/]+",
    *(
        re.escape(folder.rstrip("/").encode())
        for folder in sorted(os.environ.get("PYTHONPATH", "").split(os.pathsep), key=len, reverse=True)
        if folder.startswith("/") and folder.strip("/")
    ),
)
_PREFIXES = re.compile(rb"(?:" + rb"|".join(_FOLDERS) + rb")/(?:tmp[^/\s]+/)?")
_COMPARE = Path(__file__).resolve().parents[1]
_BINARY = {".pb"}  # a changed length breaks a serialized proto; XLA's flags make its paths relative
_LEFT_OUT = {".cubin"}  # SASS and PTX hold the same code, and a cubin's debug sections name absolute paths


def pack(source: Path, archive: Path) -> bool:
    """Pack the files under `source` into the zip `archive`. Return False and write nothing where there are none."""
    files = sorted(p for p in source.rglob("*") if p.is_file() and p.suffix not in _LEFT_OUT) if source.is_dir() else []
    if not files:
        return False
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            data = file.read_bytes()
            packed.writestr(str(file.relative_to(source)), data if file.suffix in _BINARY else portable(data))
    atomic_write.write(archive, content.getvalue())
    return True


def portable(text: bytes) -> bytes:
    """Cut the project's and the packages' folders off the front of paths."""
    return _PREFIXES.sub(b"", text)


def portable_line(line: str) -> str:
    """Cut the folders off the front of "file:line", as `portable` does."""
    return portable(line.encode()).decode()


def users_line(line: str) -> str:
    """Return "file:line" as `portable_line` does, or "" for a line of the package `compare` itself."""
    known = portable_line(line)
    if line.startswith("/"):
        return "" if line.startswith(f"{_COMPARE}/") else known
    return "" if known.startswith(("compare/", "xlafuse/compare/")) else known
