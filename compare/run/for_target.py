"""A run for a device that is not there: compile every implementation, and check on the CPU those with a CPU path.

Nothing takes turns on a GPU here, so the workers run side by side; records are written in the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

from msgspec import convert

from .. import targets
from ..backends import BACKENDS, Backend
from ..graph import store
from ..graph.analyse.summary import fingerprint
from ..graph.model import FusionGraph
from ..numerics.errors import worst_of_each
from ..plan.plan import Plan
from ..record.record import Record
from ..record.record_fields import Checked, ErrorCheck, RecordedTimeFields
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation
from ..targets import recorded_times
from ..targets.recorded_times import RecordedTime
from ..workers.client import WORKER_FAILURES, WorkerError
from ..workers.rank_group import role_of
from .session import Session, judge, note_absence, note_failure


def _check_queue(backend: Backend) -> str | None:
    """Return the name of the queue of a backend's CPU checks; ranks are processes of their own."""
    role = backend.cpu_check_worker
    return f"{role}-ranks" if role and backend.spans_gpus else role


QUEUES = {name for backend in BACKENDS.values() for name in (backend.target_worker, _check_queue(backend)) if name}
_INDUCTOR = ("inductor", "inductor-ranks")  # families whose programs are built in C++ on a CPU
DESCRIBED = {"xla", "torch", "target"}  # the workers whose versions a run keeps
NOT_COMPILED_RANKS = (
    "not compiled for {target}: its processes meet through the GPUs, from the first call on, or only a call knows its "
    "sizes"
)
NOT_COMPILED = (
    "nothing to compile for {target}: eager PyTorch launches prebuilt kernels, known only on a GPU; its graph has its "
    "operations, and its numbers are checked on the CPU"
)


def environment(target: str) -> dict[str, str]:
    return {"XLAFUSE_TARGET": target, "CUDA_VISIBLE_DEVICES": ""}


def run(plan: Plan, session: Session) -> None:
    """Write one record for each case and implementation of the plan."""
    session.begin_segment({}, None)
    times = recorded_times.read(targets.FOLDER / (session.target or ""))
    pools = {role: ThreadPoolExecutor(max_workers=1) for role in QUEUES}
    checks = _Checks(session, pools)
    try:
        roles = {role for _, group in plan.work for i in group for role in _roles(i, session)} & DESCRIBED
        asked = {role: pools[role].submit(session.workers.ask, role, "environment") for role in sorted(roles)}
        waiting = [
            _start(case, implementation, session, pools, checks, times)
            for case, implementations in plan.work
            for implementation in session.pending(case, implementations)
        ]
        for finish in waiting:
            entry = finish()
            _describe(session, asked)
            session.write(entry)
        _describe(session, asked, wait=True)
    finally:
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _refused(implementation: Implementation, session: Session) -> str | None:
    """Return why the implementation cannot be compiled for the run's target, or None."""
    target = session.target or ""
    return (implementation.refused_by(target) if targets.is_tpu(target) else None) or implementation.needs_gpu


def _roles(implementation: Implementation, session: Session) -> set[str]:
    if _refused(implementation, session):
        return set()
    backend = implementation.backend
    return {role for role in (backend.target_worker, _check_queue(backend)) if role}


def _describe(session: Session, asked: dict[str, Future[dict[str, Any]]], *, wait: bool = False) -> None:
    """Add the environments of the workers that have answered, or of all with `wait`, to the segment.

    A worker answers before it compiles anything, so an interrupted run still describes the workers of its records.
    """
    if answered := [role for role, answer in asked.items() if wait or answer.done()]:
        session.describe_workers({role: _described(asked.pop(role)) for role in answered})


