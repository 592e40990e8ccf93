"""The modules in a dump folder or an archive of one: XLA's own (`--xla_dump_to`) or this project's (`artifacts`).

Listing reads only names and sizes, so thousands of modules and gigabytes list in seconds. A file is read when it is
opened, and nothing in a dump is executed.
"""

import gzip
import io
import lzma
import os
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, cast

from xlafuse.dumps.artifacts import ARTIFACTS
from xlafuse.hlo.regular_file import require_regular

MAX_BYTES = 4 << 30  # of one unpacked file
MAX_LINE = 256 << 20  # characters; a fusion log holds a whole module in one line


@dataclass(frozen=True)
class Archive:
    """A zip archive. name: its path, or, with `content`, its name in messages. content: the archive itself."""

    name: str
    content: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.name

    def open(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.name if self.content is None else io.BytesIO(self.content))


@dataclass(frozen=True)
class File:
    """A file of a dump, in a folder (`archive` is None) or in a zip archive. A .gz file is unpacked while it is read.

    size: bytes as stored; -1 if listing did not ask for it.
    """

    path: Path
    archive: Archive | None = None
    size: int = -1

    def __str__(self) -> str:
        return f"{self.archive}!{self.path}" if self.archive else str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @contextmanager
    def open_binary(self) -> Iterator[IO[bytes]]:
        """Open the file, unpacked. Raises OSError if that fails."""
        with ExitStack() as stack:
            if self.archive is None:
                require_regular(self.path)
                stream: IO[bytes] = stack.enter_context(self.path.open("rb"))
            else:
                with self._intact():
                    archive = stack.enter_context(self.archive.open())
                    stream = stack.enter_context(archive.open(self.path.as_posix()))
            yield cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if self.name.endswith(".gz") else stream

    @contextmanager
    def _intact(self) -> Iterator[None]:
        """Raise the errors of damaged packed data as OSError."""
        try:
            yield
        except (zipfile.BadZipFile, NotImplementedError, KeyError, EOFError, zlib.error, lzma.LZMAError) as problem:
            raise OSError(f"{self}: damaged: {problem}") from None

    @contextmanager
    def open(self) -> Iterator[Iterator[str]]:
        """Yield the lines; bytes other than UTF-8 become U+FFFD. Raises OSError above the limits of this file."""
        with self.open_binary() as stream, io.TextIOWrapper(stream, encoding="utf-8", errors="replace") as text:
            yield self._lines(text)

    def _lines(self, text: IO[str]) -> Iterator[str]:
        left = MAX_BYTES
        while True:
            with self._intact():
                line = text.readline(MAX_LINE + 1)
            if not line:
                return
            left -= len(line)
            if len(line) > MAX_LINE or left < 0:
                raise OSError(f"{self}: a line is over {MAX_LINE >> 20} MiB, or the text over {MAX_BYTES >> 30} GiB")
            yield line

    @contextmanager
    def local(self) -> Iterator[Path]:
        """Yield a path that any program can open: the file itself, or a temporary unpacked copy."""
        if self.archive is None and not self.name.endswith(".gz"):
            require_regular(self.path)
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="xlafuse-") as folder:
            copy = Path(folder) / self.name.removesuffix(".gz")
            with self.open_binary() as stream, copy.open("wb") as out, self._intact():
                left = MAX_BYTES
                while chunk := stream.read(1 << 20):
                    left -= len(chunk)
                    if left < 0:
                        raise OSError(f"{self}: more than {MAX_BYTES >> 30} GiB")
                    out.write(chunk)
            yield copy


@dataclass(frozen=True)
class Snapshot:
    """The module between two passes.

    after, before: the passes' names; "" if the file's name has only the other. file: the text, or the proto if only
    that was dumped. proto: None if it was not dumped.
    """

    number: int
    after: str
    before: str
    file: File
    proto: File | None = None


