"""Bytes as the GPU's own counters tell them, kernel by kernel: workers run under Nsight Compute (ncu).

What a graph declares is what a kernel must move at least; what ncu counts is what crossed the memory bus, and what
passed through the L2. With `cache_control="all"` each kernel is measured alone, from an empty L2 (ncu's default); with
"none" the call starts from a cold L2 and its kernels find there what earlier ones left. A kernel that ends leaves up to
one L2 of dirty lines that are not yet written. CUPTI cannot run beside ncu, so nothing is timed here.
"""

from __future__ import annotations

import contextlib
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..base import host
from ..base.paths import PROJECT
from ..graph import store
from ..graph.model import FusionGraph
from ..measure.profiler_marks import BEGIN, END, PROBE
from ..spec.case import Case
from ..spec.implementation import Implementation
from ..workers.client import WORKER_FAILURES, Worker, WorkerDied, WorkerError, WorkerTimeout, interpreter
from .session import widest

CacheControl = Literal["all", "none"]

# dram__bytes: between L2 and memory. lts__t_bytes: all that passes the L2's slices, from wherever it comes.
_DRAM = {"dram__bytes_read.sum": "dram_read", "dram__bytes_write.sum": "dram_written"}
_L2 = "lts__t_bytes.sum"
_PROBE_SECONDS = 120
_LISTING_SECONDS = 120  # for ncu to write what it counted, the process that it watched being idle
_STOP_SECONDS = 15  # after an interrupt: for what is under way to end, and then, once it was killed, for ncu to write
BATCH = 20  # implementations a process, which takes 8 s to start: ncu lists at its end, and one killed loses them all


@dataclass(frozen=True)
class KernelTraffic:
    """One launch of `name` (mangled): bytes that DRAM gave and took, and that passed the L2; None where this GPU does
    not count the last."""

    name: str
    dram_read: int
    dram_written: int
    l2: int | None = None


@dataclass(frozen=True)
class Profiled:
    """An implementation's fusion graph, None where it has none, and the launches of each part of one call, in order."""

    graph: FusionGraph | None
    launches: dict[str, list[KernelTraffic]]


@dataclass(frozen=True)
class NotProfiled:
    """Why there is no traffic of an implementation."""

    reason: str


Outcome = Profiled | NotProfiled


class NcuError(RuntimeError):
    """ncu is missing, or did not say what was asked; the message says which."""


def ncu_missing() -> str | None:
    """Why traffic cannot be measured here, with the remedy, or None."""
    if shutil.which("ncu") is None:
        return "ncu is not on PATH: install NVIDIA Nsight Compute (part of the CUDA toolkit), or add its folder to PATH"
    return None


def probe(role: str) -> None:
    """Count the bytes of a kernel that does nothing, in the Python that runs `role`. Raises NcuError where ncu cannot,
    as without the permission to read the GPU's counters."""
    if reason := ncu_missing():
        raise NcuError(reason)
    with tempfile.TemporaryDirectory(prefix="xlafuse-probe-") as scratch:
        listing = Path(scratch) / "ncu.csv"
        command = [*_command(listing, "all"), interpreter(role), "-m", "compare.measure.profiler_marks"]
        try:
            done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=_PROBE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise NcuError(f"ncu cannot watch a process here: {problem}") from None
        try:
            found = split(parse(_lines(listing)))
        except NcuError as problem:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise NcuError(f"{problem}; the process that it watched: {last}") from None
    if PROBE not in found:
        raise NcuError("ncu listed kernels, and not those that it was asked to")


def measure(
    work: Sequence[tuple[Case, Implementation]],
    cache_control: CacheControl = "all",
    *,
    logs: Path | None = None,
    environment: Mapping[str, str] | None = None,
    expected: Sequence[Mapping[str, Any] | None] | None = None,
    say: Callable[[int], None] = lambda number: None,
) -> Iterator[tuple[int, Outcome]]:
    """One warmed-up call of each implementation of a case, all of them of one framework, up to BATCH of them in a
    process under ncu. Yields the number of each of `work`, and what became of it, as soon as its process has ended.

    Copies and memsets are not among the launches: ncu sees kernels alone. What ends a process costs the one that it was
    busy with; another process goes on with the others. A KeyboardInterrupt is raised when what was profiled until then
    has been yielded; a second one at once. logs: a folder for what the processes print, and for ncu's listings.
    environment: variables for the worker. expected: what its `environment` must be for each of `work`, or None for any.
    say: is told the number of each of `work` that begins. Raises NcuError without ncu.
    """
    if reason := ncu_missing():
        raise NcuError(reason)
    (role,) = {implementation.framework for _, implementation in work}
    left = list(range(len(work)))
    with tempfile.TemporaryDirectory(prefix="xlafuse-traffic-", dir=host.scratch_root()) as scratch:
        attempt = _Attempt(role, work, cache_control, Path(scratch), logs or Path(scratch), environment, expected, say)
        while left:
            found, interrupt = attempt.run(left[:BATCH])
            yield from found.items()
            if interrupt:
                raise interrupt
            left = [number for number in left if number not in found]


