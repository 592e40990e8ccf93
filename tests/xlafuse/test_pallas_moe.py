"""A mixture of experts in Pallas: in Pallas' interpreter against float64, its declared costs, its code for an H200."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels import dump_code, dumped_code, interpreted, kernels_of, largest_error, step, structs

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.blocks.moe import sizes
from xlafuse.compare.spec.case import Case, Sizes
from xlafuse.compile import compiler, directions

if jax.__version_info__ < (0, 11):
    pytest.skip("Pallas' interpreter of Mosaic GPU needs jax 0.11", allow_module_level=True)

from xlafuse.pallas import grouped_matmul, matmul, moe
from xlafuse.pallas.product_warpgroups import ROWS

Arrays = dict[str, Any]
BLOCK = BLOCKS["moe"]
# gate, up, act and their gradients are rounded before the next product, and results after it.
LIMIT = 3
# An expert without tokens; edges of tiles; several tiles of one expert; whole tiles only; less than a piece.
SIZES = [
    sizes(40, 64, 128, 3, 2, used=2), sizes(200, 128, 320, 4, 2), sizes(300, 64, 64, 3, 1, used=2),
    sizes(256, 64, 64, 2, 1, used=1), sizes(7, 16, 24, 3, 1, used=1),
]


def drawn(of: Sizes, dtype: str) -> tuple[Arrays, Arrays]:
    """Return the block's inputs and cotangents."""
    generator = np.random.default_rng(0)

    def draw(tensor: Any) -> Any:
        if tensor.draw is not None:
            return tensor.draw(generator, of)
        scale = np.sqrt(of[tensor.fan_in]) if tensor.fan_in else 1
        return generator.standard_normal(tensor.shape(of)) / scale

    inputs = {tensor.name: jnp.asarray(draw(tensor), dtype) for tensor in BLOCK.inputs}
    dy = jnp.asarray(generator.standard_normal((of["tokens"], of["width"])), dtype)
    return inputs, {"y": dy, "balance_loss": jnp.float32(1)}


def every_expert(inputs: Arrays, top_k: int) -> Arrays:
    """Return the block's outputs by every expert on every token; JAX can differentiate this, unlike the reference."""
    x, experts = inputs["x"], len(inputs["router"])
    logits = x @ inputs["router"].T
    values, chosen = jax.lax.top_k(logits, top_k)
    weights = jnp.sum(jax.nn.softmax(values)[:, :, None] * jax.nn.one_hot(chosen, experts), axis=1)
    gate, up = (jnp.einsum("tw,ewh->eth", x, inputs[name]) for name in ("w_gate", "w_up"))
    y = jnp.einsum("te,eth,ehw->tw", weights, gate * jax.nn.sigmoid(gate) * up, inputs["w_down"])
    fraction = jnp.mean(jax.nn.one_hot(chosen, experts), axis=(0, 1))
    return {"y": y, "balance_loss": experts * jnp.sum(fraction * jnp.mean(jax.nn.softmax(logits), axis=0))}


