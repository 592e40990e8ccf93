"""A run on this machine's GPU: compiled, checked, then timed in rounds, the workers taking turns on the device."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import conditions
from compare.calibration import AGREEMENT, disagreement
from compare.client import WORKER_FAILURES, WorkerDied, WorkerError, WorkerTimeout
from compare.clock import CuptiClock, DeviceRecord
from compare.graph import store
from compare.graph.join import join
from compare.graph.model import FusionGraph
from compare.record import Record
from compare.selection import Plan
from compare.session import Data, Session, judge, note_failure
from compare.spec import Case, Implementation
from xlafuse.autotune import merge_results

ROUNDS = 5
ROUND_SECONDS = 0.015  # of timed calls, for each implementation in each round


def environment(folder: Path) -> dict[str, str]:
    """XLA writes what its autotuner chose into the run's own target pack, to be replayed where there is no GPU."""
    (folder / "target" / "xla").mkdir(parents=True, exist_ok=True)
    return {"XLAFUSE_TARGET_PACK": str((folder / "target").resolve())}


def run(plan: Plan, session: Session) -> None:
    """Write one record for each case and implementation of the plan."""
    _describe_machine(plan, session)
    try:
        for case, implementations in plan.work:
            left = session.pending(case, implementations)
            if left:
                _run_case(case, left, session)
    finally:
        _join_autotune_results(session.folder / "target" / "xla")


@dataclass
class _Entry:
    """One implementation of the case at hand."""

    record: Record
    implementation: Implementation
    alive: bool = True
    graph: FusionGraph | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    conditions: list[dict[str, Any] | None] = field(default_factory=list)  # of the GPU, beside each round


def _describe_machine(plan: Plan, session: Session) -> None:
    """Environment of each worker that the plan needs, and this segment's ceilings."""
    roles = {implementation.framework for _, group in plan.work for implementation in group}
    session.crew.start({*roles, "reference"})
    session.progress.say("measuring this GPU's ceilings")
    workers: dict[str, Any] = {}
    clocks: dict[str, float] = {}
    ceilings = None
    for role in sorted(roles):
        try:
            workers[role] = session.crew.ask(role, "environment")
            if (seconds := session.crew.ask(role, "calibrate")) is not None:
                clocks[role] = seconds
            if role == "torch":
                ceilings = session.crew.ask(role, "ceilings")
                properties = session.crew.ask(role, "device_properties")
                _leave_in_pack(session, "ceilings.json", ceilings)
                _leave_in_pack(session, "cuda_device_properties.json", properties)
        except WORKER_FAILURES as problem:
            workers[role] = {"unavailable": str(problem)}
    if (apart := disagreement(clocks)) > AGREEMENT:
        session.progress.say(f"the workers' clocks differ by {apart:.1%}: no ratio between them will be given")
    session.begin_segment(workers, ceilings, clocks)


def _join_autotune_results(folder: Path) -> None:
    """One file a jax version of what each XLA worker's process left (`autotune-<version>.<process>.textproto`)."""
    parts: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("autotune-*.*.textproto"), key=lambda p: p.stat().st_mtime):
        stem, _, process = path.name.removesuffix(".textproto").rpartition(".")
        if process.isdigit() and stem.count(".") == 2:
            parts.setdefault(stem, []).append(path)
    for stem, paths in parts.items():
        whole = folder / f"{stem}.textproto"
        texts = [path.read_text() for path in ([whole] if whole.is_file() else []) + paths]
        whole.write_text(merge_results(texts))
        for path in paths:
            path.unlink()


def _leave_in_pack(session: Session, name: str, content: dict[str, Any]) -> None:
    (session.folder / "target" / name).write_text(json.dumps(content, indent=1) + "\n")


def _run_case(case: Case, implementations: list[Implementation], session: Session) -> None:
    entries = [_Entry(session.new(case, i), i) for i in implementations]
    for entry in entries:
        if reason := entry.implementation.unsupported(case):
            entry.record.status, entry.record.detail, entry.alive = "skipped", reason, False
    try:
        data = session.data(case)
    except WORKER_FAILURES as problem:
        for entry in entries:
            if entry.alive:
                _fail(entry, problem)
                entry.record.detail = f"no reference: {entry.record.detail}"
    else:
        for entry in entries:
            if entry.alive:
                session.progress.say(f"compiling and checking {entry.record.id}")
                _prepare_and_check(entry, entries, data, session)
        session.progress.say(f"timing {case.id}")
        _measure(entries, data, session)
    for entry in entries:
        _finish(entry, session)


