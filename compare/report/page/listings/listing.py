"""Compiler output without boilerplate, with the lines of each kernel.

Lines keep their numbers in the file, so that a reader finds them in the run's dumps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from xlafuse.hlo import text_reader

Span = tuple[int, int]  # first and last line, from 1
LONGEST = 400  # characters in a line


@dataclass
class Listing:
    """A source text.

    language: "hlo", "python" or "cuda". lines: text by line number, ascending. spans: lines by kernel name; those that
    launch the kernel come first. places: the program's "file:line" by line number.
    """

    language: str
    lines: dict[int, str]
    spans: dict[str, list[Span]] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)


def hlo(text: str) -> Listing:
    """Return optimized HLO without metadata (kept as places), stack frame tables and defaults of backend_config."""
    lines: dict[int, str] = {}
    defined: dict[str, int] = {}
    bodies: dict[str, Span] = {}
    name, start, blank = "", 0, True
    for number, line in _numbered(text):
        if match := _COMPUTATION.match(line):
            name, start = match[1], number
        elif line.startswith("}") and start:
            bodies[name], start = (start, number), 0
        elif start and (match := _INSTRUCTION.match(line)):
            defined[match[1]] = number
        if not _TABLES.fullmatch(line) and (line or not blank):
            lines[number] = _cut(_without_defaults(_cut(line, _LONGEST_PARSED)))
            blank = not line
    listing = Listing("hlo", lines)
    for computation in text_reader.parse(text).computations.values():
        for instruction in computation.instructions.values():
            if (at := defined.get(instruction.name)) is not None:
                inside = [bodies[called] for called in instruction.called("calls") if called in bodies]
                listing.spans[instruction.name] = [(at, at), *inside]
                if instruction.source:
                    listing.places[at] = instruction.source
    return listing


# FileNames, FunctionNames, FileLocations, StackFrames and their rows
_TABLES = re.compile(r'(FileNames|FunctionNames|FileLocations|StackFrames)|\d+ ("[^"]*"|\{[a-z_0-9= ]*\})')
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([^\s(){}=,]+) (?:\{$|\(.*\{$)")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([^\s=(),]+) = ")
_STRING = r'"(?:[^"\\]|\\.)*"'
_METADATA = re.compile(rf",? (?:metadata|frontend_attributes)=\{{(?:[^{{}}\"]|{_STRING})*\}}")
# Default settings that XLA writes for every instruction.
_DEFAULTS = re.compile(
    r'"(?:device_type":"DEVICE_TYPE_INVALID"|force_earliest_schedule":false|operation_queue_id":"0"|'
    r'wait_on_operation_queues":\[\]|reification_cost":\[\]|'
    r'native_emitter_backend_config":\{"type":"NATIVE_EMITTER_TYPE_INVALID","unroll_factor":0\}),?'
)
_EMPTY = re.compile(r",? backend_config=\{,?\}")
_LONGEST_PARSED = 50_000  # characters


def _without_defaults(line: str) -> str:
    if "=" not in line:
        return line
    line = _METADATA.sub("", line)
    return _EMPTY.sub("", _DEFAULTS.sub("", line)) if "backend_config=" in line else line


def output_code(text: str) -> Listing:
    """Return Inductor's output_code.py without imports, metadata and the benchmark at its end."""
    lines: dict[int, str] = {}
    listing = Listing("python", lines)
    comment = kernel = handle = ""
    first = 0
    in_call = False
    for number, line in _numbered(text):
        if kernel:
            if line.startswith("'''"):
                listing.spans.setdefault(kernel, []).append((first, number))
                kernel = ""
            elif _BOILERPLATE.match(line):
                continue
            lines[number] = _cut(line, 100 if _META.match(line) else LONGEST)
        elif line.startswith("#"):
            first = first if comment else number
            comment = line
            if not line.startswith(_LEFT_OUT):
                lines[number] = _cut(line)
        elif match := _DEFINED.match(line):
            first, kernel, comment = (first if comment else number), match[1], ""
            lines[number] = _cut(line)
        else:
            comment = ""
            in_call = (in_call and (line.startswith("    ") or not line)) or bool(_CALL.match(line))
            if in_call and line and not line.lstrip().startswith(_AGAIN):
                lines[number] = _cut(line)
                if match := _HANDLE.match(line):
                    handle = match[1]
                    listing.spans.setdefault(f"call {handle}", []).append((number, number + 1))
                elif match := _LAUNCH.match(_cut(line)):
                    calls = listing.spans.setdefault(f"call {match[1]}", [])
                    if match[1] == handle:
                        calls.pop()  # the comment above named this line
                        handle = ""
                    calls.append((number, number))
    return listing


# Comments above a kernel (cache path, FX graph), and the copy above its call.
_LEFT_OUT = ("#   ", "# kernel path:", "# Source node to ATen", "# Graph fragment:")
_AGAIN = "# Topologically Sorted"
_DEFINED = re.compile(r"(\w+) = async_compile\.\w+\(")
_CALL = re.compile(r"\s*def (?:call|partition_\d+)\(")
_HANDLE = re.compile(r"\s+# \[Provenance debug handles\] (\S+):\d+\s*$")
# "triton_poi_fused_add_0.run(arg0_1, ...)", "extern_kernels.mm(buf0, ...)", "buf3 = torch.ops.aten.sort.stable(...)"
_LAUNCH = re.compile(r"\s+(?:[\w, ]+ = )?([A-Za-z_][\w.]*?)(?:\.run)?\((?!\)$)")
_BOILERPLATE = re.compile(r"import |from |triton_helpers\.set_driver|$")
_META = re.compile(r"    (?:triton_meta|inductor_meta|configs?)=")


def program(text: str, language: str) -> Listing:
    """Return a source file with the lines of each function."""
    lines = dict(_numbered(text))
    listing = Listing(language, lines)
    texts = list(lines.values())
    for name, first, opening in _python(text) if language == "python" else _cuda(texts):
        while first and texts[first - 1].startswith("template"):
            first -= 1
        listing.spans.setdefault(name, []).append((first + 1, _end(texts, opening) + 1))
    return listing


def _python(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield each top-level function's name, the line of its first decorator or its own, and its own, from 0.

    Yields nothing for text that this Python cannot parse.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = min((each.lineno for each in node.decorator_list), default=node.lineno)
            yield node.name, first - 1, node.lineno - 1


def _cuda(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    for number, line in enumerate(lines):
        if line.startswith("__global__"):
            # __global__ void __launch_bounds__(THREADS)
            # gelu_forward(const T* __restrict__ x, ...) {
            for opening in (number, number + 1):
                if opening < len(lines) and (match := _KERNEL.match(lines[opening])):
                    yield match[1], number, opening
                    break


_KERNEL = re.compile(r"(?:__global__ void )?(?:__\w+__\([^)]*\) )*([a-z]\w*)\(")


def _end(lines: list[str], opening: int) -> int:
    """Return the last line of a function: the end of its indentation and closing brackets."""
    last = opening
    for number in range(opening + 1, len(lines)):
        if lines[number] and not lines[number].startswith((" ", "\t", ")", "}", "#")):
            break
        if lines[number].strip():
            last = number
        if lines[number].startswith("}"):
            break
    return last


def _numbered(text: str) -> Iterable[tuple[int, str]]:
    return enumerate(text.split("\n"), 1)


def _cut(line: str, longest: int = LONGEST) -> str:
    return line if len(line) <= longest else f"{line[:longest]}… ({len(line):,} characters)"
