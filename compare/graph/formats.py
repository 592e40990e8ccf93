"""Names and numbers as text, and the kernels of a graph by these names.

The text is safe to print, because names may come from files of any origin.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from functools import lru_cache

from ..base.text import number, printable
from .model import Buffer, FusionGraph, Kernel, PredictedTime, SourceOp

UNKNOWN = "?"


@lru_cache(maxsize=1 << 14)  # a page shows the same sizes many times
def size(count: float | None) -> str:
    """Return bytes in decimal units with three digits: "16.8 MB"."""
    return UNKNOWN if count is None else _scaled(count, "B", "TGMk")


def flops(count: float) -> str:
    """Return FLOPs in decimal units with three digits: "241 GFLOP"."""
    return _scaled(count, "FLOP", "PTGMk")


def _scaled(count: float, unit: str, prefixes: str) -> str:
    """Return the count in the largest unit that it has one of. prefixes: from the largest to kilo."""
    for power, prefix in zip(range(len(prefixes), 0, -1), prefixes, strict=True):
        scaled = float(f"{count / 1000.0**power:.3g}")
        if scaled >= 1:
            return f"{number(scaled)} {prefix}{unit}"
    return f"{count:.0f} {unit}"


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


def predicted(time: PredictedTime) -> str:
    """Return "~420 µs (380 to 470)", or the reason why there is no prediction."""
    if time.us is None:
        return f"not predicted: {_printable(time.reason)}"
    return f"~{microseconds(time.us)} {_interval(time)}"


def about_us(time: PredictedTime | None, *, interval: bool = False) -> str:
    """Return a predicted time for a column that names the unit: "~420"; "" where there is none."""
    if time is None or time.us is None:
        return ""
    return f"~{number(time.us)} {_interval(time)}" if interval else f"~{number(time.us)}"


def _interval(time: PredictedTime) -> str:
    return f"({number(time.low_us)} to {number(time.high_us)})"


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


_LONGEST = 4000  # characters of a name


def _printable(text: str) -> str:
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
    return printable(text, _LONGEST + 1)


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


def kernels_named(graph: FusionGraph, wanted: str) -> list[int]:
    """Return kernels by number, else by the compiler's name, else by a profiler's, else by a pattern of any of these.

    A profiler's name may be of several kernels: XLA runs equal ones under one name, and a library chooses one for many
    calls. A "…", by which views shorten names, stands for any letters.
    """
    kernels = list(enumerate(graph.kernels or ()))
    pattern = wanted.replace("…", "*")
    return (
        [i for i, _ in kernels if wanted == str(i + 1)]
        or [i for i, kernel in kernels if wanted == kernel.name]
        or [i for i, kernel in kernels if wanted in _profilers_names(kernel)]
        or [
            i for i, kernel in kernels
            if any(fnmatch.fnmatchcase(name, pattern) for name in (kernel.name, *_profilers_names(kernel)))
        ]
    )


def known_names(graph: FusionGraph) -> list[str]:
    """Return each name that finds a kernel, the compilers' first."""
    kernels = graph.kernels or ()
    return list(dict.fromkeys((
        *(kernel.name for kernel in kernels), *(name for kernel in kernels for name in _profilers_names(kernel)),
    )))


def _profilers_names(kernel: Kernel) -> list[str]:
    ran_as = kernel.facts.get("ran_as", ())
    names = [kernel.runtime_name or "", *(map(str, ran_as) if isinstance(ran_as, list | tuple) else ())]
    return [shown for name in names if name for shown in (name, runtime(name, _LONGEST))]
