"""A run on this machine's GPU: compiled, checked, then timed in rounds, the workers taking turns on the device."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from compare import conditions, timeline
from compare.calibration import AGREEMENT, disagreement
from compare.client import WORKER_FAILURES, WorkerDied, WorkerError, WorkerTimeout
from compare.clock import CallTrace, CuptiClock, DeviceRecord
from compare.graph import store
from compare.graph.join import join
from compare.graph.model import FusionGraph
from compare.record import Record
from compare.selection import Plan
from compare.session import Data, Session, judge, note_failure
from compare.spec import Case, Implementation
from compare.timing import MAIN, Timing
from xlafuse.autotune import merge_results

ROUND_SECONDS = 0.015  # of timed calls, for each implementation in each round and mode


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
                _replace_worn(left, session)
                _run_case(case, left, plan.timing, session)
    finally:
        _join_autotune_results(session.folder / "target" / "xla")


@dataclass
class _Entry:
    """One implementation of the case at hand."""

    record: Record
    implementation: Implementation
    alive: bool = True
    graph: FusionGraph | None = None
    command_buffers: dict[str, list[int]] | None = None  # see compare.record
    rounds: list[dict[str, Any]] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)  # of each round: in which of its workers, counted from 0
    conditions: list[dict[str, Any] | None] = field(default_factory=list)  # of the GPU, beside each round
    modes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # rounds of each mode beside the main one
    unavailable: dict[str, str] = field(default_factory=dict)  # why a mode cannot be had


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
        try:
            whole.write_text(merge_results(texts))
        except ValueError:  # of a jax whose files cannot be joined: each stays by itself
            continue
        for path in paths:
            path.unlink()


def _leave_in_pack(session: Session, name: str, content: dict[str, Any]) -> None:
    (session.folder / "target" / name).write_text(json.dumps(content, indent=1) + "\n")


def _replace_worn(implementations: list[Implementation], session: Session) -> None:
    """Fresh processes of those frameworks whose old ones could no longer measure peak memory."""
    worn = set()
    for role in {implementation.framework for implementation in implementations}:
        with contextlib.suppress(*WORKER_FAILURES):  # who cannot answer fails again, in its record, when it prepares
            if session.crew.ask(role, "worn"):
                worn.add(role)
    if worn:
        session.progress.say("starting fresh workers, to go on measuring peak memory")
        session.crew.restart(worn, meanwhile=partial(_join_autotune_results, session.folder / "target" / "xla"))


def _run_case(case: Case, implementations: list[Implementation], timing: Timing, session: Session) -> None:
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
        _measure(entries, timing, data, session)
        _trace(entries, session)
    for entry in entries:
        _finish(entry, session)


def _prepare_and_check(entry: _Entry, entries: list[_Entry], data: Data, session: Session) -> None:
    record, role = entry.record, entry.implementation.framework
    try:
        prepared = _prepare(entry, data, session)
        record.compile_s, entry.command_buffers = prepared["compile_s"], prepared["command_buffers"]
        entry.graph = None if prepared["graph"] is None else store.from_json(prepared["graph"])
        session.archive(record)
        outcome = session.crew.ask(role, "check", id=record.id, timeout=300)
    except WorkerError as problem:
        _fail(entry, problem)
        return
    except (WorkerDied, WorkerTimeout) as problem:
        _fail(entry, problem)
        checked = [e for e in entries if e.alive and e.record.status == "ok"]  # the later ones are prepared in turn
        _prepare_again(checked, {role}, data, session)
        return
    record.status = "ok"
    record.checked = {
        "device": outcome["device"], "backend": outcome["backend"], "dtype": record.case.dtype, "case": record.case.name
    }
    judge(record, outcome["errors"])
    entry.alive = record.status == "ok"


def _prepare(entry: _Entry, data: Data, session: Session) -> dict[str, Any]:
    """Have the worker compile; returns what it says of that."""
    record, dumps = entry.record, session.dumps_folder(entry.record)
    shutil.rmtree(dumps, ignore_errors=True)  # of a process that is gone
    prepared: dict[str, Any] = session.crew.ask(
        entry.implementation.framework, "prepare", id=record.id, case=record.case.to_json(),
        implementation=record.implementation, folders=[str(f) for f in data.folders], scales=data.scales,
        dumps=str(dumps),
    )
    return prepared


def _measure(entries: list[_Entry], timing: Timing, data: Data, session: Session) -> None:
    """Rounds over all implementations, each round starting with another one, so that drift hits all alike; and on
    another input set. A round visits all in the main mode, then all in the next one.
    """
    for number in range(timing.rounds):
        if number and timing.process_of(number) != timing.process_of(number - 1):
            _restart(entries, data, session)
        for mode in (MAIN, *timing.modes):
            alive = [e for e in entries if e.alive]
            start = number % len(alive) if alive else 0
            for entry in alive[start:] + alive[:start]:
                if not entry.alive:  # its worker died under another implementation and could not prepare it again
                    continue
                if mode == MAIN:
                    _measure_main(entry, number, timing.process_of(number), entries, data, session)
                elif mode not in entry.unavailable:
                    _measure_mode(entry, mode, number, entries, data, session)


def _measure_main(
    entry: _Entry, number: int, process: int, entries: list[_Entry], data: Data, session: Session
) -> None:
    role = entry.implementation.framework
    try:
        entry.rounds.append(
            session.crew.ask(
                role, "measure", id=entry.record.id, seconds=ROUND_SECONDS, first=number == 0, input_set=number,
                timeout=300,
            )
        )
        entry.processes.append(process)
        entry.conditions.append(conditions.read())
    except WorkerError as problem:
        _fail(entry, problem)
    except (WorkerDied, WorkerTimeout) as problem:
        _fail(entry, problem)
        _prepare_again([e for e in entries if e.alive], {role}, data, session)


def _measure_mode(
    entry: _Entry, mode: str, number: int, entries: list[_Entry], data: Data, session: Session
) -> None:
    """Unlike the main mode, one that cannot be had costs itself alone, with the reason."""
    role, rounds = entry.implementation.framework, entry.modes.setdefault(mode, [])
    if rounds and "same_as" in rounds[0]:
        return
    try:
        rounds.append(
            session.crew.ask(
                role, "measure_mode", id=entry.record.id, mode=mode, seconds=ROUND_SECONDS, input_set=number,
                timeout=300,
            )
        )
    except WorkerError as problem:
        if mode == "warm" and problem.kind == "wrong":  # the very program of the main mode: so are its results
            _fail(entry, problem)
        entry.unavailable[mode] = problem.message
    except (WorkerDied, WorkerTimeout) as problem:
        entry.unavailable[mode] = str(problem)
        _prepare_again([e for e in entries if e.alive], {role}, data, session)


def _restart(entries: list[_Entry], data: Data, session: Session) -> None:
    """Fresh processes for all frameworks: what a process happens upon, as where its memory lies, is drawn again."""
    roles = {e.implementation.framework for e in entries if e.alive}
    if not roles:
        return
    case, started = entries[0].record.case.id, time.perf_counter()
    session.progress.say(f"starting fresh workers for {case}")
    # With the files of the leaving processes joined, the fresh ones find XLA's choices instead of tuning again.
    session.crew.restart(roles, meanwhile=partial(_join_autotune_results, session.folder / "target" / "xla"))
    _prepare_again([e for e in entries if e.alive], roles, data, session)
    took = time.perf_counter() - started
    session.progress.say(f"timing {case} in fresh workers, which took {took:.0f} s to get ready")


def _prepare_again(entries: list[_Entry], roles: set[str], data: Data, session: Session) -> None:
    """In fresh workers: implementations go on with the rounds that they have; the record keeps the first compile."""
    for entry in entries:
        if entry.implementation.framework in roles:
            try:
                _prepare(entry, data, session)
            except WORKER_FAILURES as problem:
                _fail(entry, problem)


def _trace(entries: list[_Entry], session: Session) -> None:
    """One more call of each, for its timeline; what goes wrong with it costs the timeline alone."""
    gone: dict[str, str] = {}
    for entry in entries:
        record, role = entry.record, entry.implementation.framework
        if not entry.alive or session.timers[role] != CuptiClock.name:
            continue
        if role in gone:
            record.trace = {"unavailable": gone[role]}
            continue
        try:
            found = session.crew.ask(role, "trace", id=record.id, timeout=300)
        except WorkerError as problem:
            record.trace = {"unavailable": problem.message}
        except (WorkerDied, WorkerTimeout) as problem:
            gone[role] = f"while {record.id} was traced: {problem}"
            record.trace = {"unavailable": gone[role]}
        else:
            traces = {part: CallTrace.from_json(found[part]) for part in record.case.parts}
            session.keep_trace(record, timeline.of_call(traces, entry.graph, name=record.id))


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
        "timer": session.timers[entry.implementation.framework], "parts": parts,
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
    return {
        "device_time": [f["device_time"] for f in found], "busy_time": [f["busy_time"] for f in found],
        "launches": found[0]["launches"], "poisoned": all(f["poisoned"] for f in found),
    }
