"""DRAM bytes as the GPU's own counters tell them, kernel by kernel: workers run under Nsight Compute (ncu).

What a graph declares is what a kernel must move at least; what ncu counts is what crossed the memory bus. With
`cache_control="all"` each kernel is measured alone, from an empty L2 (ncu's default); with "none" the call's kernels
find in L2 what earlier ones left there. A kernel that ends leaves up to one L2 of dirty lines that are not yet written.
CUPTI cannot run beside ncu, so nothing is timed here.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compare import machine
from compare.client import Worker, interpreter
from compare.graph import store
from compare.graph.model import FusionGraph
from compare.profiled import BOUNDARY
from compare.spec import Case, Implementation

CacheControl = Literal["all", "none"]

_METRICS = {"dram__bytes_read.sum": "dram_read", "dram__bytes_write.sum": "dram_written"}


@dataclass(frozen=True)
class KernelTraffic:
    """One launch of `name` (mangled): bytes that DRAM gave and took."""

    name: str
    dram_read: int
    dram_written: int


@dataclass(frozen=True)
class Profiled:
    """An implementation's fusion graph, None where it has none, and the launches of each part of one call, in order."""

    graph: FusionGraph | None
    launches: dict[str, list[KernelTraffic]]


class NcuError(RuntimeError):
    """ncu is missing, or did not say what was asked; the message says which."""


def ncu_missing() -> str | None:
    """Why traffic cannot be measured here, with the remedy, or None."""
    if shutil.which("ncu") is None:
        return "ncu is not on PATH: install NVIDIA Nsight Compute (part of the CUDA toolkit)"
    return None


def measure(
    work: Sequence[tuple[Case, Implementation]], cache_control: CacheControl = "all"
) -> list[Profiled]:
    """One warmed-up call of each implementation of a case, all of them of one framework.

    Copies and memsets are not among the launches: ncu sees kernels alone. Raises NcuError, and what compare.client
    raises.
    """
    if reason := ncu_missing():
        raise NcuError(reason)
    (role,) = {implementation.framework for _, implementation in work}
    graphs: list[FusionGraph | None] = []
    with tempfile.TemporaryDirectory(prefix="xlafuse-traffic-", dir=machine.scratch_root()) as scratch:
        folder = Path(scratch)
        listing = folder / "ncu.csv"
        command = [*_command(listing, cache_control), interpreter(role), "-m", "compare.worker", role]
        reference = Worker("reference", folder / "reference.log")
        worker = Worker(role, folder / "ncu.log", {"XLAFUSE_TIMER": "none"}, command)
        try:
            reference.wait_ready()
            worker.wait_ready()
            for number, (case, implementation) in enumerate(work):
                data = folder / "data" / case.id.replace("/", "-") / "0"
                if not data.exists():
                    shutil.rmtree(folder / "data", ignore_errors=True)
                    reference.ask("draw", case=case.to_json(), seed=0, folder=str(data))
                prepared = worker.ask(
                    "prepare", id=str(number), case=case.to_json(), implementation=implementation.name,
                    folders=[str(data)], scales=[{}], dumps=str(folder / "dumps" / str(number)),
                )
                graphs.append(None if prepared["graph"] is None else store.from_json(prepared["graph"]))
                worker.ask("profile", id=str(number))
                worker.ask("release", id=str(number))
        finally:
            reference.stop()
            worker.stop(patience=60)  # ncu writes its listing when the process that it watches has ended
        stretches = iter(split(parse(listing.read_text().splitlines())))
    try:
        return [
            Profiled(graph, {part: next(stretches) for part in case.parts})
            for (case, _), graph in zip(work, graphs, strict=True)
        ]
    except StopIteration:
        raise NcuError("ncu listed fewer parts of calls than were made") from None


def _command(listing: Path, cache_control: CacheControl) -> list[str]:
    return [
        "ncu", "--log-file", str(listing), "--csv", "--page", "raw", "--print-units", "base",
        "--print-kernel-base", "mangled", "--metrics", ",".join(_METRICS), "--cache-control", cache_control,
        "--clock-control", "none", "--profile-from-start", "off",
    ]


def parse(lines: Iterable[str]) -> list[KernelTraffic]:
    """ncu's raw page as CSV: a header, a row of units, a row a launch; its own messages begin with "==".

    Raises NcuError where a column is missing, or a number is not one.
    """
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 3:
        raise NcuError("ncu listed no kernel")
    header = rows[0]
    missing = [name for name in ("Kernel Name", *_METRICS) if name not in header]
    if missing:
        raise NcuError(f"ncu's listing has no column {', '.join(missing)}; it has {', '.join(header)}")
    found = []
    for row in rows[2:]:
        cells = dict(zip(header, row, strict=True))
        try:
            counts = {field: int(float(cells[metric].replace(",", ""))) for metric, field in _METRICS.items()}
        except ValueError as problem:
            raise NcuError(f"ncu could not count {cells['Kernel Name']}: {problem}") from None
        found.append(KernelTraffic(cells["Kernel Name"], **counts))
    return found


def split(launches: Iterable[KernelTraffic]) -> list[list[KernelTraffic]]:
    """The stretches between boundary kernels: each part of a call is enclosed by one at its start and one at its end.

    Raises NcuError for a launch outside.
    """
    stretches: list[list[KernelTraffic]] = []
    inside = False
    for launch in launches:
        if launch.name == BOUNDARY:
            inside = not inside
            if inside:
                stretches.append([])
        elif inside:
            stretches[-1].append(launch)
        else:
            raise NcuError(f"{launch.name} ran outside what was to be profiled")
    if inside:
        raise NcuError("the profiled process ended within a call")
    return stretches