def _described(asked: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return asked.result()
    except WORKER_FAILURES as problem:
        return {"unavailable": str(problem)}


def _start(
    case: Case, implementation: Implementation, session: Session, pools: dict[str, ThreadPoolExecutor],
    checks: _Checks, times: Mapping[str, RecordedTime],
) -> Callable[[], Record]:
    """Enqueue an implementation's compile and check; return a function that waits for both and makes the record."""
    entry = session.new(case, implementation)
    reason = implementation.unsupported(case) or _refused(implementation, session)
    if reason:
        entry.status, entry.detail = "skipped", f"not here: {reason}"
        return lambda: entry
    role = implementation.backend.target_worker
    compiling = role and pools[role].submit(_compile, role, case, implementation, session, entry)
    checking = checks.start(case, implementation)

    def finish() -> Record:
        session.progress.say(entry.id)
        try:
            if not compiling:
                entry.status, entry.detail = "skipped", NOT_COMPILED_RANKS.format(target=session.target)
                if checking is not None:
                    _join_check(entry, checking)
                return entry
            compiled = compiling.result()
            graph = store.from_json(compiled["graph"])
            session.keep_graph(entry, graph)
            entry.recorded = _recorded(times.get(entry.id), graph)
            if implementation.backend.prebuilt:
                entry.status, entry.detail = "skipped", NOT_COMPILED.format(target=session.target)
            else:
                entry.status, entry.detail, entry.compile_s = "compiled", None, compiled["compile_s"]
        except WORKER_FAILURES as problem:
            note_failure(entry, problem)
            if session.target and not targets.is_tpu(session.target):
                note_absence(entry, implementation, targets.load(session.target).device_properties())
        session.archive(entry)
        if checking is not None:
            _join_check(entry, checking)
        return entry

    return finish


def _recorded(known: RecordedTime | None, graph: FusionGraph) -> RecordedTimeFields:
    """Return the time that the target's GPU took, if it ran the same kernels."""
    if known is None:
        return RecordedTimeFields(unavailable="not recorded")
    if fingerprint(graph) != known.fingerprint:
        return RecordedTimeFields(unavailable="other kernels")
    return RecordedTimeFields(device_time_us=known.device_time_us)


def _join_check(entry: Record, checking: Future[dict[str, Any]]) -> None:
    """Add a CPU check to the record: it can make the record wrong, never ok."""
    try:
        outcome = checking.result()
    except WORKER_FAILURES as problem:
        if isinstance(problem, WorkerError) and problem.kind == "skipped":
            entry.detail = entry.detail or f"not checked on the CPU: {problem.message}"
        elif entry.status in ("compiled", "skipped"):
            note_failure(entry, problem)
            entry.detail = f"check on the CPU: {entry.detail}"
        return
    entry.checked = outcome["checked"]
    judge(entry, outcome["errors"])
    if entry.status == "wrong" and outcome["failed"]:
        entry.detail = f"check on the CPU: {outcome['failed']}: {entry.detail}"


def _compile(
    role: str, case: Case, implementation: Implementation, session: Session, entry: Record
) -> dict[str, Any]:
    params: dict[str, Any] = {
        "case": case.to_json(), "implementation": implementation.request, "dumps": str(session.dumps_folder(entry))
    }
    if role == "xla":
        params["target"] = session.target or ""
    return dict(session.workers.ask(role, "compile", **params))


class _Checks:
    """CPU checks on the block's small edge cases, each done once for all records that need it."""

    def __init__(self, session: Session, pools: dict[str, ThreadPoolExecutor]) -> None:
        self._session, self._pools = session, pools
        self._known: dict[tuple[str, ...], Future[dict[str, Any]]] = {}

    def start(self, case: Case, implementation: Implementation) -> Future[dict[str, Any]] | None:
        role = implementation.backend.cpu_check_worker
        if role is None:
            return None
        dtype = _check_dtype(case, role, implementation)
        cases = [
            c for c in BLOCKS[case.block].cpu_check_cases()
            if (c.dtype, c.direction) == (dtype, case.direction) and not implementation.unsupported(c)
        ]
        if implementation.own is not None:  # a user's function may support the selected kind of case only
            cases = [c for c in cases if _kind(c) == _kind(case)] or cases
        key = (case.block, implementation.name, dtype, case.direction, *(c.name for c in cases))
        if key not in self._known:
            if implementation.backend.family in _INDUCTOR:
                # A C++ build of seconds each; they test the graph, which is the others' too.
                cases = [c for c in cases if c.name == "odd"] or cases[:1]
            if not cases:
                return None
            queue = _check_queue(implementation.backend) or role
            self._known[key] = self._pools[queue].submit(self._check, role, cases, implementation)
        return self._known[key]

    def _check(self, worker: str, cases: list[Case], implementation: Implementation) -> dict[str, Any]:
        """Check on the CPU, in processes of their own for ranks."""
        answers: list[dict[str, Any]] = []
        for case in cases:
            entry, role = self._session.new(case, implementation), role_of(worker, case)
            data = self._session.check_data(case)
            dumps = self._session.scratch / "checks" / role / entry.id.replace("/", "-")
            try:
                self._session.workers.ask(
                    role, "prepare", id=entry.id, case=case.to_json(), implementation=implementation.request,
                    folders=[str(f) for f in data.folders], scales=data.scales, dumps=str(dumps),
                )
                answers.append(self._session.workers.ask(role, "check", id=entry.id))
            except WorkerError as problem:
                raise WorkerError(problem.kind, f"{_with_sizes(case)}: {problem.message}") from None
            self._session.workers.ask(role, "release", id=entry.id)
        return _outcome(answers, cases)


def _kind(case: Case) -> tuple[bool, ...]:
    """Return what a function of the case must support: each of the block's parameters, and groups of heads."""
    sizes = case.sizes
    parameters = (bool(sizes.get(name)) for name in BLOCKS[case.block].parameters)
    return (*parameters, sizes.get("heads") == sizes.get("kv_heads"))


def _with_sizes(case: Case) -> str:
    return f"case {case.name} ({', '.join(f'{axis}={size}' for axis, size in case.sizes.items())})"


def _outcome(answers: list[dict[str, Any]], cases: list[Case]) -> dict[str, Any]:
    errors = [convert(answer["errors"], list[ErrorCheck]) for answer in answers]
    failed = [case for case, found in zip(cases, errors, strict=True) if not all(check.passes for check in found)]
    return {
        "errors": worst_of_each(chain(*errors)), "checked": _checked(answers[-1], cases),
        "failed": _with_sizes(failed[0]) if failed else "",
    }


def _checked(outcome: Mapping[str, Any], cases: list[Case]) -> Checked:
    names = " and ".join(case.name for case in cases)
    return Checked(outcome["device"], outcome["backend"], cases[0].dtype, names)


def _check_dtype(case: Case, role: str, implementation: Implementation) -> str:
    """Return the dtype of the CPU check: the case's own, where the CPU path computes it correctly."""
    if role == "interpreter" and case.dtype == "bfloat16":
        return "float16"  # Triton's interpreter is silently wrong in bfloat16: its dot and its additions
    if implementation.backend.family in _INDUCTOR and not implementation.unsupported(replace(case, dtype="float32")):
        return "float32"  # what the cases of all dtypes share, as they do the graph
    return case.dtype
