"""`xlafuse run --traffic`: after all timed rounds, count the bytes of each record's kernels with the GPU's counters.

Each record is compiled once more, in a process under ncu that takes a batch of a framework's records. It is counted in
two ways: "alone", every kernel from an empty L2, and "call", the whole call with caches left alone. XLA replays the
run's autotune results, so it compiles the same kernels. Implementations that autotune for minutes might choose other
kernels than the timed ones; their records say that they have no traffic.

Each way appends the record anew as soon as its process has ended, so an interrupt costs one process's counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import targets
from ..backends import Backend
from ..base import host
from ..base.usage import UsageError
from ..graph import store
from ..graph.join.kernel_records import MEMCPY, MEMSET, assign
from ..graph.model import FusionGraph
from ..plan.plan import Plan
from ..record import run_folder
from ..record.record import Record, record_id
from ..record.record_fields import DeviceRecord, Traffic, TrafficOfKernel, TrafficOfPhase, UncountedTraffic
from ..record.run_files import recorded_file
from ..spec.implementation import Implementation
from ..targets import Pack
from . import ncu
from .ncu import CacheControl, KernelTraffic, NcuError, NotProfiled, Outcome, Profiled

WAYS: dict[str, CacheControl] = {"alone": "all", "call": "none"}
TUNES = "a second compile would autotune for minutes, and might choose other kernels than the timed ones"
_NO_GRAPH = 1_000_000  # successive launches from which XLA makes a CUDA graph
COUNTS = ("dram_read", "dram_written", "l2")


def refuse(plan: Plan, target: str | None) -> None:
    """Raise UsageError where traffic cannot be measured: before the run, not after it."""
    if target is not None or not host.gpu_present():
        where = f"compiles for {target} without one" if target else "is on a machine that has none"
        raise UsageError(f"--traffic counts bytes on an NVIDIA GPU, and this run {where}: leave --traffic out")
    for role in sorted({i.backend.worker for _, implementations in plan.work for i in implementations}):
        try:
            ncu.probe(role)
        except NcuError as problem:
            raise UsageError(f"--traffic: {problem}") from None


def missing(plan: Plan, folder: Path) -> list[Record]:
    """Return the timed records of the plan whose traffic was not counted in both ways."""
    wanted = {record_id(case, i.name) for case, found in plan.work if plan.in_depth(case) for i in found}
    found = run_folder.read_records(folder)[0]
    return [r for r in found if r.id in wanted and r.status == "ok" and not all(_settled(r, w) for w in WAYS)]


def measure(plan: Plan, folder: Path, say: Callable[[str], None]) -> str:
    """Count the traffic of each record of `missing`, appending it anew with each way; return a sentence with the
    counts.

    say gets a line for each record. The GPU must be free of other work.
    """
    left, rows = missing(plan, folder), _rows(plan)
    for entry in left:
        if reason := _never_counted(rows[entry.id].backend):
            entry.traffic = {way: Traffic(unavailable=reason, final=True) for way in WAYS}
            run_folder.append(folder, entry)
    steps = [
        (role, way, entries) for role in ("torch", "xla") for way in WAYS
        if (entries := [e for e in left if rows[e.id].backend.worker == role and not _settled(e, way)])
    ]
    total, before = sum(len(entries) for _, _, entries in steps), 0
    for role, way, entries in steps:
        for number, outcome in _profile(entries, rows, role, way, folder, say, before, total):
            entry = entries[number]
            entry.traffic = {**(entry.traffic or {}), way: _summary(entry, way, outcome, folder)}
            run_folder.append(folder, entry)
        before += len(entries)
    none = sum(any(way.unavailable for way in (entry.traffic or {}).values()) for entry in left)
    why = f"; {none} without, and xlafuse inspect {folder} --view traffic says why" if none else ""
    return f"traffic of {len(left) - none} records was counted{why}"


def _profile(
    entries: Sequence[Record], rows: Mapping[str, Implementation], role: str, way: str, folder: Path,
    say: Callable[[str], None], before: int, total: int,
) -> Iterator[tuple[int, Outcome]]:
    """Profile these records with ncu, of which `before` of `total` are done already."""
    environments = _environments(folder)
    return ncu.measure(
        [(entry.case, rows[entry.id]) for entry in entries], WAYS[way], logs=folder / "logs",
        environment=_variables(folder, role, environments),
        expected=[environments.get((entry.segment, role)) for entry in entries],
        say=lambda number: say(f"traffic, {before + number + 1} of {total}, {way}: {entries[number].id}"),
    )


def _never_counted(backend: Backend) -> str | None:
    if backend.spans_gpus:
        return "ncu watches one process, and its case has a process for each of several GPUs"
    if backend.autotunes_for_minutes:
        return TUNES
    if backend.replays_graphs:
        return f"its graphs replay the kernels of {backend.family}, whose record has their traffic"
    return None


def _settled(entry: Record, way: str) -> bool:
    """Return whether the way was counted, or never can be; a mere failure is tried again by a resumed run."""
    found = (entry.traffic or {}).get(way)
    return found is not None and (found.unavailable is None or found.final)


def _rows(plan: Plan) -> dict[str, Implementation]:
    """Return the implementation of each of the plan's records, by the record's id."""
    return {record_id(case, row.name): row for case, implementations in plan.work for row in implementations}


def _environments(folder: Path) -> dict[tuple[str | None, str], dict[str, Any]]:
    """Return the environment of each worker, by segment and role."""
    segments = run_folder.read_run(folder).get("segments", [])
    return {(s["id"], role): found for s in segments for role, found in s["environment"]["workers"].items()}


def _variables(
    folder: Path, role: str, environments: Mapping[tuple[str | None, str], dict[str, Any]]
) -> dict[str, str]:
    """Return XLA_FLAGS: no CUDA graphs, so that ncu sees each kernel, and this run's autotune results replayed.

    Autotuning under ncu took minutes for one product.
    """
    if role != "xla":
        return {}
    flags = [f"--xla_gpu_graph_min_graph_size={_NO_GRAPH}"]
    found = [found for (_, whose), found in environments.items() if whose == role and "jax" in found]
    if found and (results := _autotune_results(folder, found[-1]["jax"], found[-1]["device"])):
        flags.append(f"--xla_gpu_load_autotune_results_from={results}")
    return {"XLA_FLAGS": " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()}


def _autotune_results(folder: Path, jax_version: str, device: str) -> Path | None:
    """Return the run's own autotune results, or those of this GPU's target pack where the run has none.

    `_graph` detects a pack that chose another kernel.
    """
    own = Pack(folder.resolve() / "target").xla_autotune_results(jax_version)
    target = targets.of_device(device)
    return own or (targets.load(target).xla_autotune_results(jax_version) if target else None)


def _summary(entry: Record, way: str, outcome: Outcome, folder: Path) -> Traffic:
    """Return one way of `Record.traffic`."""
    if isinstance(outcome, NotProfiled):
        return Traffic(unavailable=outcome.reason)
    graph = _graph(entry, outcome, folder)
    if isinstance(graph, NotProfiled):
        return Traffic(unavailable=graph.reason)
    phases = {}
    for phase in entry.case.phases:
        times = entry.times.get(phase)
        phases[phase] = phase_traffic(graph, phase, outcome.launches[phase], (times and times.records) or ())
    return Traffic(phases=phases, cache_control=WAYS[way])


def _graph(entry: Record, outcome: Profiled, folder: Path) -> FusionGraph | NotProfiled | None:
    """Return the graph to join the launches to: the profiled compile's, if it has the record's kernels.

    Eager PyTorch's kernels are known only from CUPTI, so its graph is the record's own.
    """
    try:
        kept = None if entry.graph is None else store.load(recorded_file(folder, entry, entry.graph))
    except (OSError, ValueError) as problem:  # a GraphError, too
        return NotProfiled(f"its graph cannot be read: {problem}")
    if kept is None or kept.kernels is None:
        return None
    if outcome.graph is None or outcome.graph.kernels is None:
        return kept
    names, others = _names(kept), _names(outcome.graph)
    if names != others:
        new = next((name for name in others if name not in names), f"{len(others)} instead of {len(names)}")
        return NotProfiled(f"the second compile has other kernels than the timed one: {new}")
    return outcome.graph


def _names(graph: FusionGraph) -> list[str]:
    return [f"{kernel.phase} {kernel.name}" for kernel in graph.kernels or ()]


def phase_traffic(
    graph: FusionGraph | None, phase: str, launches: Sequence[KernelTraffic], ran: Sequence[DeviceRecord]
) -> TrafficOfPhase:
    """Return the byte counts of a phase and, with a graph, of each kernel; `unjoined` launches belong to no kernel.

    ran: the records of the timed call, with its copies and memsets among the kernels. ncu sees none of those;
    `uncounted` has their number and bytes.
    """
    aside = [record for record in ran if record.name in (MEMCPY, MEMSET)]
    moved = [(record.bytes or 0) * (2 if record.name == MEMCPY else 1) for record in aside]  # a copy reads and writes
    uncounted = UncountedTraffic(len(aside), sum(moved))
    result = TrafficOfPhase(launches=len(launches), **_counted(launches), kernels=[], uncounted=uncounted)
    if graph is None:
        return result
    joined, leftover = assign(graph, {phase: _in_order(launches, ran)})
    for index in sorted(joined):
        own = [launches[int(record.start)] for record in joined[index] if record.name not in (MEMCPY, MEMSET)]
        if own:
            result.kernels.append(TrafficOfKernel(kernel=index, launches=len(own), **_counted(own)))
    result.unjoined = [record.name for record in leftover]
    return result


def _counted(launches: Iterable[KernelTraffic]) -> dict[str, Any]:
    """Return the sums, None where a term is unknown."""
    launches = list(launches)
    columns = {count: [getattr(launch, count) for launch in launches] for count in COUNTS}
    return {count: None if None in values else sum(values) for count, values in columns.items()}


def _in_order(launches: Sequence[KernelTraffic], ran: Sequence[DeviceRecord]) -> list[DeviceRecord]:
    """Return the launches as records that `join` takes, each with its index as start.

    Copies and memsets of the timed call are added at their places, if the call had as many kernels.
    """
    records = [DeviceRecord(launch.name, number, number + 1) for number, launch in enumerate(launches)]
    aside = [each.name in (MEMCPY, MEMSET) for each in ran]
    if aside.count(False) != len(records):
        return records
    kernels = iter(records)
    return [each if is_aside else next(kernels) for each, is_aside in zip(ran, aside, strict=True)]
