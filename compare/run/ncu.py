"""Measured bytes of each kernel, from the GPU's hardware counters: workers run under Nsight Compute (ncu).

A graph declares the bytes that a kernel reads and writes. ncu counts the bytes between L2 and DRAM, and the bytes
through L2.

- `cache_control="all"`, ncu's default: each kernel starts with an empty L2.
- `cache_control="none"`: the call starts with a cold L2, and each kernel finds the lines that earlier kernels left.

When a kernel ends, L2 may still be full of dirty lines. Their writes are not in its count. CUPTI cannot run together
with ncu, so nothing is timed here.
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
from ..base.paths import PACKAGE, PROJECT
from ..graph import store
from ..graph.model import FusionGraph
from ..measure.profiler_marks import BEGIN, END, PROBE
from ..spec.case import Case
from ..spec.implementation import Implementation
from ..workers.client import WORKER_FAILURES, Worker, WorkerDied, WorkerError, WorkerTimeout, interpreter
from .batches import widest

CacheControl = Literal["all", "none"]

# dram__bytes: between L2 and DRAM. lts__t_bytes: all traffic of the L2's slices, from any source.
_DRAM = {"dram__bytes_read.sum": "dram_read", "dram__bytes_write.sum": "dram_written"}
_L2 = "lts__t_bytes.sum"
_PROBE_SECONDS = 120
_LISTING_SECONDS = 120  # for ncu to write its listing after the worker's last request
_STOP_SECONDS = 15  # after an interrupt: for the current request to end; after a kill, as long for ncu to write
# Implementations per process. A process takes 8 s to start. ncu writes its listing when the process ends, so a process
# that is killed loses all its counts.
BATCH = 20


@dataclass(frozen=True)
class KernelTraffic:
    """The bytes of one launch: read from DRAM, written to DRAM, and through L2.

    name: the kernel's mangled name. l2: None if this GPU has no such counter.
    """

    name: str
    dram_read: int
    dram_written: int
    l2: int | None = None


@dataclass(frozen=True)
class Profiled:
    """An implementation's fusion graph, or None, and the launches of one call, in order, by phase."""

    graph: FusionGraph | None
    launches: dict[str, list[KernelTraffic]]


@dataclass(frozen=True)
class NotProfiled:
    """The reason why an implementation has no traffic."""

    reason: str


Outcome = Profiled | NotProfiled


class NcuError(RuntimeError):
    """ncu is missing, or its listing lacks the expected kernels; the message says which."""


def ncu_missing() -> str | None:
    """Return why ncu cannot be run here, and the remedy; None if it can."""
    if shutil.which("ncu") is None:
        return "ncu is not on PATH: install NVIDIA Nsight Compute (part of the CUDA toolkit), or add its folder to PATH"
    return None


def probe(role: str) -> None:
    """Profile an empty call with ncu, in the Python interpreter that runs `role`.

    Raises NcuError if that fails, for example without permission to read the GPU's counters.
    """
    if reason := ncu_missing():
        raise NcuError(reason)
    with tempfile.TemporaryDirectory(prefix="xlafuse-probe-") as scratch:
        listing = Path(scratch) / "ncu.csv"
        command = [*_command(listing, "all"), interpreter(role), "-m", f"{PACKAGE}.measure.profiler_marks"]
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
        raise NcuError(f"ncu listed {len(found)} marked calls, but not the probe's empty call")


