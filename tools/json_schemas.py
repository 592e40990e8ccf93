"""Write docs/schemas/, the JSON Schema of everything that `--json` prints: `python -m tools.json_schemas`.

The types of the program, and the columns of its tables, have the fields and their meanings. An output that is no single
type of the program is composed of them here. A test validates real output of every command.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tools.tables import COLUMNS
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli.doctor import Examination
from xlafuse.compare.graph import model, store
from xlafuse.compare.graph.analyse import diff
from xlafuse.compare.graph.analyse.align import Alignment
from xlafuse.compare.graph.analyse.forced_fusion import Saving
from xlafuse.compare.plan.plan import SUITES
from xlafuse.compare.plan.speedup import Speedup
from xlafuse.compare.record.record import Status
from xlafuse.compare.record.record_fields import KernelsOfPhase, TimesOfPhase
from xlafuse.compare.report.columns import Column
from xlafuse.compare.report.diff import environment, profiles, times
from xlafuse.compare.report.outline import SCHEMA
from xlafuse.compare.report.views import TABLE_VIEWS
from xlafuse.compare.sources import explained
from xlafuse.reasons.pass_changes import PassChange

FOLDER = PROJECT / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
# The tables that views show, where they have another name.
VIEW_LINES = dict.fromkeys(("times", "matrix", "roofline", "traffic"), "records") | {"kernel-roofline": "kernels"}


def struct(name: str, /, **types: Any) -> Any:
    """Return a type with these fields. Those whose type includes UnsetType may be absent."""
    fields = [(key, kind, UNSET) if UnsetType in get_args(kind) else (key, kind) for key, kind in types.items()]
    return msgspec.defstruct(name, fields, kw_only=True)


def array(of: Any) -> Any:
    return GenericAlias(list, (of,))


def by_name(of: Any) -> Any:
    return GenericAlias(dict, (str, of))


def extended(name: str, kind: type, /, **types: Any) -> Any:
    """Return a type with the fields of a class, and with these besides them or in their place."""
    made = struct(name, **get_type_hints(kind) | types)
    made.__doc__ = kind.__doc__
    return made


def line_of(name: str, columns: Sequence[Column]) -> Any:
    """Return the type of a line of a table."""

    def cell(column: Column) -> Any:
        kind = {"": str, "yes or no": bool}.get(column.unit, float)
        meaning = f"{column.doc} ({column.unit})" if column.unit else column.doc
        return Annotated[kind | None, Meta(description=meaning)]

    return struct(name, **{column.name: cell(column) for column in columns})


def constant(text: str) -> Any:
    return Annotated[str, Meta(extra_json_schema={"const": text})]


def before_and_after(of: str, kind: Any) -> Any:
    return struct(f"{of}BeforeAndAfter", before=kind, after=kind)


LINES = {name: line_of(name.title(), columns) for name, columns in COLUMNS.items()}
GRAPH_KERNEL = extended(
    "Kernel", model.Kernel, index=int, bytes_read=int | None, bytes_written=int | None, stages=list[str],
    lines=list[str], predicted=model.PredictedTime | UnsetType,
)
GRAPH = extended(
    "FusionGraph", model.FusionGraph, schema=constant(store.SCHEMA), kernels=array(GRAPH_KERNEL) | None,
    buffers=array(extended("GraphBuffer", model.Buffer, producer=int | None, consumers=list[int])),
)
FUSION = {
    "kernels": array(extended("KernelChange", diff.KernelChange, before_names=list[str], after_names=list[str])),
    "buffers": array(extended("BufferChange", diff.BufferChange, bytes=int)), "reasons": list[diff.ReasonChange],
}
EXPLAINED = {
    "graphs": by_name(GRAPH), "predicted": dict[str, model.PredictedTime | None],
    "provenance": dict[str, dict[str, int]], "notes": list[str],
    "agreement": array(extended("Agreement", explained.Agreement, agrees=bool)) | UnsetType,
}
PRICE = {"saves_bytes": int, "saves_launches": int, "saves_us": float | None, "saves_predicted": bool}
TIMES = struct("Times", total=float, median=float, min=float, max=float)
CHANGE = struct(
    "Change", name=str, was=str | None, change=profiles.Word, lost_us=float, before_us=TIMES | None,
    after_us=TIMES | None, launches=tuple[int, int], operations=list[str],
)
PROFILE_DIFF = {
    "step": CHANGE, "busy": CHANGE, "notes": list[str], "kernels": array(CHANGE),
    "parts": array(struct(
        "PartChange", part=str, where=str, before_us=float | None, after_us=float | None, lost_us=float,
    )),
}
STEP = struct(
    "Step", layers=int, model_flops=float | None, idle_us=float, wait_us=float, before_call_us=float,
    memory=by_name(struct("Memory", bytes=int, arguments=int, results=int, between=dict[str, int])),
    parts=array(LINES["parts"]), remedies=array(LINES["remedies"]),
)
PROFILE = {
    "tool": str, "source": str, "device": str, "rank": int | None, "gpu": int | None, "versions": dict[str, str],
    "same_kernels": list[str], "other_kernels": list[str], "notes": list[str], "compile_s": dict[str, float],
    "steps": array(struct("ProfiledStep", name=str, kernels=int, device_us=float, idle_us=float)),
    "device_us": TIMES, "idle_us": TIMES, "host_late_us": float | None, "joined_share": float | None,
    "operator_shares": dict[str, float], "graphs": dict[str, int],
    "kernels": array(struct(
        "ProfiledKernel", name=str, grid=list[int] | None, launches=int, step_us=TIMES, launch_us=TIMES,
        helpers=array(struct("Helper", name=str, launches=int, step_us=TIMES)), graph=str | None, kernels=list[int],
        host_ops=list[str], host_functions=list[str], part=str | None, phase=model.StepPhase | None,
        kind=model.Kind | None, operations=list[tuple[str, str, str]], lines=list[str], roofline_us=float | None,
        above_roofline_us=float | None,
    )),
    "gap_causes": array(struct("GapCause", kind=str, name=str, lines=list[str], us=float)),
    "gaps": array(struct("Gap", before=str, after=str, us=float, host_late=bool | None)),
    "step": STEP | None,
}
RECORD = {
    "id": str, "block": str, "case": str, "direction": str, "dtype": str, "precision": str, "implementation": str,
    "status": Status, "detail": str | None, "segment": str | None, "target": str | None, "dumps": str | None,
    "kernels": dict[str, KernelsOfPhase], "graph": GRAPH | None,
}
RUN_CHANGE = {
    "id": str, "only_in": Literal["before", "after"] | None, "differs": bool, "regressions": list[str],
    "other_card": str | None, "notes": list[str], "status": before_and_after("Status", Status | None),
    "provenance": before_and_after("Provenance", str | None),
    **dict.fromkeys(("kernels", "bytes_declared"), before_and_after("Number", int | None)),
    "fusion": struct("Fusion", **FUSION) | None,
    "times": struct(
        "TimeChange", before_us=float | None, after_us=float | None, word=times.Word | None, refused=str | None,
        notes=list[str], ratios=dict[str, Speedup],
    ) | None,
}
TRIAL = {
    "switch": str, "took_effect": bool, "effect": str,
    "profiles": struct("ProfileDiff", schema=constant(profiles.SCHEMA), **PROFILE_DIFF) | None,
    "losses": struct("LossAgreement", agree=bool | None, dtype=str, steps=array(struct(
        "StepLosses", step=int, before=list[float | None], after=list[float | None], error=float | None, allowed=float,
    ))) | None,
    "step": struct(
        "StepTimes", before_us=list[float], after_us=list[float], word=str | None | UnsetType,
        ratio=float | UnsetType, low=float | UnsetType, high=float | UnsetType,
    ) | None,
}
BLOCK = {
    "name": str, "summary": str, "inputs": dict[str, list[str]], "outputs": dict[str, list[str]],
    "attributes": dict[str, Any], "parameters": list[str], "own_dtypes": dict[str, str], "directions": list[str],
    "cases": struct("Suites", **dict.fromkeys(SUITES, array(struct(
        "Case", name=str, sizes=dict[str, int], dtypes=list[str], precisions=list[str], directions=list[str],
    )))),
    "implementations": array(struct(
        "Implementation", name=str, compiler=str, summary=str, target=str, directions=list[str], requires=list[str],
    )),
}
NUMBERS = struct(
    "Numbers", kernels=int | None, bytes_declared=int | None, device_time_us=float | None,
    predicted=model.PredictedTime | None,
)
TARGET = {
    "target": str, "device": str, "compute_capability": str | None, "multiprocessors": int | None, "memory_bytes": int,
    "bandwidth": float, "bf16_flop_per_s": float, "rates": str, "sources": list[str],
}
TUNED = {
    "kernel": str, "shape_class": dict[str, Any], "case": str, "before": dict[str, Any], "config": dict[str, Any],
    "before_us": float | None, "us": float,
}
MISSED = extended(
    "MissedFusion", model.Reason, **PRICE, kernels_us=float | None, kernels_predicted=model.PredictedTime | None,
)

# The fields of each output besides `schema`, whose value is the key: a name and the version of its form.
OUTPUTS: dict[str, dict[str, Any]] = {
    "xlafuse.fusion-graph/3": get_type_hints(GRAPH),
    "xlafuse.explained/1": EXPLAINED,
    "xlafuse.variants/1": EXPLAINED | {
        "times": dict[str, TimesOfPhase],
        "differences": by_name(struct(
            "Difference", differs=bool, **FUSION, speedup=Speedup | None, predicted_verdict=str | None,
            saving=Saving | None,
        )),
    },
    "xlafuse.records/1": {"records": array(struct("Record", **RECORD))},
    "xlafuse.modules/1": {"modules": array(struct("Module", number=int, name=str, id=int, cost=int))},
    "xlafuse.kernels/1": {"kernels": array(extended("NamedKernel", GRAPH_KERNEL, graph=str))},
    "xlafuse.why/1": {"graphs": array(struct(
        "Graph", graph=str, bandwidth=float | None, launch_us=float | None, bandwidth_of=str, missed=array(MISSED),
        together=struct("Price", **PRICE), others=list[model.Reason],
    ))},
    "xlafuse.stages/1": {"cases": array(extended("Case", Alignment, case=str, graphs=list[str]))},
    "xlafuse.passes/1": {"modules": array(struct(
        "Module", module=str, passes=array(extended("PassChange", PassChange, text=str)),
    ))},
    "xlafuse.profile/1": PROFILE,
    "xlafuse.rows/3": {"view": str, "rows": list[dict[str, Any]]},
    "xlafuse.graph-diff/1": {"graphs": array(struct(
        "Graph", name=str, differs=bool, only_in=str | None, before=NUMBERS | None, after=NUMBERS | None,
        **{name: kind | UnsetType for name, kind in FUSION.items()},
    ))},
    "xlafuse.run-diff/1": {
        "before": str, "after": str, "tolerance": float, "fail_on": list[str], "regressed": list[str],
        "environment": list[environment.Difference], "records": array(struct("RecordChange", **RUN_CHANGE)),
        "warnings": list[str],
    },
    "xlafuse.profile-diff/1": PROFILE_DIFF,
    "xlafuse.trial/1": TRIAL,
    "xlafuse.list/1": {"blocks": array(struct("Block", **BLOCK)), "targets": list[str]},
    "xlafuse.targets/1": {"targets": array(struct("Target", **TARGET))},
    "xlafuse.doctor/1": get_type_hints(Examination),
    "xlafuse.tune/1": {
        "gpu": str, "file": str | None, "searched": int, "left": int, "failed": int,
        "changed": array(struct("Tuned", **TUNED)),
    },
}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of an output."""
    fields = OUTPUTS[name] | {"schema": constant(name)}
    forms = [struct("Output", **fields)]
    if name == SCHEMA:  # a table of each view
        lines = {view: array(LINES[VIEW_LINES.get(view, view)]) for view in TABLE_VIEWS}
        forms = [struct(f"View {view}", **fields | {"view": constant(view), "rows": lines[view]}) for view in lines]
    found, types = msgspec.json.schema_components(forms, ref_template="#/$defs/{name}")
    for kind in types.values():
        if "description" in kind:  # of a docstring, which Python 3.13 and later strip of its indentation
            kind["description"] = cleandoc(kind["description"])
    content = found[0] if len(found) == 1 else {"anyOf": list(found)}
    return {"$schema": DIALECT, "title": name, **content, "$defs": types}


def file_of(name: str) -> Path:
    """Return the file of an output's schema: docs/schemas/rows-3.json of xlafuse.rows/3."""
    return FOLDER / f"{name.removeprefix('xlafuse.').replace('/', '-')}.json"


def text_of(name: str) -> str:
    return json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.json"):
        file.unlink()
    for output in OUTPUTS:
        file_of(output).write_text(text_of(output))
