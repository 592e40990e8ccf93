"""The source texts of a run with the lines of each kernel, which `static/sources.js` shows.

Each record has its optimized HLO, Inductor's output code and compiled CUDA; a graph without a record has the text that
it was read from. The program and its Triton kernels come from the installed project, since runs do not keep them. A
case embeds equal texts once.
"""

from __future__ import annotations

import gzip
import io
import lzma
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from ....base.paths import PROJECT
from ....base.program import in_words, sources_in
from ....base.text import printable
from ....base.usage import UsageError
from ....graph.model import Kernel
from ....record.run_files import RunFile, recorded_file
from ....sources.dump_files import read_bytes
from ....sources.result import Result, reading_errors_as_usage
from ....spec.block import MAIN_IMPLEMENTATIONS
from . import extra_files, programs
from . import listing as listings
from .listing import Listing, Span

BUDGET = 1_100_000  # compressed bytes of all compiled texts; base64 adds a third
MAX_BYTES = 16 << 20  # for one text
MOST_TEXTS = 16  # of one folder of Inductor's output
_OUTPUTS = ("optimized.hlo.txt", "output_code.py")  # in an archive, next to CUDA


@dataclass(frozen=True)
class Sources:
    """The embedded data. cases: by case id. programs: by path, shared by cases."""

    cases: dict[str, dict[str, Any]]
    programs: dict[str, dict[str, Any]]


@dataclass
class _Document:
    """A text of a record. title: its path in the archive or project. spans: lines by launch index. program: True for a
    file of the project."""

    title: str
    listing: Listing
    spans: dict[int, list[Span]]
    note: str = ""
    program: bool = False


@dataclass
class _Record:
    source: Result
    kernels: Sequence[Kernel] = ()
    documents: list[_Document] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    @property
    def implementation(self) -> str:
        return self.source.record.implementation if self.source.record else self.source.name

    @property
    def compiled(self) -> list[_Document]:
        return [document for document in self.documents if not document.program]


def of_cases(graphs: Mapping[str, Sequence[Result]], folder: Path | None) -> Sources:
    """Return the sources of all cases. graphs: by case id.

    PTX and SASS are written to `folder`. When `BUDGET` is used up, compiled texts of less important records go there
    too. Without a folder they are left out. If a text cannot be read or written, its record has a note instead.
    """
    program, installed = cache(programs.read), sources_in(PROJECT)
    cases = {
        case: [_read(source, program, installed, folder) for source in of_case] for case, of_case in graphs.items()
    }
    _keep_to_the_budget([record for records in cases.values() for record in records], folder)
    shown: dict[str, dict[str, Any]] = {}
    return Sources({case: _packed(records, shown) for case, records in cases.items()}, shown)


def _read(source: Result, program: programs.Read, installed: str, folder: Path | None) -> _Record:
    record = _Record(source)
    try:
        record.kernels = (source.load().kernels or ()) if source.read is not None else ()
        made_by = "" if source.made_by.get("sources") == installed else printable(in_words(source.made_by))
        for name, listing, spans, note in programs.of_kernels(record.kernels, program, made_by):
            record.documents.append(_Document(name, listing, spans, note, program=True))
        if source.record is None:
            with reading_errors_as_usage(source.path):
                _add_own_texts(record, folder)
        elif source.record.dumps is not None:
            _add_archive(record, recorded_file(source.path, source.record, source.record.dumps), folder)
    except (OSError, UsageError, ValueError) as problem:
        record.note = printable(str(problem), 400)
    # Compiled texts come first, then the program.
    record.documents.sort(key=lambda document: (document.program, not document.title.startswith("forward")))
    return record


def _add_archive(record: _Record, file: RunFile, folder: Path | None) -> None:
    try:
        packed = file.read_bytes()
    except FileNotFoundError:
        record.note = f"no compiled text: the run's folder has no {printable(PurePosixPath(file.name).name)}"
        return
    try:
        with reading_errors_as_usage(file.folder / file.name), zipfile.ZipFile(io.BytesIO(packed)) as archive:
            for info in archive.infolist():
                name = PurePosixPath(info.filename)
                if info.file_size <= MAX_BYTES and (name.name in _OUTPUTS or name.suffix == ".cu"):
                    phase = "backward" if name.parts[0].startswith("backward") else "forward"
                    _add(record, info.filename, archive.read(info), phase)
            if folder is not None:
                record.files += extra_files.write(archive, record.kernels, folder)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, lzma.LZMAError, zlib.error) as problem:
        raise UsageError(f"{file}: {problem}") from None


def _add_own_texts(record: _Record, folder: Path | None) -> None:
    """Add the texts that a graph was read from."""
    source = record.source
    if source.artifacts is None and zipfile.is_zipfile(source.path):
        _add_archive(record, RunFile(source.path.parent, source.path.name), folder)
        return
    for title, data in _own_texts(source):
        if len(data) > MAX_BYTES:
            raise ValueError(f"the text is over {MAX_BYTES >> 20} MiB and is left out")
        _add(record, title, data)


