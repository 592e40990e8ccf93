"""One crew at work: a few cases compiled and checked beside other lanes, timed while those wait at the gate."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..graph import store
from ..graph.join.kernel_records import join
from ..graph.model import FusionGraph
from ..measure import gpu_conditions as conditions
from ..measure import timeline
from ..measure.clock import CallTrace, CuptiClock, DeviceRecord
from ..plan.timing_modes import MAIN, Timing
from ..record.record import Record
from ..spec.implementation import Implementation
from ..workers.client import WORKER_FAILURES, WorkerDied, WorkerError, WorkerTimeout
from ..workers.pool import Crew
from .clerk import Clerk
from .gate import Gate
from .session import Data, Session, judge, note_failure, widest
from .shards import Group

# After which nobody hopes any more. On the host of an H200, beside seven other lanes, the longest compile took 36 s (of
# lm_step, with 8 layers), and 159 s the longest that tunes, most of which it waited for its turns (of gpt2_block). What
# Inductor compiles beside what is timed may have kernels to choose, too, and waits with that for a minute or more.
COMPILE_SECONDS, TUNE_SECONDS = 600, 900
ROUND_SECONDS = 0.006  # of timed calls, for each implementation in each round and mode
_OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "RESOURCE_EXHAUSTED")


def _wants_memory(detail: str) -> bool:
    return any(words in detail for words in _OUT_OF_MEMORY)


@dataclass
class _Entry:
    """One implementation of one case in hand."""

    record: Record
    implementation: Implementation
    alive: bool = True
    prepared: bool = False  # its worker holds its program
    graph: FusionGraph | None = None
    command_buffers: dict[str, list[int]] | None = None  # see compare.record.run_folder
    rounds: list[dict[str, Any]] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)  # of each round: in which of its workers, counted from 0
    conditions: list[dict[str, Any] | None] = field(default_factory=list)  # of the GPU, beside each round
    modes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # rounds of each mode beside the main one
    unavailable: dict[str, str] = field(default_factory=dict)  # why a mode cannot be had
    traces: dict[str, CallTrace] | None = None  # of one call, by part
    packed: Future[None] | None = None  # its artifacts; nothing is packed of a later compile

    @property
    def role(self) -> str:
        return self.implementation.framework


class Lane:
    """Holds one group of cases at a time; what compiles or checks may be called in a thread of its own, all else from
    one, and the clerk's writes what is finished."""

    def __init__(
        self, session: Session, crew: Crew, timing: Timing, gate: Gate, clerk: Clerk, make_room: Callable[[], bool]
    ) -> None:
        """make_room: called where something finds no memory while it is timed; whether trying again is worth while."""
        self.session, self.crew, self._timing, self._make_room = session, crew, timing, make_room
        self._gate, self._clerk = gate, clerk
        self._beside_others = False
        self.process = 0  # which of its processes is next to take its rounds
        self._cases: list[list[_Entry]] = []
        self._data: Data | None = None

    def take(self, group: Group) -> None:
        self._cases = [[_Entry(self.session.new(case, i), i) for i in found] for case, found in group]
        for entry in self._entries():
            if reason := entry.implementation.unsupported(entry.record.case):
                entry.record.status, entry.record.detail, entry.alive = "skipped", reason, False
        self._data, self.process = None, 0

    def ask(self, role: str, method: str, **params: Any) -> Any:
        """A worker of its crew; see `Crew.ask`. What goes on beside other lanes waits at the gate while somebody is
        timed."""
        with self._gate.passed() if self._beside_others else contextlib.nullcontext():
            return self.crew.ask(role, method, **params)

    def needs_restart(self, kept: int) -> set[str]:
        """Return the frameworks whose processes keep more than `kept` bytes of the GPU's memory."""
        found = set()
        for role in filter(self.crew.has, ("torch", "xla")):
            with contextlib.suppress(*WORKER_FAILURES):  # who cannot answer fails again, in its record
                if self.crew.ask(role, "needs_restart", kept=kept):
                    found.add(role)
        return found

    def prepare(self) -> None:
        """Beside other lanes: draw inputs; compile, and evaluate the references, side by side; and check what was
        compiled."""
        with self._beside():
            if not any(self._alive()):
                return
            with ThreadPoolExecutor(2) as threads:
                threads.submit(self._start)
                try:
                    self._data = self.session.draw(widest(self._cases[0][0].record.case), self)
                    references = threads.submit(self.session.refer, self._data, self)
                    self._by_role(self._prepare_first, list(self._alive()))
                    references.result()
                except WORKER_FAILURES as problem:
                    for entry in self._alive():
                        self._fail(entry, problem)
                        entry.record.detail = f"no reference: {entry.record.detail}"
            self._by_role(self._tune, self._unprepared())
            self._by_role(self._check, list(self._alive()))

    def _unprepared(self) -> list[_Entry]:
        """What times kernels to choose one, for which it waits for its turn (compare.workers.autotune_lock): it comes
        last."""
        return [entry for entry in self._alive() if not entry.prepared]

    def dismiss(self) -> None:
        """End the processes: what a process happens upon, as where its memory lies, is drawn again."""
        self.crew.dismiss({entry.role for entry in self._alive()})
        self._forget(self._entries())

    def prepare_again(self) -> None:
        """Compile in fresh processes, beside other lanes."""
        with self._beside():
            self._start()
            self._by_role(self._prepare_or_fail, list(self._alive()))
            self._by_role(self._tune, self._unprepared())

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        self._beside_others = True
        try:
            yield
        finally:
            self._beside_others = False

    def measure(self) -> None:
        """Those rounds of each case that belong to the processes that it has; the GPU is this lane's alone."""
        for entries in self._cases:
            self.session.progress.say(f"timing {entries[0].record.case.id}")
            for number in range(self._timing.rounds):
                if self._timing.process_of(number) == self.process:
                    self._round(entries, number)
        self.process += 1

    @property
    def measured(self) -> bool:
        """Whether all of its processes had their rounds."""
        return self.process > self._timing.restarts

    def starved(self) -> bool:
        """Whether something of the group failed for want of memory."""
        return any(_wants_memory(e.record.detail or "") for e in self._entries() if e.record.status == "failed")

    @property
    def busy(self) -> bool:
        """Whether it holds a group that is not finished."""
        return bool(self._cases)

    def finish(self) -> None:
        """Trace one call of each implementation, and have its record written."""
        for entries in self._cases:
            self._trace(entries)
            for entry in entries:
                self._release(entry)
                self._clerk.do(partial(self._complete, entry))
        self._cases = []
        self._tidy()

    def abandon(self) -> None:
        """Let go of what is not finished, without a record."""
        for entry in self._entries():
            self._release(entry)
        wait([entry.packed for entry in self._entries() if entry.packed])  # another try writes where these are read
        self._cases = []
        self._tidy()

    def _release(self, entry: _Entry) -> None:
        if entry.record.status != "skipped":
            # A program is gone with its worker; the record says how that ended, where it was its own.
            with contextlib.suppress(*WORKER_FAILURES):
                self.crew.ask(entry.role, "release", id=entry.record.id)

    def _tidy(self) -> None:
        if self._data is not None:
            shutil.rmtree(self._data.folders[0].parent, ignore_errors=True)
            self._data = None

    def _start(self) -> None:
        """Those workers that the group needs and are not there, all at once: each spends seconds importing, and its
        context on the GPU takes time from others."""
        with self._gate.passed():
            self.crew.start({entry.role for entry in self._alive()})

    def _entries(self) -> Iterator[_Entry]:
        return (entry for entries in self._cases for entry in entries)

    def _alive(self) -> Iterator[_Entry]:
        return (entry for entry in self._entries() if entry.alive)

    @staticmethod
    def _by_role(do: Callable[[_Entry], object], entries: Sequence[_Entry]) -> None:
        """Each framework's entries in order, frameworks side by side."""

        def of(role: str) -> None:
            for entry in entries:
                if entry.role == role and entry.alive:
                    do(entry)

        roles = sorted({entry.role for entry in entries})
        with ThreadPoolExecutor(max(1, len(roles))) as threads:
            list(threads.map(of, roles))

    def _tune(self, entry: _Entry) -> None:
        """Past the gate: it takes minutes, and nobody need wait for that. Its worker times kernels under a lock, which
        who is timed holds (compare.workers.autotune_lock), and goes on compiling meanwhile."""
        found = entry.record.status == "ok"  # by an earlier process; the record keeps the first compile
        (self._prepare_or_fail if found else self._prepare_first)(entry, tune=True)

    def _prepare_first(self, entry: _Entry, *, tune: bool = False) -> None:
        record = entry.record
        self.session.progress.say(f"compiling {record.id}")
        if (prepared := self._prepare_or_fail(entry, tune=tune)) is None:
            return
        record.compile_s, entry.command_buffers = prepared["compile_s"], prepared["command_buffers"]
        entry.graph = None if prepared["graph"] is None else store.from_json(prepared["graph"])

    def _check(self, entry: _Entry) -> None:
        record = entry.record
        self.session.progress.say(f"checking {record.id}")
        try:
            outcome = self.ask(entry.role, "check", id=record.id, scales=self._known().scales, timeout=300)
        except WORKER_FAILURES as problem:
            self._fail_and_revive(entry, problem)
            return
        finally:
            entry.packed = self._clerk.do(partial(self.session.archive, record))
        record.status = "ok"
        record.checked = {
            "device": outcome["device"], "backend": outcome["backend"], "dtype": record.case.dtype,
            "case": record.case.name,
        }
        judge(record, outcome["errors"])
        entry.alive = record.status == "ok"

    def _prepare_or_fail(self, entry: _Entry, *, tune: bool = False) -> dict[str, Any] | None:
        """As `_prepare`, past the gate if it is to tune; None also where it fails, as its record says."""
        try:
            return self._prepare(entry, tune, at_gate=not tune)
        except WORKER_FAILURES as problem:
            self._fail_and_revive(entry, problem)
            return None

    def _prepare(self, entry: _Entry, tune: bool, at_gate: bool = True) -> dict[str, Any] | None:
        """Have the worker compile; returns what it says of that, None where it would have to time kernels and is not to
        `tune`."""
        record, data, dumps = entry.record, self._known(), self.session.dumps_folder(entry.record)
        if entry.packed is not None:
            wait([entry.packed])
        shutil.rmtree(dumps, ignore_errors=True)  # of a process that is gone
        try:
            with self._compiling(entry) if at_gate and self._beside_others else contextlib.nullcontext():
                prepared: dict[str, Any] = self.crew.ask(
                    entry.role, "prepare", id=record.id, case=record.case.to_json(),
                    implementation=record.implementation, folders=[str(f) for f in data.folders], dumps=str(dumps),
                    tune=tune, scales=data.scales, timeout=TUNE_SECONDS if tune else COMPILE_SECONDS,
                )
        except WorkerError as problem:
            if problem.kind != "untuned":
                raise
            if tune:
                raise WorkerError("failed", f"it was to tune, and did not: {problem.message}") from problem
            return None
        entry.prepared = True
        return prepared

    def _compiling(self, entry: _Entry) -> AbstractContextManager[None]:
        """To prepare what no compiler makes is mostly to call it."""
        return self._gate.compiling(entry.role) if entry.implementation.compiled_on_host else self._gate.passed()

    def _known(self) -> Data:
        assert self._data is not None
        return self._data

    def _round(self, entries: list[_Entry], number: int) -> None:
        """Each round starts with another implementation, so that drift hits all alike, and is on another input set. It
        visits all in the main mode, then all in the next one."""
        for mode in (MAIN, *self._timing.modes):
            alive = [e for e in entries if e.alive]
            start = number % len(alive) if alive else 0
            for entry in alive[start:] + alive[:start]:
                if not entry.alive:  # its worker died under another implementation and could not prepare it again
                    continue
                if mode == MAIN:
                    self._measure_main(entry, number)
                elif mode not in entry.unavailable:
                    self._measure_mode(entry, mode, number)

    def _ask_alone(self, entry: _Entry, method: str, **params: Any) -> Any:
        """Of what is done while all others wait: where it finds no memory, once more if they could make room."""
        ask = partial(self.crew.ask, entry.role, method, id=entry.record.id, timeout=300, **params)
        try:
            return ask()
        except WorkerError as problem:
            if not (_wants_memory(problem.message) and self._make_room()):
                raise
            return ask()

    def _measure_main(self, entry: _Entry, number: int) -> None:
        try:
            entry.rounds.append(
                self._ask_alone(entry, "measure", seconds=ROUND_SECONDS, first=number == 0, input_set=number)
            )
            entry.processes.append(self._timing.process_of(number))
            entry.conditions.append(conditions.read())
        except WORKER_FAILURES as problem:
            self._fail_and_revive(entry, problem)

    def _measure_mode(self, entry: _Entry, mode: str, number: int) -> None:
        """Unlike the main mode, one that cannot be had costs itself alone, with the reason."""
        rounds = entry.modes.setdefault(mode, [])
        if rounds and "same_as" in rounds[0]:
            return
        try:
            rounds.append(
                self._ask_alone(entry, "measure_mode", mode=mode, seconds=ROUND_SECONDS, input_set=number)
            )
        except WorkerError as problem:
            if mode == "warm" and problem.kind == "wrong":  # the very program of the main mode: so are its results
                self._fail(entry, problem)
            entry.unavailable[mode] = problem.message
        except (WorkerDied, WorkerTimeout) as problem:
            entry.unavailable[mode] = str(problem)
            self._revive(entry.role)

    def _fail_and_revive(self, entry: _Entry, problem: Exception) -> None:
        self._fail(entry, problem)
        if not isinstance(problem, WorkerError):
            self._revive(entry.role)

    def _revive(self, role: str) -> None:
        """After a worker's death: all that it held, in a fresh one; what it did not hold yet is prepared in turn. Who
        kills that one, too, fails for it, and the others begin again."""
        held = [entry for entry in self._alive() if entry.role == role and entry.prepared]
        self._forget(held)
        while left := [entry for entry in held if entry.alive and not entry.prepared]:
            try:
                with contextlib.nullcontext() if self._beside_others else self._gate.lent():
                    self._prepare(left[0], tune=True)
            except WORKER_FAILURES as problem:
                self._fail(left[0], problem)
                if not isinstance(problem, WorkerError):
                    self._forget(held)

    @staticmethod
    def _forget(entries: Iterable[_Entry]) -> None:
        for entry in entries:
            entry.prepared = False

    def _trace(self, entries: list[_Entry]) -> None:
        """One more call of each, for its timeline; what goes wrong with it costs the timeline alone."""
        gone: dict[str, str] = {}
        for entry in entries:
            record = entry.record
            if not entry.alive or self.session.timers[entry.role] != CuptiClock.name:
                continue
            if entry.role in gone:
                record.trace = {"unavailable": gone[entry.role]}
                continue
            try:
                found = self._ask_alone(entry, "trace")
            except WorkerError as problem:
                record.trace = {"unavailable": problem.message}
            except (WorkerDied, WorkerTimeout) as problem:
                gone[entry.role] = f"while {record.id} was traced: {problem}"
                record.trace = {"unavailable": gone[entry.role]}
            else:
                entry.traces = {part: CallTrace.from_json(found[part]) for part in record.case.parts}

    @staticmethod
    def _fail(entry: _Entry, problem: Exception) -> None:
        note_failure(entry.record, problem)
        entry.alive = False

    def _complete(self, entry: _Entry) -> None:
        """Write the record, with timeline, measurement and graph; in the clerk's thread."""
        if entry.packed is not None:
            entry.packed.result()  # or it would name no archive, and be done with
        if entry.traces is not None:
            self.session.keep_trace(entry.record, timeline.of_call(entry.traces, entry.graph, name=entry.record.id))
        timer = self.session.timers[entry.role]
        if entry.alive:
            entry.record.measurement = _measurement(entry, timer)
        if entry.graph is not None:
            self._keep_graph(entry, entry.graph, timer)
        self.session.write(entry.record)

    def _keep_graph(self, entry: _Entry, graph: FusionGraph, timer: str | None) -> None:
        """The graph has the times of the records of a median call, each joined to its kernel."""
        unjoined = {}
        for part, measured in ((entry.record.measurement or {}).get("parts") or {}).items():
            if graph.kernels is not None and timer == CuptiClock.name:
                records = [DeviceRecord.from_json(record) for record in measured["records"]]
                graph, left = join(graph, {part: records})
                unjoined[part] = [record.name for record in left]
        self.session.keep_graph(entry.record, graph)
        for part, names in unjoined.items():
            entry.record.kernels[part]["unjoined"] = names


