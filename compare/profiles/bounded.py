"""Bytes of a file up to a limit: plain, gzipped, or the one profile in a zip."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from xlafuse.hlo.regular_file import require_regular

from .model import ProfileError

# Raised where a packed file is damaged or cut off. RuntimeError: a zip that is encrypted or of an unknown method.
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, RuntimeError)

GZIP, ZIP = b"\x1f\x8b", b"PK\x03\x04"  # beginnings

_CHUNK = 1 << 20
_NAMES = (".json", ".json.gz", ".sqlite", ".sqlite.gz", ".pb", ".pb.gz")


def chunks(path: Path, most: int = _CHUNK) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked, at most so many at a time. Raises OSError and, where it is damaged, DAMAGED."""
    require_regular(path)
    with ExitStack() as opened:
        stream: Any = opened.enter_context(path.open("rb"))
        if stream.peek(4).startswith(ZIP):
            archive = opened.enter_context(zipfile.ZipFile(stream))
            stream = opened.enter_context(archive.open(_member(archive)))
        if stream.peek(2).startswith(GZIP):
            stream = opened.enter_context(gzip.open(stream))
        while data := stream.read1(most):  # unlike read, it keeps the bytes before the place where a file is cut off
            yield data


def _member(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the only file of an archive, or its only one with the name of a profile."""
    files = [each for each in archive.infolist() if not each.is_dir() and not each.filename.startswith("__MACOSX/")]
    named = [each for each in files if each.filename.endswith(_NAMES)]
    for found in (files, named):
        if len(found) == 1:
            return found[0]
    raise zipfile.BadZipFile(f"{len(files)} files, of which {len(named)} have the name of a profile; unpack it")


def head(path: Path, size: int) -> bytes:
    """Return the beginning of a file, unpacked, as far as it can be read."""
    found = b""
    try:
        for data in chunks(path, size):
            found += data
            if len(found) >= size:
                break
    except DAMAGED:
        pass
    return found[:size]


def read_bytes(path: Path, most: int) -> bytes:
    """Return a file's bytes, unpacked. Raises ProfileError for a damaged file and for more than `most` bytes."""
    found = io.BytesIO()
    copy(path, found, most)
    return found.getvalue()


def copy(path: Path, target: IO[bytes], most: int) -> None:
    """Write a file's bytes, unpacked, to `target`. Raises as `read_bytes` does."""
    size = 0
    try:
        for data in chunks(path):
            size += len(data)
            if size > most:
                raise ProfileError(too_large(path, most))
            target.write(data)
    except DAMAGED as problem:
        raise ProfileError(f"{path}: {damage(problem)}") from None


def damage(problem: BaseException) -> str:
    """Return what is wrong with a packed file."""
    return f"damaged {'zip' if isinstance(problem, (zipfile.BadZipFile, RuntimeError)) else 'gzip file'}: {problem}"


def too_large(path: Path, most: int) -> str:
    return f"{path}: more than {most >> 20} MiB; profile fewer steps"