@dataclass
class Artifacts:
    """The files of one compiled module.

    where: the folder or archive. files: name without the prefix "module_0001.jit_f." -> file.
    """

    where: str
    files: dict[str, File] = field(default_factory=dict)

    def find(self, artifact: str) -> File | None:
        """Return the file of one of `ARTIFACTS`, the last by name if several match; None if none does."""
        return next(iter(reversed(self.find_all(artifact))), None)

    def find_all(self, artifact: str) -> list[File]:
        """Return every file of one of `ARTIFACTS`, sorted by name. Raises KeyError for another artifact."""
        own, pattern = ARTIFACTS[artifact]
        if own in self.files:
            return [self.files[own]]
        if not pattern:
            return []
        return [f for name, f in sorted(self.files.items()) if re.fullmatch(pattern, name.removesuffix(".gz"))]

    def snapshots(self) -> list[Snapshot]:
        """Return the dumped snapshots of the module, in the order of the compile.

        This project's folders hold two for each pass that changed the module, one before and one after the pass.
        """
        forms: dict[tuple[int, str, str], dict[str, File]] = {}
        for name, file in self.files.items():
            if (match := _SNAPSHOT.fullmatch(name.removesuffix(".gz"))) is None:
                continue
            if match["own"]:
                after, before = ("", match["own"]) if match["moment"] == "before" else (match["own"], "")
            else:
                after, before = match["after"], match["before"] or ""
            forms.setdefault((int(match["number"]), after, before), {})[match["form"]] = file
        return [
            Snapshot(*place, files.get("txt") or files["hlo.pb"], files.get("hlo.pb"))
            for place, files in sorted(forms.items(), key=lambda item: item[0])
        ]


# passes/06_before_priority-fusion.txt    or    0006.fusion.after_sort-iota-fusion.before_priority-fusion.txt
_SNAPSHOT = re.compile(
    r"(?:passes/)?(?P<number>\d{1,18})"
    r"(?:_(?P<moment>before|after)_(?P<own>.+?)|\.(?:[^/]*?\.)?after_(?P<after>.+?)(?:\.before_(?P<before>.+?))?)"
    r"\.(?P<form>txt|hlo\.pb)"
)


@dataclass(frozen=True)
class DumpedModule:
    """A module of a dump, not read yet.

    name: "jit_f"; in this project's dumps the folder's name, "forward" or "backward".
    id: XLA's number, unique in one process; 0 in this project's dumps.
    cost: the bytes of the optimized HLO's text, else of its proto, else of the largest text. It estimates the module's
        size, which is known only once the module is read.
    """

    name: str
    id: int
    cost: int
    artifacts: Artifacts


def modules(source: Path | Archive) -> list[DumpedModule]:
    """Return the modules under a folder or in a zip archive, largest first. An archive's file may be given as a path.

    Raises OSError (FileNotFoundError, NotADirectoryError, ...) if the source cannot be listed; ValueError for a broken
    archive.
    """
    own: dict[str, Artifacts] = {}
    raw: dict[tuple[str, str, int], list[tuple[str, File]]] = {}
    for folder, file in _entries(source):
        match = _RAW.fullmatch(file.name)
        if match and len(match["id"]) < 18:
            lead, name = match["lead"] or "", match["rest"]
            if (frames := _FRAMES.fullmatch(name)) is not None:  # the lead is a computation here, not a timestamp
                lead, name = "", f"{frames[1]}.{lead}.{frames[2]}"
            raw.setdefault((folder, lead, int(match["id"])), []).append((name, file))
        else:
            top, _, below = folder.rpartition("/")
            if below in ("passes", "ptx"):
                own.setdefault(top, Artifacts(_place(source, top))).files[f"{below}/{file.name}"] = file
            else:
                own.setdefault(folder, Artifacts(_place(source, folder))).files[file.name] = file
    ours = {file for file, _ in ARTIFACTS.values()}
    whole = Path(str(source)).stem  # the name of a module that is not in a folder of its own
    found = [
        DumpedModule(PurePosixPath(folder).name or whole, 0, _cost(artifacts), artifacts)
        for folder, artifacts in own.items()
        if ours & artifacts.files.keys()
    ]
    for (folder, _, number), files in raw.items():
        found += _split(_place(source, folder), number, files)
    return sorted(found, key=lambda module: (-module.cost, module.id, module.name))


