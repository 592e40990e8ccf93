"""A record: the result of one implementation of one case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from ..spec.case import PHASES, Case
from ..spec.dtype import DTYPES
from .record_fields import (
    CudaGraphFields,
    ErrorField,
    KernelsOfPart,
    Measurement,
    ParallelFields,
    RecordedTimeFields,
    TimesOfPart,
    Traffic,
    check_times,
    mismatch,
    with_current_names,
)

SCHEMA = 2
STATUSES = ("ok", "compiled", "wrong", "failed", "skipped", "timeout")
BAD = ("wrong", "failed", "timeout")  # statuses that something must be done about


class NewerSchema(Exception):
    """A record of a later version, which this one cannot read."""


@dataclass
class Record:
    """One implementation of one case.

    checked: {"device", "backend", "dtype", "case"} of the check behind the numbers, or None.
    graph: file of the fusion graph, relative to the run folder (compare.graph.store).
    kernels: by part, a summary of the fusion graph.
    measurement: None where the implementation was not timed.
    recorded: of a compile for a target, the time of the same kernels on that GPU; None for others.
    parallel: of a case that spans several GPUs, the times and bytes of each; None for others.
    traffic: bytes that ncu counted, by method ("alone", "call"); None where the run did not ask for them.
    cuda_graph: of an implementation that replays CUDA graphs, how they get their inputs; None for others.
    bytes_compulsory, flops: of the case, by part.
    dumps: archive of compiler artifacts, relative to the run folder.
    trace: {"file": the timeline of one call, relative to the run folder (compare.measure.timeline)}, or
    {"unavailable": the reason}; None where the clock is not CUPTI.
    """

    case: Case
    implementation: str
    compiler: str
    status: str
    detail: str | None = None
    checked: dict[str, str | None] | None = None
    segment: str | None = None
    target: str | None = None
    errors: list[ErrorField] = field(default_factory=list)
    compile_s: float | None = None
    graph: str | None = None
    kernels: dict[str, KernelsOfPart] = field(default_factory=dict)
    measurement: Measurement | None = None
    recorded: RecordedTimeFields | None = None
    parallel: ParallelFields | None = None
    traffic: Traffic | None = None
    cuda_graph: CudaGraphFields | None = None
    bytes_compulsory: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    dumps: str | None = None
    trace: dict[str, str] | None = None
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        return record_id(self.case, self.implementation)

    @property
    def times(self) -> dict[str, TimesOfPart]:
        """Times of the main mode by part; empty where no device clock ran."""
        return (self.measurement["parts"] if self.measurement else None) or {}

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, **{f.name: getattr(self, f.name) for f in fields(self)}, "case": asdict(self.case)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Return the record of JSON data, also of an older version's.

        This is the only place that checks records: code that reads one may rely on its types. Raises ValueError naming
        the first field that is wrong, and NewerSchema.
        """
        if (schema := data.get("schema")) != SCHEMA:
            if isinstance(schema, int) and schema > SCHEMA and isinstance(data.get("id"), str):
                raise NewerSchema(f"schema {schema}, and this version reads {SCHEMA}: use the xlafuse that wrote it")
            raise ValueError(f"schema {schema!r}, expected {SCHEMA}")
        if data.get("status") not in STATUSES:
            raise ValueError(f"status {data.get('status')!r}, expected one of {', '.join(STATUSES)}")
        known = {name: value for name, value in with_current_names(dict(data)).items() if name in _types()}
        name = data.get("id") if isinstance(data.get("id"), str) else "a record"
        for field_name, kind in _types().items():
            if field_name != "case" and field_name in known and (wrong := mismatch(known[field_name], kind)):
                raise ValueError(f"{name}: {field_name}{wrong}")
        try:
            record = cls(**known | {"case": Case.from_json(data["case"])})
        except (KeyError, TypeError) as problem:
            raise ValueError(f"missing or misnamed field: {problem}") from None
        case = record.case
        if wrong := mismatch([case.block, case.name, case.dtype, case.direction, case.precision], list[str]):
            raise ValueError(f"{name}: case{wrong}")
        if wrong := mismatch(case.sizes, dict[str, int]):
            raise ValueError(f"{name}: sizes{wrong}")
        if case.dtype not in DTYPES or case.direction not in PHASES:
            raise ValueError(f"unknown dtype {case.dtype!r} or direction {case.direction!r}")
        if record.measurement is not None:
            try:
                check_times(record.measurement)
            except ValueError as problem:
                raise ValueError(f"{name}: measurement: {problem}") from None
        return record


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(Record)


def record_id(case: Case, implementation: str) -> str:
    return f"{case.id}/{implementation}"