@dataclass(frozen=True)
class _Attempt:
    """A process under ncu that takes as much of the work as it lives to see."""

    role: str
    work: Sequence[tuple[Case, Implementation]]
    cache_control: CacheControl
    scratch: Path
    logs: Path
    environment: Mapping[str, str] | None
    expected: Sequence[Mapping[str, Any] | None] | None
    say: Callable[[int], None]

    def run(self, numbers: Sequence[int]) -> tuple[dict[int, Outcome], KeyboardInterrupt | None]:
        """What became of some of `numbers`, at least one of them, or the interrupt that ended it."""
        log = self.logs.resolve() / f"ncu-{self.role}-{self.cache_control}.log"
        listing = log.with_suffix(".csv")
        listing.unlink(missing_ok=True)
        found: dict[int, Outcome] = {}
        graphs: dict[int, FusionGraph | None] = {}
        died = False
        interrupt: KeyboardInterrupt | None = None
        reference = Worker("reference", self.logs / "ncu-reference.log")
        try:
            command = [*_command(listing, self.cache_control), interpreter(self.role)]
            command += ["-m", "compare.workers.main", self.role]
            variables = {**(self.environment or {}), "XLAFUSE_TIMER": "none"}
            worker = Worker(self.role, log, variables, command)
            try:
                here = self._start(reference, worker, listing)
                for number in numbers:
                    self.say(number)
                    try:
                        graphs[number] = self._profile(number, reference, worker, here)
                    except WorkerError as problem:
                        found[number] = NotProfiled(problem.message)
                        with contextlib.suppress(*WORKER_FAILURES):
                            worker.ask("release", id=str(number))
                    except (WorkerDied, WorkerTimeout) as problem:
                        found[number], died = NotProfiled(str(problem)), True
                        break
                worker.finish(_LISTING_SECONDS)  # ncu writes when the process that it watches has ended
            except KeyboardInterrupt as stop:
                interrupt = stop
                if graphs:
                    print("stopping: ncu lists what it counted; another Ctrl-C does not wait for it", file=sys.stderr)
                    worker.finish(_STOP_SECONDS)
            finally:
                worker.kill()
        except _NotStarted as problem:
            return dict.fromkeys(numbers, NotProfiled(str(problem))), None
        finally:
            reference.kill()
        return found | self._listed(listing, graphs, partly=died or interrupt is not None), interrupt

    def _start(self, reference: Worker, worker: Worker, listing: Path) -> dict[str, Any]:
        """Both workers ready; what the one under ncu is."""
        try:
            reference.wait_ready()
            worker.wait_ready()
            return dict(worker.ask("environment"))
        except WORKER_FAILURES as problem:
            raise _NotStarted("; ".join([str(problem), *_errors(_lines(listing))])) from None

    def _profile(self, number: int, reference: Worker, worker: Worker, here: dict[str, Any]) -> FusionGraph | None:
        case, implementation = self.work[number]
        expected = self.expected[number] if self.expected else None
        if expected is not None and (other := _differences(here, expected)):
            raise WorkerError("skipped", f"it was timed in another environment, with {other}")
        drawn = widest(case)
        data = self.scratch / "data" / drawn.id.replace("/", "-") / "0"
        if not data.exists():
            shutil.rmtree(self.scratch / "data", ignore_errors=True)
            reference.ask("draw", case=drawn.to_json(), seed=0, folder=str(data))
        dumps = self.scratch / "dumps"
        prepared = worker.ask(
            "prepare", id=str(number), case=case.to_json(), implementation=implementation.name,
            folders=[str(data)], dumps=str(dumps / str(number)),
        )
        worker.ask("profile", id=str(number), mark=str(number))
        worker.ask("release", id=str(number))
        shutil.rmtree(dumps, ignore_errors=True)
        return None if prepared["graph"] is None else store.from_json(prepared["graph"])

    def _listed(
        self, listing: Path, graphs: Mapping[int, FusionGraph | None], partly: bool
    ) -> dict[int, Outcome]:
        """The launches of those that were profiled. partly: the process ended early, and ncu may have listed nothing,
        as when it was killed: what it did not list is left for the next attempt."""
        if not graphs:
            return {}
        try:
            stretches = split(parse(_lines(listing)))
        except NcuError as problem:
            return {} if partly else dict.fromkeys(graphs, NotProfiled(str(problem)))
        found: dict[int, Outcome] = {}
        for number, graph in graphs.items():
            marks = {part: f"{number}_{part}" for part in self.work[number][0].parts}
            if all(mark in stretches for mark in marks.values()):
                found[number] = Profiled(graph, {part: stretches[mark] for part, mark in marks.items()})
            elif not partly:
                found[number] = NotProfiled("ncu listed fewer calls than were made")
        return found


