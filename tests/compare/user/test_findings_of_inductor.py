"""Findings about Inductor's graphs of an MLP, which change with the part of the function that causes them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import xlafuse
from xlafuse.compare.graph.findings.collect import findings
from xlafuse.compare.graph.model import FusionGraph

pytestmark = [pytest.mark.slow, pytest.mark.full]
CODE = Path(__file__).parent / "user_code"


@pytest.fixture(scope="module")
def explained() -> Any:
    torch = pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CODE))
        mlps = importlib.import_module("mlps")
        shapes = [(2048, 1024), (1024, 4096), (1024, 4096), (4096, 1024)]
        arguments = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        functions = {"swiglu": mlps.swiglu, "no residual": mlps.no_residual, "geglu": mlps.geglu}
        return {
            direction: xlafuse.explain(functions, *arguments, grad=direction == "train", target="h200").graphs
            for direction in ("fwd", "train")
        }


def sentences(graph: FusionGraph) -> list[str]:
    return [finding.text for finding in findings({"inductor": graph})]


def test_a_residual_is_fused_into_the_product(explained: Any) -> None:
    (sentence,) = [text for text in sentences(explained["fwd"]["swiglu"]) if "inside the product" in text]
    assert sentence.startswith("Inductor computes add inside the product") and "mlps.py:8" in sentence
    assert not [text for text in sentences(explained["fwd"]["no residual"]) if "inside the product" in text]


def test_the_activation_is_one_backward_kernel_with_two_results(explained: Any) -> None:
    for name in ("swiglu", "no residual", "geglu"):
        written = [
            kernel for kernel in explained["train"][name].kernels
            if kernel.phase == "backward" and kernel.kind == "elementwise" and len(kernel.outputs) == 2
        ]
        assert len(written) == 1, name
        texts = sentences(explained["train"][name])
        recomputed = [text for text in texts if "computes" in text and "backward kernels" in text]
        assert not recomputed, (name, recomputed)


def test_a_geglu_has_a_gelu_and_no_silu(explained: Any) -> None:
    def operations(name: str) -> set[str]:
        return {op.op for kernel in explained["train"][name].kernels for op in kernel.source_ops}

    assert any("tanh" in op for op in operations("geglu")) and not any("sigmoid" in op for op in operations("geglu"))
    assert any("sigmoid" in op for op in operations("swiglu"))
