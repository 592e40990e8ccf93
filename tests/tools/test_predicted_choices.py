"""How right predicted choices of products are: shares of products and of their time, and the error of calls."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools import predicted_choices
from tools.predicted_choices import Program, _evaluated, _sums
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp

N, BYTES = 4096, 2 * 4096**2


def product(name: str, us: float | None, target: str = "") -> Kernel:
    facts = {"opcode": "custom-call" if target else "fusion", "custom_call_target": target, "tunable": True}
    return Kernel(
        name, "gemm", source_ops=(SourceOp("dot_general"),), inputs=(Access("a", BYTES), Access("b", BYTES)),
        outputs=(Access("y", BYTES),), flops=2.0 * N**3, provenance="device", device_time_us=us, facts=facts,
    )


def graph(*kernels: Kernel) -> FusionGraph:
    buffers = tuple(
        Buffer(name, (N, N), "bf16", BYTES, role) for name, role in (("a", "input"), ("b", "input"), ("y", "output"))
    )
    return FusionGraph("f", "xla", kernels, buffers, target="h200")


CUBLAS, TRITON = "__cublas$lt$matmul", ""


def test_a_choice_is_right_where_the_gpu_made_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = graph(product("custom-call.1", 200.0, CUBLAS), product("gemm_fusion_dot.1", 100.0, TRITON))
    compiled = {
        kind: graph(product("one", None, target), product("two", None, target))
        for kind, target in (("cublas", CUBLAS), ("triton", TRITON))
    }
    times = {"cublas": 150.0, "triton": 160.0}

    def predict(found: FusionGraph, ceilings: Any) -> FusionGraph:
        kind = "cublas" if found.kernels and found.kernels[0].facts["custom_call_target"] else "triton"
        time = SimpleNamespace(us=times[kind], low_us=times[kind], high_us=times[kind], reason="")
        return replace(found, kernels=tuple(replace(k, predicted=cast(Any, time)) for k in found.kernels or ()))

    monkeypatch.setattr(predicted_choices, "with_predictions", predict)
    line = _evaluated(Program("matmul/square/bf16/fwd/xla", "matmul", recorded, 250.0, compiled))
    assert (line["chosen"], line["products"], line["right"], line["us"], line["right_us"]) == ("cublas", 2, 1, 300, 200)
    assert line["error"] == pytest.approx(300 / 250 - 1, abs=0.01)  # with the gap between two launches
    times["triton"] = 100.0
    other = _evaluated(Program("matmul/square/bf16/fwd/xla", "matmul", recorded, 250.0, compiled))
    assert (other["chosen"], other["right_us"]) == ("triton", 100)
    sums = _sums([line, other])
    assert (sums["programs"], sums["cublas"], sums["right"], sums["right_by_time"]) == (2, 1, 0.5, 0.5)
    assert sums["calls"] == 2 and sums["calls_within_20_percent"] == 0.5
