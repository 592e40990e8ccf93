"""The Pallas kernels: in Pallas' interpreter against float64, their declared costs, and their code for an H200."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels import dump_code, dumped_code, interpreted, kernels_of, step, structs

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compile import compiler, directions

if jax.__version_info__ < (0, 11):
    pytest.skip("Pallas' interpreter of Mosaic GPU needs jax 0.11", allow_module_level=True)

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas import matmul, mosaic, rmsnorm, softmax

Arrays = dict[str, jax.Array]

# Pieces of a tile, edges of tiles, more steps than the ring holds; one row; a wide tile next to a narrow one.
PRODUCTS = [{"m": 136, "k": 320, "n": 320}, {"m": 1, "k": 32, "n": 48}, {"m": 8, "k": 64, "n": 576}]
# A last tile of two rows, and of persistent programs several tiles; the longest row.
ROWS = [{"rows": 70, "columns": 1024}, {"rows": 5, "columns": 4096}]
SIZES = {
    "matmul": PRODUCTS, "linear": PRODUCTS, "linear_gelu": PRODUCTS, "rmsnorm": ROWS, "softmax": ROWS, "swiglu": ROWS,
}
CASES = [
    Case(block, "x", sizes, dtype, "train") for block, each in SIZES.items() for sizes in each
    for dtype in ("bfloat16", "float16")
]


def apply_of(case: Case) -> Any:
    apply = importlib.import_module(f"xlafuse.pallas.{case.block}").apply
    return functools.partial(apply, **BLOCKS[case.block].attributes_of(case))


def drawn(given: dict[str, jax.ShapeDtypeStruct]) -> Arrays:
    keys = jax.random.split(jax.random.key(0), len(given))
    normal = [jax.random.normal(key, s.shape).astype(s.dtype) for key, s in zip(keys, given.values(), strict=True)]
    return dict(zip(given, normal, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.block}-{case.dtype}-{case.sizes}")
def test_outputs_and_gradients_against_float64(case: Case) -> None:
    block = BLOCKS[case.block]
    inputs, cotangents = drawn(structs(case, block.inputs)), drawn(structs(case, block.outputs))
    with interpreted():
        found = jax.jit(functools.partial(step, apply_of(case)))(inputs, cotangents)
    with jax.enable_x64(True):
        wide, wide_cotangents = (
            {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in arrays.items()}
            for arrays in (inputs, cotangents)
        )
        reference = functools.partial(block.reference, jnp, **block.attributes_of(case))
        expected = {n: np.asarray(x) for n, x in step(reference, wide, wide_cotangents).items()}
    eps = float(jnp.finfo(case.dtype).eps)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.dtype == case.dtype
        error = np.abs(np.asarray(values, np.float64) - expected[name])
        # An output is rounded once; before it, one operand of a gradient is. Sums of float32 add less.
        scale = np.abs(expected[name]) + expected[name].std() + 1e-3
        assert (error / scale).max() < 1.5 * eps, name


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)], ids=["nn", "tn", "nt"])
def test_no_copy_races_with_a_reader(transposed: tuple[bool, bool], capfd: pytest.CaptureFixture[str]) -> None:
    a, b = jnp.ones((136, 320), jnp.bfloat16), jnp.ones((320, 576), jnp.bfloat16)
    a, b = a.T if transposed[0] else a, b.T if transposed[1] else b
    with interpreted(detect_races=True):
        sums, _ = matmul.launch_matmul(
            a, b, jnp.ones(576, jnp.bfloat16), epilogue=("sum", "gelu"), a_transposed=transposed[0],
            b_transposed=transposed[1],
        )
        assert (sums == 320).all()  # 321 in bfloat16
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("block", ["rmsnorm", "softmax", "swiglu"])
def test_no_copy_of_rows_races_with_a_reader(block: str, capfd: pytest.CaptureFixture[str]) -> None:
    """These kernels have no barriers of Mosaic's around their accesses to shared memory."""
    for sizes in ROWS:
        case = Case(block, "x", sizes, "bfloat16", "train")
        inputs, cotangents = drawn(structs(case, BLOCKS[block].inputs)), drawn(structs(case, BLOCKS[block].outputs))
        with interpreted(detect_races=True):
            jax.block_until_ready(step(apply_of(case), inputs, cotangents))
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_hidden_elements_and_rows_of_softmax() -> None:
    """A row of nothing but -inf gives zeros and zero gradients, and an element of -inf has none."""
    x = jax.random.normal(jax.random.key(0), (6, 256)).astype(jnp.bfloat16)
    x = x.at[2].set(-jnp.inf).at[3, 5:].set(-jnp.inf)
    dy = jnp.ones_like(x).at[:, 0].set(2)
    with interpreted():
        found = step(apply_of(Case("softmax", "x", {}, "bfloat16", "train")), {"x": x}, {"y": dy})
    for name in ("y", "d_x"):
        values = np.asarray(found[name], np.float32)
        assert np.isfinite(values).all() and not values[2].any() and not values[3, 5:].any()
        assert values[0].any() and values[3, :5].all()


