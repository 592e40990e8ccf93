"""Cases that span several GPUs of one host: each implementation in turn is prepared, checked, timed and recorded.

A rank group runs it (compare.workers.rank_group). Collectives hang easily, so every request has a short time limit; an
implementation that hangs, dies or fails costs its own record, and the next one gets fresh ranks.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import convert

from ..base import host
from ..graph import store
from ..graph.join.kernel_records import join
from ..graph.model import FusionGraph
from ..measure import timeline
from ..measure.clock import CallTrace, CuptiClock
from ..plan.paired_rounds import later
from ..plan.speedup import LEAST_ROUNDS
from ..record.record import Record
from ..record.record_fields import (
    Checked,
    DeviceRecord,
    ErrorCheck,
    Measurement,
    ParallelFields,
    RankFields,
    TimelineFields,
    TimesOfPhase,
)
from ..record.run_folder import RunFolderError
from ..spec.case import Case
from ..spec.implementation import Implementation
from ..workers.client import WORKER_FAILURES
from ..workers.rank_group import rank_role
from .batches import Group, groups_of, widest
from .session import Data, Session, TimeIsUp, judge, note_failure

# Time limits of requests. XLA times candidate kernels while it compiles; the others compile within seconds.
COMPILE_SECONDS = {"xla": 150.0, "torch": 60.0}
CHECK_SECONDS = MEASURE_SECONDS = 60.0
GRAPH_SECONDS = TRACE_SECONDS = 30.0


def run(
    work: Sequence[tuple[Case, Sequence[Implementation]]], session: Session, *, timed: bool, deadline: float | None
) -> None:
    """Write one record for each case and implementation. Raises TimeIsUp before a record that begins after `deadline`.
    """
    _describe(work, session)
    for group in groups_of(work):
        if reason := too_few_gpus(group[0][0]):
            for case, found in group:
                for implementation in found:
                    entry = session.new(case, implementation)
                    entry.status, entry.detail = "skipped", reason
                    session.write(entry)
            continue
        _group(group, session, timed, deadline)


def _describe(work: Sequence[tuple[Case, Sequence[Implementation]]], session: Session) -> None:
    """Add the rank workers' environments to the segment; a group that does not start fails again, in its records."""
    roles = {
        (i.backend.worker, case.ranks) for case, found in work if too_few_gpus(case) is None for i in found
    }
    session.workers.start(["reference", *(rank_role(worker, ranks) for worker, ranks in roles)])
    described: dict[str, Any] = {}
    for worker, ranks in sorted(roles):
        try:
            described[f"{worker}-ranks"] = session.workers.ask(rank_role(worker, ranks), "environment")[0]
        except WORKER_FAILURES as problem:
            described[f"{worker}-ranks"] = {"unavailable": str(problem)}
            session.progress.warn(f"the {worker} ranks are not available: {problem}")
    session.describe_workers(described)
    session.timers |= {role: found.get("timer") for role, found in described.items()}


def too_few_gpus(case: Case) -> str | None:
    """Return why this machine cannot run the case, or None."""
    gpus = host.gpu_count()
    return None if gpus >= case.ranks else f"the case spans {case.ranks} GPUs; this machine has {gpus}"


def worst_errors(answers: Sequence[Mapping[str, Any]]) -> list[ErrorCheck]:
    """Return the worst error of each output and gradient over the answers to `check`."""
    worst: dict[str, ErrorCheck] = {}
    for check in (check for answer in answers for check in convert(answer["errors"], list[ErrorCheck])):
        if check.name not in worst or check.severity > worst[check.name].severity:
            worst[check.name] = check
    return list(worst.values())


def _group(group: Group, session: Session, timed: bool, deadline: float | None) -> None:
    """Write the records of one shape, whose directions share inputs and references."""
    session.progress.say(f"drawing {group[0][0].id}")
    data: Data | None = None
    failure: Exception | None = None
    try:
        data = session.draw(widest(group[0][0]), session.workers)
        session.refer(data, session.workers)
        session.workers.restart({"reference"})  # its GPU memory is the first rank's
    except WORKER_FAILURES as problem:
        failure = problem
    try:
        for case, implementation in [(case, i) for case, found in group for i in found]:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeIsUp
            entry = session.new(case, implementation)
            if reason := implementation.unsupported(case):
                entry.status, entry.detail = "skipped", reason
            elif data is None or failure is not None:
                note_failure(entry, failure or RuntimeError("no reference"))
                entry.detail = f"no reference: {entry.detail}"
            else:
                _Record(session, data, entry, implementation).make(timed)
            session.write(entry)
    finally:
        if data is not None:
            shutil.rmtree(data.folders[0].parent, ignore_errors=True)


