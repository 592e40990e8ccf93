"""This project's source files behind a run: the compiled program and hand-written kernels, with their lines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from ....base.paths import PROJECT
from ....graph.model import Kernel
from . import listing as listings
from .listing import Listing, Span

INSTALLED = "the installed version of this file; the compiled one is of {}, so recorded lines may have moved"
MOVED = "the file has changed since the run: recorded lines may have moved"
BY_NAME = "the file has changed since the run: kernels are found by name"
MAX_BYTES = 1 << 20  # for one file
_LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}
_FOLDERS = ("xlafuse", "triton_side")

Read = Callable[[str], Listing | None]


def read(name: str) -> Listing | None:
    """Return a source file; None if it is not one of this project's.

    No file outside the project is read, whatever a record names.
    """
    path = PurePosixPath(name)
    if path.suffix not in _LANGUAGES or path.is_absolute() or path.parts[0] not in _FOLDERS or ".." in path.parts:
        return None
    file = PROJECT / path
    if not file.is_file() or file.stat().st_size > MAX_BYTES:
        return None
    return listings.program(file.read_text(errors="replace"), _LANGUAGES[path.suffix])


def function(kernel: Kernel) -> str:
    """Return a kernel's function name: softmax_forward for "softmax_forward<__nv_bfloat16, 8>"."""
    return re.split(r"[<(#]", kernel.name, maxsplit=1)[0]


def of_kernels(
    kernels: Sequence[Kernel], program: Read = read, made_by: str = ""
) -> Iterator[tuple[str, Listing, dict[int, list[Span]], str]]:
    """Yield the files that kernels name: path, text, the lines of each kernel, and a note.

    CUDA files are left out, since a run keeps the CUDA text that it compiled. program: `read`, or a cache of it.
    made_by: the program that was compiled, in words; "" for the installed one.
    """
    named: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for index, kernel in enumerate(kernels):
        for line in kernel.lines:
            name, _, number = line.rpartition(":")
            if number.isdecimal() and len(number) < 9 and kernel.facts.get("language") != "cuda":
                named[name][index].append((int(number), int(number)))
    for name, spans in named.items():
        listing = program(name)
        if listing is None:
            continue
        written = {i: listing.spans[function(kernels[i])] for i in spans if function(kernels[i]) in listing.spans}
        changed = ""
        if any(not _overlap(spans[i], found) for i, found in written.items()):
            changed = BY_NAME
        elif any(not _is_code(listing, first) for found in spans.values() for first, _ in found):
            changed = MOVED
        installed = made_by and INSTALLED.format(made_by)
        yield name, listing, {**spans, **written}, "; ".join(filter(None, (installed, changed)))


def _overlap(recorded: Sequence[Span], found: Sequence[Span]) -> bool:
    """True if a recorded line lies within the function that has the kernel's name now, or directly before it."""
    return any(first - 1 <= line <= last for line, _ in recorded for first, last in found)


def _is_code(listing: Listing, line: int) -> bool:
    """True if the line exists and is neither blank nor a comment."""
    text = listing.lines.get(line, "").strip()
    return bool(text) and not text.startswith(("#", "//", '"""'))
