"""Text files next to the page for PTX and SASS, which are too large for the page itself."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from ....base import atomic_write
from ....base.text import printable
from ....base.usage import UsageError
from ....graph.model import Kernel

KINDS = (".ptx", ".sass")
MAX_BYTES = 64 << 20  # for one file

# Debug sections of PTX; they follow the code and reach to the end of the text.
_DEBUG = re.compile(rb"^\s*\.section\s+\.debug_.*\Z", re.MULTILINE | re.DOTALL)
_ENCODING = b"/* 0x"  # follows each instruction of SASS; its second half has a line of its own


def write(archive: zipfile.ZipFile, kernels: Sequence[Kernel], folder: Path) -> Iterator[dict[str, Any]]:
    """Write the files that do not exist yet. Yield links to them: `title`, `href` and `kernels` (launch indices).

    Equal texts of several records share a file. Raises UsageError if a file cannot be written.
    """
    names = [(kernel.phase, _names(kernel)) for kernel in kernels]
    for info in archive.infolist():
        path = PurePosixPath(info.filename)
        if path.suffix not in KINDS or info.file_size > MAX_BYTES:
            continue
        # "forward/triton/NAME.ptx", or "forward/00_NAME.ptx"
        name = _letters(re.sub(r"^\d\d_", "", path.stem))
        own = [i for i, (phase, known) in enumerate(names) if name in known and path.parts[0].startswith(phase)]
        yield link(info.filename, info.CRC, info.file_size, folder, own, partial(_read, archive, info))


def link(
    title: str, checksum: int, size: int, folder: Path, kernels: Sequence[int], read: Callable[[], bytes]
) -> dict[str, Any]:
    """Write a text unless its file exists, and return a link to it. checksum, size: those of the original text."""
    path = PurePosixPath(title)
    name = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    file = f"{name}-{checksum ^ size:08x}{path.suffix}.txt"
    target = folder / file
    try:
        if not target.is_file():
            data = read()
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write.write(target, data)
    except OSError as problem:
        raise UsageError(f"{target}: cannot be written: {problem.strerror}") from None
    return {"title": printable(title), "href": f"{quote(folder.name)}/{quote(file)}", "kernels": list(kernels)}


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return a text without PTX's debug sections and SASS's encodings."""
    data = archive.read(info)
    if info.filename.endswith(".ptx"):
        return _DEBUG.sub(b"", data)
    lines = (line.partition(_ENCODING)[0].rstrip() for line in data.split(b"\n"))
    return b"\n".join(line for line in lines if line) + b"\n"


def _names(kernel: Kernel) -> set[str]:
    return {_letters(name) for name in (kernel.name, kernel.runtime_name, kernel.facts.get("call")) if name}


def _letters(name: object) -> str:
    """Return the letters and digits of a name.

    File names replace the others: "softmax_forward<__nv_bfloat16, 8>" becomes softmax_forward___nv_bfloat16_8.
    """
    return re.sub(r"[^A-Za-z0-9]", "", str(name).removeprefix("backward/"))