def _own_texts(source: Result) -> Iterator[tuple[str, bytes]]:
    """Yield names and texts. HLO as a proto and a graph's JSON have none."""
    if source.artifacts is not None:
        if (file := source.artifacts.find("hlo")) is not None:
            with file.open_binary() as stream:
                yield file.name, stream.read(MAX_BYTES + 1)
    elif source.path.is_dir():
        for path in sorted(source.path.rglob("output_code.py"))[:MOST_TEXTS]:
            yield str(path.relative_to(source.path)), read_bytes(path, MAX_BYTES)
    else:
        data = read_bytes(source.path, MAX_BYTES)
        if source.path.suffix == ".py" or (b"HloModule" in data[:4096] and b"\0" not in data[:4096]):
            yield source.path.name, data


def _add(record: _Record, title: str, data: bytes, phase: str | None = None) -> None:
    """Add a compiled text with the lines of each kernel. phase: that of its kernels; None for those of both."""
    text, suffix = data.decode(errors="replace"), PurePosixPath(title).suffix
    if suffix == ".cu":
        listing = listings.program(text, "cuda")
    else:
        listing = listings.output_code(text) if suffix == ".py" else listings.hlo(text)
    spans = _spans(listing, {i: k for i, k in enumerate(record.kernels) if phase in (None, k.phase)})
    same = next((document for document in record.documents if suffix == ".cu" and document.listing == listing), None)
    if same is None:
        record.documents.append(_Document(title, listing, spans))
    else:
        same.spans = spans | same.spans


def _spans(listing: Listing, kernels: Mapping[int, Kernel]) -> dict[int, list[Span]]:
    """Return the lines that launch and define each kernel; launches of one name in Python are matched in order."""
    taken: dict[str, int] = defaultdict(int)
    spans = {}
    for index, kernel in kernels.items():
        name = {
            "hlo": kernel.name.removeprefix("backward/"), "python": str(kernel.facts.get("call") or kernel.name),
            "cuda": programs.function(kernel),
        }[listing.language]
        launch = listing.spans.get(f"call {name}", [])[taken[name] : taken[name] + 1]
        spans[index] = [*launch, *listing.spans.get(name, [])]
        taken[name] += 1
    return {index: lines for index, lines in spans.items() if lines}


def _keep_to_the_budget(records: Iterable[_Record], folder: Path | None) -> None:
    """Move the compiled texts beyond `BUDGET` to files; those of the main implementations are embedded first."""
    left = BUDGET
    for record in sorted(records, key=lambda record: record.implementation not in MAIN_IMPLEMENTATIONS):
        left -= sum(_size(document.listing) for document in record.compiled)
        if left < 0 and record.compiled:
            links, note = _linked(record.compiled, folder)
            record.files = [*links, *record.files]
            record.note = "; ".join(filter(None, (record.note, note)))
            record.documents = [document for document in record.documents if document.program]


def _size(listing: Listing) -> int:
    """Return the compressed bytes of a text."""
    return len(gzip.compress("\n".join(listing.lines.values()).encode(errors="replace"), 6))


def _linked(documents: Iterable[_Document], folder: Path | None) -> tuple[list[dict[str, Any]], str]:
    """Return links to files with texts that exceed the page's budget, and a note."""
    why = "the page's budget for compiled texts is used up"
    if folder is None:
        return [], f"the compiled texts are left out: {why}"
    try:
        return [_file(document, folder) for document in documents], f"the compiled texts are in separate files: {why}"
    except UsageError as problem:
        return [], printable(f"the compiled texts are left out: {why}, and {problem}", 400)


def _file(document: _Document, folder: Path) -> dict[str, Any]:
    text = "\n".join(document.listing.lines.values()).encode(errors="replace")
    return extra_files.link(
        document.title, zlib.crc32(text), len(text), folder, sorted(document.spans), lambda: text
    )


def _packed(records: Sequence[_Record], shown_programs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a case's sources. shown_programs: gets the files of the project."""
    numbers: dict[str, int] = {}
    texts: list[dict[str, Any]] = []
    shown = []
    for record in records:
        documents = []
        for document in record.documents:
            where: dict[str, Any] = {}
            text = _text(document.listing)
            if document.program:
                shown_programs.setdefault(document.title, text)
            else:
                where["text"] = numbers.setdefault(repr(text), len(texts))
                texts += [text] if where["text"] == len(texts) else []
            documents.append({
                **where, "title": printable(document.title), "note": document.note,
                "kernels": {str(i): [list(span) for span in spans] for i, spans in document.spans.items()},
            })
        shown.append({
            "name": printable(record.source.name, 80), "documents": documents, "files": record.files,
            "note": record.note, "kernels": [printable(kernel.name, 200) for kernel in record.kernels],
        })
    return {"texts": texts, "records": shown}


def _text(listing: Listing) -> dict[str, Any]:
    """Return a text as JSON values; lines that were left out are None. places: by line number."""
    return {
        "language": listing.language,
        "lines": [listing.lines.get(number) for number in range(1, max(listing.lines, default=0) + 1)],
        "places": {str(number): printable(place) for number, place in listing.places.items()},
    }
