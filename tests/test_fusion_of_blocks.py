"""Snapshots of how XLA and Inductor fuse five blocks for an H200, at the versions of constraints/cpu.txt.

A changed block or version that changes the fusion fails with a text difference. After an intended change,
`pytest tests/test_fusion_of_blocks.py --xlafuse-update` records it.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Shapes = dict[str, tuple[tuple[int, ...], str]]
BLOCKS: dict[str, tuple[Shapes, dict[str, float]]] = {
    "rmsnorm": ({"x": ((2048, 4096), "bfloat16"), "weight": ((4096,), "bfloat16")}, {"eps": 1e-6}),
    "softmax": ({"x": ((2048, 1024), "bfloat16")}, {}),
    "swiglu": (dict.fromkeys(("gate", "up"), ((2048, 4096), "bfloat16")), {}),
    "cross_entropy": (
        {"logits": ((1024, 32000), "bfloat16"), "labels": ((1024,), "int32")}, {"smoothing": 0.1, "z_loss": 1e-4},
    ),
    "attention": (dict.fromkeys("qkv", ((1, 8, 1024, 64), "bfloat16")), {"causal": 1}),
}


@pytest.fixture(params=["jax", "torch"])
def of_block(request: pytest.FixtureRequest, fusion: Any) -> Any:
    """A function from a block's name to the fusion graph of its forward pass."""
    pytest.importorskip(request.param)
    make = {"jax": _struct, "torch": _meta}[request.param]
    package = {"jax": "xlafuse", "torch": "xlafuse.triton_side"}[request.param]

    def graph(name: str) -> Any:
        shapes, attributes = BLOCKS[name]
        module = importlib.import_module(f"{package}.blocks.{name}")
        inputs = {key: make(shape, dtype) for key, (shape, dtype) in shapes.items()}
        return fusion(module.apply, inputs, **attributes, name=name)

    return graph


def _struct(shape: tuple[int, ...], dtype: str) -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))


def _meta(shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


@pytest.mark.parametrize("block", BLOCKS)
def test_fused_as_recorded(of_block: Any, block: str) -> None:
    assert of_block(block).matches_snapshot()


@pytest.mark.parametrize("block", ["rmsnorm", "softmax", "swiglu"])
def test_one_kernel_moves_only_compulsory_bytes(of_block: Any, block: str) -> None:
    g = of_block(block)
    assert g.kernel_count == 1
    assert not g.materialized
    assert g.bytes_moved <= 1.01 * g.bytes_compulsory


def test_cross_entropy_materializes_nothing_of_the_logits_size(of_block: Any) -> None:
    g = of_block("cross_entropy")
    assert g.materialized.largest < g.bytes_compulsory / 100


def test_plain_attention_materializes_its_scores(of_block: Any) -> None:
    g = of_block("attention")
    assert "scores" in g.materialized and "mask" not in g.materialized
    assert g.fused("mask", "softmax")
    assert g.bytes_moved <= 2.1 * g.bytes_with_products
