"""Texts of a run as files beside its page, where a browser shows them: PTX and SASS are too large to be in it."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from compare import whole
from compare.graph.model import Kernel
from compare.report import printable
from compare.selection import UsageError

KINDS = (".ptx", ".sass")
MAX_BYTES = 64 << 20  # of one file

# What debuggers alone read of PTX, from its heading to the end of the text; all of it follows the code.
_DEBUG = re.compile(rb"^\s*\.section\s+\.debug_.*\Z", re.MULTILINE | re.DOTALL)
# The encoding beside each instruction of SASS, and its second half on a line of its own.
_ENCODING = re.compile(rb"[ \t]*/\* 0x[0-9a-f]{16} \*/")
_EMPTY = re.compile(rb"\n(?:[ \t]*\n)+")


def write(archive: zipfile.ZipFile, kernels: Sequence[Kernel], beside: Path) -> Iterator[dict[str, Any]]:
    """Links to the files, which are written unless they are there: `title`, `href` and `kernels` (launch indices).

    Equal texts of several records are one file. Raises UsageError where one cannot be written.
    """
    for info in archive.infolist():
        path = PurePosixPath(info.filename)
        if path.suffix not in KINDS or info.file_size > MAX_BYTES:
            continue
        data = _readable(path.suffix, archive.read(info))
        yield put(info.filename, data, beside, [i for i, kernel in enumerate(kernels) if _compiles(path, kernel)])


def put(title: str, data: bytes, beside: Path, kernels: Sequence[int]) -> dict[str, Any]:
    """Write one text, unless it is there, and link it."""
    path = PurePosixPath(title)
    name = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    file = f"{name}-{hashlib.sha256(data).hexdigest()[:10]}{path.suffix}.txt"
    target = beside / file
    try:
        if not target.exists():
            beside.mkdir(parents=True, exist_ok=True)
            whole.write(target, data)
    except OSError as problem:
        raise UsageError(f"{target}: cannot be written: {problem.strerror}") from None
    return {"title": printable(title), "href": f"{quote(beside.name)}/{quote(file)}", "kernels": list(kernels)}


def _readable(kind: str, data: bytes) -> bytes:
    if kind == ".ptx":
        return _DEBUG.sub(b"", data)
    return _EMPTY.sub(b"\n", _ENCODING.sub(b"", data)).lstrip(b"\n")


def _compiles(path: PurePosixPath, kernel: Kernel) -> bool:
    """Whether a file "forward/triton/NAME.ptx" or "forward/00_NAME.ptx" is the kernel's."""
    if not path.parts[0].startswith(kernel.part):
        return False
    file = _letters(re.sub(r"^\d\d_", "", path.stem))
    return file in {_letters(name) for name in (kernel.name, kernel.runtime_name, kernel.facts.get("call")) if name}


def _letters(name: str) -> str:
    """Of a name in code as in a file's name: "softmax_forward<__nv_bfloat16, 8>" is softmax_forward___nv_bfloat16_8."""
    return re.sub(r"[^A-Za-z0-9]", "", name.removeprefix("backward/"))
