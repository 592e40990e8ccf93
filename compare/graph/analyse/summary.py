"""The summary of a fusion graph that a record keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...backends import BACKENDS
from ...base.archive import users_line
from ..model import FusionGraph, Kernel, SourceOp
from ..operations import token
from .roofline import Ceilings, recoverable_us, roofline_point
from .totals import declared_bytes, tally


def summary(
    graph: FusionGraph, phases: Iterable[str], ceilings: Ceilings | None = None
) -> dict[str, Any]:
    """Return `Record.kernels`, by phase, with `roofline` if ceilings are given; {} for a graph without kernels."""
    if graph.kernels is None:
        return {}
    result: dict[str, Any] = {}
    for phase in phases:
        kernels = [kernel for kernel in graph.kernels if kernel.phase == phase]
        result[phase] = {
            "launches": tally(kernel.launches for kernel in kernels).exact,
            "bytes_declared": tally(map(declared_bytes, kernels)).exact,
            "provenance": dict(Counter(kernel.provenance for kernel in kernels)),
        }
        if _is_hand_written(graph) and (found := products(kernels)):
            result[phase]["products"] = found
        if ceilings is not None and ceilings.streams:
            result[phase]["roofline"] = roofline(graph, kernels, ceilings)
    return result


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


def roofline(graph: FusionGraph, kernels: Iterable[Kernel], ceilings: Ceilings) -> dict[str, Any]:
    """Return the sums of the kernels' roofline times; a sum that lacks a term is None.

    "roofline_time_us": their roofline times.
    "recoverable_us": their measured times above those.
    "bound_us": their measured times by bound ("memory", "compute", "launch", "unknown"), or roofline times where
    nothing was measured.
    """
    roofline_times, above = [], []
    bound_us: dict[str, float] = {}
    for kernel in kernels:
        found, time = roofline_point(graph, kernel, ceilings), kernel.device_time_us
        roofline_time = None if found is None else found.roofline_time_us
        roofline_times.append(roofline_time)
        above.append(recoverable_us(time, roofline_time))
        bound = "unknown" if found is None else found.bound
        bound_us[bound] = bound_us.get(bound, 0.0) + ((time if time is not None else roofline_time) or 0.0)
    return {"roofline_time_us": tally(roofline_times).exact, "recoverable_us": tally(above).exact, "bound_us": bound_us}


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
