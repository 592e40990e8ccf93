"""Texts of a run as files beside its page, where a browser shows them: PTX and SASS are too large to be in it."""

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
MAX_BYTES = 64 << 20  # of one file

# What debuggers alone read of PTX, from its heading to the end of the text; all of it follows the code.
_DEBUG = re.compile(rb"^\s*\.section\s+\.debug_.*\Z", re.MULTILINE | re.DOTALL)
_ENCODING = b"/* 0x"  # beside each instruction of SASS, and its second half on a line of its own


def write(archive: zipfile.ZipFile, kernels: Sequence[Kernel], beside: Path) -> Iterator[dict[str, Any]]:
    """Links to the files, which are written unless they are there: `title`, `href` and `kernels` (launch indices).

    Equal texts of several records are one file. Raises UsageError where one cannot be written.
    """
    names = [(kernel.phase, _names(kernel)) for kernel in kernels]
    for info in archive.infolist():
        path = PurePosixPath(info.filename)
        if path.suffix not in KINDS or info.file_size > MAX_BYTES:
            continue
        # "forward/triton/NAME.ptx", or "forward/00_NAME.ptx"
        name, folder = _letters(re.sub(r"^\d\d_", "", path.stem)), path.parts[0]
        own = [i for i, (phase, known) in enumerate(names) if name in known and folder.startswith(phase)]
        yield put(info.filename, info.CRC, info.file_size, beside, own, partial(_read, archive, info))


def put(
    title: str, checksum: int, size: int, beside: Path, kernels: Sequence[int], read: Callable[[], bytes]
) -> dict[str, Any]:
    """Write one text, unless it is there, and link it. checksum, size: of what it is made from."""
    path = PurePosixPath(title)
    name = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    file = f"{name}-{checksum ^ size:08x}{path.suffix}.txt"
    target = beside / file
    try:
        if not target.is_file():
            data = read()
            beside.mkdir(parents=True, exist_ok=True)
            atomic_write.write(target, data)
    except OSError as problem:
        raise UsageError(f"{target}: cannot be written: {problem.strerror}") from None
    return {"title": printable(title), "href": f"{quote(beside.name)}/{quote(file)}", "kernels": list(kernels)}


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """As a person reads it."""
    data = archive.read(info)
    if info.filename.endswith(".ptx"):
        return _DEBUG.sub(b"", data)
    lines = (line.partition(_ENCODING)[0].rstrip() for line in data.split(b"\n"))
    return b"\n".join(line for line in lines if line) + b"\n"


def _names(kernel: Kernel) -> set[str]:
    return {_letters(name) for name in (kernel.name, kernel.runtime_name, kernel.facts.get("call")) if name}


def _letters(name: object) -> str:
    """Of a name in code as in a file's name: "softmax_forward<__nv_bfloat16, 8>" is softmax_forward___nv_bfloat16_8."""
    return re.sub(r"[^A-Za-z0-9]", "", str(name).removeprefix("backward/"))
