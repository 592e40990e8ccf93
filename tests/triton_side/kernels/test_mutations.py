"""Mutations: each hand-written Triton kernel, broken in one place, must fail the properties that the sound kernel has.

`sound` must occur exactly once in the kernel's file; the test reports a text that has changed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import kernel_properties as properties
import pytest
import torch
from property_checks import FINITE, NOT_FINITE, ORDINARY, matrix, placed
from row_kernel_checks import DEVICE, built_on, mutant
from test_adamw import problem as adamw_problem
from test_attention import DK_DV, DQ, FORWARD
from test_attention import agrees as attention_agrees
from test_attention import configured as attention_configured
from test_attention import tensors as attention_tensors
from test_bias_gelu import configured as bias_gelu_configured
from test_cross_entropy import SMOOTHING, Z_LOSS, draw_labels
from test_cross_entropy import configured as cross_entropy_configured
from test_decode_attention import CONFIGS as DECODE_CONFIGS
from test_decode_attention import caches, draw_lengths
from test_decode_attention import configured as decode_configured
from test_dropout_residual_norm import problem as dropout_residual_norm_problem
from test_embedding import NARROW, draw_ids
from test_embedding import configured as embedding_configured
from test_gated import launched_as
from test_hopper_attention import on_hopper
from test_layernorm import configured as layernorm_configured
from test_linear_cross_entropy import CONFIGS as PROJECTIONS
from test_linear_cross_entropy import configured as linear_cross_entropy_configured
from test_linear_gelu import DPRE_CONFIGS
from test_matmul_fp8 import CONFIGS as FP8_PRODUCTS
from test_matmul_fp8 import SCALES
from test_matmul_fp8 import agrees as fp8_agrees
from test_matmul_fp8 import operands as fp8_operands
from test_moe import (
    group_gradient_problems,
    grouped_problems,
    routing_gradient_problems,
    routing_problems,
    row_problems,
)
from test_rmsnorm import EPS
from test_rmsnorm import configured as rmsnorm_configured
from test_rmsnorm import of_sum as rmsnorm_of_sum
from test_rope import THETA
from test_rope import configured as rope_configured
from test_softmax import configured as softmax_configured
from test_swiglu_mlp import of_activation

from xlafuse.triton_side import kernels
from xlafuse.triton_side.kernels import (
    adamw,
    attention,
    attention_backward,
    attention_few_tokens,
    bias_gelu,
    cross_entropy,
    decode_attention,
    dropout_residual_norm,
    embedding,
    geglu,
    gelu,
    layernorm,
    linear_cross_entropy,
    linear_gelu,
    matmul,
    matmul_fp8,
    moe,
    moe_routing,
    rmsnorm,
    rope,
    softmax,
    swiglu,
    swiglu_mlp,
    vector_add,
)
from xlafuse.triton_side.kernels.bias_gelu import TileConfig
from xlafuse.triton_side.kernels.hopper import attention_backward as hopper_backward
from xlafuse.triton_side.kernels.hopper import attention_forward as hopper_forward
from xlafuse.triton_side.kernels.hopper import matmul_fp8 as hopper_fp8
from xlafuse.triton_side.kernels.shared import (
    column_sums,
    gated_unit,
    grouped_gradient,
    grouped_product,
    head_splits,
    matmul_tiles,
    row_reduction,
    tf32_operand,
)
from xlafuse.triton_side.kernels.shared.launch import FlatConfig, RowConfig
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

FLAT = FlatConfig(block=64, num_warps=1)  # overruns stay within the guard
ROW = RowConfig(block_rows=4, block_columns=256, num_warps=4, num_stages=1, programs=3)
LOOPED = RowConfig(block_rows=1, block_columns=32, num_warps=1, num_stages=1, programs=3)
HALVES = RowConfig(block_rows=1, block_columns=64, num_warps=1, num_stages=1, programs=3)
PREFETCHED = RowConfig(block_rows=1, block_columns=256, num_warps=1, num_stages=2, programs=3)
BIASED = TileConfig(block_rows=4, block_columns=64, num_warps=1, programs=2)
LOOPED_FLAT = FlatConfig(block=32, num_warps=1)
TILES = MatmulConfig(16, 32, 16, num_warps=4, num_stages=1, group_m=2, descriptors=False)
ORDINARY_ROWS, KINDS = [ORDINARY], [*FINITE, *NOT_FINITE]

Problem = str | None


def draw(*shape: int, seed: int = 0, kinds=ORDINARY_ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = matrix(torch.Size(shape[:-1]).numel(), shape[-1], kinds, seed, dtype)
    return placed(rows.view(shape), "dense", DEVICE)


def vector_add_problems(module: ModuleType) -> Iterator[Problem]:
    yield properties.vector_add(lambda x, y: (module.vector_add(x, y, config=FLAT),), draw(100), draw(100, seed=1))


def gelu_problems(module: ModuleType) -> Iterator[Problem]:
    def launch(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return module.forward(x, FLAT), module.backward(x, dy, FLAT)

    yield properties.gelu(launch, draw(13, 17, kinds=KINDS), draw(13, 17, seed=1))


def adamw_problems(module: ModuleType) -> Iterator[Problem]:
    yield adamw_problem(FLAT, module, elements=100)
    yield adamw_problem(FLAT, module, elements=100, step=500)


def gated_problems(unit: ModuleType, module: ModuleType) -> Iterator[Problem]:
    """module: the unit's own module, or gated_unit."""
    name, activation = {swiglu: ("swiglu", "silu"), geglu: ("geglu", "gelu")}[unit]
    if not hasattr(module, name):
        module = unit if module is gated_unit else built_on(module, gated_unit, unit)
    operands = draw(13, 17, kinds=KINDS), draw(13, 17, seed=1), draw(13, 17, seed=2)
    yield properties.gated_unit(activation, launched_as(module, name, FLAT), *operands)


