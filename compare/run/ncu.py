"""Measured bytes, kernel by kernel, from the GPU's own counters: workers run under Nsight Compute (ncu).

A graph declares the bytes that a kernel reads and writes. ncu counts the bytes that crossed the memory bus, and those
that passed through the L2. With `cache_control="all"`, ncu's default, each kernel is measured from an empty L2. With
"none" the call starts from a cold L2, and its kernels find there the lines that earlier ones left. A kernel leaves up
to one L2 of dirty lines that are not yet written. CUPTI cannot run together with ncu, so nothing is timed here.
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

# dram__bytes: between L2 and memory. lts__t_bytes: all traffic of the L2's slices, from any source.
_DRAM = {"dram__bytes_read.sum": "dram_read", "dram__bytes_write.sum": "dram_written"}
_L2 = "lts__t_bytes.sum"
_PROBE_SECONDS = 120
_LISTING_SECONDS = 120  # for ncu to write its listing, after the watched process has ended its work
_STOP_SECONDS = 15  # after an interrupt: for the current request to end, and again for ncu to write after a kill
BATCH = 20  # implementations a process. It takes 8 s to start; ncu lists at its end, so a killed one loses them all


@dataclass(frozen=True)
class KernelTraffic:
    """One launch of `name` (mangled): bytes read from and written to DRAM, and bytes through the L2, None where this
    GPU has no such counter."""

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
    """The reason why an implementation has no traffic."""

    reason: str


Outcome = Profiled | NotProfiled


class NcuError(RuntimeError):
    """A missing ncu, or a listing without the expected kernels; the message says which."""


def ncu_missing() -> str | None:
    """Return why traffic cannot be measured here, with the remedy, or None."""
    if shutil.which("ncu") is None:
        return "ncu is not on PATH: install NVIDIA Nsight Compute (part of the CUDA toolkit), or add its folder to PATH"
    return None


def probe(role: str) -> None:
    """Count the bytes of an empty kernel, in the Python that runs `role`.

    Raises NcuError where ncu cannot, for example without the permission to read the GPU's counters.
    """
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
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise NcuError(f"{problem}; the watched process: {last}") from None
    if PROBE not in found:
        raise NcuError(f"ncu listed {len(found)} stretches of kernels, but not the probe's")


def measure(
    work: Sequence[tuple[Case, Implementation]],
    cache_control: CacheControl = "all",
    *,
    logs: Path | None = None,
    environment: Mapping[str, str] | None = None,
    expected: Sequence[Mapping[str, Any] | None] | None = None,
    say: Callable[[int], None] = lambda number: None,
) -> Iterator[tuple[int, Outcome]]:
    """Profile one warmed-up call of each implementation, all of one framework, up to BATCH of them in a process.

    Yield the index into `work` and the outcome of each, as soon as its process has ended. Copies and memsets are not
    among the launches: ncu sees kernels alone. A crash costs the implementation being profiled; another process goes on
    with the others. A KeyboardInterrupt is raised after the finished ones were yielded; a second one at once.

    logs: a folder for the output of the processes and ncu's listings. environment: variables for the worker. expected:
    the worker's required `environment` for each of `work`, or None for any. say gets the index of each one that begins.
    Raises NcuError without ncu.
    """
    if reason := ncu_missing():
        raise NcuError(reason)
    (role,) = {implementation.backend.worker for _, implementation in work}
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
    """One process under ncu, which profiles as much of the work as it can."""

    role: str
    work: Sequence[tuple[Case, Implementation]]
    cache_control: CacheControl
    scratch: Path
    logs: Path
    environment: Mapping[str, str] | None
    expected: Sequence[Mapping[str, Any] | None] | None
    say: Callable[[int], None]

    def run(self, numbers: Sequence[int]) -> tuple[dict[int, Outcome], KeyboardInterrupt | None]:
        """Return the outcomes of at least one of `numbers`, and the interrupt that ended the process, if any."""
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
                worker.finish(_LISTING_SECONDS)  # ncu writes when the watched process has ended
            except KeyboardInterrupt as stop:
                interrupt = stop
                if graphs:
                    print("stopping: ncu is writing its counts; another Ctrl-C does not wait for it", file=sys.stderr)
                    worker.finish(_STOP_SECONDS)
            finally:
                worker.kill()
        except _NotStarted as problem:
            return dict.fromkeys(numbers, NotProfiled(str(problem))), None
        finally:
            reference.kill()
        return found | self._listed(listing, graphs, partly=died or interrupt is not None), interrupt

    def _start(self, reference: Worker, worker: Worker, listing: Path) -> dict[str, Any]:
        """Wait for both workers, and return the environment of the one under ncu."""
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
            raise WorkerError("skipped", f"it was timed in another environment: {other}")
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
        """Return the launches of the profiled implementations.

        partly: the process ended early, so ncu may have listed nothing; missing ones are left for the next attempt.
        """
        if not graphs:
            return {}
        try:
            stretches = split(parse(_lines(listing)))
        except NcuError as problem:
            return {} if partly else dict.fromkeys(graphs, NotProfiled(str(problem)))
        found: dict[int, Outcome] = {}
        for number, graph in graphs.items():
            marks = {part: f"{number}_{part}" for part in self.work[number][0].phases}
            if all(mark in stretches for mark in marks.values()):
                found[number] = Profiled(graph, {part: stretches[mark] for part, mark in marks.items()})
            elif not partly:
                found[number] = NotProfiled("ncu listed fewer calls than were made")
        return found


class _NotStarted(Exception):
    """A worker did not become ready; the message says why."""


def _differences(here: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the differences to the environment of the timed run; the timer differs always, as ncu excludes CUPTI."""
    other = [name for name in expected if name != "timer" and here.get(name) != expected[name]]
    return ", ".join(f"{name} {expected[name]}, not {here.get(name)}" for name in other)


def _command(listing: Path, cache_control: CacheControl) -> list[str]:
    """Return the command that runs a worker under ncu.

    Only the worker is watched: with its child processes watched, too, compiles ended in a segmentation fault, and the
    run waited for them (ncu 2025.3, Triton 3.6 and XLA).
    """
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
    """Return ncu's own first error."""
    return [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")][:1]


def parse(lines: Iterable[str]) -> list[KernelTraffic]:
    """Return the launches in ncu's raw page as CSV: a header, a row of units, a row a launch; messages begin with "==".

    Raises NcuError where a column is missing, or a number cannot be read.
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
    """Return the launches between marks, by mark. A stretch without an end, after a crash, is left out.

    Raises NcuError for a launch outside of all marks.
    """
    stretches: dict[str, list[KernelTraffic]] = {}
    mark: str | None = None
    inside: list[KernelTraffic] = []
    for launch in launches:
        if launch.name.startswith(BEGIN):
            mark, inside = launch.name.removeprefix(BEGIN), []
        elif mark is None:
            raise NcuError(f"{launch.name} ran outside of the marked calls")
        elif launch.name == END:
            stretches[mark], mark = inside, None
        else:
            inside.append(launch)
    return stretches
