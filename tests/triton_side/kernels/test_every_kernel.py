"""All public kernels: any storage, empty inputs, memory that training keeps, bits that repeat, refused arguments."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import float64_reference
import pytest
import torch
from float64_reference import attributes_of, case_of, cotangents_of, evaluated, inputs_of
from row_kernel_checks import DEVICE, is_accurate, random

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.triton_side.kernels import rmsnorm, softmax

# NumPy computes for the interpreter and warns about overflow and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Tensors = dict[str, torch.Tensor]


def on_device(tensors: Tensors) -> Tensors:
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def applied(package: str, case: Case) -> Callable[[Tensors], Tensors]:
    """Return the block's function in `kernels` or `blocks`, with its attributes bound."""
    return partial(importlib.import_module(f"xlafuse.triton_side.{package}.{case.block}").apply, **attributes_of(case))


def swapped(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with the last two axes swapped in memory."""
    return x.mT.contiguous().mT if x.ndim > 1 else x


def apart(x: torch.Tensor) -> torch.Tensor:
    """Return the same values, every second element of misaligned rows."""
    return x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 3)[..., 3::2].copy_(x) if x.ndim else x


def between(x: torch.Tensor) -> torch.Tensor:
    """Return the same values, rows of one head between those of the others."""
    return x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.ndim > 2 else swapped(x)


STORAGES = [swapped, apart, between]
ONE_GPU = [name for name in BLOCKS if not BLOCKS[name].spans_gpus and name not in ("lm_step", "matmul_fp8")]


@pytest.mark.parametrize("first", range(len(STORAGES)))
@pytest.mark.parametrize("block", ONE_GPU)
def test_results_of_any_storage_are_as_accurate(block: str, first: int) -> None:
    """Each input and cotangent has another storage; a cotangent may also be one row, repeated."""
    case = case_of(block, "float32", **({"sequence": 33} if block in ("attention", "attention_bias") else {}))

    def stored(tensors: Tensors) -> Tensors:
        kinds = itertools.islice(itertools.cycle(STORAGES), first, None)
        return {
            name: x if name == "cu_seqlens" else store(x)
            for (name, x), store in zip(tensors.items(), kinds, strict=False)
        }

    inputs, cotangents = inputs_of(case), cotangents_of(case)
    if first:
        cotangents = {name: x[:1].expand_as(x) if x.ndim else x for name, x in cotangents.items()}
    exact = on_device(float64_reference.exact(case, inputs, cotangents))
    inputs, cotangents = on_device(inputs), on_device(cotangents)
    contiguous = evaluated(applied("kernels", case), inputs, cotangents)
    found = evaluated(applied("kernels", case), stored(inputs), cotangents if first else stored(cotangents))
    for name, value in found.items():
        assert is_accurate(value, contiguous[name], exact[name]), name


# Block, and the axis without elements.
EMPTY = [
    ("vector_add", "elements"), ("adamw", "elements"), ("gelu", "rows"), ("swiglu", "rows"), ("geglu", "rows"),
    ("softmax", "rows"), ("dropout_residual_norm", "columns"), ("swiglu_mlp", "tokens"), ("rope", "sequence"),
    ("attention", "batch"), ("attention_bias", "batch"),
    *((block, axis) for block in ("bias_gelu", "rmsnorm", "layernorm") for axis in ("rows", "columns")),
    *((block, axis) for block in ("matmul", "linear", "linear_gelu") for axis in "mkn"),
    *(("embedding", axis) for axis in ("tokens", "columns")),
]


@pytest.mark.parametrize(("block", "axis"), EMPTY)
def test_empty_inputs_give_what_the_plain_block_gives(block: str, axis: str) -> None:
    case = case_of(block, "float32")

    def emptied(tensors: Tensors) -> Tensors:
        axes = {name: BLOCKS[block].tensor(name).axes for name in tensors}
        empty = {name: tuple(slice(0) if own == axis else slice(None) for own in axes[name]) for name in tensors}
        return {name: x[empty[name]].to(DEVICE) for name, x in tensors.items()}

    inputs, cotangents = emptied(inputs_of(case)), emptied(cotangents_of(case))
    found = evaluated(applied("kernels", case), inputs, cotangents)
    expected = evaluated(applied("blocks", case), inputs, cotangents)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_softmax_of_no_columns_is_empty() -> None:
    x = random(5, 0).requires_grad_()
    softmax.softmax(x).sum().backward()
    assert x.grad.shape == (5, 0)


@pytest.mark.parametrize("block", ONE_GPU)
def test_inference_saves_nothing(block: str) -> None:
    case = case_of(block, "float32")
    inputs = {name: x.requires_grad_(x.is_floating_point()) for name, x in on_device(inputs_of(case)).items()}
    with torch.no_grad():
        assert not any(y.requires_grad for y in applied("kernels", case)(inputs).values())


# Each saved tensor: an input or output by its name, else its shape.
SAVED: dict[str, tuple[dict[str, int], list[Any]]] = {
    "softmax": ({"rows": 2, "columns": 3}, ["y"]),
    "swiglu": ({"rows": 2, "columns": 3}, ["gate", "up"]),
    "rmsnorm": ({"rows": 3, "columns": 50}, ["x", "weight", (3,)]),
    "layernorm": ({"rows": 3, "columns": 50}, ["x", "weight", (3,), (3,)]),
    "dropout_residual_norm": ({"rows": 3, "columns": 50}, ["h", "weight", "seed", (3,), (3,)]),
    "cross_entropy": ({"tokens": 3, "classes": 50}, ["logits", "labels", (3,), (3,), ()]),
    "embedding": ({"rows": 4, "columns": 3, "tokens": 5, "distinct": 2}, ["ids"]),
    "linear": ({"m": 5, "k": 8, "n": 12}, ["x", "weight"]),
    "linear_gelu": ({"m": 5, "k": 8, "n": 12}, ["x", "weight", (5, 12)]),
    "attention": ({"sequence": 40}, ["q", "k", "v", "out", (1, 2, 40)]),
    "swiglu_mlp": (
        {"tokens": 5, "width": 8, "hidden": 12},
        ["x", "norm_weight", "gate_weight", "up_weight", "down_weight", (5,), (5, 8), (5, 12), (5, 12)],
    ),
    "moe": (
        {"tokens": 5, "width": 8, "hidden": 12, "experts": 3, "top_k": 2, "used": 3},
        ["x", "router", "w_gate", "w_up", "w_down", *[(10, 12)] * 2, *[(5, 2)] * 3, (10,), (4,), (5, 3)],
    ),
}


@pytest.mark.parametrize("block", SAVED)
def test_training_saves_inputs_and_statistics_alone(block: str) -> None:
    sizes, expected = SAVED[block]
    case = case_of(block, "float32", **sizes)
    inputs = {name: x.requires_grad_(x.is_floating_point()) for name, x in on_device(inputs_of(case)).items()}
    outputs = applied("kernels", case)(inputs)
    names = {x.data_ptr(): name for name, x in {**outputs, **inputs}.items()}
    first = next(iter(outputs.values()))  # torch 2.11 frees the graph with it
    saved = [x for x in first.grad_fn.saved_tensors if x is not None]
    assert sorted((names.get(x.data_ptr(), tuple(x.shape)) for x in saved), key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("block", "sizes"),
    [
        *((block, {"rows": 33, "columns": 67}) for block in ("bias_gelu", "rmsnorm", "layernorm")),
        ("dropout_residual_norm", {"rows": 9, "columns": 67}),
        ("cross_entropy", {"tokens": 13, "classes": 203}), ("moe", {"tokens": 19}),
    ],
)
def test_results_repeat_bit_for_bit(block: str, sizes: dict[str, int]) -> None:
    case = case_of(block, "float32", **sizes)
    inputs, cotangents = on_device(inputs_of(case)), on_device(cotangents_of(case))
    first, second = (evaluated(applied("kernels", case), inputs, cotangents) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


CONFIGURED_ROWS = [
    (softmax.configure_forward, 1), (softmax.configure_backward, 2), (rmsnorm.configure_forward, 1),
    (rmsnorm.configure_backward, 2),
]


@pytest.mark.parametrize(("configure", "operands"), CONFIGURED_ROWS)
@pytest.mark.parametrize("columns", [1, 100, 4096, 8192, 8193, 16384, 16385, 32768, 32769, 50257, 131072])
def test_configurations_of_rows_cover_the_matrix_and_fit_an_h200(configure: Any, operands: int, columns: int) -> None:
    for rows in (1, 133, 8192):
        for element_bytes in (2, 4):
            config = configure(rows, columns, element_bytes, 132)
            tile = config.block_rows * config.block_columns
            assert operands * (config.num_stages - 1) * tile * element_bytes < 232448 - 1024
            assert 1 <= config.programs <= -(-rows // config.block_rows)
            assert config.block_columns >= columns or config.block_rows == 1


FIRST, FEWER = itemgetter(0), itemgetter(slice(-1))
HALF, DOUBLE, FLOAT, LONG = (getattr(torch.Tensor, dtype) for dtype in ("half", "double", "float", "long"))
TURNED = torch.Tensor.t


def on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def heads(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x[:, :count]


def columns(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x[..., :count]


# Block: changes of inputs (by a function) and of attributes, the error, and what its message says.
REFUSED: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "vector_add": [
        ({"y": FEWER}, ValueError, "broadcast"), ({"y": HALF}, TypeError, "y in torch.float16.*cast y"),
        ({"x": LONG, "y": LONG}, TypeError, "got torch.int64"), ({"y": on_meta}, ValueError, "one device"),
    ],
    "gelu": [({"x": DOUBLE}, TypeError, "x must be bfloat16, float16 or float32, got torch.float64")],
    "swiglu": [({"up": FEWER}, ValueError, "one shape.*broadcast")],
    "geglu": [({"up": HALF}, TypeError, "up in torch.float16.*cast up")],
    "bias_gelu": [
        ({"x": FIRST}, ValueError, r"x must be \[rows, columns\]"),
        ({"bias": FEWER}, ValueError, r"\[columns\] = \[257\]"), ({"bias": HALF}, TypeError, "bias in torch.float16"),
    ],
    "softmax": [
        ({"x": FIRST}, ValueError, r"x must be \[rows, columns\].*reshape"),
        ({"x": LONG}, TypeError, "got torch.int64"),
    ],
    "rmsnorm": [
        ({"x": FIRST}, ValueError, r"x must be \[rows, columns\]"),
        ({"weight": FEWER}, ValueError, r"\[columns\] = \[257\]"),
        ({"weight": HALF}, TypeError, "weight in torch.float16"),
    ],
    "layernorm": [
        ({"x": FIRST}, ValueError, r"x must be \[rows, columns\]"), ({"weight": FEWER}, ValueError, "weight must be"),
        ({"bias": lambda bias: bias[None]}, ValueError, r"bias must be .*got \(1, 257\)"),
        ({"bias": HALF}, TypeError, "bias in torch.float16"),
    ],
    "dropout_residual_norm": [
        ({"x": FIRST}, ValueError, r"x must be \[rows, columns\]"), ({"residual": TURNED}, ValueError, "x's shape"),
        ({"shift": FEWER}, ValueError, "shift must be"), ({"weight": HALF}, TypeError, "weight in torch.float16"),
        ({"seed": LONG}, TypeError, "seed must be int32"), ({"seed": FEWER}, ValueError, "seed must be two words"),
        *(({"p": p}, ValueError, "p must be at least 0") for p in (-0.1, 1.0, 1 - 2**-17, float("inf"))),
        (
            {name: lambda x: x.new_zeros(1, 16385)[0 if x.ndim == 1 else slice(None)]
             for name in ("x", "residual", "bias", "weight", "shift")},
            ValueError, "at most 16384 columns, .*got 16385",
        ),
    ],
    "embedding": [
        ({"ids": torch.Tensor.short}, TypeError, "int32 or int64, got torch.int16; cast"),
        ({"ids": lambda ids: ids[None]}, ValueError, r"ids must be \[tokens\]"),
        ({"table": FIRST}, ValueError, r"table must be \[rows, columns\]"),
        ({"table": DOUBLE}, TypeError, "bfloat16, float16 or float32, got torch.float64"),
        ({"ids": on_meta}, ValueError, r"ids must be on \w+(:0)? as the table is, got meta"),
    ],
    "cross_entropy": [
        ({"logits": FIRST}, ValueError, r"logits must be \[rows, columns\]"),
        ({"logits": columns(0)}, ValueError, "at least one class"), ({"logits": LONG}, TypeError, "got torch.int64"),
        ({"labels": FEWER}, ValueError, r"\[tokens\] = \[7\]"),
        ({"labels": FLOAT}, TypeError, "int32 or int64, got torch.float32"),
    ],
    "linear_cross_entropy": [
        ({"w": TURNED}, ValueError, "must fit, with at least one class.*Linear"),
        ({"w": itemgetter(slice(0))}, ValueError, "at least one class"),
        ({"h": lambda h: h[None]}, ValueError, r"h must be \[rows, columns\]"), ({"w": HALF}, TypeError, "one dtype"),
        ({"labels": FEWER}, ValueError, r"\[tokens\] = \[7\]"), ({"labels": FLOAT}, TypeError, "int32 or int64"),
    ],
    "matmul": [
        ({"b": TURNED}, ValueError, "must fit.*transpose"),
        ({"b": lambda b: b[None]}, ValueError, r"b must be \[rows, columns\]"),
    ],
    "matmul_fp8": [
        ({"b": FLOAT}, TypeError, "b must be torch.float8_e4m3fn, got torch.float32"),
        ({"b_scale": HALF}, TypeError, "b_scale must be torch.float32"), ({"b": TURNED}, ValueError, "must fit"),
        ({"a_scale": lambda scale: scale.repeat(2)}, ValueError, r"a_scale \[2\]"),
        ({"kernels": "fast"}, ValueError, "'auto', 'hopper' or 'portable', got 'fast'"),
    ],
    **{block: [
        ({"weight": TURNED}, ValueError, "must fit.*Linear"), ({"bias": FEWER}, ValueError, r"bias \[66\]"),
        ({"x": lambda x: x[None]}, ValueError, r"x must be \[rows, columns\]"),
        ({"bias": HALF}, TypeError, "one dtype"),
    ] for block in ("linear", "linear_gelu")},
    "swiglu_mlp": [
        ({"down_weight": TURNED}, ValueError, "expected .*'down_weight'.*transpose .*Linear"),
        ({"x": lambda x: x[None]}, ValueError, r"x must be \[rows, columns\]"),
    ],
    "moe": [
        ({"w_down": lambda weight: weight.mT}, ValueError, "expected .*'w_down'.*transpose torch.nn.Linear's weights"),
        ({"top_k": 6}, ValueError, "top_k must be 1 to 5, the number of experts, got 6"),
        ({"x": itemgetter(slice(0))}, ValueError, "at least one token"),
    ],
    "rope": [
        ({"k": columns(8)}, ValueError, "differ in heads alone"),
        ({"q": columns(9), "k": columns(9)}, ValueError, "head_dim must be even, .* got 9"),
        ({"positions": FLOAT}, TypeError, "int32 or int64, got torch.float32"),
        ({"positions": FEWER}, ValueError, r"positions must be \[batch, sequence\]"),
        ({"k": HALF}, TypeError, "k in torch.float16"), ({"theta": 0}, ValueError, "theta must be positive, got 0"),
    ],
    "attention": [
        ({"k": heads(1)}, ValueError, "a multiple of kv_heads"),
        ({"q": heads(1)}, ValueError, "a multiple of kv_heads"),
        ({"causal": 0, "window": 3}, ValueError, "got window=3, causal=False"),
        ({name: columns(24) for name in "qkv"}, ValueError, "head_dim must be one of .* got 24; pad"),
        ({"k": HALF}, TypeError, "one dtype"),
    ],
    "attention_bias": [
        ({"bias": FEWER}, ValueError, r"bias \[heads, sequence, sequence\]"), ({"bias": HALF}, TypeError, "one dtype"),
        ({"k": heads(1), "v": heads(1)}, ValueError, "got .*2, 1, 67, 32"),
    ],
    "attention_packed": [
        ({"cu_seqlens": LONG}, TypeError, "cu_seqlens must be int32"),
        ({"cu_seqlens": itemgetter(slice(1))}, ValueError, r"contiguous \[sequences \+ 1\]"),
        ({"q": lambda q: q[None]}, ValueError, r"must be \[tokens, heads, head_dim\]"),
        ({"q": heads(1)}, ValueError, "a multiple of kv_heads"),
    ],
    "decode_attention": [
        ({"q": heads(3)}, ValueError, "a multiple of the cache's 2"),
        ({"q": lambda q: q[:, :, None, None]}, ValueError, r"q must be .*or \[batch, heads, queries, head_dim\]"),
        ({"q": lambda q: q[:, None]}, ValueError, "a multiple of the cache's 2, got 1"),
        ({name: FEWER for name in ("k_cache", "v_cache")}, ValueError, "for q"),
        ({name: columns(8) for name in ("q", "k_cache", "v_cache")}, ValueError, "head_dim must be one of .* got 8"),
        ({"lengths": LONG}, TypeError, "lengths must be int32, got torch.int64; cast"),
        ({"lengths": on_meta}, ValueError, r"lengths must be on \w+(:0)? as q is, got meta"),
        ({"lengths": FEWER}, ValueError, r"lengths must be \[batch\]"), ({"k_cache": HALF}, TypeError, "one dtype"),
    ],
    "decode_attention_paged": [
        ({"q": lambda q: q[:, :, None]}, ValueError, r"a multiple of the cache's 2, got 1 .*batch, queries, heads"),
        ({"page_table": FIRST}, ValueError, r"page_table must be \[batch, pages_per_sequence\]"),
        ({"v_pages": FEWER}, ValueError, r"must be \[pages, page_size, kv_heads, head_dim\]"),
    ],
    "decoder_block": [
        ({"x": FIRST}, ValueError, r"x must be \[batch, sequence, width\] and not empty"),
        ({"positions": FLOAT}, TypeError, "positions must be int32 or int64"),
        ({"positions": FEWER}, ValueError, r"positions must be \[batch, sequence\]"),
        ({"kv_heads": 3}, ValueError, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"kv_heads": 4}, ValueError, r"w_qkv must have 4 \+ 2 \* 4 heads of .* columns, got 128"),
        ({"w_down": TURNED}, ValueError, "the weights must fit x .*expected .*'w_down'"),
        ({"w_o": HALF}, TypeError, "w_o in torch.float16"),
    ],
    "gpt2_block": [
        ({"x": FIRST}, ValueError, r"x must be \[batch, sequence, width\]"),
        ({"seed": LONG}, TypeError, "seed must be int32"), ({"seed": FIRST}, ValueError, r"seed must be \[2, 2\]"),
        ({"p": 1}, ValueError, "p must be at least 0 .* got 1"),
        ({"heads": 4}, ValueError, r"w_qkv must have 3 \* 4 heads of .* columns, got 96"),
        ({"b_down": FEWER}, ValueError, "the weights must fit x .*expected .*'b_down'"),
    ],
    "adamw": [
        ({"mu": FEWER}, ValueError, "param's shape"), ({"gradient": HALF}, TypeError, "gradient in torch.float16"),
        ({"mu": HALF, "nu": HALF}, TypeError, "mu and nu must be float32, got torch.float16"),
        ({"step": lambda step: step.repeat(2)}, ValueError, "step must be one integer"),
        ({"beta1": 1.0}, ValueError, "between 0 and 1, got 1.0"),
    ],
}


@pytest.mark.parametrize(
    ("block", "changes", "error", "message"), [(block, *row) for block, rows in REFUSED.items() for row in rows],
    ids=[f"{block}-{message}" for block, rows in REFUSED.items() for *_, message in rows],
)
def test_wrong_arguments_are_refused(
    block: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = case_of(block, "float32")
    inputs, attributes = on_device(inputs_of(case)), attributes_of(case)
    for name, change in changes.items():
        if name in inputs:
            inputs[name] = change(inputs[name])
        else:
            attributes[name] = change
    with pytest.raises(error, match=message):
        importlib.import_module(f"xlafuse.triton_side.kernels.{block}").apply(inputs, **attributes)