def bias_gelu_problems(module: ModuleType) -> Iterator[Problem]:
    launch = properties.training(bias_gelu_configured(BIASED, module))
    yield properties.bias_gelu(launch, draw(21, 67, kinds=KINDS), draw(67, seed=1), draw(21, 67, seed=2))
    yield properties.bias_gelu(launch, draw(21, 67), draw(67, seed=1), draw(21, 67, seed=2))


def sum_columns_problems(module: ModuleType) -> Iterator[Problem]:
    yield properties.sum_columns(lambda partial: (module.sum_columns(partial, torch.float32),), draw(300, 37))
    yield properties.sum_columns(lambda partial: module.sum_vectors(partial, torch.float32), draw(300, 3, 37))


def of_block(block: ModuleType, module: ModuleType) -> ModuleType:
    """Return the block's module, built on `module` if that is row_reduction or a mutant of it."""
    if hasattr(module, block.__name__.rpartition(".")[2]):
        return module
    return block if module is row_reduction else built_on(module, row_reduction, block)


def softmax_problems(
    config: RowConfig, module: ModuleType, dtype: torch.dtype = torch.float32
) -> Iterator[Problem]:
    launch = properties.training(softmax_configured(config, of_block(softmax, module)))
    for columns in (67, 80):  # rows with and without edges
        x, dy = draw(14, columns, kinds=KINDS, dtype=dtype), draw(14, columns, seed=1, dtype=dtype)
        yield properties.softmax(launch, x, dy)


def cross_entropy_problems(module: ModuleType) -> Iterator[Problem]:
    launch, dloss = cross_entropy_configured(LOOPED_FLAT, module), torch.tensor(1.7, device=DEVICE)
    for columns, kinds in ((67, ORDINARY_ROWS), (80, ORDINARY_ROWS), (80, KINDS)):
        logits, labels = draw(14, columns, kinds=kinds), draw_labels(14, columns)
        yield properties.cross_entropy(launch, logits, labels, dloss, SMOOTHING, Z_LOSS)


def linear_cross_entropy_problems(module: ModuleType) -> Iterator[Problem]:
    launch = linear_cross_entropy_configured(PROJECTIONS[0], module)
    h, w, labels = draw(19, 40), draw(300, 40, seed=1) / 8, draw_labels(19, 300)
    labels[:4] = torch.tensor([0, 63, 64, 299])  # at the edges of tiles
    yield properties.linear_cross_entropy(launch, h, w, labels, torch.tensor(1.7, device=DEVICE), SMOOTHING, Z_LOSS)


