"""A case runner: one worker pool that prepares a group of cases, and then measures them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from msgspec import convert

from ..base import host
from ..graph.join.kernel_records import join
from ..measure import gpu_conditions
from ..measure.clock import CuptiClock
from ..plan.plan import Plan
from ..plan.timing_modes import MAIN
from ..record.record_fields import Checked, ErrorCheck, TimelineFields
from ..record.run_folder import RunFolderError
from ..spec.case import Case
from ..workers.client import WORKER_FAILURES, WorkerDied, WorkerError, WorkerTimeout
from ..workers.pool import WorkerPool
from .batches import Group, memory_of, widest
from .entry import Entry
from .session import Data, Session, judge, note_absence, note_failure

# Time limits of one compile. On the host of an H200, beside seven other runners, the longest took 36 s (lm_step with 8
# layers), and the longest autotuned one 159 s (gpt2_block), most of it waiting for the autotune lock.
COMPILE_SECONDS, AUTOTUNE_SECONDS = 600, 900
ROUND_SECONDS = 0.006  # of timed calls, for each implementation in each round and mode


def too_few_gpus(case: Case) -> str | None:
    """Return why this machine cannot run a case over several GPUs, or None."""
    if case.ranks == 1:
        return None
    if (count := host.gpu_count()) < case.ranks:
        return f"the case spans {case.ranks} GPUs; this machine has {count}"
    kinds = sorted({gpu.name for gpu in host.gpus()[: case.ranks]})
    if len(kinds) > 1:
        return f"the case spans {case.ranks} GPUs of one kind; CUDA names first {' and '.join(kinds)}"
    return None


class CaseRunner:
    """Prepares and measures one group of cases at a time, in worker processes of its own."""

    def __init__(
        self, session: Session, workers: WorkerPool, plan: Plan, free_bytes: int | None = None
    ) -> None:
        """free_bytes: of the GPU's memory, None where no worker knows them."""
        self.session, self.workers, self._free_bytes = session, workers, free_bytes
        self._plan, self._timing = plan, plan.timing
        self.group: Group = ()
        self.gives_up = False  # the group ran out of GPU memory beside others
        self._cases: list[list[Entry]] = []
        self._data: Data | None = None
        self._alone = True

    def take(self, group: Group, *, alone: bool) -> None:
        """Begin with a group; implementations that cannot take a case are skipped with their reason.

        alone: no other group needs GPU memory. Beside others, a group that runs out of memory is given up at once, as
        XLA waits 30 s for memory before each such failure.
        """
        self.group, self.gives_up, self._alone = group, False, alone
        self._cases = [[Entry(self.session.new(case, i), i) for i in found] for case, found in group]
        self._data = None
        for entry in self._entries():
            case = entry.record.case
            if reason := too_few_gpus(case) or entry.implementation.unsupported(case):
                entry.record.status, entry.record.detail, entry.sound = "skipped", reason, False

    # Preparing, beside other runners.

    def prepare(self) -> None:
        """Draw inputs; compile, beside the float64 references; check. Compiles that must autotune wait for `autotune`.

        After a restart, compile again in fresh workers: a process draws its memory layout anew.
        """
        if not any(self._sound()):
            return
        self._forget(self._entries())
        self.workers.start({entry.role for entry in self._sound()})
        with ThreadPoolExecutor(1) as beside, self._references_needed():
            self._data = self._data or self.session.draw(widest(self._cases[0][0].record.case), self.workers)
            references = beside.submit(self.session.refer, self._data, self.workers)
            self._by_role(self._compile, self._sound())
            references.result()
        self.check()

    def autotune(self) -> None:
        """Compile the implementations that autotune. No other work runs; the autotune lock keeps runners apart."""
        left = [entry for entry in self._sound() if not entry.prepared]
        self._by_role(partial(self._compile, autotune=True), left)

    @contextlib.contextmanager
    def _references_needed(self) -> Iterator[None]:
        try:
            yield
        except WORKER_FAILURES as problem:
            for entry in self._sound():
                self._fail(entry, problem)
                entry.record.detail = f"no reference: {entry.record.detail}"

    def _compile(self, entry: Entry, *, autotune: bool = False) -> None:
        self.session.progress.say(f"compiling {entry.record.id}")
        with self._failure_costs(entry):
            self._prepare_program(entry, autotune)

    def _prepare_program(self, entry: Entry, autotune: bool) -> None:
        """Compile in the entry's worker, unless it needs autotuning that is not allowed. Raises its failure."""
        assert self._data is not None
        record, dumps = entry.record, self.session.dumps_folder(entry.record)
        if entry.packed is not None:
            wait([entry.packed])
        shutil.rmtree(dumps, ignore_errors=True)  # an earlier process's
        try:
            answer = self.workers.ask(
                entry.role, "prepare", id=record.id, case=record.case.to_json(),
                implementation=entry.implementation.request,
                folders=[str(folder) for folder in self._data.folders], dumps=str(dumps), autotune=autotune,
                scales=self._data.scales, timeout=AUTOTUNE_SECONDS if autotune else COMPILE_SECONDS,
            )
        except WorkerError as problem:
            if problem.kind == "not_autotuned" and not autotune:
                return
            raise
        entry.prepared = True
        entry.keep_first_compile(answer)

    def check(self) -> None:
        """Check what was not checked yet, and pack the artifacts of each compile in a thread beside."""
        entries = [entry for entry in self._sound() if entry.prepared and not entry.record.checked]
        with ThreadPoolExecutor(1) as packing:

            def check(entry: Entry) -> None:
                with self._failure_costs(entry):
                    self._check_one(entry)
                entry.packed = packing.submit(self.session.archive, entry.record)

            self._by_role(check, entries)
        for entry in entries:
            if entry.packed is not None:
                entry.packed.result()

    def _check_one(self, entry: Entry) -> None:
        assert self._data is not None
        record = entry.record
        self.session.progress.say(f"checking {record.id}")
        outcome = self._ask(entry, "check", scales=self._data.scales)
        record.status, record.detail = "ok", None
        record.checked = Checked(outcome["device"], outcome["backend"], record.case.dtype, record.case.name)
        judge(record, convert(outcome["errors"], list[ErrorCheck]))
        entry.sound = record.status == "ok"

    # Measuring, while nothing else runs.

    def measure(self, process: int) -> None:
        """Take the rounds that belong to this process number, of each case in turn."""
        for entries in self._cases:
            self.session.progress.say(f"timing {entries[0].record.case.id}")
            for number in range(self._timing.rounds):
                if self._timing.process_of(number) == process:
                    self._round(entries, number)

    def _round(self, entries: list[Entry], number: int) -> None:
        """Measure every implementation once in each mode.

        Each round starts with another implementation, so that drift hits all alike, and uses another input set.
        """
        modes = self._timing.modes if self._plan.in_depth(entries[0].record.case) else ()
        for mode in (MAIN, *modes):
            sound = [entry for entry in entries if entry.sound]
            start = number % len(sound) if sound else 0
            for entry in sound[start:] + sound[:start]:
                if not entry.sound:  # its worker died under another implementation, and it failed to compile again
                    continue
                if mode == MAIN:
                    with self._failure_costs(entry):
                        self._measure_main(entry, number)
                elif mode not in entry.unavailable:
                    self._measure_mode(entry, mode, number)

    def _measure_main(self, entry: Entry, number: int) -> None:
        found = self._ask(entry, "measure", seconds=ROUND_SECONDS, first=number == 0, input_set=number)
        entry.rounds.append(found)
        entry.processes.append(self._timing.process_of(number))
        entry.conditions.append(gpu_conditions.read())

    def _measure_mode(self, entry: Entry, mode: str, number: int) -> None:
        """Measure one round of a mode. Unlike the main mode, one that cannot be had costs itself alone."""
        rounds = entry.modes.setdefault(mode, [])
        if rounds and "same_as" in rounds[0]:
            return
        try:
            rounds.append(self._ask(entry, "measure_mode", mode=mode, seconds=ROUND_SECONDS, input_set=number))
        except WorkerError as problem:
            if mode == "warm" and problem.kind == "wrong":  # the main mode's program: its results are wrong there, too
                self._fail(entry, problem)
            elif problem.kind == "out_of_memory" and not self._alone:  # the group gives up, and is done again alone
                self._fail(entry, problem)
            entry.unavailable[mode] = problem.message
        except (WorkerDied, WorkerTimeout) as problem:
            entry.unavailable[mode] = str(problem)
            self._recover(entry.role)

    def one_by_one(self, check_deadline: Callable[[], None]) -> None:
        """Do all steps for one implementation after the other; check_deadline comes before each.

        So ranks have their GPUs for themselves, and ranks that hang or die lose one record.
        """
        if any(self._sound()):
            with self._references_needed():
                self._data = self.session.draw(widest(self._cases[0][0].record.case), self.workers)
                self.session.refer(self._data, self.workers)
                self.workers.restart({"reference"})  # its GPU memory is the first rank's
        for entry in self._entries():
            check_deadline()
            if entry.sound:
                self._compile(entry, autotune=True)
                self.check()
            if entry.sound and self._plan.is_timed and self.session.timers.get(entry.role) == CuptiClock.name:
                for number in range(self._timing.rounds):
                    self._round([entry], number)
            if entry.sound and entry.rounds:
                self._ask_for_graph(entry)
                self._trace([entry])
            if entry.prepared:
                self._release(entry)
            self._write(entry)
        self._drop()

    def _ask_for_graph(self, entry: Entry) -> None:
        """Get the graph that ranks make after the measurement; a failure costs the graph alone."""
        try:
            entry.keep_graph(self._ask(entry, "graph"))
        except WORKER_FAILURES as problem:
            self.session.progress.warn(f"{entry.record.id} has no graph: {problem}")

    def finish(self) -> None:
        """Trace one call of each implementation where anything was timed, write the records, and let the group go.

        A group that gives up gets no records.
        """
        for entries in self._cases:
            if self._plan.in_depth(entries[0].record.case) and not self.gives_up:
                self._trace([entry for entry in entries if entry.rounds])
            for entry in entries:
                self._release(entry)
                if not self.gives_up:
                    self._write(entry)
        self._drop()

    def _trace(self, entries: list[Entry]) -> None:
        """Trace one more call of each for its timeline; a failure costs the timeline alone."""
        dead: dict[str, str] = {}  # by role, the reason why nothing more is traced
        for entry in entries:
            record = entry.record
            if not entry.sound or self.session.timers[entry.role] != CuptiClock.name:
                continue
            if entry.role in dead:
                record.trace = TimelineFields(unavailable=dead[entry.role])
                continue
            try:
                self.session.keep_trace(record, entry.timeline(self._ask(entry, "trace")))
            except RunFolderError:
                raise
            except Exception as problem:  # also one of this process, as of a call that cannot be drawn
                reason = str(problem) if isinstance(problem, WorkerError) else f"{type(problem).__name__}: {problem}"
                if isinstance(problem, WorkerDied | WorkerTimeout):
                    reason = dead[entry.role] = f"while {record.id} was traced: {problem}"
                record.trace = TimelineFields(unavailable=reason)

    def _write(self, entry: Entry) -> None:
        """Write the record, with its measurement and graph. A graph that does not fit the times costs itself alone."""
        timer = self.session.timers.get(entry.role)
        if entry.sound and entry.rounds:
            entry.keep_measurement(timer)
        try:
            self._keep_graph(entry, timer)
        except RunFolderError:
            raise
        except Exception as problem:
            self.session.progress.warn(f"{entry.record.id} has no graph: {type(problem).__name__}: {problem}")
        self.session.write(entry.record)

    def _keep_graph(self, entry: Entry, timer: str | None) -> None:
        """Keep the graph with the times of a median call, each record joined to its kernel."""
        if (graph := entry.graph) is None:
            return
        unjoined = {}
        for phase, measured in entry.record.times.items():
            if graph.kernels is not None and timer == CuptiClock.name:
                graph, left = join(graph, {phase: measured.records or []})
                unjoined[phase] = [record.name for record in left]
        self.session.keep_graph(entry.record, graph)
        for phase, names in unjoined.items():
            entry.record.kernels[phase].unjoined = names

    # Failures.

    @contextlib.contextmanager
    def _failure_costs(self, entry: Entry) -> Iterator[None]:
        """Put a failure of the entry's worker into its record; go on in a fresh worker if this one is gone."""
        try:
            yield
        except WORKER_FAILURES as problem:
            self._fail(entry, problem)
            if not isinstance(problem, WorkerError):
                self._recover(entry.role)

    def _fail(self, entry: Entry, problem: Exception) -> None:
        record = entry.record
        note_failure(record, problem)
        for gpu in host.gpus()[:1]:
            note_absence(record, entry.implementation, gpu.properties)
        entry.sound = False
        if not isinstance(problem, WorkerError) or problem.kind != "out_of_memory":
            return
        self.gives_up = not self._alone
        needed = memory_of([(record.case, [entry.implementation])])
        if self._alone and self._free_bytes is not None and needed > self._free_bytes:
            record.status = "skipped"
            record.detail = (
                f"it needs about {needed / 1e9:.0f} GB by estimate, and this GPU has "
                f"{self._free_bytes / 1e9:.0f} GB free: {record.detail}"
            )

    def _recover(self, role: str) -> None:
        """After a worker's death, compile again the programs that it held, in a fresh one.

        An entry that kills this one, too, fails for it, and the others are compiled once more.
        """
        lost = [entry for entry in self._sound() if entry.role == role and entry.prepared]
        self._forget(lost)
        while left := [entry for entry in lost if entry.sound and not entry.prepared]:
            try:
                self._prepare_program(left[0], autotune=True)
            except WORKER_FAILURES as problem:
                self._fail(left[0], problem)
                if not isinstance(problem, WorkerError):
                    self._forget(lost)

    @staticmethod
    def _forget(entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.prepared = False

    # Plumbing.

    def _ask(self, entry: Entry, method: str, **params: Any) -> Any:
        return self.workers.ask(entry.role, method, id=entry.record.id, timeout=300, **params)

    def _release(self, entry: Entry) -> None:
        if entry.record.status != "skipped":
            with contextlib.suppress(*WORKER_FAILURES):  # a dead worker holds no program
                self.workers.ask(entry.role, "release", id=entry.record.id)
        entry.prepared = False

    def _drop(self) -> None:
        self._cases = []
        if self._data is not None:
            shutil.rmtree(self._data.folders[0].parent, ignore_errors=True)
            self._data = None

    def _entries(self) -> Iterator[Entry]:
        return (entry for entries in self._cases for entry in entries)

    def _sound(self) -> list[Entry]:
        return [entry for entry in self._entries() if entry.sound]

    def _by_role(self, do: Callable[[Entry], object], entries: Sequence[Entry]) -> None:
        """Do it for each entry: one role's in order, roles side by side."""

        def in_order(role: str) -> None:
            for entry in entries:
                if entry.role == role and entry.sound and not self.gives_up:
                    do(entry)

        roles = sorted({entry.role for entry in entries})
        with ThreadPoolExecutor(max(1, len(roles))) as threads:
            list(threads.map(in_order, roles))
