"""Fusion graphs as small text files beside the tests: what is in which kernel, and what goes through memory.

No times, line numbers, paths or compilers' names for kernels: nothing that changes while the fusion stays what it is.
One file is one graph (all its worlds) as certain versions made it for a certain target:

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
_KEYED = ("jax", "torch", "triton")  # whose versions decide what is fused
_LONGEST = 120  # characters of a test's name in a file's: file systems take 255 bytes
# 'TestLayer::test_mlp[bf16-64]', and a label
_SIMPLE = re.compile(r"([\w:]+)(?:\[([\w.-]+)\])?", re.ASCII)
_LABEL = re.compile(r"[\w-]*", re.ASCII)


@dataclass(frozen=True)
class Key:
    """Whose snapshot it is: a test ("TestLayer::test_mlp[64]", and what tells several graphs of it apart), the versions
    ("jax-0.10.2") and the target that compiled it."""

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
        """Of all versions' files: the test's name, and a digest where that is not for a file system to take."""
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
        """Versions and targets that this test and label have snapshots of, as "jax 0.10.2 for h200"."""
        if not self.folder.is_dir():
            return []
        found = (path.name.removesuffix(".txt").split("@") for path in sorted(self.folder.glob("*.txt")))
        return [f"{_spoken(parts[1])} for {parts[2]}" for parts in found if len(parts) == 3 and parts[0] == self.stem]

    @property
    def spoken(self) -> str:
        return f"{_spoken(self.versions)} for {self.target}"


def versions_of(graph: FusionGraph) -> str:
    """ "jax-0.10.2", "torch-2.13.0+triton-3.7.1": without what says for which device a wheel was built."""
    return "+".join(f"{name}-{graph.versions[name].partition('+')[0]}" for name in _KEYED if name in graph.versions)


def text(key: Key, graphs: Mapping[str, FusionGraph]) -> str:
    lines = [_HEAD[0], f"{_HEAD[1]}{shown_test(key.test)}"]
    lines += [f"{_HEAD[2]}{printable(key.label)}"] if key.label else []
    lines.append(f"{_HEAD[3]}{key.spoken}")
    for worlds, graph in alike(graphs):
        lines += ["", f"products by {worlds}:"] if worlds else [""]
        lines += _graph(graph)
    return "\n".join(lines) + "\n"


def alike(graphs: Mapping[str, FusionGraph]) -> list[tuple[str, FusionGraph]]:
    """("Triton GEMM or cuBLAS", the first's graph) of worlds whose snapshots are the same."""
    bodies: dict[str, list[str]] = {}
    for world, graph in graphs.items():
        bodies.setdefault("\n".join(_graph(graph)), []).append(world)
    return [(" or ".join(map(printable, worlds)), graphs[worlds[0]]) for worlds in bodies.values()]


def difference(recorded: str, now: str) -> str:
    lines = difflib.unified_diff(recorded.splitlines(), now.splitlines(), "recorded", "now", lineterm="", n=100)
    return "\n".join(line.rstrip() for line in lines)


def write(path: Path, content: str) -> None:
    atomic_write.write(path, content.encode())


def shown_test(test: str) -> str:
    """A test's name as its snapshots have it: on one line."""
    return printable(test, 2000)


def test_of(path: Path) -> str:
    """Whose snapshot is in a file, as `shown_test`; "" where it is none."""
    with path.open(errors="replace") as file:
        first, second = file.readline().rstrip("\n"), file.readline().rstrip("\n")
    return second.removeprefix(_HEAD[1]) if first == _HEAD[0] and second.startswith(_HEAD[1]) else ""


def _spoken(versions: str) -> str:
    return ", ".join(" ".join(package.split("-", 1)) for package in versions.split("+"))


def _graph(graph: FusionGraph) -> list[str]:
    found = totals(graph)
    moved = "?" if found.declared.exact is None else f"{found.declared.exact:.0f}"
    lines = [f"moves {moved} bytes, compulsory {sum(found.compulsory.values())}"]
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
    """Largest first; what a kernel reads comes in no order of the program's."""
    if accesses is None:
        return [f"{verb} what is not known"]
    found = []
    for access in accesses:
        buffer = graph.buffer[access.buffer]
        size = "?" if access.bytes is None else access.bytes
        found.append((-(access.bytes or 0), f"{verb} {buffer.role} {formats.shape(buffer)} {size}"))
    return [line for _, line in sorted(found)]