def rmsnorm_problems(config: RowConfig, module: ModuleType) -> Iterator[Problem]:
    launch = properties.training(rmsnorm_configured(config, of_block(rmsnorm, module)))
    yield properties.rmsnorm(launch, draw(14, 67), draw(67, seed=1), draw(14, 67, seed=2), EPS)


def rmsnorm_of_sum_problems(config: RowConfig, module: ModuleType) -> Iterator[Problem]:
    x, residual, dy, dsum = (draw(14, 67, seed=seed) for seed in range(4))
    yield properties.rmsnorm_of_sum(
        rmsnorm_of_sum(config, of_block(rmsnorm, module)), x, residual, draw(67, seed=4), dy, dsum, EPS
    )


def layernorm_problems(config: RowConfig, module: ModuleType) -> Iterator[Problem]:
    launch = properties.training(layernorm_configured(config, of_block(layernorm, module)))
    operands = draw(14, 67) + 2, draw(67, seed=1), draw(67, seed=3), draw(14, 67, seed=2)
    yield properties.layernorm(launch, *operands, EPS)


def rope_problems(module: ModuleType) -> Iterator[Problem]:
    config = module.RopeConfig(vectors=8, heads=2, splits=2, num_warps=1)
    q, dq, k, dk = (draw(2, heads, 9, 6, seed=heads + seed) for heads in (5, 1) for seed in (0, 10))
    positions = torch.arange(990, 1008, device=DEVICE).view(2, 9)
    yield properties.rope(rope_configured(config, module), q, k, positions, dq, dk, THETA)


def dropout_residual_norm_problems(module: ModuleType) -> Iterator[Problem]:
    yield dropout_residual_norm_problem(14, 67, config=ROW, module=module)


def matmul_problems(module: ModuleType) -> Iterator[Problem]:
    if not hasattr(module, "launch_matmul"):
        module = matmul if module is matmul_tiles else built_on(module, matmul_tiles, matmul)
    operands = draw(53, 41), draw(41, 67, seed=1), draw(53, 67, seed=2)
    yield properties.matmul(lambda a, b, residual: (module.launch_matmul(a, b, TILES, residual),), *operands)


def product_bias_gelu_problems(module: ModuleType) -> Iterator[Problem]:
    operands = draw(53, 41), draw(41, 67, seed=1), draw(67, seed=2)
    yield properties.product_bias_gelu(lambda *x: module.launch_bias_gelu(*x, TILES, True), *operands)


def partial_sums_problems(module: ModuleType) -> Iterator[Problem]:
    yield properties.sums_over_rows(lambda x: (module.partial_sums(x),), draw(600, 67))


def dpre_problems(module: ModuleType) -> Iterator[Problem]:
    yield properties.dpre(lambda *x: module.launch_dpre(*x, DPRE_CONFIGS[0]), draw(19, 67), draw(19, 67, seed=1))


def activation_problems(module: ModuleType) -> Iterator[Problem]:
    operands = draw(13, 17, kinds=KINDS), draw(13, 17, seed=1), draw(13, 17, seed=2)
    yield properties.gated_unit("silu", of_activation(module), *operands)


def attention_problems(module: ModuleType) -> Iterator[Problem]:
    side = {"above" if hasattr(module, "launch_forward") else "below": module}
    launch = properties.training(attention_configured(FORWARD[0], DK_DV[0], DQ[0], **side))
    yield properties.attention(launch, *(draw(1, 2, 70, 16, seed=seed) for seed in range(4)))


def head_splits_problems(module: ModuleType) -> Iterator[Problem]:
    sums = tuple(draw(2, 6, 70, 16, seed=seed) for seed in range(2))
    dk, dv = (torch.empty_like(each[:, :2]) for each in sums)
    module.launch_sum_splits(sums, dk, dv)
    for name, found, each in zip(("dk", "dv"), (dk, dv), sums, strict=True):
        yield None if torch.allclose(found, each.unflatten(1, (2, 3)).sum(2), atol=1e-5) else f"{name} is no sum"


def operand_problems(module: ModuleType) -> Iterator[Problem]:
    b = draw(70, 33)
    _, copy = module.prepare_operands(draw(5, 70), b, "tf32x3")
    big, rest = copy.split(33, dim=1)
    yield None if torch.equal(big + rest, b) and rest.abs().max() < 1e-3 * b.abs().max() else "the parts are not b"


