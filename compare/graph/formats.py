"""Names and numbers as text. The results are safe to print, because names may come from files of any origin."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ..base.text import number, printable
from .model import Buffer, FusionGraph, SourceOp

UNKNOWN = "?"


@lru_cache(maxsize=1 << 14)  # a page shows the same sizes many times
def size(count: float | None) -> str:
    """Return bytes in decimal units with three digits: "16.8 MB"."""
    if count is None:
        return UNKNOWN
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        scaled = float(f"{count / scale:.3g}")
        if scaled >= 1:
            return f"{number(scaled)} {unit}"
    return f"{count:.0f} B"


def flops(count: float) -> str:
    """Return FLOPs in decimal units with three digits: "241 GFLOP"."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        scaled = float(f"{count / scale:.3g}")
        if scaled >= 1:
            return f"{number(scaled)} {unit}"
    return f"{count:.0f} FLOP"


def signed_size(count: float | None) -> str:
    """Return a difference of bytes with its sign: "+16.8 MB"."""
    if count is None:
        return UNKNOWN
    return f"{'+' if count > 0 else '-' if count < 0 else ''}{size(abs(count))}"


def share(part: float | None, whole: float | None) -> str:
    """Return a percentage. A small share that is not zero is "<1%"; an unknown whole gives ""."""
    if part is None or not whole:
        return ""
    percent = 100 * part / whole
    return f"{percent:.0f}%" if percent >= 0.5 or part <= 0 else "<1%"


def number_of_us(value: float | None) -> str:
    """Return microseconds for a column that names the unit; "" where they were not measured."""
    return number(value)


def microseconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{number(value)} µs"


def span(us: float) -> str:
    """Return a time in µs or ms."""
    return f"{number(us / 1e3)} ms" if us >= 1e3 else microseconds(us)


def count(many: int, one: str, more: str | None = None) -> str:
    return f"{many:,} {one if many == 1 else more or one + 's'}"


def name(text: str, width: int = 60) -> str:
    """Return a compiler's name, printable, shortened in its middle, because such names differ at their ends."""
    shown = _printable(text) or "unnamed"
    if len(shown) <= width:
        return shown
    tail = (width - 1) // 2
    return f"{shown[: width - 1 - tail]}…{shown[-tail:] if tail else ''}"


# Numbers in a mangled C++ name: those of literals, substitutions and closures, and then lengths.
_MANGLED = re.compile(r"L[a-z]n?\d+E|[ST][0-9A-Z]*_|E\d+_|(\d+)")
_TELLING = re.compile(r"cutlass_.+|.+_kernel_(?:cuda|impl)|.+Ops|\w*[Ff]unctor\w*")
_DEMANGLED = re.compile(r"(?:void )?(?:(?:\w+|\(anonymous namespace\))::)+(\w+)[<(]")
_GENERIC = ("BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor")


def runtime(text: str, width: int = 60) -> str:
    """Return the name that profilers show for a kernel.

    A C++ template becomes its name and its most telling parameter: "vectorized_elementwise_kernel MulFunctor".
    """
    if template := _DEMANGLED.match(text):
        words = (word for word in re.findall(r"\w+", text[template.end():]) if _TELLING.fullmatch(word))
        parameter = next((word for word in words if word not in _GENERIC), "")
        return name(f"{template[1]} {parameter}".rstrip(), width)
    if not text.startswith("_Z"):
        return name(text, width)
    outer, telling, position = "", "", 2
    nested = True  # in the template's own name, whose words follow one another
    while match := _MANGLED.search(text, position):
        nested = nested and match.start() <= position + (position == 2)
        position = match.end()
        if match[1]:
            position += min(int(match[1]), len(text))
            word = text[match.end() : position]
            if nested:
                outer = word
                nested = text.startswith("_ZN")  # without N, the name has one word, and its parameters follow
            elif not telling and _TELLING.fullmatch(word) and word not in _GENERIC:
                telling = word
    return name(" ".join(filter(None, ("" if outer == "Kernel2" else outer, telling))) or text, width)


def place(line: str, width: int = 60) -> str:
    """Return a "file:line", shortened from its front, at a folder where that loses little."""
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
    """Return dtype and shape as HLO writes them: "bf16[2048,4096]"."""
    return printable(f"{buffer.dtype}[{','.join('?' if size < 0 else str(size) for size in buffer.shape)}]", 60)


def words(items: Iterable[str]) -> str:
    """Return the distinct items in order, with their counts: "mul x3, add"."""
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return ", ".join(item if many == 1 else f"{item} x{many}" for item, many in counts.items())


def operation(op: SourceOp) -> str:
    return printable(op.op, 60) + (" (rematerialized)" if op.rematerialized else "")


def origin(graph: FusionGraph) -> str:
    """Return the compiler, target and versions: "xla for NVIDIA H200, jax 0.11.2"."""
    target = f" for {printable(graph.target, 60)}" if graph.target else ""
    versions = "".join(f", {printable(f'{package} {version}', 40)}" for package, version in graph.versions.items())
    return printable(graph.compiler, 40) + target + versions