def measure(
    work: Sequence[tuple[Case, Implementation]],
    cache_control: CacheControl = "all",
    *,
    logs: Path | None = None,
    environment: Mapping[str, str] | None = None,
    expected: Sequence[Mapping[str, Any] | None] | None = None,
    say: Callable[[int], None] = lambda number: None,
) -> Iterator[tuple[int, Outcome]]:
    """Profile one warmed-up call of each implementation, up to BATCH implementations per process.

    Yield each implementation's index in `work` and its outcome when its process has ended. All implementations must run
    in workers of one role. The launches are kernels only, because ncu does not list copies and memsets.

    After a crash, the implementation that was being profiled has no traffic, and a new process profiles the rest. After
    a KeyboardInterrupt, the finished outcomes are yielded before it is raised. A second one is raised at once.

    Args:
        logs: the folder for the output of the processes and for ncu's listings.
        environment: variables for the worker.
        expected: for each entry of `work`, the worker environment that it needs, or None for any.
        say: called with the index of each implementation when its profile begins.

    Raises:
        NcuError: ncu is missing.
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
    """Profiles a batch of the work in one process under ncu. A crash or an interrupt ends the batch early."""

    role: str
    work: Sequence[tuple[Case, Implementation]]
    cache_control: CacheControl
    scratch: Path
    logs: Path
    environment: Mapping[str, str] | None
    expected: Sequence[Mapping[str, Any] | None] | None
    say: Callable[[int], None]

    def run(self, numbers: Sequence[int]) -> tuple[dict[int, Outcome], KeyboardInterrupt | None]:
        """Return outcomes by number, and the interrupt that ended the process, if any.

        Without an interrupt, at least one of `numbers` has an outcome.
        """
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
            command += ["-m", f"{PACKAGE}.workers.main", self.role]
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
                worker.finish(_LISTING_SECONDS)  # ncu writes its listing when the worker ends
            except KeyboardInterrupt as stop:
                interrupt = stop
                if graphs:
                    print("stopping: ncu is writing its counts; press Ctrl-C again to stop now", file=sys.stderr)
                    worker.finish(_STOP_SECONDS)
            finally:
                worker.kill()
        except _NotStarted as problem:
            return dict.fromkeys(numbers, NotProfiled(str(problem))), None
        finally:
            reference.kill()
        return found | self._listed(listing, graphs, ended_early=died or interrupt is not None), interrupt

    def _start(self, reference: Worker, worker: Worker, listing: Path) -> dict[str, Any]:
        """Wait until both workers are ready, and return the environment of the worker under ncu."""
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
            "prepare", id=str(number), case=case.to_json(), implementation=implementation.request,
            folders=[str(data)], dumps=str(dumps / str(number)),
        )
        worker.ask("profile", id=str(number), mark=str(number))
        worker.ask("release", id=str(number))
        shutil.rmtree(dumps, ignore_errors=True)
        return None if prepared["graph"] is None else store.from_json(prepared["graph"])

    def _listed(
        self, listing: Path, graphs: Mapping[int, FusionGraph | None], ended_early: bool
    ) -> dict[int, Outcome]:
        """Return the outcomes of the profiled implementations from ncu's listing.

        ended_early: the listing may be incomplete or empty. Implementations that it lacks get no outcome, so the next
        process profiles them again.
        """
        if not graphs:
            return {}
        try:
            by_mark = split(parse(_lines(listing)))
        except NcuError as problem:
            return {} if ended_early else dict.fromkeys(graphs, NotProfiled(str(problem)))
        found: dict[int, Outcome] = {}
        for number, graph in graphs.items():
            marks = {phase: f"{number}_{phase}" for phase in self.work[number][0].phases}
            if all(mark in by_mark for mark in marks.values()):
                found[number] = Profiled(graph, {phase: by_mark[mark] for phase, mark in marks.items()})
            elif not ended_early:
                found[number] = NotProfiled("ncu's listing lacks some of the profiled calls")
        return found


class _NotStarted(Exception):
    """A worker did not become ready; the message says why."""


def _differences(here: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return how the environment differs from the expected one.

    The timer is not compared: it always differs, because CUPTI cannot run under ncu.
    """
    other = [name for name in expected if name != "timer" and here.get(name) != expected[name]]
    return ", ".join(f"{name} {expected[name]}, not {here.get(name)}" for name in other)


def _command(listing: Path, cache_control: CacheControl) -> list[str]:
    """Return the command that runs a worker under ncu.

    ncu profiles only the worker itself. When it also profiled the child processes, compiles crashed with a segmentation
    fault and the run hung (ncu 2025.3, Triton 3.6 and XLA).
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
    """Return the first error that ncu itself wrote, if any."""
    return [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")][:1]


def parse(lines: Iterable[str]) -> list[KernelTraffic]:
    """Return the launches in the CSV of ncu's raw page: a header, a row of units, then one row per launch.

    Lines that begin with "==" are messages. Raises NcuError if a column is missing or a number cannot be read.
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
    """Return the launches of each marked call, by mark. A call without an end mark, after a crash, is left out.

    Raises NcuError for a launch outside of the marked calls.
    """
    by_mark: dict[str, list[KernelTraffic]] = {}
    mark: str | None = None
    inside: list[KernelTraffic] = []
    for launch in launches:
        if launch.name.startswith(BEGIN):
            mark, inside = launch.name.removeprefix(BEGIN), []
        elif mark is None:
            raise NcuError(f"{launch.name} ran outside of the marked calls")
        elif launch.name == END:
            by_mark[mark], mark = inside, None
        else:
            inside.append(launch)
    return by_mark