def few_tokens_problems(module: ModuleType) -> Iterator[Problem]:
    q, k, v, dout = (draw(2, 2, 3, 16, seed=seed, dtype=torch.float16) for seed in range(4))

    def trained(q, k, v, dout):
        out, logsumexp2 = module.launch_few_tokens(q, k, v, True, True, 0)
        return out, *attention.backward(q, k, v, out, dout, logsumexp2, hopper=False)

    yield properties.attention(trained, q, k, v, dout)


def attention_bias_problems(module: ModuleType) -> Iterator[Problem]:
    launch = properties.training(attention_configured(FORWARD[0], DK_DV[0], DQ[0], False, below=module))
    inputs = [draw(2, 2, 70, 16, seed=seed) for seed in range(4)]
    yield properties.attention(launch, *inputs, causal=False, bias=draw(2, 70, 70, seed=4))


def decode_problems(module: ModuleType) -> Iterator[Problem]:
    lengths = draw_lengths(0, 33, 60)
    k, v = caches(lengths, 2, 60, 16)
    for config, page_size in ((DECODE_CONFIGS[0], None), (DECODE_CONFIGS[2], 5)):
        for queries in ((), (3,)):
            yield properties.decode_attention(
                decode_configured(config, page_size, module), draw(3, 6, *queries, 16), k, v, lengths
            )


def fp8_problems(module: ModuleType) -> Iterator[Problem]:
    a, b = fp8_operands(53, 41, 67)
    agrees = fp8_agrees(module.launch_fp8(a, b.T, *SCALES, FP8_PRODUCTS[0]), a, b)
    yield None if agrees else "differs from float64"


def hopper_problems(name: str, module: ModuleType) -> Iterator[Problem]:
    """name: the module's name in `attention`."""
    tensors = attention_tensors(1, 4, 300, 128, torch.bfloat16, kv_heads=2)
    with mock.patch.object(attention, name, module):
        agrees = attention_agrees(partial(attention.attention, kernels="hopper"), *tensors)
    yield None if agrees else "differs from float64"


def hopper_fp8_problems(module: ModuleType) -> Iterator[Problem]:
    a, b = fp8_operands(300, 1040, 264)
    yield None if fp8_agrees(module.launch_fp8(a, b, *SCALES, 512), a, b) else "differs from float64"


def embedding_problems(module: ModuleType) -> Iterator[Problem]:
    """Check the order first, because the gradient reads memory by it."""
    ids = draw_ids(10, 70)
    yield properties.sorted_by_id(module.sort_by_id, ids)
    table = placed(matrix(10, 19, KINDS, 0, torch.float32), "padded rows", DEVICE)
    yield properties.embedding(embedding_configured(NARROW, module), table, ids, draw(70, 19, seed=1))


HOPPER_BACKWARD = partial(hopper_problems, "hopper_backward")


@dataclass(frozen=True)
class Mutation:
    kernel: str
    module: ModuleType
    sound: str
    broken: str
    problems: Callable[[ModuleType], Iterator[Problem]]
    hopper: bool = False  # it runs on a Hopper GPU only


