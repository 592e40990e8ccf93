"""A record: the result of one implementation of one case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from ..spec.case import Case
from .record_fields import (
    Checked,
    ErrorCheck,
    Fields,
    GraphInputs,
    KernelsOfPhase,
    Measurement,
    ParallelFields,
    Phase,
    RecordedTimeFields,
    TimelineFields,
    TimesOfPhase,
    Traffic,
)

SCHEMA = 3
Status = Literal["ok", "compiled", "wrong", "failed", "skipped", "timeout"]
STATUSES: tuple[Status, ...] = get_args(Status)
BAD = ("wrong", "failed", "timeout")  # statuses that something must be done about
_WITHOUT_RESULT = (*BAD, "skipped")


class NewerSchema(Exception):
    """A record of a later version, which this one cannot read."""


class Record(Fields):
    """One implementation of one case. It has no number that its graph and the ceilings of its segment give.

    detail: the reason for a status that is neither `ok` nor `compiled`, or a remark.
    checked: of the check behind the numbers, or None.
    graph: file of the fusion graph, relative to the run folder (compare.graph.store).
    kernels: by phase, a summary of the fusion graph.
    measurement: None where the implementation was not timed.
    recorded: of a compile for a target, the time of the same kernels on that GPU; None for others.
    parallel: of a case that spans several GPUs, the times and bytes of each; None for others.
    traffic: bytes that ncu counted, by way: "alone" (every kernel from an empty L2) and "call" (the whole call from a
    cold L2); None where the run did not ask for them.
    cuda_graph: of an implementation that replays CUDA graphs, how they get their inputs; None for others.
    bytes_compulsory, flops: of the case, by phase.
    dumps: archive of compiler artifacts, relative to the run folder.
    trace: None where the clock is not CUPTI.
    """

    case: Case
    implementation: str
    compiler: str
    status: Status
    detail: str | None = None
    checked: Checked | None = None
    segment: str | None = None
    target: str | None = None
    errors: list[ErrorCheck] = []
    compile_s: float | None = None
    graph: str | None = None
    kernels: dict[Phase, KernelsOfPhase] = {}
    measurement: Measurement | None = None
    recorded: RecordedTimeFields | None = None
    parallel: ParallelFields | None = None
    traffic: dict[str, Traffic] | None = None
    cuda_graph: GraphInputs | None = None
    bytes_compulsory: dict[Phase, int] = {}
    flops: dict[Phase, float] = {}
    dumps: str | None = None
    trace: TimelineFields | None = None

    def __post_init__(self) -> None:
        self.require_fields_of_status()

    def require_fields_of_status(self) -> None:
        """Raise ValueError where a field that the status stands for is missing."""
        if self.status == "ok" and not (self.checked and self.errors):
            raise ValueError("status ok needs `checked` and `errors`")
        if self.status in _WITHOUT_RESULT and not self.detail:
            raise ValueError(f"status {self.status} needs a reason in `detail`")

    @property
    def id(self) -> str:
        return record_id(self.case, self.implementation)

    @property
    def times(self) -> dict[Phase, TimesOfPhase]:
        """Times of the main mode by phase; empty where no device clock ran."""
        return (self.measurement.phases if self.measurement else None) or {}

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "id": self.id, **msgspec.to_builtins(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Return the record of JSON data.

        This is the only place that checks records: code that reads one may rely on its types. Raises ValueError naming
        the first field that is wrong, and NewerSchema.
        """
        id = data.get("id")
        if (schema := data.get("schema")) != SCHEMA:
            if isinstance(schema, int) and schema > SCHEMA and isinstance(id, str):
                raise NewerSchema(f"schema {schema}, and this version reads {SCHEMA}: use the xlafuse that wrote it")
            raise ValueError(f"schema {schema!r}, expected {SCHEMA}")
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as problem:
            raise ValueError(f"{id if isinstance(id, str) else 'a record'}: {problem}") from None


def record_id(case: Case, implementation: str) -> str:
    return f"{case.id}/{implementation}"
