"""A record: the result of one implementation of one case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..spec.case import PARTS, Case
from ..spec.dtype import DTYPES

SCHEMA = 2
STATUSES = ("ok", "compiled", "wrong", "failed", "skipped", "timeout")


@dataclass
class Record:
    """One implementation of one case.

    checked: {"device", "backend", "dtype", "case"} of the check that stands behind the numbers, or None.
    errors: [{"name", "error", "tolerance"}], gradients named d_<input>; dimensionless (compare.numerics.errors).
    graph: the fusion graph's file, relative to the run folder (compare.graph.store).
    kernels: what the graph comes to, per part: {"launches", "bytes_moved" (null where not known), "provenance": {word:
    how many kernels}, "unjoined": [names of device records that belong to no kernel of the graph], "products": of a
    hand-written implementation {"cuBLAS", "triton" or "cuda": [stages whose products it computes]}, "roofline": against
    the device's ceilings, where those are known}; see compare.graph.analyse.summary.
    measurement: {"timer", "parts": {part: {"device_time": [[s, ...] a round], "busy_time", "launches", "records" (these
    three null where the timer sees no single kernels, as CUDA events), "poisoned"}}, "modes": {mode: {"parts" as these
    without records, "settled", "command_buffers"}, {"same_as": "cold"} or {"unavailable": why}}
    (compare.plan.timing_modes), "processes": [which of its workers took the round], "warm_up": {"seconds", "settled":
    [a round]}, "command_buffers": {part: [launches in XLA's command buffers, all launches]} of the main mode, or None
    of what is not XLA's, "wall_time": [s a round], "peak_memory_bytes": {part: bytes or null}, "peak_memory": {part:
    compare.measure.measurement.Peak}, "conditions": [what compare.measure.gpu_conditions read right after each round]}
    or None; seconds throughout. traffic: what ncu counted, {"alone": ..., "call": ...}: every kernel from an empty L2,
    or the whole call from a cold one. Each is {"cache_control", "parts": {part: {"launches", "dram_read",
    "dram_written", "l2" (null where unknown), "uncounted": {"launches", "bytes"} of copies and memsets, "kernels":
    [{"kernel": index in the graph, "launches", "dram_read", "dram_written", "l2"}], "unjoined": [names]}}}, bytes
    throughout, or {"unavailable": why}; with "final" where trying again would not help. None where nobody asked.
    bytes_compulsory, flops: per part, of the case.
    dumps: the archive of compiler artifacts, relative to the run folder.
    trace: {"file": the timeline of one call, relative to the run folder (compare.measure.timeline)}, or {"unavailable":
    why}; None where the clock is not CUPTI.
    """

    case: Case
    implementation: str
    compiler: str
    status: str
    detail: str | None = None
    checked: dict[str, Any] | None = None
    segment: str | None = None
    target: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    compile_s: float | None = None
    graph: str | None = None
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurement: dict[str, Any] | None = None
    traffic: dict[str, dict[str, Any]] | None = None
    bytes_compulsory: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    dumps: str | None = None
    trace: dict[str, str] | None = None
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        return record_id(self.case, self.implementation)

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, **{f.name: getattr(self, f.name) for f in fields(self)}, "case": asdict(self.case)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Raises ValueError naming the first thing that is wrong."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}, expected {SCHEMA}")
        if data.get("status") not in STATUSES:
            raise ValueError(f"status {data.get('status')!r}, expected one of {', '.join(STATUSES)}")
        known = {f.name for f in fields(cls)}
        try:
            record = cls(**{k: v for k, v in data.items() if k in known} | {"case": Case.from_json(data["case"])})
        except (KeyError, TypeError) as problem:
            raise ValueError(f"missing or misnamed field: {problem}") from None
        case = record.case
        if not all(isinstance(name, str) for name in (case.block, case.name, record.implementation)):
            raise ValueError("block, case and implementation must be names")
        if not isinstance(case.sizes, dict) or not isinstance(record.checked, dict | None):
            raise ValueError("sizes and checked must be objects")
        if str(case.dtype) not in DTYPES or str(case.direction) not in PARTS:
            raise ValueError(f"unknown dtype {case.dtype!r} or direction {case.direction!r}")
        return record


def record_id(case: Case, implementation: str) -> str:
    return f"{case.id}/{implementation}"