def single_module(source: Path) -> Artifacts:
    """Return the only module of a source. Raises ValueError if it holds several, which the message names, or none."""
    found = modules(source)
    if len(found) != 1:
        names = ", ".join(f"{module.name} ({module.artifacts.where})" for module in found[:5])
        raise ValueError(f"{source} holds {len(found)} modules, not one{': ' + names if names else ''}. Choose by name")
    return found[0].artifacts


# lead: a computation (main.9.module_0001.jit_f._fusion.pyz), or a timestamp (xla_dump_include_timestamp).
_RAW = re.compile(r"(?:(?P<lead>.+?)\.)?module_(?P<id>\d+)\.(?P<rest>.+)")
_FRAMES = re.compile(r"(.+)\.(_fusion\.(?:pyz|html))")
# XLA for TPUs writes the number of its version after a module's name: jit_f.cl_1000038190.after_optimizations.txt
_VERSION = re.compile(r"cl_\d+\.")
# A module's name may contain dots. "sm_9.0a_gpu_after_optimizations.txt" or "0006.fusion.after_" follows it.
_KIND = re.compile(
    r"(?P<name>.+?)\.(?:cl_\d+\.)?(?:(?:sm_\d[\da-z.]*_|gfx[^_]*_)?(?:[a-z]+_)?after_optimizations|before_optimizations"
    r"|(?:before|after)_spmd_partitioner|after_codegen|\d{4,}\.[^/]+\.after_).*"
)


def _split(where: str, number: int, files: list[tuple[str, File]]) -> Iterator[DumpedModule]:
    """Yield one module for each name; processes that share a folder use the same numbers."""
    names = {match["name"] for name, _ in files if (match := _KIND.fullmatch(name))}
    if not names:
        names = {min((name for name, _ in files), key=len).split(".")[0]}
    by_name: dict[str, Artifacts] = {}
    ordered = sorted(names, key=len, reverse=True)
    for name, file in files:
        owner = next((known for known in ordered if name.startswith(known + ".")), None)
        if owner is not None:
            rest = name[len(owner) + 1 :]
            version = _VERSION.match(rest)
            by_name.setdefault(owner, Artifacts(where)).files[rest[version.end() :] if version else rest] = file
    for name, artifacts in by_name.items():
        yield DumpedModule(name, number, _cost(artifacts), artifacts)


def _cost(artifacts: Artifacts) -> int:
    for artifact in ("hlo", "hlo_proto"):
        if (file := artifacts.find(artifact)) is not None:
            return _size(file)
    return max((_size(file) for name, file in artifacts.files.items() if name.endswith(".txt")), default=0)


def _size(file: File) -> int:
    if file.size >= 0:
        return file.size
    try:
        return file.path.stat().st_size
    except OSError:
        return 0


def _place(source: Path | Archive, folder: str) -> str:
    if not folder:
        return str(source)
    return str(source / folder) if isinstance(source, Path) and source.is_dir() else f"{source}!{folder}"


def _entries(source: Path | Archive) -> Iterator[tuple[str, File]]:
    """Yield (folder inside the source, with "/", and file)."""
    if isinstance(source, Path) and not stat.S_ISDIR(source.stat().st_mode):
        source = Archive(str(source))
    if isinstance(source, Archive):
        try:
            with source.open() as archive:
                for info in archive.infolist():
                    member = PurePosixPath(info.filename)
                    if not info.is_dir():
                        folder = "" if str(member.parent) == "." else str(member.parent)
                        yield folder, File(Path(info.filename), source, info.file_size)
        except zipfile.BadZipFile as problem:
            raise ValueError(f"{source} is neither a folder nor a zip archive: {problem}") from None
        return
    pending = [(str(source), "")]
    while pending:
        path, folder = pending.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, f"{folder}/{entry.name}" if folder else entry.name))
                elif not entry.is_dir():  # also a FIFO; opening it raises an error
                    yield folder, File(Path(entry.path))
