"""Attention in Pallas: in Pallas' interpreter against float64, its declared costs, and its code for an H200."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels import dump_code, dumped_code, interpreted, kernels_of, largest_error, structs

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compile import compiler, directions

if jax.__version_info__ < (0, 11):
    pytest.skip("Pallas' interpreter of Mosaic GPU needs jax 0.11", allow_module_level=True)

from xlafuse.pallas import attention
from xlafuse.pallas.attention_parts import Config

BLOCK = BLOCKS["attention"]
# Weights and ds are rounded before their products, and results after them. ds is a difference, whose terms come from a
# rounded out and rounded weights.
LIMIT = 3


def drawn(
    sequence: int, head_dim: int, heads: int, kv_heads: int, dtype: str = "float16"
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return q, k, v and a cotangent of out."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        jax.random.normal(key, (1, number, sequence, head_dim)).astype(dtype)
        for key, number in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    )
    return q, k, v, dout


def step(function: Any, *operands: jax.Array) -> list[np.ndarray]:
    """Return out, dq, dk and dv."""
    q, k, v, dout = operands
    out, vjp = jax.vjp(function, q, k, v)
    return [np.asarray(x) for x in (out, *vjp(dout))]


def expected(operands: tuple[jax.Array, ...], causal: bool) -> list[np.ndarray]:
    """Return the same in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in operands]

        def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return BLOCK.reference(jnp, {"q": q, "k": k, "v": v}, int(causal), 0)["out"]

        return step(reference, *wide)


# Whole tiles; edges of tiles of queries and keys; less than a tile; one head of k and v for several of q.
SHAPES = [(256, 128, 1, 1), (328, 64, 2, 1), (200, 128, 4, 2), (8, 64, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_against_float64(shape: tuple[int, int, int, int], dtype: str, causal: bool) -> None:
    operands = drawn(*shape, dtype)
    with interpreted():
        found = step(functools.partial(attention.attention, causal=causal), *operands)
    for name, values, reference in zip(("out", "dq", "dk", "dv"), found, expected(operands, causal), strict=True):
        assert values.dtype == dtype
        assert largest_error(values, reference, str(values.dtype)) < LIMIT, name


CONFIGS = [Config(2, 64, 2, 3, 2), Config(3, 128, 2, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_other_configurations(config: Config) -> None:
    operands = drawn(456, 64, 1, 1)
    with interpreted():
        found = step(functools.partial(attention.attention, config=config), *operands)
    for name, values, reference in zip(("out", "dq", "dk", "dv"), found, expected(operands, True), strict=True):
        assert largest_error(values, reference, str(values.dtype)) < LIMIT, name


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_copy_races_with_a_reader(head_dim: int, capfd: pytest.CaptureFixture[str]) -> None:
    q, k, v, dout = drawn(128, head_dim, 3, 1)  # one tile of keys: programs that add to the same dq would be a race
    with interpreted(detect_races=True):
        step(attention.attention, q, k, v, dout)
    q, k, v, _ = drawn(520, head_dim, 1, 1)
    with interpreted(detect_races=True):
        jax.block_until_ready(attention.attention(q, k, v))
    assert "RACE" not in "".join(capfd.readouterr())


def test_large_scores_stay_finite() -> None:
    q, k, v, dout = drawn(128, 64, 1, 1)
    with interpreted():
        found = step(attention.attention, q * 100, k * 100, v, dout)
    assert all(np.isfinite(values).all() for values in found)


def phases_of(case: Case) -> tuple[Any, Any]:
    return directions.train_phases(attention.apply, BLOCK.attributes_of(case))


def full_case(shape: str) -> Case:
    return next(c for c in BLOCK.cases("full") if c.name == shape and c.direction == "train" and c.dtype == "bfloat16")


@pytest.mark.parametrize("shape", ["llama-3-8b-8k", "full"])
def test_kernels_declare_flops_and_bytes(shape: str) -> None:
    case = full_case(shape)
    inputs, outputs = structs(case, BLOCK.inputs), structs(case, BLOCK.outputs)
    (inference,) = kernels_of(functools.partial(attention.apply, **BLOCK.attributes_of(case)), inputs)
    cost = inference.params["cost_estimate"]
    assert cost.flops == BLOCK.flops(case.sizes)
    assert cost.bytes_accessed == BLOCK.bytes_compulsory(case)["forward"]
    forward, backward = phases_of(case)
    _, residuals = jax.eval_shape(forward, inputs)
    (gradients,) = kernels_of(backward, residuals, outputs)
    assert gradients.params["cost_estimate"].flops == BLOCK.backward_flops(case.sizes)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama-3-8b-8k", "gpt2", "full"])
def test_code_for_an_h200(
    shape: str, h200: compiler.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel copies by TMA, keeps its values in registers, and its products run beside other work."""
    dump_code(tmp_path, monkeypatch)
    case = full_case(shape)
    forward, backward = phases_of(case)
    inputs, outputs = structs(case, BLOCK.inputs), structs(case, BLOCK.outputs)
    saved = compiler.compile(forward, [inputs], target=h200)
    last = compiler.compile(backward, [saved.output_structs[1], outputs], target=h200)
    copies = [k for k in (*saved.kernels, *last.kernels) if k.opcodes == ("copy",)]
    assert not copies  # of the float32 array to which the backward kernel adds dq
    found = dumped_code(tmp_path)
    assert len(found) == 2
    assert all("wgmma.mma_async" in ptx and "setmaxnreg.inc" in ptx for ptx in found.values())


def test_other_dtypes_and_sizes_are_refused() -> None:
    q, k, v, _ = drawn(64, 64, 2, 1)
    with pytest.raises(TypeError, match="all bfloat16 or all float16, got float32, float32, float32"):
        attention.attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    with pytest.raises(ValueError, match=r"must fit, .* got \[1, 2, 64, 64\], \[1, 1, 64, 64\], \[1, 1, 32, 64\]"):
        attention.attention(q, k, v[:, :, :32])
    with pytest.raises(ValueError, match="sequence a multiple of 8, got 64 and 63: pad the arrays"):
        attention.attention(q[:, :, :63], k[:, :, :63], v[:, :, :63])
    with pytest.raises(ValueError, match="the kernels have no window, got 32"):
        attention.apply({"q": q, "k": k, "v": v}, window=32)