@pytest.mark.parametrize(("shape", "refused"), [((3, 320), True), ((1, 320), False), ((3, 512), False)])
def test_a_store_past_the_end_of_a_row_is_refused(shape: tuple[int, int], refused: bool) -> None:
    """The interpreter cuts such a store off; a GPU would overwrite the next row."""

    @mosaic.kernel
    def fill(rows: Any, *, buffer: Any) -> None:
        buffer[...] = jnp.ones(256, jnp.float32)
        plgpu.commit_smem()
        row, block = jnp.divmod(jax.lax.axis_index(mosaic.PROGRAM), 2)
        mosaic.store(buffer, rows, (row, pl.ds(block * 256, 256)))
        plgpu.wait_smem_to_gmem(0)

    def launch() -> Any:
        return fill(
            results=jax.ShapeDtypeStruct(shape, jnp.float32), programs=2 * shape[0], computes=[],
            scratch={"buffer": plgpu.SMEM((256,), jnp.float32)},
            cost=pl.CostEstimate(flops=0, bytes_accessed=0, transcendentals=0),
        )

    if refused:
        with pytest.raises(ValueError, match="pad the array"):
            jax.eval_shape(launch)
    else:
        jax.eval_shape(launch)


@pytest.mark.parametrize("block", SIZES)
def test_a_forward_kernel_declares_the_flops_and_bytes_of_its_block(block: str) -> None:
    case = next(c for c in BLOCKS[block].cases("full") if c.direction == "fwd" and c.dtype == "bfloat16")
    (kernel,) = kernels_of(apply_of(case), structs(case, BLOCKS[block].inputs))
    cost = kernel.params["cost_estimate"]
    assert cost.flops == BLOCKS[block].flops(case.sizes)
    assert cost.bytes_accessed == BLOCKS[block].bytes_compulsory(case)["forward"]


@pytest.mark.parametrize("block", ["matmul", "linear", "linear_gelu"])
def test_products_of_a_backward_pass_declare_their_flops(block: str) -> None:
    case = next(c for c in BLOCKS[block].cases("full") if c.direction == "train")
    forward, backward = directions.train_phases(apply_of(case), {})
    inputs, outputs = structs(case, BLOCKS[block].inputs), structs(case, BLOCKS[block].outputs)
    _, residuals = jax.eval_shape(forward, inputs)
    found = kernels_of(backward, residuals, outputs)
    products = [k.params["cost_estimate"].flops for k in found if "matmul" in str(k.source_info.name_stack)]
    assert sum(products) == BLOCKS[block].backward_flops(case.sizes)


@pytest.mark.slow
@pytest.mark.parametrize("block", SIZES)
def test_code_for_an_h200(
    block: str, h200: compiler.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel copies by TMA and keeps its values in registers; products use the tensor cores of Hopper."""
    dump_code(tmp_path, monkeypatch)
    case = next(c for c in BLOCKS[block].cases("full") if c.direction == "train" and c.dtype != "float32")
    forward, backward = directions.train_phases(apply_of(case), {})
    inputs, outputs = structs(case, BLOCKS[block].inputs), structs(case, BLOCKS[block].outputs)
    saved = compiler.compile(forward, [inputs], target=h200)
    last = compiler.compile(backward, [saved.output_structs[1], outputs], target=h200)
    names = {k.runtime_name for k in (*saved.kernels, *last.kernels) if k.opcodes == ("custom-call",)}
    found = dumped_code(tmp_path)
    assert {f"{re.sub(r'_[0-9]+$', '', name)}_mosaic_gpu_kernel" for name in found} == names
    for name, ptx in found.items():
        assert ("wgmma.mma_async" in ptx) == ("matmul" in name)


@pytest.mark.parametrize(
    ("m", "n", "columns", "steps"), [(8192, 14336, 256, 4), (16, 14336, 128, 6), (16, 4096, 64, 8)],
    ids=["many-rows", "few-rows", "few-tiles"],
)
def test_narrower_tiles_where_multiprocessors_would_be_idle(
    m: int, n: int, columns: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "multiprocessors", lambda: 132)
    config = matmul.choose_config(m, n, itemsize=2)
    assert (config.columns, config.steps) == (columns, steps)


def test_other_dtypes_and_sizes_are_refused() -> None:
    a, b = jnp.ones((16, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    with pytest.raises(TypeError, match="all bfloat16 or all float16, got float32, float32"):
        matmul.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
    with pytest.raises(TypeError, match="got bfloat16, float16"):
        matmul.matmul(a, b.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"must fit, got \[16, 64\], \[32, 64\]"):
        matmul.matmul(a, b[:32])
    with pytest.raises(ValueError, match="got m 15, k 64, n 64: pad the arrays"):
        matmul.matmul(a[:15], b)
    rows = jnp.ones((4, 128), jnp.bfloat16)
    for x in (rows[0], rows[None]):
        with pytest.raises(ValueError, match="expected a matrix"):
            softmax.softmax(x)
    with pytest.raises(ValueError, match=r"got arrays of \[4, 128\], \[256\]"):
        rmsnorm.rmsnorm(rows, jnp.ones(256, jnp.bfloat16), 1e-6)