def _measurement(entry: _Entry, timer: str | None) -> dict[str, Any]:
    """The record's measurement from its rounds; see compare.record.record.Record."""
    parts = None
    if entry.rounds[0]["parts"] is not None:
        described = entry.rounds[entry.processes.count(0) - 1]["parts"]  # of the compile that the graph is of
        parts = {
            part: _timed(entry.rounds, part) | {"records": described[part]["records"]}
            for part in entry.record.case.parts
        }
    warm_ups = [r["warm_up"] for r in entry.rounds if r["warm_up"]]
    peaks = next((r for r in entry.rounds if "peak_memory" in r), {})
    return {
        "timer": timer, "parts": parts,
        "wall_time": [r["wall_time"] for r in entry.rounds], "peak_memory_bytes": peaks.get("peak_memory_bytes"),
        "peak_memory": peaks.get("peak_memory"),
        "conditions": entry.conditions, "processes": entry.processes,
        "warm_up": {name: [w[name] for w in warm_ups] for name in ("seconds", "settled")},
        "command_buffers": entry.command_buffers,
        "modes": {mode: _mode(entry, mode) for mode in entry.modes},
    }


def _mode(entry: _Entry, mode: str) -> dict[str, Any]:
    if mode in entry.unavailable:
        return {"unavailable": entry.unavailable[mode]}
    rounds = entry.modes[mode]
    if "same_as" in rounds[0]:
        return rounds[0]
    return {
        "parts": {part: _timed(rounds, part) for part in entry.record.case.parts},
        "settled": [r["warm_up"]["settled"] for r in rounds],
        "command_buffers": rounds[0].get("command_buffers"),
    }


def _timed(rounds: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """One part over all rounds of a mode."""
    found = [r["parts"][part] for r in rounds]
    busy_times = [f["busy_time"] for f in found]
    return {
        "device_time": [f["device_time"] for f in found], "busy_time": None if None in busy_times else busy_times,
        "launches": found[0]["launches"], "poisoned": all(f["poisoned"] for f in found),
    }
