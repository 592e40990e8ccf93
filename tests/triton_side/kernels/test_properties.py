"""Property tests of every hand-written Triton kernel with unusual shapes, strides and values.

Without a GPU, Triton's interpreter runs the kernels in float32 and float16. With a GPU they also run in bfloat16, with
more examples.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import moe_properties
import pytest
import torch
from full_marks import examples as draws
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_properties import (
    attention,
    bias_gelu,
    cross_entropy,
    decode_attention,
    dpre,
    embedding,
    first,
    gated_unit,
    gelu,
    launched,
    layernorm,
    linear,
    linear_cross_entropy,
    matmul,
    matmul_fp8,
    product_bias_gelu,
    rmsnorm,
    rmsnorm_of_sum,
    rope,
    softmax,
    sum_columns,
    sums_over_rows,
    trained_matmul,
    training,
    vector_add,
    within_plain_code,
)
from property_checks import (
    COMMON,
    FINITE,
    NOT_FINITE,
    ORDINARY,
    SIZES,
    layouts,
    matrix,
    placed,
    problem,
    rows_of_any_kind,
    rows_of_numbers,
    seeds,
    sizes,
)
from row_kernel_checks import DEVICE, DTYPES
from test_adamw import problem as adamw_problem
from test_attention import DK_DV, DQ, FORWARD
from test_attention import configured as attention_configured
from test_bias_gelu import CONFIGS as BIAS_GELU_CONFIGS
from test_bias_gelu import configured as bias_gelu_configured
from test_cross_entropy import SMOOTHING, Z_LOSS, draw_labels
from test_cross_entropy import configured as cross_entropy_configured
from test_decode_attention import CONFIGS as DECODE_CONFIGS
from test_decode_attention import PAGE_SIZES
from test_decode_attention import configured as decode_configured
from test_dropout_residual_norm import problem as dropout_residual_norm_problem
from test_embedding import NARROW
from test_embedding import configured as embedding_configured
from test_embedding import trained as embedding_trained
from test_layernorm import configured as layernorm_configured
from test_layernorm import default as default_layernorm
from test_linear_cross_entropy import CONFIGS as PROJECTIONS
from test_linear_cross_entropy import configured as linear_cross_entropy_configured
from test_linear_gelu import DPRE_CONFIGS
from test_linear_gelu import plain as plain_linear_gelu
from test_matmul_fp8 import CONFIGS as FP8_CONFIGS
from test_moe import DESCRIPTORS as MOE_DESCRIPTORS
from test_moe import TILES as MOE_TILES
from test_moe import routed
from test_rmsnorm import EPS
from test_rmsnorm import configured as rmsnorm_configured
from test_rmsnorm import of_sum as rmsnorm_configured_of_sum
from test_rope import THETA, trained
from test_rope import configured as rope_configured
from test_softmax import configured as softmax_configured
from test_swiglu_mlp import of_activation
from test_swiglu_mlp import plain as plain_mlp

from xlafuse.triton_side.kernels import attention as attention_module
from xlafuse.triton_side.kernels import bias_gelu as bias_gelu_module
from xlafuse.triton_side.kernels import geglu as geglu_module
from xlafuse.triton_side.kernels import gelu as gelu_module
from xlafuse.triton_side.kernels import linear as linear_module
from xlafuse.triton_side.kernels import linear_gelu as linear_gelu_module
from xlafuse.triton_side.kernels import matmul as matmul_module
from xlafuse.triton_side.kernels import matmul_fp8 as fp8_module
from xlafuse.triton_side.kernels import moe as moe_module
from xlafuse.triton_side.kernels import moe_routing as moe_routing_module
from xlafuse.triton_side.kernels import rmsnorm as rmsnorm_module
from xlafuse.triton_side.kernels import rope as rope_module
from xlafuse.triton_side.kernels import softmax as softmax_module
from xlafuse.triton_side.kernels import swiglu as swiglu_module
from xlafuse.triton_side.kernels import swiglu_mlp as mlp_module
from xlafuse.triton_side.kernels import vector_add as vector_add_module
from xlafuse.triton_side.kernels.attention_bias import attention_bias
from xlafuse.triton_side.kernels.attention_packed import attention_packed
from xlafuse.triton_side.kernels.moe_routing import Route
from xlafuse.triton_side.kernels.rope import RopeConfig
from xlafuse.triton_side.kernels.shared import column_sums, grouped_gradient, grouped_product
from xlafuse.triton_side.kernels.shared.launch import INTERPRETED, FlatConfig, RowConfig
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig


def examples(interpreted: int, on_a_gpu: int) -> settings:
    """Return settings for so many examples. `make test` interprets a third of them."""
    return settings(COMMON, max_examples=draws(-(-interpreted // 3), interpreted) if INTERPRETED else on_a_gpu)


# NumPy computes for the interpreter and warns about overflow and NaN, which these tests want.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
few_rows = st.sampled_from([1, 2, 3, 5, 17] if INTERPRETED else SIZES)  # programs run one after another
flat_configs = st.sampled_from([None, FlatConfig(block=64, num_warps=1)])
wide_configs = st.sampled_from([None, FlatConfig(block=32, num_warps=1), FlatConfig(block=256, num_warps=4)])
# Whole rows, several rows a tile, and looped kernels; a program has several tiles or rows.
row_configs = st.sampled_from([
    None,
    RowConfig(block_rows=4, block_columns=256, num_warps=4, num_stages=1, programs=3),
    RowConfig(block_rows=1, block_columns=32, num_warps=1, num_stages=1, programs=5),
    RowConfig(block_rows=1, block_columns=16, num_warps=1, num_stages=2, programs=2),
    RowConfig(block_rows=1, block_columns=256, num_warps=1, num_stages=2, programs=5),
])
matmul_configs = st.sampled_from([
    MatmulConfig(16, 32, 16, num_warps=4, num_stages=1, group_m=1, descriptors=False),
    MatmulConfig(32, 16, 32, num_warps=4, num_stages=2, group_m=3, descriptors=False),
    MatmulConfig(16, 32, 32, num_warps=4, num_stages=2, group_m=2),
])
ORDINARY_ROWS = [ORDINARY]
# Rows whose products and squares fit fp32.
MODERATE = [kind for kind in FINITE if kind.name != "near overflow"]
moderate_rows = st.lists(st.sampled_from(MODERATE), min_size=1, max_size=4)


def draw(rows, columns, kinds, seed, dtype, layout="dense") -> torch.Tensor:
    return placed(matrix(rows, columns, kinds, seed, dtype), layout, DEVICE)


def fitting(config: RowConfig | None, columns: int) -> RowConfig | None:
    """Return the configuration, or a looped one if it is narrower than the row."""
    if config is None or config.block_columns >= columns or config.block_rows == 1:
        return config
    return replace(config, block_rows=1)


@dtypes
@examples(13, 100)
@given(sizes, sizes, rows_of_any_kind, rows_of_any_kind, layouts, layouts, flat_configs, seeds)
def test_vector_add(dtype, rows, columns, x_kinds, y_kinds, x_layout, y_layout, config, seed) -> None:
    x = draw(rows, columns, x_kinds, seed, dtype, x_layout)
    y = draw(rows, columns, y_kinds, seed + 1, dtype, y_layout)
    assert not vector_add(lambda x, y: (vector_add_module.vector_add(x, y, config=config),), x, y)


@dtypes
@examples(6, 100)
@given(
    sizes,
    sizes,
    rows_of_any_kind,
    rows_of_any_kind,
    moderate_rows,
    moderate_rows,
    layouts,
    flat_configs,
    st.integers(1, 2000),
    seeds,
)
def test_adamw(dtype, rows, columns, kinds, dp_kinds, mu_kinds, nu_kinds, layout, config, step, seed) -> None:
    param, gradient = (draw(rows, columns, k, seed + i, dtype, layout) for i, k in enumerate((kinds, dp_kinds)))
    mu = draw(rows, columns, mu_kinds, seed + 2, torch.float32, layout)
    nu = draw(rows, columns, nu_kinds, seed + 3, torch.float32, layout).abs()
    assert not adamw_problem(config, dtype=dtype, step=step, param=param, gradient=gradient, mu=mu, nu=nu)


@dtypes
@examples(15, 100)
@given(sizes, sizes, rows_of_any_kind, rows_of_numbers, layouts, layouts)
def test_gelu(dtype, rows, columns, kinds, dy_kinds, x_layout, dy_layout) -> None:
    x = draw(rows, columns, kinds, 0, dtype, x_layout)
    dy = draw(rows, columns, dy_kinds, 1, dtype, dy_layout)
    assert not gelu(training(gelu_module.gelu), x, dy)


@pytest.mark.parametrize(
    ("activation", "unit"), [("silu", swiglu_module.swiglu), ("gelu", geglu_module.geglu)], ids=["swiglu", "geglu"]
)
@dtypes
@examples(8, 80)
@given(sizes, sizes, rows_of_any_kind, moderate_rows, moderate_rows, st.tuples(layouts, layouts, layouts), seeds)
def test_gated_unit(activation, unit, dtype, rows, columns, gate_kinds, up_kinds, dy_kinds, storage, seed) -> None:
    gate, up, dy = (
        draw(rows, columns, kinds, seed + i, dtype, layout)
        for i, (kinds, layout) in enumerate(zip((gate_kinds, up_kinds, dy_kinds), storage, strict=True))
    )
    assert not gated_unit(activation, training(unit), gate, up, dy)


bias_gelu_configs = st.sampled_from([None, *BIAS_GELU_CONFIGS])


@dtypes
@examples(8, 100)
@given(
    few_rows, sizes, rows_of_any_kind, rows_of_any_kind, rows_of_numbers, st.tuples(layouts, layouts, layouts),
    bias_gelu_configs, seeds,
)
def test_bias_gelu(dtype, rows, columns, kinds, bias_kinds, dy_kinds, storage, config, seed) -> None:
    x = draw(rows, columns, kinds, seed, dtype, storage[0])
    bias = draw(1, columns, bias_kinds, seed + 1, dtype, storage[1])[0]
    dy = draw(rows, columns, dy_kinds, seed + 2, dtype, storage[2])
    function = bias_gelu_configured(config) if config else bias_gelu_module.bias_gelu
    assert not bias_gelu(training(function), x, bias, dy)


@dtypes
@examples(10, 80)
@given(few_rows, sizes, rows_of_any_kind, moderate_rows, layouts, layouts, row_configs, seeds)
def test_softmax(dtype, rows, columns, kinds, dy_kinds, x_layout, dy_layout, config, seed) -> None:
    config = fitting(config, columns)
    function = softmax_configured(config) if config else softmax_module.softmax
    x = draw(rows, columns, kinds, seed, dtype, x_layout)
    assert not softmax(training(function), x, draw(rows, columns, dy_kinds, seed + 1, dtype, dy_layout))


@dtypes
@examples(10, 80)
@given(few_rows, sizes, rows_of_any_kind, moderate_rows, layouts, layouts, layouts, row_configs, seeds)
def test_rmsnorm(dtype, rows, columns, kinds, dy_kinds, x_layout, weight_layout, dy_layout, config, seed) -> None:
    config = fitting(config, columns)

    def default(x, weight):
        return rmsnorm_module.rmsnorm(x, weight, EPS)

    function = rmsnorm_configured(config) if config else default
    x = draw(rows, columns, kinds, seed, dtype, x_layout)
    weight = draw(1, columns, ORDINARY_ROWS, seed + 1, dtype, weight_layout)[0]
    dy = draw(rows, columns, dy_kinds, seed + 2, dtype, dy_layout)
    assert not rmsnorm(training(function), x, weight, dy, EPS)


@dtypes
@examples(8, 80)
@given(
    sizes, sizes, few_rows, rows_of_any_kind, moderate_rows, layouts, layouts, st.sampled_from([None, NARROW]), seeds,
)
def test_embedding(dtype, rows, columns, tokens, kinds, dy_kinds, layout, dy_layout, config, seed) -> None:
    table = draw(rows, columns, kinds, seed, dtype, layout)
    ids = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    dy = draw(tokens, columns, dy_kinds, seed + 1, dtype, dy_layout)
    assert not embedding(embedding_configured(config) if config else embedding_trained, table, ids, dy)


@dtypes
@examples(10, 80)
@given(few_rows, sizes, rows_of_any_kind, layouts, wide_configs, st.sampled_from([0.0, 0.3, 1.0]), seeds)
def test_cross_entropy(dtype, tokens, classes, kinds, layout, config, ignored, seed) -> None:
    logits = draw(tokens, classes, kinds, seed, dtype, layout)
    labels, dloss = draw_labels(tokens, classes, ignored, seed), torch.tensor(1.7, device=DEVICE)
    assert not cross_entropy(cross_entropy_configured(config), logits, labels, dloss, SMOOTHING, Z_LOSS)


@dtypes
@examples(8, 80)
@given(few_rows, sizes, rows_of_any_kind, moderate_rows, st.lists(layouts, min_size=5, max_size=5), row_configs, seeds)
def test_rmsnorm_of_sum(dtype, rows, columns, kinds, dy_kinds, storage, config, seed) -> None:
    config = fitting(config, columns)
    x, residual, dy, dsum = (
        draw(rows, columns, of, seed + i, dtype, storage[i])
        for i, of in enumerate((kinds, ORDINARY_ROWS, dy_kinds, dy_kinds))
    )
    weight = draw(1, columns, ORDINARY_ROWS, seed + 4, dtype, storage[4])[0]
    assert not rmsnorm_of_sum(rmsnorm_configured_of_sum(config), x, residual, weight, dy, dsum, EPS)


@dtypes
@examples(4, 15)
@given(
    few_rows, sizes, sizes, moderate_rows, layouts, layouts, st.sampled_from([None, *PROJECTIONS]),
    st.sampled_from([0.0, 0.3, 1.0]), seeds,
)
def test_linear_cross_entropy(
    dtype, tokens, width, classes, kinds, h_layout, w_layout, config, ignored, seed
) -> None:
    if config and config.descriptors:
        width, h_layout, w_layout = -(-width // 8) * 8, "dense", "dense"
    h = draw(tokens, width, kinds, seed, dtype, h_layout)
    w = matrix(classes, width, ORDINARY_ROWS, seed + 1, torch.float64) * width**-0.5
    w = placed(w.to(dtype), w_layout, DEVICE)
    labels, dloss = draw_labels(tokens, classes, ignored, seed), torch.tensor(1.7, device=DEVICE)
    launch = linear_cross_entropy_configured(config)
    assert not linear_cross_entropy(launch, h, w, labels, dloss, SMOOTHING, Z_LOSS)


def test_rmsnorm_of_rows_too_large_for_their_squares_is_zero_as_in_torch() -> None:
    x = torch.full((2, 40), 3e30, device=DEVICE)
    weight = torch.ones(40, device=DEVICE)
    assert (torch.nn.functional.rms_norm(x, (40,), weight, EPS) == 0).all()
    assert (rmsnorm_module.rmsnorm(x, weight, EPS) == 0).all()


rope_configs = st.sampled_from([
    None,
    RopeConfig(vectors=8, heads=2, splits=2, num_warps=1),
    RopeConfig(vectors=4, heads=1, splits=1, num_warps=1),
    RopeConfig(vectors=32, heads=8, splits=3, num_warps=4),
])


@dtypes
@examples(8, 100)
@given(
    st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 5]), st.sampled_from([1, 3]), st.sampled_from([1, 3, 17]),
    st.sampled_from([2, 6, 16, 80]), st.lists(st.sampled_from(FINITE + NOT_FINITE), min_size=1, max_size=5),
    st.lists(layouts, min_size=4, max_size=4), st.sampled_from([1, 1000, 2**20]), st.booleans(), rope_configs, seeds,
)
def test_rope(
    dtype, batch, heads, kv_heads, sequence, head_dim, kinds, storage, farthest, narrow, config, seed
) -> None:
    def drawn(number: int) -> torch.Tensor:
        of = kv_heads if number % 2 else heads
        rows = matrix(batch * of * sequence, head_dim, kinds, seed + number, dtype)
        return placed(rows.view(batch, of, sequence, head_dim), storage[number], DEVICE)

    q, k, dq_out, dk_out = (drawn(number) for number in range(4))
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(farthest, (sequence, batch), generator=generator).to(DEVICE).t()
    positions = positions.int() if narrow else positions
    launch = rope_configured(config) if config else trained(rope_module.rope)
    assert not rope(launch, q, k, positions, dq_out, dk_out, THETA)


@dtypes
@examples(5, 40)
@given(st.sampled_from([1, 2, 255, 256, 257, 600]), st.integers(1, 3), sizes, moderate_rows, seeds)
def test_sum_columns(dtype, partials, vectors, columns, kinds, seed) -> None:
    partial = draw(partials * vectors, columns, kinds, seed, torch.float32).view(partials, vectors, columns)
    assert not sum_columns(lambda partial: column_sums.sum_vectors(partial, dtype), partial)


@dtypes
@examples(4, 60)
@given(
    few_rows, sizes, st.lists(st.sampled_from(MODERATE + NOT_FINITE), min_size=1, max_size=5), moderate_rows,
    moderate_rows, st.lists(layouts, min_size=7, max_size=7), row_configs, st.sampled_from([0.0, 0.1, 0.5]), seeds,
)
def test_dropout_residual_norm(dtype, rows, columns, x_kinds, kinds, dy_kinds, storage, config, p, seed) -> None:
    if config is not None and config.block_columns < columns:
        config = None
    drawn = [(rows, x_kinds), (1, ORDINARY_ROWS), (rows, kinds), *2 * [(1, ORDINARY_ROWS)], *2 * [(rows, dy_kinds)]]
    inputs = tuple(
        draw(count, columns, of, seed + i, dtype, layout)
        for i, ((count, of), layout) in enumerate(zip(drawn, storage, strict=True))
    )
    inputs = tuple(x[0] if i in (1, 3, 4) else x for i, x in enumerate(inputs))
    assert not dropout_residual_norm_problem(config=config, p=p, inputs=inputs)


@dtypes
@examples(10, 80)
@given(few_rows, sizes, rows_of_any_kind, moderate_rows, st.tuples(layouts, layouts, layouts), row_configs, seeds)
def test_layernorm(dtype, rows, columns, kinds, dy_kinds, storage, config, seed) -> None:
    config = fitting(config, columns)
    function = layernorm_configured(config) if config else default_layernorm
    x = draw(rows, columns, kinds, seed, dtype, storage[0])
    weight, bias = (draw(1, columns, ORDINARY_ROWS, seed + i, dtype, storage[1])[0] for i in (1, 3))
    dy = draw(rows, columns, dy_kinds, seed + 2, dtype, storage[2])
    assert not layernorm(training(function), x, weight, bias, dy, EPS)


@dtypes
@examples(13, 40)
@given(sizes, sizes, sizes, moderate_rows, st.booleans(), st.tuples(layouts, layouts, layouts), seeds)
def test_matmul(dtype, m, k, n, kinds, add, storage, seed) -> None:
    a = draw(m, k, kinds, seed, dtype, storage[0])
    b = draw(k, n, ORDINARY_ROWS, seed + 1, dtype, storage[1])
    residual = [draw(m, n, kinds, seed + 2, dtype, storage[2])] if add else []
    assert not matmul(lambda *operands: (matmul_module.matmul(*operands),), a, b, *residual)


@dtypes
@examples(8, 30)
@given(sizes, sizes, sizes, st.sampled_from(NOT_FINITE), seeds)
def test_matmul_keeps_what_is_not_finite_in_its_row(dtype, m, k, n, kind, seed) -> None:
    """Only rows and columns that are not finite in the reference may be so."""
    a = draw(m, k, [kind, *3 * ORDINARY_ROWS], seed, dtype)
    b = draw(k, n, ORDINARY_ROWS, seed + 1, dtype)
    assert not matmul(lambda a, b: (matmul_module.matmul(a, b),), a, b)


@dtypes
@examples(5, 40)
@given(sizes, sizes, sizes, moderate_rows, st.tuples(layouts, layouts, layouts), seeds)
def test_gradients_of_matmul(dtype, m, k, n, dc_kinds, storage, seed) -> None:
    a = draw(m, k, ORDINARY_ROWS, seed, dtype, storage[0])
    b = draw(k, n, ORDINARY_ROWS, seed + 1, dtype, storage[1])
    dc = draw(m, n, dc_kinds, seed + 2, dtype, storage[2])
    assert not trained_matmul(training(matmul_module.matmul), a, b, dc)


def aligned(config: MatmulConfig, *counts: int) -> list[int]:
    """Draw sizes that descriptors can read: multiples of 16 bytes of a 16-bit dtype."""
    return [-(-count // 8) * 8 for count in counts] if config.descriptors else list(counts)


@dtypes
@examples(10, 80)
@given(sizes, sizes, moderate_rows, rows_of_any_kind, moderate_rows, seeds)
def test_activation_gradients(dtype, tokens, hidden, dact_kinds, gate_kinds, up_kinds, seed) -> None:
    dact, gate, up = (
        draw(tokens, hidden, kinds, seed + i, dtype) for i, kinds in enumerate((dact_kinds, gate_kinds, up_kinds))
    )
    assert not gated_unit("silu", of_activation(mlp_module), gate, up, dact)


@dtypes
@examples(3, 20)
@given(sizes, st.integers(2, 40), st.integers(2, 70), layouts, layouts, seeds)
def test_swiglu_mlp(dtype, tokens, width, hidden, x_layout, weight_layout, seed) -> None:
    shapes = [(tokens, width), (1, width), (width, hidden), (width, hidden), (hidden, width), (tokens, width)]
    fan_in = [1, 1, width, width, hidden, 1]
    drawn = [
        placed(
            (matrix(*shape, ORDINARY_ROWS, seed + i, torch.float64) * fan**-0.5).to(dtype),
            weight_layout if 2 <= i < 5 else x_layout, DEVICE,
        )
        for i, (shape, fan) in enumerate(zip(shapes, fan_in, strict=True))
    ]
    x, norm_weight, *weights, dy = drawn
    names = ("y", "dx", "dnorm_weight", "dgate_weight", "dup_weight", "ddown_weight")

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return mlp_module.swiglu_mlp(*inputs, eps=1e-5)

    assert not within_plain_code(training(function), plain_mlp, names, (x, norm_weight[0], *weights), dy)


@dtypes
@examples(5, 30)
@given(sizes, sizes, sizes, moderate_rows, matmul_configs, layouts, seeds)
def test_product_with_bias_and_gelu(dtype, m, k, n, kinds, config, bias_layout, seed) -> None:
    m, k, n = aligned(config, m, k, n)
    a, b = draw(m, k, kinds, seed, dtype), draw(k, n, ORDINARY_ROWS, seed + 1, dtype)
    bias = draw(1, n, ORDINARY_ROWS, seed + 2, dtype, bias_layout)[0].contiguous()
    assert not product_bias_gelu(lambda *operands: matmul_module.launch_bias_gelu(*operands, config, True), a, b, bias)


@dtypes
@examples(5, 80)
@given(sizes, sizes, moderate_rows, moderate_rows, layouts, st.sampled_from([None, *DPRE_CONFIGS]), seeds)
def test_gradient_of_gelu_with_its_sums_over_rows(dtype, m, n, dy_kinds, pre_kinds, dy_layout, config, seed) -> None:
    dy, pre = draw(m, n, dy_kinds, seed, dtype, dy_layout), draw(m, n, pre_kinds, seed + 1, dtype)
    assert not dpre(lambda *tensors: linear_gelu_module.launch_dpre(*tensors, config), dy, pre)


@dtypes
@examples(3, 20)
@given(sizes, sizes, sizes, layouts, layouts, seeds)
def test_linear_gelu(dtype, m, k, n, x_layout, weight_layout, seed) -> None:
    x, dy = draw(m, k, ORDINARY_ROWS, seed, dtype, x_layout), draw(m, n, ORDINARY_ROWS, seed + 1, dtype, x_layout)
    weight = placed((matrix(k, n, ORDINARY_ROWS, seed + 2, torch.float64) * k**-0.5).to(dtype), weight_layout, DEVICE)
    bias = draw(1, n, ORDINARY_ROWS, seed + 3, dtype, weight_layout)[0]
    function, names = linear_gelu_module.linear_gelu, ("y", "dx", "dweight", "dbias")
    assert not within_plain_code(training(function), plain_linear_gelu, names, (x, weight, bias), dy)


@examples(5, 40)
@given(sizes, sizes, sizes, st.sampled_from([None, *FP8_CONFIGS]), layouts, layouts, seeds)
def test_matmul_fp8(m, k, n, config, a_layout, b_layout, seed) -> None:
    if config is not None and config.descriptors:
        k, a_layout, b_layout = -(-k // 16) * 16, "dense", "dense"
    dtype = torch.float8_e4m3fn
    a, b = draw(m, k, ORDINARY_ROWS, seed, dtype, a_layout), draw(n, k, ORDINARY_ROWS, seed + 1, dtype, b_layout)

    def launch(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> tuple[torch.Tensor]:
        if config is None:
            return (fp8_module.matmul_fp8(a, b, *scales),)
        return (fp8_module.launch_fp8(a, b.T, *scales, config),)

    assert not matmul_fp8(launch, a, b, *torch.tensor([0.37, -0.011], device=DEVICE))


@dtypes
@examples(5, 20)
@given(sizes, sizes, sizes, layouts, layouts, layouts, seeds)
def test_linear(dtype, m, k, n, x_layout, weight_layout, dy_layout, seed) -> None:
    x = draw(m, k, ORDINARY_ROWS, seed, dtype, x_layout)
    weight = draw(k, n, ORDINARY_ROWS, seed + 1, dtype, weight_layout)
    bias = draw(1, n, ORDINARY_ROWS, seed + 2, dtype, weight_layout)[0]
    dy = draw(m, n, ORDINARY_ROWS, seed + 3, dtype, dy_layout)
    assert not linear(training(linear_module.linear), x, weight, bias, dy)


@dtypes
@examples(5, 20)
@given(st.sampled_from([1, 5, 67, 300]), sizes, moderate_rows, layouts, seeds)
def test_partial_sums(dtype, rows, columns, kinds, layout, seed) -> None:
    x = draw(rows, columns, kinds, seed, dtype, layout)
    assert not sums_over_rows(lambda x: (column_sums.partial_sums(x),), x)


head_counts = st.sampled_from([(1, 1), (3, 1), (2, 2), (4, 2)])  # of q, and of k and v
masks = st.sampled_from([(True, 0), (False, 0), (True, 1), (True, 5), (True, 32), (True, 40)])  # causal, window
sequences = st.sampled_from([1, 2, 15, 16, 17, 31, 33, 47, 64, 67])
attention_configs = st.sampled_from([None, *zip(FORWARD, DK_DV, DQ, strict=True)])
magnitudes = st.sampled_from([0.0, 1e-4, 1.0, 8.0])


@dtypes
@examples(3, 20)
@given(
    st.integers(1, 3), st.integers(1, 2), sequences, attention_configs, magnitudes, st.sampled_from([1, 2, 5, 10**9]),
    st.tuples(layouts, layouts), seeds,
)
def test_attention_bias(dtype, batch, heads, sequence, config, magnitude, hidden, storage, seed) -> None:
    """The bias hides every `hidden`-th pair."""
    function = attention_configured(*config, False) if config else attention_bias
    layout = "dense" if config and config[0].descriptors else storage[0]
    q, k, v, dout = (
        placed(
            matrix(batch * heads * sequence, 16, ORDINARY_ROWS, seed + i, torch.float64)
            .to(dtype).view(batch, heads, sequence, 16), layout, DEVICE,
        )
        for i in range(4)
    )
    bias = matrix(heads * sequence, sequence, ORDINARY_ROWS, seed + 4, torch.float64) * magnitude
    bias.view(-1)[::hidden] = -torch.inf
    bias = placed(bias.to(dtype).view(heads, sequence, sequence), storage[1], DEVICE)
    assert not attention(training(function), q, k, v, dout, False, bias=bias)


@dtypes
@examples(5, 20)
@given(
    st.integers(1, 2), head_counts, masks, sequences, st.sampled_from([16, 32]), attention_configs, magnitudes,
    st.tuples(layouts, layouts, layouts, layouts), seeds,
)
def test_attention(dtype, batch, heads, mask, sequence, head_dim, config, magnitude, storage, seed) -> None:
    causal, window = mask
    function = (
        attention_configured(*config, *mask)
        if config
        else partial(attention_module.attention, causal=causal, window=window)
    )
    if config and config[0].descriptors:
        storage = ("dense",) * 4  # configurations given by hand do not check what descriptors can read
    counts = (heads[0], heads[1], heads[1], heads[0])
    q, k, v, dout = (
        placed(
            (matrix(batch * count * sequence, head_dim, ORDINARY_ROWS, seed + i, torch.float64)
             * (magnitude if i < 2 else 1.0)).to(dtype).view(batch, count, sequence, head_dim), layout, DEVICE,
        )
        for i, (layout, count) in enumerate(zip(storage, counts, strict=True))
    )
    assert not attention(training(function), q, k, v, dout, causal, window)


@dtypes
@examples(4, 20)
@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 16, 21]), min_size=1, max_size=3).filter(any), head_counts, magnitudes,
    st.tuples(layouts, layouts, layouts, layouts), seeds,
)
def test_attention_packed(dtype, lengths, heads, magnitude, storage, seed) -> None:
    tokens, counts = sum(lengths), (heads[0], heads[1], heads[1], heads[0])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)

    def function(q, k, v):
        return attention_packed(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens).transpose(0, 1)[None]

    q, k, v, dout = (
        placed(
            (matrix(count * tokens, 16, ORDINARY_ROWS, seed + i, torch.float64) * (magnitude if i < 2 else 1.0))
            .to(dtype).view(1, count, tokens, 16), layout, DEVICE,
        )
        for i, (layout, count) in enumerate(zip(storage, counts, strict=True))
    )
    assert not attention(training(function), q, k, v, dout, packed=lengths)


@dtypes
@examples(5, 20)
@given(
    sequences, st.data(), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.sampled_from("qkv"),
    attention_configs, seeds,
)
def test_attention_hides_later_positions(dtype, sequence, data, value, operand, config, seed) -> None:
    """A NaN or infinity at one position of one head reaches no earlier row and no other head.

    In its own tile, 0 * NaN is NaN, as in plain code.
    """
    at = data.draw(st.integers(0, sequence - 1))
    q, k, v = (matrix(2 * sequence, 16, ORDINARY_ROWS, seed + i, dtype).view(1, 2, sequence, 16) for i in range(3))
    {"q": q, "k": k, "v": v}[operand][0, 1, at] = value
    launch = attention_configured(*config) if config else attention_module.attention
    (out,), stray = launched(lambda *x: (launch(*x),), *(placed(x, "dense", DEVICE) for x in (q, k, v)))
    clean = [x.double().nan_to_num(1.0, 1.0, 1.0) for x in (q, k, v)]
    reference = torch.nn.functional.scaled_dot_product_attention(*clean, is_causal=True)
    out = out.cpu()
    eps = torch.finfo(dtype).eps
    sound = [problem(out[:, 0], reference[:, 0], 8 * eps)]
    tile = 128 if config is None else max(config[0].block_q, config[0].block_kv)
    before = at if operand != "v" else at // tile * tile
    sound.append(problem(out[0, 1, :before], reference[0, 1, :before], 8 * eps))
    if operand == "q":
        sound.append(problem(out[0, 1, at + 1 :], reference[0, 1, at + 1 :], 8 * eps))
        assert out[0, 1, at].isnan().all()
    elif operand == "v":
        assert not out[0, 1, at:].isfinite().any()
    elif value != value:
        assert out[0, 1, at:].isnan().all()
    assert not first(stray, *sound)


@dtypes
@examples(4, 40)
@given(sizes, sizes, st.integers(1, 20), st.data(), moderate_rows, moderate_rows, layouts, layouts, seeds)
def test_moe_routing(
    dtype, tokens, width, experts, data, kinds, router_kinds, x_layout, router_layout, seed
) -> None:
    """Rows of equal numbers and of zeros have tied logits."""
    top_k = data.draw(st.integers(1, experts))
    x = draw(tokens, width, kinds, seed, dtype, x_layout)
    router = draw(experts, width, router_kinds, seed + 1, dtype, router_layout)
    assert not moe_properties.routing(lambda *given: routed(*given, top_k), x, router, top_k)


def drawn_route(tokens: int, width: int, experts: int, top_k: int, kinds, dtype: torch.dtype, seed: int) -> Route:
    """Draw a route; rows of equal numbers or zeros have tied logits, so all tokens choose the same experts."""
    x, router = draw(tokens, width, kinds, seed, dtype), draw(experts, width, ORDINARY_ROWS, seed + 1, dtype)
    return moe_routing_module.route_tokens(x, router, top_k, save=True)[0]


few_tokens = st.sampled_from([1, 2, 7, 17, 33] if INTERPRETED else SIZES)
few_columns = st.sampled_from([1, 7, 16, 33, 67] if INTERPRETED else SIZES)
some_experts = st.integers(1, 9)


@dtypes
@examples(4, 40)
@given(
    few_tokens, sizes, sizes, some_experts, st.data(), moderate_rows, moderate_rows, st.tuples(layouts, layouts), seeds,
)
def test_rows_of_moe(dtype, tokens, width, hidden, experts, data, route_kinds, kinds, storage, seed) -> None:
    """Each kernel of the layer on a token's rows or a choice's, except its products."""
    top_k = data.draw(st.integers(1, experts))
    found = drawn_route(tokens, width, experts, top_k, route_kinds, dtype, seed)
    slots = tokens * top_k
    assert not moe_properties.combine(
        lambda out: (moe_module.launch_combine(out, found),), draw(slots, width, kinds, seed + 2, dtype), found
    )
    dout, gate, up = (draw(slots, hidden, kinds, seed + i, dtype) for i in (3, 4, 5))
    assert not moe_properties.activation_gradients(
        lambda *given: moe_module.launch_activation_gradients(*given, found), dout, gate, up, found
    )
    dweights, dloss = draw(tokens, top_k, ORDINARY_ROWS, seed + 6, torch.float32), torch.tensor(20.0, device=DEVICE)
    assert not moe_properties.dlogits(
        lambda *given: (moe_routing_module.launch_dlogits(found, *given),), found, dweights, dloss
    )
    dlogits = draw(tokens, experts, ORDINARY_ROWS, seed + 7, torch.float32)
    x = draw(tokens, width, kinds, seed + 8, dtype, storage[0])
    assert not moe_properties.drouter(lambda *given: (moe_routing_module.launch_drouter(*given),), x, dlogits)
    router = draw(experts, width, ORDINARY_ROWS, seed + 9, dtype, storage[1])
    assert not moe_properties.dx(
        lambda *given: (moe_module.launch_dx(*given, found),), draw(slots, width, kinds, seed + 10, dtype), dlogits,
        router, found,
    )


@dtypes
@examples(4, 40)
@given(
    few_tokens, few_columns, few_columns, some_experts, st.data(), moderate_rows, moderate_rows, st.booleans(), seeds,
)
def test_grouped_products_of_moe(dtype, tokens, k, n, experts, data, route_kinds, kinds, descriptors, seed) -> None:
    """Groups of several tiles, part of one, and none; rows gathered, and in the order of the slots."""
    config = MOE_DESCRIPTORS if descriptors and dtype != torch.float32 else MOE_TILES
    k, n = aligned(config, k, n)
    top_k = data.draw(st.integers(1, experts))
    found = drawn_route(tokens, k, experts, top_k, route_kinds, dtype, seed)
    rows, offsets, slots = found.rows, found.offsets, len(found.rows)

    # configurations given by hand do not check what descriptors can read
    layout = data.draw(st.sampled_from(["dense", "transposed"]) if config.descriptors else layouts)

    def weights(number: int) -> torch.Tensor:
        drawn = matrix(experts * k, n, ORDINARY_ROWS, seed + number, dtype).view(experts, k, n)
        return placed(drawn, layout, DEVICE)

    def product(rows: torch.Tensor | None, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, w, *second = operands
        return (grouped_product.launch_grouped_product(a, rows, w, offsets, slots, config, tuple(second) or None),)

    x, w, w2 = draw(tokens, k, kinds, seed + 2, dtype), weights(3), weights(4)
    a, a2 = (draw(slots, k, kinds, seed + i, dtype) for i in (5, 6))
    b, b2 = (draw(slots, n, ORDINARY_ROWS, seed + i, dtype) for i in (7, 8))
    assert not moe_properties.grouped_product(lambda *given: product(rows, *given), x, rows, w, offsets)
    assert not moe_properties.grouped_product(lambda *given: product(None, *given), a, None, w, offsets, a2, w2)
    assert not moe_properties.gate_up(
        lambda x, *ws: grouped_product.launch_gate_up(x, rows, *ws, offsets, config, True), x, rows, w, w2, offsets
    )

    def gradients(
        a: torch.Tensor, b: torch.Tensor, b2: torch.Tensor | None, gathered: bool | None
    ) -> tuple[torch.Tensor, ...]:
        made = grouped_gradient.launch_group_gradients(
            a=a, rows=None if gathered is None else rows, offsets=offsets, config=config, a_gathered=bool(gathered),
            b=b, b2=b2,
        )
        return made[: 1 if b2 is None else 2]

    dy = draw(tokens, n, ORDINARY_ROWS, seed + 9, dtype)
    at = rows.long()
    assert not moe_properties.group_gradients(lambda: gradients(x, b, b2, True), x[at], offsets, b, b2)
    assert not moe_properties.group_gradients(lambda: gradients(a, dy, None, False), a, offsets, dy[at])
    assert not moe_properties.group_gradients(lambda: gradients(a, b, b2, None), a, offsets, b, b2)


def test_attention_skips_keys_of_weight_zero() -> None:
    """Keys of score -inf have weight 0, also in the first tiles: row 99 has 30 keys of finite score."""
    q = matrix(100, 16, ORDINARY_ROWS, 0, torch.float32).abs().view(1, 1, 100, 16)
    k, v = (matrix(100, 16, ORDINARY_ROWS, i, torch.float32).view(1, 1, 100, 16) for i in (1, 2))
    k[0, 0, :70] = -torch.inf
    out = attention_module.attention(*(x.to(DEVICE) for x in (q, k, v)))
    assert out[0, 0, 70:].isfinite().all()


@dtypes
@examples(5, 30)
@given(
    st.lists(st.sampled_from([0, 1, 15, 16, 17, 33, 48, 67]), min_size=1, max_size=3), st.integers(1, 2),
    st.sampled_from([1, 3, 4, 17]), st.sampled_from([(), (1,), (2,), (5,), (16,)]), st.sampled_from([16, 32]),
    st.sampled_from([None, *DECODE_CONFIGS]), st.sampled_from(PAGE_SIZES), magnitudes,
    st.tuples(layouts, layouts, layouts), seeds,
)
def test_decode_attention(
    dtype, lengths, kv_heads, group, queries, head_dim, config, page_size, magnitude, storage, seed
) -> None:
    """NaN surrounds the caches and fills them past each length."""
    batch, capacity = len(lengths), max([*lengths, 1]) + seed % 3
    q, k, v = (
        (matrix(batch * rows, head_dim, ORDINARY_ROWS, seed + i, torch.float64) * (magnitude if i < 2 else 1.0))
        .to(dtype).view(batch, -1, *inner, head_dim)
        for i, (rows, inner) in enumerate((
            (kv_heads * group * math.prod(queries), queries), *((kv_heads * capacity, (capacity,)),) * 2
        ))
    )
    for i, length in enumerate(lengths):
        k[i, :, length:] = v[i, :, length:] = torch.nan
    placed_inputs = (placed(x, layout, DEVICE) for x, layout in zip((q, k, v), storage, strict=True))
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    assert not decode_attention(decode_configured(config, page_size), *placed_inputs, counts)
