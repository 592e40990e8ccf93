"""The summary of a fusion graph that a record keeps, its sums against the roofline, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...backends import BACKENDS
from ...base.archive import users_line
from ...record.record_fields import KernelsOfPhase
from ..model import UNMEASURED_CHOICES, FusionGraph, Kernel, SourceOp
from ..operations import token
from .roofline import Ceilings, recoverable_us, roofline_point
from .totals import declared_bytes, tally


def summary(graph: FusionGraph, phases: Iterable[str]) -> dict[str, KernelsOfPhase]:
    """Return `Record.kernels`; {} for a graph without kernels."""
    if graph.kernels is None:
        return {}
    result = {}
    hand_written = graph.compiler in BACKENDS and BACKENDS[graph.compiler].hand_written
    for phase in phases:
        kernels = [kernel for kernel in graph.kernels if kernel.phase == phase]
        result[phase] = KernelsOfPhase(
            launches=_exact(kernel.launches for kernel in kernels), bytes_declared=_exact(map(declared_bytes, kernels)),
            provenance=dict(Counter(kernel.provenance for kernel in kernels)),
            products=_products(kernels) if hand_written else {},
        )
    return result


def _exact(terms: Iterable[int | None]) -> int | None:
    found = tally(terms).exact
    return None if found is None else int(found)


def _products(kernels: Iterable[Kernel]) -> dict[str, list[str]]:
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
    return None if graph.kernels is None else [_roofline(graph, phase, ceilings) for phase in phases]


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


# Facts that describe a kernel's configuration, or the library routine that it calls.
_CONFIGURATION = ("config", "opcode", "opcodes", "fusion_kind", "custom_call_target")


def fingerprint(graph: FusionGraph) -> str | None:
    """Return 16 hexadecimal digits; None where a GPU could run other kernels than the graph's.

    Equal fingerprints: kernels do the same work with the same configuration, in the same order. Names, registers and
    source lines do not count, because they differ between versions of a compiler.

    A GPU could where it would choose a kernel's configuration by measuring: XLA's kernels that are "not autotuned" or a
    "predicted choice". The configuration of Inductor's kernels is among their facts, so it is compared instead.
    """
    kernels = graph.kernels
    if not kernels or any(k.provenance in UNMEASURED_CHOICES and "config" not in k.facts for k in kernels):
        return None
    text = json.dumps([_work(kernel) for kernel in kernels], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _work(kernel: Kernel) -> list[Any]:
    operations = sorted((op.op, op.stage, op.backward) for op in kernel.source_ops)
    language, launch = kernel.facts.get("language"), kernel.launch
    # A GPU records the launch of every kernel, a compiler states those of hand-written ones.
    stated = [launch.grid, launch.block, (launch.config or {}).get("num_warps")] if language else [None] * 3
    configuration = [language, *stated, *(kernel.facts.get(name) for name in _CONFIGURATION)]
    return [
        kernel.phase, kernel.kind, operations, kernel.bytes_read, kernel.bytes_written, kernel.launches, configuration
    ]