def expected(inputs: Arrays, cotangents: Arrays, top_k: int) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        wide, wide_cotangents = (
            {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in arrays.items()}
            for arrays in (inputs, cotangents)
        )
        found = step(functools.partial(every_expert, top_k=top_k), wide, wide_cotangents)
        return {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("of", SIZES, ids=str)
def test_outputs_and_gradients_against_float64(of: Sizes, dtype: str) -> None:
    inputs, cotangents = drawn(of, dtype)
    with interpreted():
        found = jax.jit(functools.partial(step, functools.partial(moe.apply, top_k=of["top_k"])))(inputs, cotangents)
    reference = expected(inputs, cotangents, of["top_k"])
    y = BLOCK.reference(np, {n: np.asarray(x, np.float64) for n, x in inputs.items()}, top_k=of["top_k"])["y"]
    np.testing.assert_allclose(reference["y"], y, rtol=1e-9, atol=1e-9)
    assert found.keys() == reference.keys()
    for name, values in found.items():
        assert values.dtype == ("float32" if name == "balance_loss" else dtype)
        assert largest_error(values, reference[name], dtype) < LIMIT, name
    unused = np.abs(reference["d_w_down"]).max(axis=(1, 2)) == 0
    assert unused.sum() == of["experts"] - of["used"]
    for name in ("d_w_gate", "d_w_up", "d_w_down"):
        assert not np.asarray(found[name], np.float32)[unused].any()


@pytest.mark.slow
def test_no_copy_races_with_a_reader(capfd: pytest.CaptureFixture[str]) -> None:
    inputs, cotangents = drawn(sizes(200, 128, 320, 4, 2, used=3), "bfloat16")
    with interpreted(detect_races=True):
        jax.block_until_ready(step(functools.partial(moe.apply, top_k=2), inputs, cotangents))
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("counts", [[0, 5, 128, 0], [129, 0, 127, 1], [0, 0, 0, 1], [130] * 7, [0, 512]], ids=str)
def test_slots_are_sorted_by_expert_in_whole_tiles(counts: list[int]) -> None:
    experts = np.repeat(np.arange(len(counts)), counts)
    chosen = np.random.default_rng(0).permutation(experts)[:, None]
    slots = jax.jit(moe.slots_of)(jnp.asarray(chosen, jnp.int32), jnp.asarray(counts, jnp.int32))
    tiles = [-(-count // ROWS) for count in counts]
    assert list(slots.groups.ends) == list(np.cumsum(tiles))
    used = sum(tiles)
    assert list(slots.groups.of_tile[:used]) == list(np.repeat(np.arange(len(counts)), tiles))
    order = np.full((len(slots.groups.of_tile), ROWS), len(chosen))
    for expert, (count, tile) in enumerate(zip(counts, np.cumsum([0, *tiles]), strict=False)):
        order[tile:].reshape(-1)[:count] = np.flatnonzero(chosen[:, 0] == expert)
    assert (np.asarray(slots.choices) == order.ravel()).all()
    assert (np.asarray(slots.choices)[slots.of_choice[:, 0]] == np.arange(len(chosen))).all()


def test_the_bound_of_tiles_holds_for_the_worst_groups() -> None:
    assert grouped_matmul.most_tiles(8 * 129, 8) == 16  # 129 rows in each group
    assert grouped_matmul.most_tiles(3, 8) == 3
    assert grouped_matmul.most_tiles(8192, 8) == 71


@pytest.mark.parametrize(("slots", "n", "columns", "steps"), [(9088, 3584, 128, 4), (1024, 1024, 64, 6)], ids=str)
def test_two_accumulators_have_half_the_columns_each(
    slots: int, n: int, columns: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "multiprocessors", lambda: 132)
    config = matmul.choose_config(slots, n, itemsize=2, accumulators=2)
    assert (config.columns, config.steps) == (columns, steps)


def full_case(shape: str) -> Case:
    return next(c for c in BLOCK.cases("full") if c.name == shape and c.direction == "train" and c.dtype == "bfloat16")


def test_kernels_declare_flops_and_bytes() -> None:
    case = full_case("mixtral-small")
    inputs, outputs = structs(case, BLOCK.inputs), structs(case, BLOCK.outputs)
    inference = kernels_of(functools.partial(moe.apply, **BLOCK.attributes_of(case)), inputs)
    costs = [kernel.params["cost_estimate"] for kernel in inference]
    assert sum(cost.flops for cost in costs) == BLOCK.flops(case.sizes)
    slots, width, hidden, experts = 4096 * 2, 2048, 3584, 8
    weight = experts * width * hidden
    assert [cost.bytes_accessed for cost in costs] == [
        2 * (slots * width + 2 * weight + slots * hidden), 2 * (slots * hidden + weight + slots * width)
    ]
    forward, backward = directions.train_phases(moe.apply, BLOCK.attributes_of(case))
    _, residuals = jax.eval_shape(forward, inputs)
    gradients = kernels_of(backward, residuals, outputs)
    assert len(gradients) == 5
    assert sum(kernel.params["cost_estimate"].flops for kernel in gradients) == BLOCK.backward_flops(case.sizes)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["mixtral-small", "olmoe", "few-tokens"])
def test_code_for_an_h200(
    shape: str, h200: compiler.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel copies by TMA, keeps its values in registers, and its products run beside other work."""
    dump_code(tmp_path, monkeypatch)
    case = full_case(shape)
    forward, backward = directions.train_phases(moe.apply, BLOCK.attributes_of(case))
    inputs, outputs = structs(case, BLOCK.inputs), structs(case, BLOCK.outputs)
    compiler.compile(functools.partial(moe.apply, **BLOCK.attributes_of(case)), [inputs], target=h200)
    saved = compiler.compile(forward, [inputs], target=h200)
    compiler.compile(backward, [saved.output_structs[1], outputs], target=h200)
    found = dumped_code(tmp_path)
    names = [re.sub(r"_[0-9]+$", "", name) for name in found]
    assert {name: names.count(name) for name in names} == {
        "grouped_matmul_kernel": 6, "grouped_weight_gradient_kernel": 3,
    }
    assert all("wgmma.mma_async" in ptx and "setmaxnreg.inc" in ptx for ptx in found.values())


def test_other_dtypes_and_sizes_are_refused() -> None:
    inputs, _ = drawn(sizes(8, 64, 64, 2, 1), "bfloat16")
    with pytest.raises(TypeError, match="all bfloat16 or all float16, got float32"):
        moe.apply({name: x.astype(jnp.float32) for name, x in inputs.items()}, top_k=1)
    with pytest.raises(ValueError, match=r"must fit, got \[8, 64\], \[2, 64\], \[2, 64, 64\], \[2, 32, 64\]"):
        moe.apply(inputs | {"w_up": inputs["w_up"][:, :32]}, top_k=1)
    with pytest.raises(ValueError, match="got width 60, hidden 64: pad the arrays"):
        narrow, _ = drawn(sizes(8, 60, 64, 2, 1), "bfloat16")
        moe.apply(narrow, top_k=1)
