"""The CUDA C++ kernels on a GPU for generated inputs: shapes, strides, special values."""

from __future__ import annotations

import kernel_properties as properties
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property_checks import (
    COMMON,
    FINITE,
    NOT_FINITE,
    ORDINARY,
    layouts,
    matrix,
    placed,
    rows_of_any_kind,
    rows_of_numbers,
    seeds,
    sizes,
)
from test_dropout_residual_norm import problem as dropout_residual_norm_problem

from xlafuse.triton_side.cuda import (
    bias_gelu,
    dropout_residual_norm,
    gelu,
    layernorm,
    matmul,
    rmsnorm,
    softmax,
    vector_add,
)

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
many = settings(COMMON, max_examples=150)
# The columns select a warp, a block, a cluster of blocks and streaming; 16 bytes divide some rows.
columns = st.one_of(sizes, st.sampled_from([256, 1000, 1024, 4099, 8192, 8193, 10007, 16384, 32003, 65536, 131073]))
MODERATE = [kind for kind in FINITE if kind.name != "near overflow"]
moderate_rows = st.lists(st.sampled_from(MODERATE), min_size=1)


def draw(rows: int, columns: int, kinds, seed: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    return placed(matrix(rows, columns, kinds, seed, dtype), layout, "cuda")


@dtypes
@many
@given(sizes, columns, rows_of_any_kind, rows_of_any_kind, layouts, layouts, seeds)
def test_vector_add(dtype, rows, columns, x_kinds, y_kinds, x_layout, y_layout, seed) -> None:
    rows = min(rows, 5)
    x, y = draw(rows, columns, x_kinds, seed, dtype, x_layout), draw(rows, columns, y_kinds, seed + 1, dtype, y_layout)
    assert not properties.vector_add(lambda x, y: (vector_add.vector_add(x, y),), x, y)


@dtypes
@many
@given(sizes, columns, rows_of_any_kind, rows_of_numbers, layouts, layouts, seeds)
def test_gelu(dtype, rows, columns, kinds, dy_kinds, x_layout, dy_layout, seed) -> None:
    rows = min(rows, 5)
    x, dy = draw(rows, columns, kinds, seed, dtype, x_layout), draw(rows, columns, dy_kinds, seed + 1, dtype, dy_layout)
    assert not properties.gelu(properties.training(gelu.gelu), x, dy)


@dtypes
@many
@given(
    sizes, columns, rows_of_any_kind, rows_of_any_kind, rows_of_numbers, st.tuples(layouts, layouts, layouts), seeds
)
def test_bias_gelu(dtype, rows, columns, kinds, bias_kinds, dy_kinds, storage, seed) -> None:
    rows = rows if columns < 1000 else min(rows, 5)
    x = draw(rows, columns, kinds, seed, dtype, storage[0])
    bias = draw(1, columns, bias_kinds, seed + 1, dtype, storage[1])[0]
    dy = draw(rows, columns, dy_kinds, seed + 2, dtype, storage[2])
    assert not properties.bias_gelu(properties.training(bias_gelu.bias_gelu), x, bias, dy)


@dtypes
@many
@given(sizes, columns, rows_of_any_kind, moderate_rows, layouts, layouts, seeds)
def test_softmax(dtype, rows, columns, kinds, dy_kinds, x_layout, dy_layout, seed) -> None:
    rows = min(rows, 7)  # a block takes four rows, so the last block may not be full
    x, dy = draw(rows, columns, kinds, seed, dtype, x_layout), draw(rows, columns, dy_kinds, seed + 1, dtype, dy_layout)
    assert not properties.softmax(properties.training(softmax.softmax), x, dy)


@dtypes
@many
@given(sizes, columns, rows_of_any_kind, moderate_rows, st.tuples(layouts, layouts, layouts), seeds)
def test_layernorm(dtype, rows, columns, kinds, dy_kinds, storage, seed) -> None:
    if columns > 1024:
        rows = min(rows, 5)
    x = draw(rows, columns, kinds, seed, dtype, storage[0])
    dy = draw(rows, columns, dy_kinds, seed + 2, dtype, storage[2])
    weight, bias = (draw(1, columns, [ORDINARY], seed + i, dtype, storage[1])[0] for i in (1, 3))
    launch = properties.training(lambda x, weight, bias: layernorm.layernorm(x, weight, bias, 1e-6))
    assert not properties.layernorm(launch, x, weight, bias, dy, 1e-6)


@dtypes
@many
@given(sizes, columns, rows_of_any_kind, moderate_rows, st.tuples(layouts, layouts, layouts), seeds)
def test_rmsnorm(dtype, rows, columns, kinds, dy_kinds, storage, seed) -> None:
    if columns > 1024:
        rows = min(rows, 5)
    x = draw(rows, columns, kinds, seed, dtype, storage[0])
    dy = draw(rows, columns, dy_kinds, seed + 2, dtype, storage[2])
    weight = draw(1, columns, [ORDINARY], seed + 1, dtype, storage[1])[0]
    launch = properties.training(lambda x, weight: rmsnorm.rmsnorm(x, weight, 1e-6))
    assert not properties.rmsnorm(launch, x, weight, dy, 1e-6)


@dtypes
@many
@given(
    sizes, columns.filter(lambda columns: columns <= 16384),
    st.lists(st.sampled_from(MODERATE + NOT_FINITE), min_size=1), moderate_rows, moderate_rows,
    st.lists(layouts, min_size=7, max_size=7), st.sampled_from([0.0, 0.1, 0.5]), seeds,
)
def test_dropout_residual_norm(dtype, rows, columns, x_kinds, kinds, dy_kinds, storage, p, seed) -> None:
    if columns > 1024:
        rows = min(rows, 5)
    drawn = [(rows, x_kinds), (1, [ORDINARY]), (rows, kinds), *2 * [(1, [ORDINARY])], *2 * [(rows, dy_kinds)]]
    inputs = tuple(
        draw(count, columns, of, seed + i, dtype, layout)
        for i, ((count, of), layout) in enumerate(zip(drawn, storage, strict=True))
    )
    inputs = tuple(x[0] if i in (1, 3, 4) else x for i, x in enumerate(inputs))
    assert not dropout_residual_norm_problem(module=dropout_residual_norm, p=p, inputs=inputs)


@dtypes
@many
@given(sizes, st.one_of(sizes, st.just(1000)), sizes, moderate_rows, st.tuples(layouts, layouts, layouts), seeds)
def test_matmul(dtype, m, k, n, dc_kinds, storage, seed) -> None:
    a = draw(m, k, [ORDINARY], seed, dtype, storage[0])
    b = draw(k, n, [ORDINARY], seed + 1, dtype, storage[1])
    dc = draw(m, n, dc_kinds, seed + 2, dtype, storage[2])
    assert not properties.trained_matmul(properties.training(matmul.matmul), a, b, dc)