class _Record:
    """One record while it is made."""

    def __init__(self, session: Session, data: Data, entry: Record, implementation: Implementation) -> None:
        self._session, self._data, self._entry, self._implementation = session, data, entry, implementation
        self._worker = implementation.backend.worker
        self._graph_found: FusionGraph | None = None
        self._role = rank_role(self._worker, entry.case.ranks)

    def make(self, timed: bool) -> None:
        """Prepare, check and measure; the record gets its status, numbers and graph."""
        entry, session = self._entry, self._session
        session.progress.say(entry.id)
        dumps = session.dumps_folder(entry)
        held = False
        try:
            prepared = self._prepare(dumps)
            held = True
            entry.compile_s = max(one["compile_s"] for one in prepared)
            answers = self._ask("check", CHECK_SECONDS, scales=self._data.scales)
            entry.status, entry.detail = "ok", None
            entry.checked = Checked(answers[0]["device"], answers[0]["backend"], entry.case.dtype, entry.case.name)
            judge(entry, worst_errors(answers))
            if entry.status == "ok" and timed and session.timers.get(f"{self._worker}-ranks") == CuptiClock.name:
                self._measure(prepared, dumps)
        except WORKER_FAILURES as problem:
            note_failure(entry, problem)
        session.archive(entry)
        if held:
            self._optional(lambda: self._ask("release", TRACE_SECONDS))

    def _measure(self, prepared: list[dict[str, Any]], dumps: Path) -> None:
        """Add times, then graph and timeline; those two cost nothing but themselves where they fail."""
        entry, session = self._entry, self._session
        without = self._optional(
            lambda: self._ask(
                "prepare_alone", COMPILE_SECONDS[self._worker], implementation=self._implementation.request,
                dumps=str(dumps),
            )
        )
        if not session.workers.holds(self._role):  # the ranks died, and fresh ones lack the program
            self._prepare(dumps)
        found = self._ask("measure", MEASURE_SECONDS, rounds=LEAST_ROUNDS)
        entry.measurement = measurement(found)
        entry.parallel = ParallelFields(rank_fields(found, prepared), without)
        if problem := self._optional(lambda: self._graph(entry.times["forward"].records or [])):
            session.progress.warn(f"{entry.id} has no graph with times: {problem}")
        if problem := self._optional(self._trace):
            entry.trace = TimelineFields(unavailable=problem)

    def _keep_graph(self, graph: FusionGraph, records: list[DeviceRecord]) -> None:
        """Keep the graph with the times of the first rank's median call."""
        unjoined = []
        if graph.kernels is not None:
            graph, left = join(graph, {"forward": records})
            unjoined = [record.name for record in left]
        self._session.keep_graph(self._entry, graph)
        if graph.kernels is not None:
            self._entry.kernels["forward"].unjoined = unjoined

    def _prepare(self, dumps: Path) -> list[dict[str, Any]]:
        entry = self._entry
        return self._ask(
            "prepare", COMPILE_SECONDS[self._worker], case=entry.case.to_json(),
            implementation=self._implementation.request,
            folders=[str(f) for f in self._data.folders], dumps=str(dumps),
        )

    def _graph(self, records: list[DeviceRecord]) -> None:
        found = self._ask("graph", GRAPH_SECONDS)[0]
        if found is not None:
            self._graph_found = store.from_json(found)
            self._keep_graph(self._graph_found, records)

    def _trace(self) -> None:
        traces = convert(self._ask("trace", TRACE_SECONDS), list[CallTrace])
        self._session.keep_trace(self._entry, timeline.of_ranks(traces, self._graph_found, name=self._entry.id))

    def _optional(self, task: Callable[[], Any]) -> str | None:
        """Do what costs no more than its own result; return why it failed, or None."""
        try:
            task()
        except RunFolderError:
            raise
        except Exception as problem:  # also one of this process, as of a graph that does not fit the records
            return str(problem) if isinstance(problem, WORKER_FAILURES) else f"{type(problem).__name__}: {problem}"
        return None

    def _ask(self, method: str, seconds: float, **params: Any) -> list[Any]:
        answers: list[Any] = self._session.workers.ask(
            self._role, method, id=self._entry.id, timeout=seconds, **params
        )
        return answers


def measurement(ranks: Sequence[Mapping[str, Any]]) -> Measurement:
    """Return the record's measurement: a call takes as long as on its slowest rank.

    ranks: the answers to `measure`. Busy times are those of the same rank; records are the first rank's.
    """
    rounds = [list(zip(*calls, strict=True)) for calls in zip(*(rank["program"] for rank in ranks), strict=True)]
    slowest = [[max(call, key=lambda one: one["device_time"]) for call in calls] for calls in rounds]
    records = convert(ranks[0]["records"], list[DeviceRecord])
    times = TimesOfPhase(
        device_time=[[one["device_time"] for one in calls] for calls in slowest],
        busy_time=[[one["busy_time"] for one in calls] for calls in slowest], launches=len(records), records=records,
    )
    return Measurement(timer=CuptiClock.name, phases={"forward": times})


def rank_fields(ranks: Sequence[Mapping[str, Any]], prepared: Sequence[Mapping[str, Any]]) -> list[RankFields]:
    """Return each rank's medians over all calls that count.

    prepared: the ranks' answers to `prepare`.
    """

    def median(rounds: list[list[dict[str, float]]] | None, name: str) -> Any:
        return None if rounds is None else statistics.median(one[name] for calls in rounds for one in later(calls))

    return [
        RankFields(
            device_time=median(rank["program"], "device_time"), busy_time=median(rank["program"], "busy_time"),
            communication=median(rank["program"], "communication"), compute=median(rank["program"], "compute"),
            overlap=median(rank["program"], "both"),
            alone_device_time=median(rank["alone"], "device_time"),
            alone_compute=median(rank["alone"], "compute"),
            sent_bytes=answer["sent"], least_sent_bytes=answer["least_sent"],
        )
        for rank, answer in zip(ranks, prepared, strict=True)
    ]