MUTATIONS = [
    Mutation(
        "adamw_kernel", adamw,
        "square_root(nu, accurate) * root_scale + eps", "(square_root(nu, accurate) + eps) * root_scale",
        adamw_problems,
    ),
    Mutation(
        "vector_add_kernel", vector_add,
        "(x + y).to(out_ptr.dtype.element_ty), mask=mask)", "(x + y).to(out_ptr.dtype.element_ty))",
        vector_add_problems,
    ),
    Mutation(
        "gelu_forward_kernel", gelu,
        "gelu_value(x, accurate).to(y_ptr.dtype.element_ty), mask=mask)",
        "gelu_value(x, accurate).to(y_ptr.dtype.element_ty))",
        gelu_problems,
    ),
    Mutation(
        "gelu_backward_kernel", gelu,
        "sigmoid = tl.where(x >= 0.0, larger, smaller)", "sigmoid = larger",
        gelu_problems,
    ),
    Mutation(
        "swiglu_forward_kernel", gated_unit,
        "value.to(pointers.dtype.element_ty), mask=mask)", "value.to(pointers.dtype.element_ty))",
        partial(gated_problems, swiglu),
    ),
    Mutation(
        "swiglu_backward_kernel", swiglu,
        "sigmoid + silu * (1.0 - sigmoid)", "sigmoid + silu",
        partial(gated_problems, swiglu),
    ),
    Mutation(
        "geglu_forward_kernel", geglu,
        "forward_block(gate_ptr, up_ptr, y_ptr", "forward_block(up_ptr, gate_ptr, y_ptr",
        partial(gated_problems, geglu),
    ),
    Mutation(
        "geglu_backward_kernel", gated_unit,
        "dy * up * slope, mask", "dy * slope, mask",
        partial(gated_problems, geglu),
    ),
    Mutation(
        "bias_gelu_forward_kernel", bias_gelu,
        "y = gelu_value(x + bias, accurate)", "y = gelu_value(x, accurate)",
        bias_gelu_problems,
    ),
    Mutation(
        "bias_gelu_backward_kernel", bias_gelu,
        "dbias += tl.where(row < rows, dx, 0.0)", "dbias = tl.where(row < rows, dx, 0.0)",
        bias_gelu_problems,
    ),
    Mutation(
        "softmax_forward_kernel", softmax,
        "numerator = exp(x - maximum, accurate)", "numerator = exp(x, accurate)",
        partial(softmax_problems, ROW),
    ),
    Mutation(
        "softmax_forward_looped_kernel", row_reduction,
        "total *= exp(maximum - new_maximum, ACCURATE)", "pass",
        partial(softmax_problems, LOOPED),
    ),
    Mutation(
        "softmax_forward_joint_kernel", softmax,
        "return joint, total * exp(maximum - joint, False) + ", "return joint, total + ",
        partial(softmax_problems, PREFETCHED, dtype=torch.float16),
    ),
    Mutation(
        "softmax_backward_kernel", softmax,
        "dx = y * (dy - tl.sum(y * dy, axis=1, keep_dims=True))", "dx = y * dy",
        partial(softmax_problems, ROW),
    ),
    Mutation(
        "softmax_backward_looped_kernel", softmax,
        "partial_dot += y * dy", "partial_dot = y * dy",
        partial(softmax_problems, LOOPED),
    ),
    Mutation(
        "cross_entropy_forward_kernel", cross_entropy,
        "tl.full([lanes, 1], LOWEST, tl.float32)", 'tl.full([lanes, 1], -float("inf"), tl.float32)',
        cross_entropy_problems,
    ),
    Mutation(
        "cross_entropy_mean_kernel", cross_entropy,
        "count = tl.maximum(tl.sum(counts), 1)", "count = tokens",
        cross_entropy_problems,
    ),
    Mutation(
        "cross_entropy_backward_kernel", cross_entropy,
        "tl.where(is_label, 1.0 - smoothing, 0.0)", "tl.where(is_label, 1.0, 0.0)",
        cross_entropy_problems,
    ),
    Mutation(
        "projected_statistics_kernel", linear_cross_entropy,
        "is_here = (label >= column) &", "is_here = (label > column) &",
        linear_cross_entropy_problems,
    ),
    Mutation(
        "combine_tiles_kernel", linear_cross_entropy,
        "exponentials * tl.exp(maximum - finite_reference(row_maximum)[None, :])", "exponentials",
        linear_cross_entropy_problems,
    ),
    Mutation(
        "dlogits_kernel", linear_cross_entropy,
        "class_ == label, maximum, log_sum, classes", "class_ == label, maximum, log_sum, COLUMNS",
        linear_cross_entropy_problems,
    ),
    Mutation(
        "count_kernel", linear_cross_entropy,
        "counts += (label != IGNORED).to(tl.int32)", "counts += (label != IGNORED + 1).to(tl.int32)",
        linear_cross_entropy_problems,
    ),
    Mutation(
        "scale_gradient_kernel", linear_cross_entropy,
        "(value * factor).to(", "value.to(",
        linear_cross_entropy_problems,
    ),
    Mutation(
        "matmul_fp8_kernel", matmul_fp8,
        "c * scale, row, column, m, n, BLOCK_M, BLOCK_N)", "c, row, column, m, n, BLOCK_M, BLOCK_N)",
        fp8_problems,
    ),
    Mutation(
        "rmsnorm_forward_kernel", rmsnorm,
        "axis=1, keep_dims=True) / columns + eps", "axis=1, keep_dims=True) / COLUMNS + eps",
        partial(rmsnorm_problems, ROW),
    ),
    Mutation(
        "rmsnorm_forward_looped_kernel", rmsnorm,
        "squares += x * x", "squares = x * x",
        partial(rmsnorm_problems, LOOPED),
    ),
    Mutation(
        "rmsnorm_forward_kernel", rmsnorm,
        "row * residual_row_stride + column", "row * columns",
        partial(rmsnorm_of_sum_problems, ROW),
    ),
    Mutation(
        "rmsnorm_forward_looped_kernel", rmsnorm,
        "sum_ptr + out_row + column", "sum_ptr + column",
        partial(rmsnorm_of_sum_problems, LOOPED),
    ),
    Mutation(
        "rmsnorm_backward_kernel", row_reduction,
        "dx += load(dsum_ptr + row *", "dx = load(dsum_ptr + row *",
        partial(rmsnorm_of_sum_problems, ROW),
    ),
    Mutation(
        "rmsnorm_backward_looped_kernel", row_reduction,
        "dsum_ptr + dsum_row + column", "dsum_ptr + column",
        partial(rmsnorm_of_sum_problems, LOOPED),
    ),
    Mutation(
        "rmsnorm_backward_kernel", row_reduction,
        "return rstd * (dnormalised - dmean - normalised * projection)", "return rstd * dnormalised",
        partial(rmsnorm_problems, ROW),
    ),
    Mutation(
        "rmsnorm_backward_looped_kernel", row_reduction,
        "projection = tl.sum(products, axis=0) / columns", "projection = tl.sum(products, axis=0) / COLUMNS",
        partial(rmsnorm_problems, LOOPED),
    ),
    Mutation(
        "rmsnorm_partial_dweight_kernel", row_reduction,
        "dweight += dy * ((x - mean) * rstd)", "dweight = dy * ((x - mean) * rstd)",
        partial(rmsnorm_problems, LOOPED),
    ),
    Mutation(
        "layernorm_forward_kernel", row_reduction,
        "centred = tl.where(mask, x - mean, 0.0)", "centred = x - mean",
        partial(layernorm_problems, ROW),
    ),
    Mutation(
        "layernorm_forward_looped_kernel", layernorm,
        "tl.sum(squares + apart * apart * count, axis=0)", "tl.sum(squares, axis=0)",
        partial(layernorm_problems, LOOPED),
    ),
    Mutation(
        "layernorm_backward_kernel", row_reduction,
        "return rstd * (dnormalised - dmean - normalised * projection)", "return rstd * (dnormalised - dmean)",
        partial(layernorm_problems, ROW),
    ),
    Mutation(
        "layernorm_backward_halves_kernel", layernorm,
        "dmean = tl.sum(dnormalised + other_dnormalised, axis=0)", "dmean = tl.sum(dnormalised, axis=0)",
        partial(layernorm_problems, HALVES),
    ),
    Mutation(
        "layernorm_backward_looped_kernel", row_reduction,
        "tl.sum(gradients, axis=0) / columns", "tl.sum(gradients, axis=0) / COLUMNS",
        partial(layernorm_problems, LOOPED),
    ),
    Mutation(
        "layernorm_partials_kernel", row_reduction,
        "dweight += dy * ((x - mean) * rstd)", "dweight += dy * (x * rstd)",
        partial(layernorm_problems, LOOPED),
    ),
    Mutation(
        "dropout_residual_norm_forward_kernel", dropout_residual_norm,
        "h.to(tl.float32), column < columns, columns", "h.to(tl.float32), column < COLUMNS, columns",
        dropout_residual_norm_problems,
    ),
    Mutation(
        "dropout_residual_norm_backward_kernel", dropout_residual_norm,
        "dx = tl.where(kept, dh * scale, 0.0)", "dx = dh * scale",
        dropout_residual_norm_problems,
    ),
    Mutation(
        "sum_columns_kernel", column_sums,
        "mask = (row < partials) & (column < columns)", "mask = (row < partials - 1) & (column < columns)",
        sum_columns_problems,
    ),
    Mutation(
        "sum_columns_kernel", column_sums,
        "total += tl.load(", "total = tl.load(",
        sum_columns_problems,
    ),
    Mutation(
        "rope_kernel", rope,
        "sin = -sin", "sin = sin",
        rope_problems,
    ),
    Mutation(
        "matmul_kernel", matmul_tiles,
        "c = add_product(c, x, y, PRECISION)", "c = add_product(tl.zeros_like(c), x, y, PRECISION)",
        matmul_problems,
    ),
    Mutation(
        "matmul_kernel", matmul,
        "mask=at_column < n, other=0.0)", "mask=at_column < n - 1, other=0.0)",
        product_bias_gelu_problems,
    ),
    Mutation(
        "partial_sums_kernel", column_sums,
        "shares += load(", "shares = load(",
        partial_sums_problems,
    ),
    Mutation(
        "dpre_kernel", linear_gelu,
        "dbias += dpre", "dbias += dy",
        dpre_problems,
    ),
    Mutation(
        "activation_gradients_kernel", swiglu_mlp,
        "dgate_ptr, dup_ptr, act_ptr, elements, silu", "dgate_ptr, act_ptr, dup_ptr, elements, silu",
        activation_problems,
    ),
    Mutation(
        "grouped_product_kernel", grouped_product,
        "begin + (row_tile - before) * BLOCK_M", "begin",
        grouped_problems,
    ),
    Mutation(
        "grouped_gate_up_kernel", grouped_product,
        "c * tl.sigmoid(c) * c2", "c * c2",
        grouped_problems,
    ),
    Mutation(
        "group_gradients_kernel", grouped_gradient,
        "rows_in_slots(rows_ptr, slot +", "rows_in_slots(rows_ptr, begin +",
        group_gradient_problems,
    ),
    Mutation(
        "moe_router_kernel", moe_routing,
        "free & (comparable == best[:, None])", "comparable == best[:, None]",
        routing_problems,
    ),
    Mutation(
        "moe_offsets_kernel", moe_routing,
        "tl.cumsum(counts, axis=0) - counts", "tl.cumsum(counts, axis=0)",
        routing_problems,
    ),
    Mutation(
        "moe_slots_kernel", moe_routing,
        "tl.cumsum(choices, axis=0) - choices", "0 * choices",
        routing_problems,
    ),
    Mutation(
        "moe_dlogits_kernel", moe_routing,
        "(weight * (dweight - mean))", "(weight * dweight)",
        routing_gradient_problems,
    ),
    Mutation(
        "moe_drouter_kernel", moe_routing,
        "tl.program_id(1) * TOKENS_PER_PARTIAL + start", "start",
        routing_gradient_problems,
    ),
    Mutation(
        "moe_combine_kernel", moe,
        "y += weight[:, None] * out.to(tl.float32)", "y += out.to(tl.float32)",
        row_problems,
    ),
    Mutation(
        "moe_activation_gradients_kernel", moe,
        "dweights += dout * act", "dweights += dact * act",
        row_problems,
    ),
    Mutation(
        "moe_dx_kernel", moe,
        "dx += tl.load(dx_of_experts_ptr", "dx = tl.load(dx_of_experts_ptr",
        row_problems,
    ),
    Mutation(
        "attention_forward_kernel", attention,
        "visible = is_visible(row[:, None], column[None, :]", "visible = is_visible(row[:, None], column[None, :] + 1",
        attention_problems,
    ),
    Mutation(
        "attention_few_tokens_kernel", attention_few_tokens,
        "scores * scale_log2e - row_max", "scores - row_max",
        few_tokens_problems,
    ),
    Mutation(
        "attention_delta_kernel", attention_backward,
        "* dout.to(tl.float32), axis=1)", "* dout.to(tl.float32), axis=1) * 0.5",
        attention_problems,
    ),
    Mutation(
        "attention_dk_dv_kernel", attention_backward,
        "is_visible(row[None, :], column[:, None]", "is_visible(row[None, :], column[:, None] + 1",
        attention_problems,
    ),
    Mutation(
        "prepare_operand_kernel", tf32_operand,
        "stride_pn, rest", "stride_pn, big",
        operand_problems,
    ),
    Mutation(
        "attention_sum_splits_kernel", head_splits,
        "dv += tl.load", "dv = tl.load",
        head_splits_problems,
    ),
    Mutation(
        "attention_dq_kernel", attention_backward,
        "is_visible(row[:, None], column[None, :]", "is_visible(row[:, None], column[None, :] + 1",
        attention_problems,
    ),
    Mutation(
        "attention_dbias_kernel", attention_backward,
        "tl.where(batch == 0, ds, total + ds)", "ds",
        attention_bias_problems,
    ),
    Mutation(
        "decode_attention_kernel", decode_attention,
        "scores = tl.where(visible, ", "scores = tl.where(key[None, :] >= 0, ",
        decode_problems,
    ),
    Mutation(
        "decode_attention_kernel", decode_attention,
        "+ key // PAGE_SIZE", "+ key // (PAGE_SIZE + 1)",
        decode_problems,
    ),
    Mutation(
        "decode_attention_kernel", decode_attention,
        "else length - (QUERIES - 1) + query", "else length",
        decode_problems,
    ),
    Mutation(
        "combine_splits_kernel", decode_attention,
        "weights[:, None] * partial", "partial",
        decode_problems,
    ),
    Mutation(
        "combine_splits_kernel", decode_attention,
        "out = accumulator / tl.where(seen > 0, row_sum, 1.0)", "out = accumulator / row_sum",
        decode_problems,
    ),
    Mutation(
        "embedding_forward_kernel", embedding,
        "table_ptr + row * table_row_stride", "table_ptr + row * columns",
        embedding_problems,
    ),
    Mutation(
        "embedding_order_kernel", embedding,
        "& (other[None, :] < token[:, None])", "",
        embedding_problems,
    ),
    Mutation(
        "embedding_backward_kernel", embedding,
        "total += tl.sum(dy.to(tl.float32), axis=0)", "total = tl.sum(dy.to(tl.float32), axis=0)",
        embedding_problems,
    ),
    Mutation(
        "hopper_attention_forward_kernel", hopper_forward,
        "sums = sums * per_row(alpha, sums) + _row_sums(a + b)", "sums = sums + _row_sums(a + b)",
        partial(hopper_problems, "hopper_forward"), hopper=True,
    ),
    Mutation(
        "hopper_attention_before_kernel", hopper_backward,
        "tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)", "tl.sum(dout.to(tl.float32), axis=1)",
        HOPPER_BACKWARD, hopper=True,
    ),
    Mutation(
        "hopper_attention_backward_kernel", hopper_backward,
        "k = matrix(k_smem.index(1 - PART + zero))", "k = matrix(k_smem.index(PART + zero))",
        HOPPER_BACKWARD, hopper=True,
    ),
    Mutation(
        "hopper_attention_after_kernel", hopper_backward,
        "+ number) * scale", "+ number)",
        HOPPER_BACKWARD, hopper=True,
    ),
    Mutation(
        "hopper_matmul_fp8_kernel", hopper_fp8,
        "x += earlier_x.to(gl.float32)", "x += 0 * earlier_x.to(gl.float32)",
        hopper_fp8_problems, hopper=True,
    ),
]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def declared_kernels() -> set[str]:
    """Return the functions of xlafuse.triton_side.kernels that declare operations: every kernel that is launched."""
    names = [info.name for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    return {
        name
        for module in map(importlib.import_module, names)
        for name, value in vars(module).items()
        if hasattr(value, "declaration")
    }


def test_every_kernel_has_a_mutation() -> None:
    assert {mutation.kernel for mutation in MUTATIONS} == declared_kernels()


# Mutations of one module share their properties, which the sound module need show only once.
SOUND = {(mutation.problems, mutation.module): mutation for mutation in MUTATIONS}.values()
ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper(), reason="needs a GPU of compute capability 9.0")]


def parameters(mutations: Iterable[Mutation]) -> list[Any]:
    return [pytest.param(m, marks=ON_HOPPER if m.hopper else [], id=m.kernel) for m in mutations]


@pytest.mark.full
@pytest.mark.parametrize("mutation", parameters(SOUND))
def test_the_sound_kernel_passes(mutation: Mutation) -> None:
    assert [text for text in mutation.problems(mutation.module) if text] == []


@pytest.mark.full
@pytest.mark.parametrize("mutation", parameters(MUTATIONS))
def test_the_mutation_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    assert Path(mutation.module.__file__).read_text().count(mutation.sound) == 1
    broken = mutant(mutation.module, mutation.sound, mutation.broken, tmp_path)
    assert any(mutation.problems(broken)), f"{mutation.kernel}: {mutation.sound!r} as {mutation.broken!r} passes"