class _NotStarted(Exception):
    """A worker did not become ready; the message says why."""


def _differences(here: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """What was other when it was timed, in words; the clock is, for ncu lets none run beside it."""
    other = [name for name in expected if name != "timer" and here.get(name) != expected[name]]
    return ", ".join(f"{name} {expected[name]}, not {here.get(name)}" for name in other)


def _command(listing: Path, cache_control: CacheControl) -> list[str]:
    """The worker alone is watched: with the processes that it starts watched, too, compiles ended in a segmentation
    fault for which all waited (ncu 2025.3, Triton 3.6 and XLA)."""
    return [
        "ncu", "--target-processes", "application-only",
        "--log-file", str(listing), "--csv", "--page", "raw", "--print-units", "base",
        "--print-kernel-base", "mangled", "--metrics", ",".join([*_DRAM, _L2]), "--cache-control", cache_control,
        "--clock-control", "none", "--profile-from-start", "off",
    ]


def _lines(listing: Path) -> list[str]:
    try:
        return listing.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _errors(lines: Iterable[str]) -> list[str]:
    """What ncu itself complained of."""
    return [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")][:1]


def parse(lines: Iterable[str]) -> list[KernelTraffic]:
    """ncu's raw page as CSV: a header, a row of units, a row a launch; its own messages begin with "==".

    Raises NcuError where a column is missing, or a number is not one.
    """
    lines = list(lines)
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 3:
        raise NcuError(": ".join(["ncu listed no kernel", *_errors(lines)]))
    header = rows[0]
    missing = [name for name in ("Kernel Name", *_DRAM) if name not in header]
    if missing:
        raise NcuError(f"ncu's listing has no column {', '.join(missing)}; it has {', '.join(header)}")
    found = []
    for row in rows[2:]:
        if len(row) != len(header):
            raise NcuError(f"ncu's listing is cut off: a row of {len(row)} cells for {len(header)} columns")
        cells = dict(zip(header, row, strict=True))
        try:
            counts = {field: _number(cells[metric]) for metric, field in _DRAM.items()}
        except ValueError as problem:
            raise NcuError(f"ncu could not count {cells['Kernel Name']}: {problem}") from None
        try:
            l2 = _number(cells[_L2]) if _L2 in cells else None
        except ValueError:
            l2 = None  # "n/a": this GPU has no such counter
        found.append(KernelTraffic(cells["Kernel Name"], **counts, l2=l2))
    return found


def _number(cell: str) -> int:
    return int(float(cell.replace(",", "")))


def split(launches: Iterable[KernelTraffic]) -> dict[str, list[KernelTraffic]]:
    """The stretches between marks, by mark. One that does not end, because its process did, is left out.

    Raises NcuError for a launch outside.
    """
    stretches: dict[str, list[KernelTraffic]] = {}
    mark: str | None = None
    inside: list[KernelTraffic] = []
    for launch in launches:
        if launch.name.startswith(BEGIN):
            mark, inside = launch.name.removeprefix(BEGIN), []
        elif mark is None:
            raise NcuError(f"{launch.name} ran outside what was to be profiled")
        elif launch.name == END:
            stretches[mark], mark = inside, None
        else:
            inside.append(launch)
    return stretches
