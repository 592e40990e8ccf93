"""Tables of docs/side-by-side.md: one operation in every language, from a committed run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from xlafuse.compare.base.text import number
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import Kernel
from xlafuse.compare.record.record import Record
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.report import authorship
from xlafuse.compare.sources.result import Result
from xlafuse.compare.sources.run_source import open_run
from xlafuse.compare.spec.blocks import BLOCKS

HEADERS = ["direction", "implementation", "kernel lines", "kernels", "registers", "shared memory, kB", "MB moved", "µs"]
KERNEL_HEADERS = ["implementation", "kernel", "operations", "registers", "shared memory, kB", "MB moved", "µs"]


def summary(run: Path, block: str, names: list[str]) -> list[list[str]]:
    """Return a line for each direction and implementation of a block's main case.

    Kernel lines are those of forward and backward together. Registers of a thread and shared memory of a block are the
    largest of all kernels, as CUPTI records them at the launch. MB moved: by the kernels' declared accesses.
    """
    found = [result.row for result in _results(run)]
    found = [row for row in found if row.block == block and row.case_name == BLOCKS[block].shapes[0].name]
    lines = {line.implementation: line.kernel_lines for line in authorship.of(found)}
    times = {(row.implementation, row.direction): row.device_time_us for row in found}
    table = []
    for record in _records(run, block, names):
        kernels = store.load(recorded_file(run, record, record.graph or "")).kernels or ()
        moved = [_moved(kernel) for kernel in kernels]
        resources = [each for of_part in _resources(record).values() for each in of_part.values()]
        table.append(
            [
                record.case.direction, f"`{record.implementation}`", str(lines.get(record.implementation) or ""),
                str(sum(kernel.launches or 0 for kernel in kernels)),
                number(max((each[0] for each in resources), default=None)),
                _kilobytes(max((each[1] for each in resources), default=None)),
                "" if None in moved else number(sum(filter(None, moved))),
                number(times[record.implementation, record.case.direction]),
            ]
        )
    return table


def kernels(run: Path, block: str, names: list[str], direction: str) -> list[list[str]]:
    """Return a line for each kernel of a block's main case in one direction."""
    table = []
    for record in _records(run, block, names):
        resources = _resources(record)
        if record.case.direction != direction:
            continue
        for kernel in store.load(recorded_file(run, record, record.graph or "")).kernels or ():
            ran = resources.get(kernel.phase, {})
            registers, shared = ran.get(kernel.runtime_name or kernel.name, (None, None))
            operations = dict.fromkeys(op.op.removeprefix("aten.") for op in kernel.source_ops)
            table.append(
                [
                    f"`{record.implementation}`", f"`{_shown(kernel)}`", ", ".join(operations),
                    number(registers), _kilobytes(shared), number(_moved(kernel)),
                    number(kernel.device_time_us),
                ]
            )
    return table


def python(path: Path, name: str) -> str:
    """Return a function's source, with its decorators, as a block of Markdown."""
    source = path.read_text()
    node = next(each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef) and each.name == name)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(["```python", *source.splitlines()[first - 1 : node.end_lineno], "```"])


def cuda(path: Path, name: str) -> str:
    """Return a kernel's source as a block of Markdown. It ends with the first line that closes a brace alone."""
    found = re.search(rf"^template [^;{{}}]*\b{name}\([^;]*?\{{.*?^\}}$", path.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{path} has no kernel {name}")
    return f"```cuda\n{found[0]}\n```"


@cache
def _results(run: Path) -> tuple[Result, ...]:
    return open_run(run).results


def _records(run: Path, block: str, names: list[str]) -> Iterator[Record]:
    """Yield the records of a block's main case that are `ok`, by direction, in the order of `names`."""
    found = [
        record for result in _results(run) if (record := result.record) is not None
        and record.case.block == block and record.case.name == BLOCKS[block].shapes[0].name
        and record.implementation in names and record.status == "ok"
    ]
    yield from sorted(found, key=lambda record: (record.case.direction, names.index(record.implementation)))


def _moved(kernel: Kernel) -> float | None:
    """Return the MB that all launches of a kernel read and write."""
    if kernel.bytes_read is None or kernel.bytes_written is None or kernel.launches is None:
        return None
    return (kernel.bytes_read + kernel.bytes_written) * kernel.launches / 1e6


def _resources(record: Record) -> dict[str, dict[str, tuple[int, int]]]:
    """Return, by phase and a kernel's name, the registers of a thread and the bytes of shared memory of a block."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for phase, times in record.times.items():
        for ran in times.records or ():
            if ran.registers is not None and ran.shared_bytes is not None:
                found.setdefault(phase, {})[ran.name] = ran.registers, ran.shared_bytes
    return found


def _shown(kernel: Kernel) -> str:
    """Return the kernel's name without template arguments, of at most 40 characters."""
    name = kernel.runtime_name or kernel.name
    name = kernel.name if name.startswith("_Z") else name
    name = name.partition("<")[0]
    return name if len(name) <= 40 else f"{name[:39]}…"


def _kilobytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e3:.1f}"
