"""Files that a run's records name: fusion graphs, timelines and compiler artifacts, loose or in an archive.

While a run goes on, the files lie loose in `graphs/`, `traces/` and `dumps/`. At its end `pack_files` moves them into
one zip archive each. Records keep the names: "graphs/x.json.gz" is then the member "x.json.xz" of graphs.zip. A loose
file is newer than the member of its name.

A member is one xz stream: of JSON, or of a zip without compression. For the texts of one compile, this takes two thirds
of the bytes of a zip, which compresses each text by itself.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import lzma
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from xlafuse.hlo.regular_file import require_regular

from .record import Record

ARCHIVES = {"graphs": "graphs.zip", "traces": "timelines.zip", "dumps": "artifacts.zip"}
MAX_BYTES = 1 << 30  # of one unpacked file
_MEMORY = 1 << 27  # bytes that a damaged or hostile stream may ask for
_REMEDY = "put an intact copy there, or delete it and lose its files alone"
_PRESET = 2  # 37 MB/s; preset 6 takes 11% fewer bytes at 6 MB/s


@dataclass(frozen=True)
class RunFile:
    """A file of a run. name: as its record has it, relative to the run's folder."""

    folder: Path
    name: str

    def __str__(self) -> str:
        loose, archive = self.folder / self.name, self._archive
        return str(loose) if archive is None or loose.exists() or not archive.exists() else f"{archive}!{self.member}"

    @property
    def kind(self) -> str:
        """The folder of the loose file."""
        return PurePosixPath(self.name).parts[0]

    @property
    def member(self) -> str:
        """The file's name in its archive."""
        return f"{PurePosixPath(self.name).name.removesuffix('.gz')}.xz"

    @property
    def _archive(self) -> Path | None:
        return self.folder / ARCHIVES[self.kind] if self.kind in ARCHIVES else None

    def exists(self) -> bool:
        """Return whether the file is there, loose or archived. Raises OSError for a damaged archive."""
        if (self.folder / self.name).exists():
            return True
        with contextlib.suppress(FileNotFoundError):
            return self._archive is not None and self.member in _opened(self._archive).NameToInfo
        return False

    def read_bytes(self) -> bytes:
        """Return the content. Raises FileNotFoundError for a missing file, OSError for a damaged archive."""
        try:
            return self._loose()
        except FileNotFoundError:
            return self._unpacked(self._archived())

    def packed(self) -> bytes:
        """Return the member's bytes. Raises as `read_bytes`."""
        try:
            loose = self._loose()
        except FileNotFoundError:
            return self._archived()
        return lzma.compress(_uncompressed(loose), preset=_PRESET)

    def _loose(self) -> bytes:
        require_regular(self.folder / self.name)
        return (self.folder / self.name).read_bytes()

    def _archived(self) -> bytes:
        if self._archive is None:
            raise self._missing()
        try:
            archive = _opened(self._archive)
            info = archive.getinfo(self.member)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_BYTES:
                raise OSError(f"{self}: expected an xz stream of at most {MAX_BYTES >> 30} GiB, stored as it is")
            return archive.read(info)
        except (FileNotFoundError, KeyError):
            raise self._missing() from None
        except (EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as problem:
            raise OSError(f"{self}: damaged: {problem}; {_REMEDY}") from None

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder / self.name))

    def _unpacked(self, packed: bytes) -> bytes:
        stream = lzma.LZMADecompressor(memlimit=_MEMORY)
        try:
            content = stream.decompress(packed, max_length=MAX_BYTES + 1)
        except lzma.LZMAError as problem:
            raise OSError(f"{self}: damaged: {problem}; {_REMEDY}") from None
        if len(content) > MAX_BYTES or not stream.eof:
            raise OSError(f"{self}: cut off, or more than {MAX_BYTES >> 30} GiB unpacked; {_REMEDY}")
        return content


def recorded_file(folder: Path, record: Record, name: str) -> RunFile:
    """Return a file that the record names. Raises ValueError for a file outside the run's folder."""
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder / 'records.jsonl'}: {record.id}: its file {name!r} is not in the run's folder")
    return RunFile(folder, name)


def pack_files(folder: Path) -> None:
    """Move a run's loose files into its archives. Raises OSError; every file is then still loose or in an archive."""
    for kind, archive in ARCHIVES.items():
        loose = [
            RunFile(folder, f"{kind}/{path.name}")
            for path in sorted((folder / kind).glob("*")) if path.is_file() and path.suffix != ".new"
        ]
        if loose:
            write(folder / archive, [*archived(folder, kind), *loose])
        if (folder / kind).is_dir():
            shutil.rmtree(folder / kind)


def write(archive: Path, files: Iterable[RunFile]) -> None:
    """Write or replace an archive in one step. The last of files with one name is kept. Raises OSError."""
    from concurrent.futures import ThreadPoolExecutor  # readers start faster without it

    members = {file.member: file for file in files}
    archive.parent.mkdir(parents=True, exist_ok=True)
    fresh = archive.with_name(f"{archive.name}.new")
    try:
        with ThreadPoolExecutor() as pool, zipfile.ZipFile(fresh, "w") as packed:
            for name, content in zip(members, pool.map(RunFile.packed, members.values()), strict=True):
                info = zipfile.ZipInfo(name)
                info.external_attr = 0o644 << 16
                packed.writestr(info, content)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(archive)
    finally:
        fresh.unlink(missing_ok=True)


def archived(folder: Path, kind: str) -> list[RunFile]:
    """Return the files in the archive of a kind. Raises OSError for a damaged one."""
    try:
        names = [name for name in _opened(folder / ARCHIVES[kind]).namelist() if "/" not in name]
    except FileNotFoundError:
        return []
    return [RunFile(folder, f"{kind}/{name.removesuffix('.xz')}") for name in names]


def _opened(archive: Path) -> zipfile.ZipFile:
    """Return an archive, open for reading. Raises OSError.

    It stays open: a report reads thousands of members, and listing them takes milliseconds.
    """
    require_regular(archive)
    stat = archive.stat()
    try:
        return _opened_once(archive, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except (NotImplementedError, zipfile.BadZipFile) as problem:
        raise OSError(f"{archive}: damaged: {problem}; {_REMEDY}") from None


@lru_cache(maxsize=16)
def _opened_once(archive: Path, inode: int, size: int, changed: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(archive)


def _uncompressed(content: bytes) -> bytes:
    """Return what is in a gzip stream, or a zip without compression; a damaged or a very large file as it is."""
    try:
        if content.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(content)) as stream:
                unpacked = stream.read(MAX_BYTES + 1)
            return unpacked if len(unpacked) <= MAX_BYTES else content
        if content.startswith(b"PK\x03\x04"):
            return _without_compression(content)
    except (EOFError, NotImplementedError, OSError, RuntimeError, zipfile.BadZipFile, lzma.LZMAError, zlib.error):
        pass
    return content


def _without_compression(content: bytes) -> bytes:
    plain = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(plain, "w") as new:
        if sum(info.file_size for info in old.infolist()) > MAX_BYTES:
            return content
        for info in old.infolist():
            new.writestr(zipfile.ZipInfo(info.filename), old.read(info))
    return plain.getvalue()