def _prepare_and_check(entry: _Entry, entries: list[_Entry], data: Data, session: Session) -> None:
    record, role = entry.record, entry.implementation.framework
    try:
        _prepare(entry, data, session)
        session.archive(record)
        outcome = session.crew.ask(role, "check", id=record.id, timeout=300)
    except WorkerError as problem:
        _fail(entry, problem)
        return
    except (WorkerDied, WorkerTimeout) as problem:
        _fail(entry, problem)
        checked = [e for e in entries if e.alive and e.record.status == "ok"]  # the later ones are prepared in turn
        _prepare_again(checked, role, data, session)
        return
    record.status = "ok"
    record.checked = {
        "device": outcome["device"], "backend": outcome["backend"], "dtype": record.case.dtype, "case": record.case.name
    }
    judge(record, outcome["errors"])
    entry.alive = record.status == "ok"


def _prepare(entry: _Entry, data: Data, session: Session) -> None:
    record, role = entry.record, entry.implementation.framework
    prepared = session.crew.ask(
        role, "prepare", id=record.id, case=record.case.to_json(), implementation=record.implementation,
        folders=[str(f) for f in data.folders], scales=data.scales, dumps=str(session.dumps_folder(record)),
    )
    record.compile_s = prepared["compile_s"]
    entry.graph = None if prepared["graph"] is None else store.from_json(prepared["graph"])


def _measure(entries: list[_Entry], data: Data, session: Session) -> None:
    """Rounds over all implementations, each round starting with another one, so that drift hits all alike."""
    for number in range(ROUNDS):
        alive = [e for e in entries if e.alive]
        start = number % len(alive) if alive else 0
        for entry in alive[start:] + alive[:start]:
            if not entry.alive:  # its worker died under another implementation and could not prepare it again
                continue
            try:
                entry.rounds.append(
                    session.crew.ask(
                        entry.implementation.framework, "measure", id=entry.record.id, seconds=ROUND_SECONDS,
                        first=number == 0, timeout=300,
                    )
                )
                entry.conditions.append(conditions.read())
            except WorkerError as problem:
                _fail(entry, problem)
            except (WorkerDied, WorkerTimeout) as problem:
                _fail(entry, problem)
                _prepare_again([e for e in entries if e.alive], entry.implementation.framework, data, session)


def _prepare_again(entries: list[_Entry], role: str, data: Data, session: Session) -> None:
    """After a worker's death: the others of that worker go on, with the rounds that they have."""
    for entry in entries:
        if entry.implementation.framework == role:
            try:
                _prepare(entry, data, session)
            except WORKER_FAILURES as problem:
                _fail(entry, problem)


def _fail(entry: _Entry, problem: Exception) -> None:
    note_failure(entry.record, problem)
    entry.alive = False


def _finish(entry: _Entry, session: Session) -> None:
    record = entry.record
    if entry.alive:
        record.measurement = _measurement(entry, session)
    if entry.graph is not None:
        _keep_graph(entry, session)
    if record.status != "skipped":
        try:
            session.crew.ask(entry.implementation.framework, "release", id=record.id)
        except WORKER_FAILURES:
            pass  # the program is gone with its worker; the record says how that worker ended, where it was its own
    session.write(record)


def _keep_graph(entry: _Entry, session: Session) -> None:
    """The graph with the times of the records of a median call, each joined to its kernel."""
    assert entry.graph is not None
    graph, unjoined = entry.graph, {}
    for part, measured in ((entry.record.measurement or {}).get("parts") or {}).items():
        if graph.kernels is not None and session.timers[entry.implementation.framework] == CuptiClock.name:
            records = [DeviceRecord.from_json(record) for record in measured["records"]]
            graph, left = join(graph, {part: records})
            unjoined[part] = [record.name for record in left]
    session.keep_graph(entry.record, graph)
    for part, names in unjoined.items():
        entry.record.kernels[part]["unjoined"] = names


def _measurement(entry: _Entry, session: Session) -> dict[str, Any]:
    """The record's measurement from its rounds; see compare.record.Record."""
    first = entry.rounds[0]
    parts = None
    if first["parts"] is not None:
        parts = {
            part: {
                "device_time": [r["parts"][part]["device_time"] for r in entry.rounds],
                "busy_time": [r["parts"][part]["busy_time"] for r in entry.rounds],
                "launches": first["parts"][part]["launches"],
                "records": entry.rounds[-1]["parts"][part]["records"],
                "poisoned": all(r["parts"][part]["poisoned"] for r in entry.rounds),
            }
            for part in entry.record.case.parts
        }
    peaks = next((r["peak_memory_bytes"] for r in entry.rounds if "peak_memory_bytes" in r), None)
    timer = session.timers[entry.implementation.framework]
    return {
        "timer": timer, "parts": parts, "wall_time": [r["wall_time"] for r in entry.rounds],
        "peak_memory_bytes": peaks, "conditions": entry.conditions,
    }
