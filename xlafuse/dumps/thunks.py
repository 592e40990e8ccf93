"""The thunks of a compile by HLO instruction. A thunk is a step of XLA's runtime: a kernel, a copy, a library call."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xlafuse.dumps.dump_folder import Artifacts

Extent = tuple[int, int, int]

#     profile_annotation: "fusion"
_INSTRUCTION = re.compile(r'\s*profile_annotation: "([^"]{1,500})"')
#     thunk_id: 3
_NUMBER = re.compile(r"\s*thunk_id: (\d{1,9})\s*$")
#   thunk_kind: "kCopy"
_KIND = re.compile(r'\s*thunk_kind: "(k\w{1,100})"')
#     001: kCustomKernel [source | sink] fusion_3 grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
_LAUNCH = re.compile(
    r"\s*(\d{1,9}): k\w+ +\[[^\]]*\] +(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]"
    r" +shared_memory: (\d+) bytes"
)
# .visible .entry fusion_11(        .shared .align 4 .b8 shared_0[16512];
_ENTRY_OR_SHARED = re.compile(
    r"^\s*(?:(?:\.visible )?\.entry ([\w$]+)|\.shared \.align (\d{1,4}) \.[busf](\d{1,3}) [\w$]+(?:\[(\d{1,9})\])?;)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Thunk:
    """One thunk. kind: XLA's name ("kCopy").

    The other fields are None unless XLA generated a kernel for it. kernel: the name that profilers show. grid: blocks.
    block: threads of a block. shared_bytes: shared memory of a block, static and dynamic; None without its PTX.
    """

    kind: str
    kernel: str | None = None
    grid: Extent | None = None
    block: Extent | None = None
    shared_bytes: int | None = None


def read(artifacts: Artifacts) -> dict[str, list[Thunk]]:
    """Return instruction -> its thunks; {} unless the dump has a thunk_metadata.txt."""
    metadata, sequence = artifacts.find("thunk_metadata"), artifacts.find("thunks")
    if metadata is None:
        return {}
    launches: dict[int, Thunk] = {}
    if sequence is not None:
        static: dict[str, int | None] = {}
        for name, file in artifacts.files.items():
            if name.removesuffix(".gz").endswith(".ptx"):
                with file.open() as lines:
                    static |= static_shared_bytes("".join(lines))
        with sequence.open() as lines:
            launches = dict(_launches(lines, static))
    found: dict[str, list[Thunk]] = {}
    with metadata.open() as lines:
        for instruction, number, kind in _instructions(lines):
            launch = launches.get(number, Thunk(kind))
            found.setdefault(instruction, []).append(
                Thunk(kind, launch.kernel, launch.grid, launch.block, launch.shared_bytes)
            )
    return found


def _instructions(lines: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    instruction, number = "", 0
    for line in lines:
        if match := _INSTRUCTION.match(line):
            instruction = match[1]
        elif match := _NUMBER.match(line):
            number = int(match[1])
        elif match := _KIND.match(line):
            if instruction:
                yield instruction, number, match[1]
            instruction, number = "", 0


def _launches(lines: Iterable[str], static: dict[str, int | None]) -> Iterator[tuple[int, Thunk]]:
    for line in lines:
        if match := _LAUNCH.match(line):
            x, y, z, of_x, of_y, of_z, dynamic = map(int, match.groups()[2:])
            own = static.get(match[2])
            shared = None if own is None else own + dynamic
            yield int(match[1]), Thunk("", match[2], (x, y, z), (of_x, of_y, of_z), shared)


def static_shared_bytes(ptx: str) -> dict[str, int | None]:
    """Return kernel -> the shared memory that its PTX declares; None where the PTX leaves the sum open.

    It does where it has several kernels and declares memory before them, or where alignment could add gaps.
    """
    found: dict[str, int | None] = {}
    declared: dict[str, list[tuple[int, int]]] = {"": []}
    entry = ""
    for match in _ENTRY_OR_SHARED.finditer(ptx):
        if match[1]:
            entry = match[1]
            declared[entry] = []
        else:
            declared[entry].append((int(match[2]), int(match[3]) // 8 * int(match[4] or 1)))
    before = declared.pop("")
    for name, own in declared.items():
        arrays = [*before, *own]
        widest = max((align for align, _ in arrays), default=1)
        fits = len(arrays) == 1 or all(size % widest == 0 for _, size in arrays)
        found[name] = sum(size for _, size in arrays) if fits and (len(declared) == 1 or not before) else None
    return found
