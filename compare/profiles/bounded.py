"""Bytes of a file, plain or gzipped, up to a limit."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from xlafuse.hlo.regular_file import require_regular

from .model import ProfileError


def head(path: Path, size: int = 4096) -> bytes:
    """Return the beginning of a file, unpacked; b"" for a damaged gzip file."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            if not file.peek(2).startswith(b"\x1f\x8b"):
                return file.read(size)
            with gzip.open(file) as unpacked:
                return unpacked.read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return b""


def read_bytes(path: Path, most: int) -> bytes:
    """Return a file's bytes, unpacked. Raises ProfileError for a damaged file and for more than `most` bytes."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            packed = file.peek(2).startswith(b"\x1f\x8b")
            with gzip.open(file) if packed else file as stream:
                data = stream.read(most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise ProfileError(f"{path}: damaged gzip file: {problem}") from None
    if len(data) > most:
        raise ProfileError(f"{path}: more than {most >> 20} MiB; profile fewer steps")
    return data
