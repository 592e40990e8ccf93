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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

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
_KINDS = {"optimized.hlo.txt": listings.hlo, "output_code.py": listings.output_code}


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


def of_cases(graphs: Mapping[str, Sequence[Result]], folder: Path | None) -> Sources:
    """Return the sources of all cases. graphs: by case id.

    PTX and SASS are written to `folder`. When `BUDGET` is used up, compiled texts of less important records go there
    too. Without a folder they are left out. If a text cannot be read or written, its record has a note instead.
    """
    installed = programs.Programs()
    cases = {case: [_read(source, installed, folder) for source in of_case] for case, of_case in graphs.items()}
    within = _affordable(cases)
    shown: dict[str, dict[str, Any]] = {}
    packed = {case: _packed(records, within, folder, shown) for case, records in cases.items()}
    return Sources(packed, shown)


def _read(source: Result, installed: programs.Programs, folder: Path | None) -> _Record:
    record = _Record(source)
    try:
        record.kernels = (source.load().kernels or ()) if source.read is not None else ()
        for name, listing, spans, note in programs.of_kernels(record.kernels, installed):
            record.documents.append(_Document(name, listing, spans, note, program=True))
        if source.record is not None and source.record.dumps is not None:
            _add_archive(record, recorded_file(source.path, source.record, source.record.dumps), folder)
        elif source.record is None:
            with reading_errors_as_usage(source.path):
                _add_own_texts(record, folder)
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
                if info.file_size <= MAX_BYTES and (name.name in _KINDS or name.suffix == ".cu"):
                    _add(record, info.filename, archive.read(info).decode(errors="replace"))
            if folder is not None:
                record.files += extra_files.write(archive, record.kernels, folder)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, lzma.LZMAError, zlib.error) as problem:
        raise UsageError(f"{file}: {problem}") from None


def _add(record: _Record, title: str, text: str) -> None:
    name = PurePosixPath(title)
    phase = "backward" if name.parts[0].startswith("backward") else "forward"
    own = {i: kernel for i, kernel in enumerate(record.kernels) if kernel.phase == phase}
    if name.suffix == ".cu":
        listing = listings.program(text, "cuda")
        spans = {i: listing.spans.get(programs.function(kernel), []) for i, kernel in own.items()}
        same = next((document for document in record.documents if document.listing == listing), None)
        if same is not None:
            for index, lines in spans.items():
                same.spans.setdefault(index, lines)
            return
        _append(record, title, listing, spans)
    else:
        _add_output(record, title, _KINDS[name.name](text), own)


def _add_output(record: _Record, title: str, listing: Listing, own: Mapping[int, Kernel]) -> None:
    """Add a compiler's output. own: its kernels, by launch index."""
    _append(record, title, listing, _in_hlo(listing, own) if listing.language == "hlo" else _in_code(listing, own))


def _append(record: _Record, title: str, listing: Listing, spans: Mapping[int, list[Span]]) -> None:
    record.documents.append(_Document(title, listing, {i: lines for i, lines in spans.items() if lines}))


def _add_own_texts(record: _Record, folder: Path | None) -> None:
    """Add the texts that a graph was read from. HLO as a proto and a graph's JSON have none."""
    source, own = record.source, dict(enumerate(record.kernels))
    if source.artifacts is not None:
        if (file := source.artifacts.find("hlo")) is not None:
            with file.open_binary() as stream:
                _add_output(record, file.name, listings.hlo(_decoded(stream.read(MAX_BYTES + 1))), own)
    elif zipfile.is_zipfile(source.path):
        _add_archive(record, RunFile(source.path.parent, source.path.name), folder)
    elif source.path.is_dir():
        for path in sorted(source.path.rglob("output_code.py"))[:MOST_TEXTS]:
            title = str(path.relative_to(source.path))
            _add_output(record, title, listings.output_code(_decoded(read_bytes(path, MAX_BYTES))), own)
    else:
        data = read_bytes(source.path, MAX_BYTES)
        if b"HloModule" in data[:4096] and b"\0" not in data[:4096]:
            _add_output(record, source.path.name, listings.hlo(_decoded(data)), own)
        elif source.path.suffix == ".py":
            _add_output(record, source.path.name, listings.output_code(_decoded(data)), own)


def _decoded(data: bytes) -> str:
    if len(data) > MAX_BYTES:
        raise ValueError(f"the text is over {MAX_BYTES >> 20} MiB and is left out")
    return data.decode(errors="replace")


def _in_hlo(listing: Listing, kernels: Mapping[int, Kernel]) -> dict[int, list[Span]]:
    return {i: listing.spans.get(kernel.name.removeprefix("backward/"), []) for i, kernel in kernels.items()}


def _in_code(listing: Listing, kernels: Mapping[int, Kernel]) -> dict[int, list[Span]]:
    """Return the lines that launch and define each kernel; calls of one name are matched in order."""
    taken: dict[str, int] = defaultdict(int)
    spans = {}
    for index, kernel in kernels.items():
        name = str(kernel.facts.get("call") or kernel.name)
        calls = listing.spans.get(f"call {name}", [])
        spans[index] = [*calls[taken[name] : taken[name] + 1], *listing.spans.get(name, [])]
        taken[name] += 1
    return spans


def _affordable(cases: Mapping[str, Iterable[_Record]]) -> set[int]:
    """Return the records (by identity) whose texts the page embeds, the main implementations first."""
    records = [record for case in cases.values() for record in case]
    left = BUDGET
    within: set[int] = set()
    for record in sorted(records, key=lambda record: record.implementation not in MAIN_IMPLEMENTATIONS):
        left -= sum(_size(document.listing) for document in record.documents if not document.program)
        if left >= 0:
            within.add(id(record))
    return within


def _size(listing: Listing) -> int:
    """Return the compressed bytes of a text."""
    return len(gzip.compress("\n".join(listing.lines.values()).encode(errors="replace"), 6))


def _packed(
    records: Sequence[_Record], within: set[int], folder: Path | None, shown_programs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    shown = []
    for record in records:
        documents, files, notes = [], list(record.files), [record.note]
        embedded = [document for document in record.documents if document.program or id(record) in within]
        if len(embedded) < len(record.documents):
            left_out = (document for document in record.documents if not document.program)
            links, note = _linked(left_out, folder)
            files, notes = [*links, *files], [*notes, note]
        for document in embedded:
            where: dict[str, Any] = {}
            if document.program:
                shown_programs.setdefault(document.title, _text(document.listing))
            else:
                text = _text(document.listing)
                where["text"] = numbers.setdefault(repr(text), len(texts))
                texts += [text] if where["text"] == len(texts) else []
            documents.append({
                **where, "title": printable(document.title), "note": document.note,
                "kernels": {str(i): [list(span) for span in spans] for i, spans in document.spans.items()},
            })
        shown.append({
            "name": printable(record.implementation, 80), "documents": documents, "files": files,
            "note": "; ".join(filter(None, notes)),
            "kernels": [printable(kernel.name, 200) for kernel in record.kernels],
        })
    return {"texts": texts, "records": shown}


def _text(listing: Listing) -> dict[str, Any]:
    """Return a text as JSON values; lines that were left out are None. places: by line number."""
    return {
        "language": listing.language,
        "lines": [listing.lines.get(number) for number in range(1, max(listing.lines, default=0) + 1)],
        "places": {str(number): printable(place) for number, place in listing.places.items()},
    }


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
