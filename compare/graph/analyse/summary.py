"""The summary of a fusion graph that a record keeps, and its sums against the roofline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...backends import BACKENDS
from ...base.archive import users_line
from ...record.record_fields import KernelsOfPhase
from ..model import FusionGraph, Kernel, SourceOp
from ..operations import token
from .roofline import Ceilings, recoverable_us, roofline_point
from .totals import declared_bytes, tally


def summary(graph: FusionGraph, phases: Iterable[str]) -> dict[str, KernelsOfPhase]:
    """Return `Record.kernels`; {} for a graph without kernels."""
    if graph.kernels is None:
        return {}
    result = {}
    for phase in phases:
        kernels = [kernel for kernel in graph.kernels if kernel.phase == phase]
        result[phase] = KernelsOfPhase(
            launches=_exact(kernel.launches for kernel in kernels), bytes_declared=_exact(map(declared_bytes, kernels)),
            provenance=dict(Counter(kernel.provenance for kernel in kernels)),
            products=products(kernels) if _is_hand_written(graph) else {},
        )
    return result


def _exact(terms: Iterable[int | None]) -> int | None:
    found = tally(terms).exact
    return None if found is None else int(found)


def _is_hand_written(graph: FusionGraph) -> bool:
    return graph.compiler in BACKENDS and BACKENDS[graph.compiler].hand_written


def products(kernels: Iterable[Kernel]) -> dict[str, list[str]]:
    """Return the stages of all products by the language of their kernel; PyTorch's own calls count as "cuBLAS"."""
    found: dict[str, dict[str, None]] = {}
    for kernel in kernels:
        stages = dict.fromkeys(op.stage for op in kernel.source_ops if token(op.op) == "dot")
        if stages:
            found.setdefault(kernel.facts.get("language", "cuBLAS"), {}).update(stages)
    return {language: list(stages) for language, stages in found.items()}


@dataclass(frozen=True)
class RooflineOfPhase:
    """Sums over the kernels of one phase; a sum that lacks a term is None.

    roofline_time_us: their roofline times.
    recoverable_us: their measured times above those.
    bound_us: their measured times by bound ("memory", "compute", "launch", "unknown"), or roofline times where
        nothing was measured.
    """

    roofline_time_us: float | None
    recoverable_us: float | None
    bound_us: dict[str, float]


def rooflines(graph: FusionGraph, phases: Iterable[str], ceilings: Ceilings) -> list[RooflineOfPhase] | None:
    """Return the sums of each phase against the ceilings; None for a graph without kernels."""
    if graph.kernels is None:
        return None
    return [_roofline(graph, phase, ceilings) for phase in phases]


def _roofline(graph: FusionGraph, phase: str, ceilings: Ceilings) -> RooflineOfPhase:
    roofline_times, above = [], []
    bound_us: dict[str, float] = {}
    for kernel in graph.kernels or ():
        if kernel.phase != phase:
            continue
        found, time = roofline_point(graph, kernel, ceilings), kernel.device_time_us
        roofline_time = None if found is None else found.roofline_time_us
        roofline_times.append(roofline_time)
        above.append(recoverable_us(time, roofline_time))
        bound = "unknown" if found is None else found.bound
        bound_us[bound] = bound_us.get(bound, 0.0) + ((time if time is not None else roofline_time) or 0.0)
    return RooflineOfPhase(tally(roofline_times).exact, tally(above).exact, bound_us)


def portable_lines(graph: FusionGraph) -> FusionGraph:
    """Return the graph with source files relative to the project or to the environment's packages.

    So it reads the same on any machine. Lines of xlafuse's own `compare` package are dropped: they are not the user's.
    """

    def shorten(op: SourceOp) -> SourceOp:
        return replace(op, line=users_line(op.line))

    kernels = None
    if graph.kernels is not None:
        kernels = tuple(replace(k, source_ops=tuple(map(shorten, k.source_ops))) for k in graph.kernels)
    return replace(graph, kernels=kernels, operations=tuple(map(shorten, graph.operations)))
