"""Invented runs: records with times, different graphs, and `xlafuse diff` of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from click.testing import CliRunner, Result
from examples import XLA
from made_records import made_record

from xlafuse.compare.cli.main import cli
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record.record import Record
from xlafuse.compare.spec.blocks import BLOCKS

CASE = next(case for case in BLOCKS["softmax"].cases("quick") if case.direction == "fwd")
SEGMENT: dict[str, Any] = {
    "id": "s1", "clocks": {"xla": 1e-3, "xla 2": 1.001e-3, "torch": 2e-3},
    "environment": {"workers": {"xla": {"device": "NVIDIA H200"}}},
    "ceilings": {"streams": {"1:1": 4e12}, "products": {"bfloat16": 8e14}},
}
QUIET = [1.0, 1.001, 0.999, 1.0, 1.0]


def record(us: float, *, busy: float | None = None, noise: list[float] = QUIET, **fields: Any) -> Record:
    device = [[us * 1e-6 * factor] * 3 for factor in noise]
    part = {
        "device_time": device, "launches": 1, "records": [],
        "busy_time": device if busy is None else [[busy * 1e-6 * factor] * 3 for factor in QUIET],
    }
    conditions = [{"sm_mhz": 1980, "throttled": []}] * len(noise)
    measurement = {"timer": "cupti", "phases": {"forward": part}, "conditions": conditions, **fields}
    return made_record(CASE, measurement=measurement, segment="s1")


def changed() -> FusionGraph:
    """The activation in two kernels instead of one, and another reason."""
    kernels = list(XLA.kernels or ())
    act = kernels[4]
    assert act.inputs and act.outputs
    kernels[4:5] = [
        dataclasses.replace(act, name="fusion.7", source_ops=act.source_ops[:5], inputs=act.inputs[:1],
                            outputs=act.outputs[1:]),
        dataclasses.replace(act, name="fusion.8", source_ops=act.source_ops[5:],
                            inputs=(*act.inputs[1:], *act.outputs[1:]), outputs=act.outputs[:1]),
    ]
    reasons = (dataclasses.replace(XLA.reasons[0], code="unprofitable"), *XLA.reasons[1:])
    return dataclasses.replace(XLA, kernels=tuple(kernels), reasons=reasons)


def diff(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["diff", *map(str, words)])


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").replace("├──", " ").replace("└──", " ").split())
