"""A reader of one HLO file, text or proto, plain or gzipped. It bounds sizes and executes nothing in the file."""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from xlafuse.hlo.proto_reader import ProtoError, module_bytes, parse_proto
from xlafuse.hlo.text_reader import Module, parse
from xlafuse.hlo.xla_printer import NotPrinted, has_xla, printed, printed_proto

MAX_BYTES = 3 << 29  # of unpacked text
MAX_PROTO_BYTES = 512 << 20
MAX_KEPT = 512 << 20  # characters of text without long literals; they are in memory while they are read
MAX_LINES = 1_000_000
MAX_LINE = 8 << 20  # characters; a longer line is a literal, or XLA did not write it

_HEAD = 4096
_TAIL = 1 << 16
_SHOWN = 200


class UnreadableHlo(ValueError):
    """No HLO module can be read from a file; the message names the file and the reason, in one line."""


def read(path: str | Path, *, statements: bool = False) -> Module:
    """Return the module in a file. The content decides how it is read; the file's name does not matter.

    The file holds text of any XLA version (`text_reader`), or a serialized HloModuleProto, HloProto or HloSnapshot
    (`proto_reader`, which needs jaxlib and protobuf). Either may be gzipped. A literal of more than MAX_LINE characters
    is skipped; any other line of that length is counted as unparsed. Text that `text_reader` does not understand is
    read as XLA prints it, if XLA's parser accepts it (`xla_printer`, which needs jaxlib). statements: as in
    `text_reader.parse`; they are of the text that XLA prints of a proto.

    As in XLA, the last computation is the entry if none is marked; but only if every line of the text was understood.

    Raises UnreadableHlo for other files, for modules without an entry computation, for text in the short form that no
    compiler prints where XLA does not read it, and above the limits of this file; OSError if the file cannot be opened.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UnreadableHlo(f"{path}: an HLO module is a regular file, and this is not one")
    try:
        with _open(path) as stream:
            head = stream.peek(_HEAD)[:_HEAD]
            is_text = _is_text(head)
            _check_size(stream, is_text)  # before parsing, which is much slower
        with _open(path) as stream:
            return _read_text(stream, head, statements) if is_text else _read_proto(stream.read(), statements)
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise UnreadableHlo(f"{path}: damaged gzip file: {problem}") from None
    except (ProtoError, _Refused) as problem:
        raise UnreadableHlo(f"{path}: {problem}") from None


class _Refused(ValueError):
    """The contents are no HLO module; the message says why."""


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    with path.open("rb") as file:
        if not file.peek(2).startswith(b"\x1f\x8b"):
            yield file
            return
        with gzip.open(file) as unpacked:
            yield cast(io.BufferedReader, unpacked)


# Every proto has some of these near its beginning (field 2 has the tag 0x12); HLO text has none.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def _is_text(head: bytes) -> bool:
    """Return whether the file is text, by its first bytes; it is a proto otherwise."""
    if not head:
        raise _Refused("the file is empty")
    if head.startswith(_UTF_16) or not _CONTROL.search(head):
        return True
    if not head.startswith(b"\n"):  # the tag of field 1, with which all three messages begin
        raise _Refused("neither HLO text nor an HLO proto")
    return False


def _check_size(stream: io.BufferedReader, is_text: bool) -> None:
    limit = MAX_BYTES if is_text else MAX_PROTO_BYTES
    size = lines = 0
    while block := stream.read(1 << 20):
        size += len(block)
        lines += block.count(b"\n")
        if size > limit:
            raise _Refused(f"more than {limit >> 20} MiB, which no HLO {'text' if is_text else 'proto'} needs")
        if is_text and lines > MAX_LINES:
            raise _Refused(f"more than {MAX_LINES} lines of HLO text")


def _read_text(stream: io.BufferedReader, head: bytes, statements: bool) -> Module:
    encoding = "utf-16" if head.startswith(_UTF_16) else "utf-8-sig"
    text = "".join(_lines(io.TextIOWrapper(stream, encoding=encoding, errors="replace")))
    module = parse(text, statements=statements)
    if module.unparsed or not module.entry:
        module = _as_xla_reads(text, module, statements)
    if not module.entry:
        raise _Refused(_no_entry(module, head))
    return module


def _read_proto(data: bytes, statements: bool) -> Module:
    if not statements:
        return parse_proto(data)
    try:
        return parse(printed_proto(module_bytes(data)), statements=True)
    except NotPrinted as problem:
        raise _Refused(f"an HLO proto without its text, and {problem}") from None


def _as_xla_reads(text: str, module: Module, statements: bool) -> Module:
    """Return the module that XLA reads in the text, or `module`, which is what `text_reader` understood."""
    try:
        whole = parse(printed(text), statements=statements)
    except NotPrinted as problem:
        if module.is_short:
            raise _Refused(f"HLO in a short form that no compiler prints, and {problem}") from None
        return module
    return module if whole.unparsed else whole


def _no_entry(module: Module, head: bytes) -> str:
    if module.computations or module.name:
        return "no ENTRY computation; the file is cut off, or part of a module"
    if re.search(rb"^(?:module @|module \{|#loc)", head, re.MULTILINE):
        return "this is MLIR (StableHLO), XLA's input; give the HLO that XLA writes"
    first = head.decode(errors="replace").strip()[:40]
    more = "" if has_xla() else "; HLO that no compiler prints needs jaxlib"
    return f"neither HLO text nor an HLO proto; it begins with {first!r}{more}"


def _lines(text: IO[str]) -> Iterator[str]:
    """Yield the lines, each at most MAX_LINE characters long."""
    left = MAX_KEPT
    while line := text.readline(MAX_LINE):
        if len(line) == MAX_LINE and not line.endswith("\n"):
            line = _shortened(line, *_skip_line(text))
        left -= len(line)
        if left < 0:
            raise _Refused(f"more than {MAX_KEPT >> 20} MiB besides long literals, which no HLO text needs")
        yield line


def _skip_line(text: IO[str]) -> tuple[int, str]:
    """Read to the line's end; return the number of characters skipped, and the last of them."""
    skipped, tail = 0, ""
    while not tail.endswith("\n") and (piece := text.readline(_TAIL)):
        skipped += len(piece)
        tail = (tail + piece)[-_TAIL:]
    return skipped, tail


def _shortened(line: str, rest: int, tail: str) -> str:
    """Return a constant without its literal, as XLA itself writes long ones, or the beginning of another line.

    A zero character keeps brackets that were cut off from being closed by later lines.
    """
    constant = line.find(" constant(", 0, _TAIL)
    close = tail.find(")")
    if constant >= 0 and close >= 0:
        return f"{line[:constant]} constant({{...}}{tail[close:]}"
    return f"{line[:_SHOWN]}\0 ... ({len(line) + rest} characters)\n"
