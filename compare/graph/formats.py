"""Names and numbers as people read them. Everything here is safe to print: names come from files of any origin."""

from __future__ import annotations

from collections.abc import Iterable

from compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp
from compare.report import printable
from compare.report.table import number

UNKNOWN = "?"


def size(count: float | None) -> str:
    """Bytes in decimal units, three digits."""
    if count is None:
        return UNKNOWN
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        scaled = float(f"{count / scale:.3g}")
        if scaled >= 1:
            return f"{number(scaled)} {unit}"
    return f"{count:.0f} B"


def signed_size(count: float | None) -> str:
    """Of a difference: "+16.8 MB"."""
    if count is None:
        return UNKNOWN
    return f"{'+' if count > 0 else '-' if count < 0 else ''}{size(abs(count))}"


def share(part: float | None, whole: float | None) -> str:
    """A percentage; "<1%" rather than a zero that is none; "" where the whole is not known."""
    if part is None or not whole:
        return ""
    percent = 100 * part / whole
    return f"{percent:.0f}%" if percent >= 0.5 or part <= 0 else "<1%"


def number_of_us(value: float | None) -> str:
    """For a column of microseconds; empty where not measured."""
    return number(value)


def microseconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{number(value)} µs"


def count(many: int, one: str, more: str | None = None) -> str:
    return f"{many:,} {one if many == 1 else more or one + 's'}"


def name(text: str, width: int = 60) -> str:
    """What a compiler named, printable, shortened in its middle: ends are what tells such names apart."""
    shown = _printable(text) or "unnamed"
    if len(shown) <= width:
        return shown
    tail = (width - 1) // 2
    return f"{shown[: width - 1 - tail]}…{shown[-tail:] if tail else ''}"


def place(line: str, width: int = 60) -> str:
    """A "file:line", shortened from its front, at a folder's border where that loses little."""
    shown = _printable(line)
    if len(shown) <= width:
        return shown
    kept = shown[-(width - 1) :]
    folder = kept.find("/")
    return f"…{kept[folder:] if 0 <= folder < width // 3 else kept}"


def _printable(text: str, longest: int = 4000) -> str:
    if len(text) > longest:
        text = f"{text[: longest // 2]}…{text[-longest // 2 :]}"
    return printable(text, longest + 1)


def shape(buffer: Buffer) -> str:
    """As HLO writes it: bf16[2048,4096]."""
    return printable(f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]", 60)


def words(items: Iterable[str]) -> str:
    """In order, each once, with how often it came."""
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return ", ".join(item if many == 1 else f"{item} x{many}" for item, many in counts.items())


def operation(op: SourceOp) -> str:
    return printable(op.op, 60) + (" (rematerialized)" if op.rematerialized else "")


def weight(access: Access, kernel: Kernel) -> int:
    """Bytes of one access over all launches, 0 where not known: for sorting and line widths alone."""
    return (access.bytes or 0) * (kernel.launches or 1)


def origin(graph: FusionGraph) -> str:
    """ "xla for NVIDIA H200, jax 0.11.2" """
    target = f" for {printable(graph.target, 60)}" if graph.target else ""
    versions = "".join(f", {printable(f'{package} {version}', 40)}" for package, version in graph.versions.items())
    return printable(graph.compiler, 40) + target + versions
