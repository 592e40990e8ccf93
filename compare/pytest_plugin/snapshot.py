"""Snapshots: fusion graphs as small text files next to the tests, with each kernel's operations and buffers.

A snapshot has no times, line numbers, paths or kernel names, because these change while the fusion stays the same. One
file holds one graph, for all autotune choices, as given versions compiled it for a target:

    fusion_snapshots/test_layers/test_mlp@jax-0.10.2@h200.txt
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..base import atomic_write
from ..base.text import printable
from ..graph import formats
from ..graph.analyse.totals import totals
from ..graph.model import Access, FusionGraph, Kernel

FOLDER = "fusion_snapshots"
_HEAD = ("fusion snapshot 1", "test: ", "graph: ", "made by: ")
_KEYED = ("jax", "torch", "triton")  # packages whose versions decide the fusion
_LONGEST = 120  # characters of a test's name in a file name: file systems allow 255 bytes
# a test such as 'TestLayer::test_mlp[bf16-64]', then a label
_SIMPLE = re.compile(r"([\w:]+)(?:\[([\w.-]+)\])?", re.ASCII)
_LABEL = re.compile(r"[\w-]*", re.ASCII)


@dataclass(frozen=True)
class Key:
    """The owner of a snapshot. test: "TestLayer::test_mlp[64]". label: tells several graphs of one test apart.
    versions: "jax-0.10.2". target: the GPU that it was compiled for."""

    test_file: Path
    test: str
    label: str
    versions: str
    target: str

    @property
    def folder(self) -> Path:
        return self.test_file.parent / FOLDER / self.test_file.stem

    @property
    def stem(self) -> str:
        """The file name before the versions: the test's name, with a digest where a file system could not take it."""
        plain = "+".join(filter(None, (self.test, self.label)))
        simple = _SIMPLE.fullmatch(self.test)
        if simple and _LABEL.fullmatch(self.label) and len(plain) <= _LONGEST:
            return "+".join(filter(None, ("-".join(filter(None, simple.groups())).replace("::", "."), self.label)))
        safe = re.sub(r"[^\w-]+", "-", plain, flags=re.ASCII)[:_LONGEST].strip("-")
        return f"{safe}-{hashlib.sha256(plain.encode(errors='backslashreplace')).hexdigest()[:8]}"

    @property
    def path(self) -> Path:
        return self.folder / f"{self.stem}@{self.versions}@{self.target}.txt"

    def others(self) -> list[str]:
        """Return the versions and targets of existing snapshots for this test and label, as "jax 0.10.2 for h200"."""
        if not self.folder.is_dir():
            return []
        found = (path.name.removesuffix(".txt").split("@") for path in sorted(self.folder.glob("*.txt")))
        return [f"{_readable(parts[1])} for {parts[2]}" for parts in found if len(parts) == 3 and parts[0] == self.stem]

    @property
    def versions_text(self) -> str:
        return f"{_readable(self.versions)} for {self.target}"


def versions_of(graph: FusionGraph) -> str:
    """Return "jax-0.10.2" or "torch-2.13.0+triton-3.7.1", without the device suffixes of wheels."""
    return "+".join(f"{name}-{graph.versions[name].partition('+')[0]}" for name in _KEYED if name in graph.versions)


def text(key: Key, graphs: Mapping[str, FusionGraph]) -> str:
    lines = [_HEAD[0], f"{_HEAD[1]}{shown_test(key.test)}"]
    lines += [f"{_HEAD[2]}{printable(key.label)}"] if key.label else []
    lines.append(f"{_HEAD[3]}{key.versions_text}")
    for choices, graph in merge_equal(graphs):
        lines += ["", f"products by {choices}:"] if choices else [""]
        lines += _graph(graph)
    return "\n".join(lines) + "\n"


def merge_equal(graphs: Mapping[str, FusionGraph]) -> list[tuple[str, FusionGraph]]:
    """Merge choices with equal snapshots into one: ("Triton GEMM or cuBLAS", the first graph)."""
    bodies: dict[str, list[str]] = {}
    for choice, graph in graphs.items():
        bodies.setdefault("\n".join(_graph(graph)), []).append(choice)
    return [(" or ".join(map(printable, choices)), graphs[choices[0]]) for choices in bodies.values()]


def difference(recorded: str, now: str) -> str:
    lines = difflib.unified_diff(recorded.splitlines(), now.splitlines(), "recorded", "now", lineterm="", n=100)
    return "\n".join(line.rstrip() for line in lines)


def write(path: Path, content: str) -> None:
    atomic_write.write(path, content.encode())


def shown_test(test: str) -> str:
    """Return a test's name on one line, as its snapshots have it."""
    return printable(test, 2000)


def test_of(path: Path) -> str:
    """Return the test of a snapshot file, as `shown_test` makes it, or "" for another file."""
    with path.open(errors="replace") as file:
        first, second = file.readline().rstrip("\n"), file.readline().rstrip("\n")
    return second.removeprefix(_HEAD[1]) if first == _HEAD[0] and second.startswith(_HEAD[1]) else ""


def _readable(versions: str) -> str:
    return ", ".join(" ".join(package.split("-", 1)) for package in versions.split("+"))


def _graph(graph: FusionGraph) -> list[str]:
    found = totals(graph)
    moved = "?" if found.declared.exact is None else f"{found.declared.exact:.0f}"
    least = "at least " if found.open_ended else ""
    lines = [f"moves {moved} bytes, compulsory {least}{sum(found.compulsory.values())}"]
    phase = None
    for kernel in graph.kernels or ():
        if kernel.phase != phase:
            phase = kernel.phase
            lines.append(f"{phase}:")
        lines += [f"  {line}" for line in _kernel(graph, kernel)]
    return lines if graph.kernels else [*lines, "no kernels"]


def _kernel(graph: FusionGraph, kernel: Kernel) -> list[str]:
    launches = "" if kernel.launches == 1 else f", {'?' if kernel.launches is None else kernel.launches} launches"
    lines = [f"{printable(kernel.kind)}{launches}"]
    by_stage: dict[str, list[str]] = {}
    for op in kernel.source_ops:
        by_stage.setdefault(op.stage, []).append(formats.operation(op) + (" (gradient)" if op.backward else ""))
    lines += [f"  {printable(stage) or '-'}: {formats.words(ops)}" for stage, ops in by_stage.items()]
    lines += [f"  {line}" for line in _accesses(graph, "reads", kernel.inputs)]
    lines += [f"  {line}" for line in _accesses(graph, "writes", kernel.outputs)]
    return lines


def _accesses(graph: FusionGraph, verb: str, accesses: tuple[Access, ...] | None) -> list[str]:
    """Return a line for each access, largest first, because the compiler lists them in no stable order."""
    if accesses is None:
        return [f"{verb} unknown buffers"]
    found = []
    for access in accesses:
        buffer = graph.buffer[access.buffer]
        size = "?" if access.bytes is None else access.bytes
        found.append((-(access.bytes or 0), f"{verb} {buffer.role} {formats.shape(buffer)} {size}"))
    return [line for _, line in sorted(found)]
