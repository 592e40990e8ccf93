"""The sources behind a run's numbers, and which lines are which kernel's: what `static/sources.js` shows.

Of each record: optimized HLO, Inductor's output code, CUDA as it was compiled; the program and its Triton kernels as
they are installed where the report is made, since runs do not keep them. Equal texts of a case are in the page once.
"""

from __future__ import annotations

import gzip
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
from ....sources.graph_sources import GraphSource, reading_errors_as_usage, recorded_file
from ..content.reading import MAIN
from . import extra_files as files_beside
from . import listing as listings
from . import programs
from .listing import Listing, Span

BUDGET = 1_100_000  # compressed bytes of all that was compiled; base64 adds a third in the page
MAX_BYTES = 16 << 20  # of one text
_KINDS = {"optimized.hlo.txt": listings.hlo, "output_code.py": listings.output_code}


@dataclass(frozen=True)
class Sources:
    """What the page embeds. cases: by case id. programs: by path, what several cases name."""

    cases: dict[str, dict[str, Any]]
    programs: dict[str, dict[str, Any]]


@dataclass
class _Document:
    """title: its path in the archive or the project. spans: launch index -> lines. program: of the project."""

    title: str
    listing: Listing
    spans: dict[int, list[Span]]
    note: str = ""
    program: bool = False


@dataclass
class _Record:
    found: GraphSource
    kernels: Sequence[Kernel] = ()
    documents: list[_Document] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    @property
    def implementation(self) -> str:
        return self.found.record.implementation if self.found.record else self.found.name


def of_run(found: Sequence[GraphSource], beside: Path | None) -> Sources:
    """What every case's page shows. PTX and SASS go to files in `beside`, and so do the sources of the less important
    records once `BUDGET` is used up; without a folder they are left out.

    What cannot be read, or written there, costs its own record what is missing, and leaves a note.
    """
    cases: dict[str, list[_Record]] = defaultdict(list)
    installed = programs.Programs()
    for each in found:
        if each.record is not None:
            cases[each.record.case.id].append(_read(each, installed, beside))
    within = _affordable(cases)
    shown: dict[str, dict[str, Any]] = {}
    packed = {case: _packed(records, within, beside, shown) for case, records in cases.items()}
    return Sources(packed, shown)


def _read(found: GraphSource, installed: programs.Programs, beside: Path | None) -> _Record:
    record = _Record(found)
    try:
        record.kernels = (found.graph().kernels or ()) if found.read is not None else ()
        for name, listing, spans, note in programs.of_kernels(record.kernels, installed):
            record.documents.append(_Document(name, listing, spans, note, program=True))
        if found.record is not None and found.record.dumps is not None:
            _add_archive(record, recorded_file(found.path, found.record, found.record.dumps), beside)
    except (UsageError, ValueError) as problem:
        record.note = printable(str(problem), 400)
    # What was compiled comes first, then the program that it was compiled from.
    record.documents.sort(key=lambda document: (document.program, not document.title.startswith("forward")))
    return record


def _add_archive(record: _Record, path: Path, beside: Path | None) -> None:
    if not path.is_file():
        record.note = f"the run's folder has no {printable(path.name)}, which would hold what was compiled"
        return
    try:
        with reading_errors_as_usage(path), zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = PurePosixPath(info.filename)
                if info.file_size <= MAX_BYTES and (name.name in _KINDS or name.suffix == ".cu"):
                    _add(record, info.filename, archive.read(info).decode(errors="replace"))
            if beside is not None:
                record.files += files_beside.write(archive, record.kernels, beside)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, lzma.LZMAError, zlib.error) as problem:
        raise UsageError(f"{path}: {problem}") from None


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
    else:
        listing = _KINDS[name.name](text)
        spans = _in_hlo(listing, own) if listing.language == "hlo" else _in_code(listing, own)
    record.documents.append(_Document(title, listing, {i: lines for i, lines in spans.items() if lines}))


def _in_hlo(listing: Listing, kernels: Mapping[int, Kernel]) -> dict[int, list[Span]]:
    return {i: listing.spans.get(kernel.name.removeprefix("backward/"), []) for i, kernel in kernels.items()}


def _in_code(listing: Listing, kernels: Mapping[int, Kernel]) -> dict[int, list[Span]]:
    """Where it is launched, then where it is written; of several calls of one name, each kernel has its own."""
    taken: dict[str, int] = defaultdict(int)
    spans = {}
    for index, kernel in kernels.items():
        name = str(kernel.facts.get("call") or kernel.name)
        calls = listing.spans.get(f"call {name}", [])
        spans[index] = [*calls[taken[name] : taken[name] + 1], *listing.spans.get(name, [])]
        taken[name] += 1
    return spans


def _affordable(cases: Mapping[str, Iterable[_Record]]) -> set[int]:
    """Which records' sources (by identity) the page holds: those of `MAIN` first, then as the run has them."""
    records = [record for case in cases.values() for record in case]
    left = BUDGET
    within: set[int] = set()
    sizes: dict[int, int] = {}
    for record in sorted(records, key=lambda record: record.implementation not in MAIN):
        left -= sum(_size(document.listing, sizes) for document in record.documents if not document.program)
        if left >= 0:
            within.add(id(record))
    return within


def _size(listing: Listing, known: dict[int, int]) -> int:
    """Compressed bytes of what was not counted yet."""
    if id(listing) in known:
        return 0
    known[id(listing)] = len(gzip.compress("\n".join(listing.lines.values()).encode(errors="replace"), 6))
    return known[id(listing)]


def _packed(
    records: Sequence[_Record], within: set[int], beside: Path | None, shown_programs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    shown = []
    for record in records:
        documents, files, notes = [], list(record.files), [record.note]
        held = [each for each in record.documents if each.program or id(record) in within]
        if len(held) < len(record.documents):
            left_out = (each for each in record.documents if not each.program)
            links, note = _apart(left_out, beside)
            files, notes = [*links, *files], [*notes, note]
        for document in held:
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
    """gaps: [position among the lines, how many are left out before it]. at: [line, which of the places it is of]."""
    gaps, expected = [], 1
    for position, number in enumerate(listing.lines):
        if number != expected:
            gaps.append([position, number - expected])
        expected = number + 1
    places = list(dict.fromkeys(listing.places.values()))
    order = {place: i for i, place in enumerate(places)}
    return {
        "language": listing.language, "text": "\n".join(listing.lines.values()), "gaps": gaps,
        "places": [printable(place) for place in places],
        "at": [[number, order[place]] for number, place in listing.places.items()],
    }


def _apart(documents: Iterable[_Document], beside: Path | None) -> tuple[list[dict[str, Any]], str]:
    """Links to files of what the page has no room for, and what is to be said of it."""
    of_page = "the page, which has no room for the texts of every record"
    if beside is None:
        return [], f"what was compiled is left out of {of_page}"
    try:
        return [_file(each, beside) for each in documents], f"what was compiled is in files beside {of_page}"
    except UsageError as problem:
        return [], printable(f"what was compiled is left out of {of_page}: {problem}", 400)


def _file(document: _Document, beside: Path) -> dict[str, Any]:
    text = "\n".join(document.listing.lines.values()).encode(errors="replace")
    return files_beside.put(
        document.title, zlib.crc32(text), len(text), beside, sorted(document.spans), lambda: text
    )
