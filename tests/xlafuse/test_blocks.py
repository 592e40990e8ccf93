"""Blocks against float64 formulas, and their gradients against finite differences of the formulas."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from full_marks import first_of_each

from xlafuse.blocks import (
    attention,
    attention_bias,
    attention_packed,
    bias_gelu,
    cross_entropy,
    decode_attention,
    decode_attention_paged,
    decoder_block,
    dropout_residual_norm,
    embedding,
    geglu,
    gelu,
    gpt2_block,
    layernorm,
    linear,
    linear_cross_entropy,
    linear_gelu,
    linear_residual,
    matmul,
    matmul_fp8,
    moe,
    rmsnorm,
    rope,
    softmax,
    swiglu,
    swiglu_mlp,
    threefry,
    vector_add,
)
from xlafuse.compare.spec.blocks import BLOCKS as COMPARED
from xlafuse.compile import _jax_private, compiler, directions

Float64s = dict[str, np.ndarray]


def _rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _layernorm(i: Float64s, eps: float) -> Float64s:
    centred = i["x"] - i["x"].mean(-1, keepdims=True)
    return {"y": _rmsnorm(centred, i["weight"], eps) + i["bias"]}


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _swiglu(i: Float64s, eps: float) -> Float64s:
    h = _rmsnorm(i["x"], i["norm_weight"], eps)
    gate = h @ i["gate_weight"]
    return {"y": i["x"] + (_silu(gate) * (h @ i["up_weight"])) @ i["down_weight"]}


def _attention(i: Float64s, before: int = 5, after: int = 0) -> Float64s:
    """A query sees the keys from `before` positions before it to `after` positions after it."""
    k, v = (np.repeat(i[name], i["q"].shape[1] // i[name].shape[1], axis=1) for name in "kv")
    scores = i["q"] @ k.swapaxes(-1, -2) / np.sqrt(i["q"].shape[-1])
    distance = np.arange(scores.shape[-1])[:, None] - np.arange(scores.shape[-1])
    return {"out": _softmax(np.where((distance <= before) & (distance >= -after), scores, -np.inf)) @ v}


def _attention_bias(i: Float64s) -> Float64s:
    scores = i["q"] @ i["k"].swapaxes(-1, -2) / np.sqrt(i["q"].shape[-1]) + i["bias"]
    return {"out": _softmax(scores) @ i["v"]}


def _attention_packed(i: Float64s) -> Float64s:
    outs = []
    for first, last in zip(_INTEGERS["cu_seqlens"], _INTEGERS["cu_seqlens"][1:], strict=False):
        one = {name: i[name][first:last].swapaxes(0, 1)[None] for name in "qkv"}
        outs.append(_attention(one)["out"][0].swapaxes(0, 1))
    return {"out": np.concatenate(outs)}


def _decode_attention(i: Float64s) -> Float64s:
    group = i["q"].shape[1] // i["k_cache"].shape[1]
    out = np.zeros_like(i["q"])
    for b, h in np.ndindex(i["q"].shape[:2]):
        keys, values = (i[name][b, h // group, : int(i["lengths"][b])] for name in ("k_cache", "v_cache"))
        if len(keys):
            out[b, h] = _softmax(keys @ i["q"][b, h] / np.sqrt(i["q"].shape[-1])) @ values
    return {"out": out}


def _decode_attention_paged(i: Float64s) -> Float64s:
    table = i["page_table"].astype(int)
    caches = {
        f"{name}_cache": i[f"{name}_pages"][table].reshape(len(table), -1, *i["k_pages"].shape[2:]).swapaxes(1, 2)
        for name in "kv"
    }
    return _decode_attention({"q": i["q"], "lengths": i["lengths"], **caches})


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _rope(i: Float64s) -> Float64s:
    half = i["q"].shape[-1] // 2
    angles = i["positions"][:, None, :, None] * _THETA ** (-2 * np.arange(half) / (2 * half))
    turn = np.exp(1j * angles)

    def turned(x: np.ndarray) -> np.ndarray:
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    return {"q_out": turned(i["q"]), "k_out": turned(i["k"])}


def _cross_entropy(i: Float64s) -> Float64s:
    x, labels = i["logits"], i["labels"].astype(int)
    lse = np.log(np.exp(x).sum(-1))
    chosen = np.take_along_axis(x, np.maximum(labels, 0)[:, None], -1)[:, 0]
    losses = 0.7 * (lse - chosen) + 0.3 * (lse - x.mean(-1)) + 0.2 * lse**2
    return {"loss": losses[labels != cross_entropy.IGNORED].sum() / max((labels != cross_entropy.IGNORED).sum(), 1)}


def _linear_cross_entropy(i: Float64s) -> Float64s:
    return _cross_entropy({"logits": i["h"] @ i["w"].T, "labels": i["labels"]})


def _moe(i: Float64s) -> Float64s:
    logits = i["x"] @ i["router"].T
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :2]
    y = np.zeros_like(i["x"])
    for token, experts in enumerate(chosen):
        for weight, e in zip(_softmax(logits[token, experts]), experts, strict=True):
            x = i["x"][token]
            y[token] += weight * (_silu(x @ i["w_gate"][e]) * (x @ i["w_up"][e])) @ i["w_down"][e]
    fraction = np.bincount(chosen.ravel(), minlength=logits.shape[1]) / chosen.size
    return {"y": y, "balance_loss": logits.shape[1] * (fraction * _softmax(logits).mean(0)).sum()}


_DROPPED = 0.25  # probability


def _dropout_residual_norm(i: Float64s, eps: float) -> Float64s:
    kept = np.asarray(threefry.uniforms(*i["x"].shape, i["seed"].astype(np.int32))) >= _DROPPED * 65536
    h = i["residual"] + kept * (i["x"] + i["bias"]) / (1 - _DROPPED)
    return _layernorm({"x": h, "weight": i["weight"], "bias": i["shift"]}, eps) | {"h": h}


def _decoder_block(i: Float64s, eps: float) -> Float64s:
    x, heads, kv_heads = i["x"], _HEADS["heads"], _HEADS["kv_heads"]
    qkv = _rmsnorm(x, i["attention_norm"], eps) @ i["w_qkv"]
    q, k, v = np.split(qkv.reshape(*x.shape[:2], 4, -1).swapaxes(1, 2), [heads, heads + kv_heads], axis=1)
    turned = _rope({"q": q, "k": k, "positions": i["positions"]})
    attended = _attention({"q": turned["q_out"], "k": turned["k_out"], "v": v})["out"]
    x = x + attended.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ i["w_o"]
    mlp = {"norm_weight": "mlp_norm", "gate_weight": "w_gate", "up_weight": "w_up", "down_weight": "w_down"}
    return _swiglu({"x": x} | {name: i[own] for name, own in mlp.items()}, eps)


def _gpt2_block(i: Float64s, eps: float) -> Float64s:
    shape, seeds = i["x"].shape, i["seeds"]
    x = i["x"].reshape(-1, shape[-1])
    norm = {"x": x, "weight": i["attention_norm_weight"], "bias": i["attention_norm_bias"]}
    qkv = _layernorm(norm, eps)["y"] @ i["w_qkv"] + i["b_qkv"]
    q, k, v = qkv.reshape(*shape[:2], 3, 2, -1).transpose(2, 0, 3, 1, 4)
    attended = _attention({"q": q, "k": k, "v": v})["out"].swapaxes(1, 2).reshape(len(x), -1)
    between = {"bias": i["b_o"], "weight": i["mlp_norm_weight"], "shift": i["mlp_norm_bias"]}
    out = _dropout_residual_norm({"x": attended @ i["w_o"], "residual": x, "seed": seeds[0], **between}, eps)
    down = {"x": _gelu(out["y"] @ i["w_up"] + i["b_up"]) @ i["w_down"], "bias": i["b_down"], "residual": out["h"]}
    y = _dropout_residual_norm(down | {"seed": seeds[1], "weight": x[0], "shift": x[0]}, eps)["h"]
    return {"y": y.reshape(shape)}


# eps is large enough here that leaving it out fails.
_EPS = 0.05
_GATED = {"gate": (3, 7), "up": (3, 7)}
_THETA = 100.0
_QKV = dict.fromkeys(("q", "k", "v"), (2, 3, 5, 4))
_SHARED = {"q": (2, 4, 5, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4)}
_PACKED = {"q": (6, 4, 4), "k": (6, 2, 4), "v": (6, 2, 4), "cu_seqlens": (4,)}
_MLP = {"x": (5, 6), "norm_weight": (6,), "gate_weight": (6, 9), "up_weight": (6, 9), "down_weight": (9, 6)}
_MOE = {"x": (5, 6), "router": (4, 6), "w_gate": (4, 6, 3), "w_up": (4, 6, 3), "w_down": (4, 3, 6)}
_CHAIN = {"x": (3, 7), "bias": (7,), "residual": (3, 7), "weight": (7,), "shift": (7,), "seed": (2,)}
_HEADS = {"heads": 2, "kv_heads": 1}
_LAYER = {
    "x": (2, 5, 6), "positions": (2, 5), "attention_norm": (6,), "w_qkv": (6, 16), "w_o": (8, 6), "mlp_norm": (6,),
    "w_gate": (6, 9), "w_up": (6, 9), "w_down": (9, 6),
}
_NORMED = dict.fromkeys((f"{half}_norm_{kind}" for half in ("attention", "mlp") for kind in ("weight", "bias")), (6,))
_GPT2_LAYER = {
    "x": (2, 5, 6), "seeds": (2, 2), "w_qkv": (6, 24), "b_qkv": (24,), "w_o": (8, 6), "b_o": (6,), "w_up": (6, 9),
    "b_up": (9,), "w_down": (9, 6), "b_down": (6,), **_NORMED,
}
_ENTROPY = {"smoothing": 0.3, "z_loss": 0.2}
_PROJECTED = {"h": (5, 3), "w": (7, 3), "labels": (5,)}
_TURNED = {"q": (2, 3, 5, 6), "k": (2, 1, 5, 6), "positions": (2, 5)}
# Small positions, as the error of an angle grows with them; equal ids.
_INTEGERS = {
    "positions": [[0, 3, 7, 1, 4], [2, 6, 5, 0, 1]], "ids": [3, 1, 3, 0, 3, 4, 0],
    "labels": [3, cross_entropy.IGNORED, 0, 6, cross_entropy.IGNORED], "seed": [-3, 5],
    "cu_seqlens": [0, 2, 3, 6],
    "lengths": [3, 0, 5], "page_table": [[8, 0, 3], [1, 7, 5], [2, 6, 4]],
    "seeds": [[-3, 5], [7, 11]],
}
_DECODED = {"q": (3, 4, 6), "k_cache": (3, 2, 5, 6), "v_cache": (3, 2, 5, 6), "lengths": (3,)}
_PAGED = {"q": (3, 4, 6), "k_pages": (9, 2, 2, 6), "v_pages": (9, 2, 2, 6), "page_table": (3, 3), "lengths": (3,)}
Shapes = dict[str, tuple[int, ...]]
# name: (apply, attributes, input shapes, formula, the most roundings to the dtype from input to output)
BLOCKS: dict[str, tuple[Any, dict[str, float], Shapes, Callable[[Float64s], Float64s], int]] = {
    "vector_add": (vector_add.apply, {}, {"x": (7,), "y": (7,)}, lambda i: {"out": i["x"] + i["y"]}, 1),
    "gelu": (gelu.apply, {}, {"x": (3, 7)}, lambda i: {"y": _gelu(i["x"])}, 9),
    "swiglu": (swiglu.apply, {}, _GATED, lambda i: {"y": _silu(i["gate"]) * i["up"]}, 5),
    "bias_gelu": (
        bias_gelu.apply, {}, {"x": (3, 7), "bias": (7,)}, lambda i: {"y": _gelu(i["x"] + i["bias"])}, 10
    ),
    "geglu": (geglu.apply, {}, _GATED, lambda i: {"y": _gelu(i["gate"]) * i["up"]}, 10),
    "softmax": (softmax.apply, {}, {"x": (3, 7)}, lambda i: {"y": _softmax(i["x"])}, 1),
    "rmsnorm": (
        rmsnorm.apply, {"eps": _EPS}, {"x": (3, 7), "weight": (7,)},
        lambda i: {"y": _rmsnorm(i["x"], i["weight"], _EPS)}, 2,
    ),
    "layernorm": (
        layernorm.apply, {"eps": _EPS}, {"x": (3, 7), "weight": (7,), "bias": (7,)},
        lambda i: _layernorm(i, _EPS), 1,
    ),
    "dropout_residual_norm": (
        dropout_residual_norm.apply, {"p": _DROPPED, "eps": _EPS}, _CHAIN,
        lambda i: _dropout_residual_norm(i, _EPS), 5,
    ),
    "matmul": (matmul.apply, {}, {"a": (3, 5), "b": (5, 7)}, lambda i: {"c": i["a"] @ i["b"]}, 1),
    "linear": (
        linear.apply, {}, {"x": (3, 5), "weight": (5, 7), "bias": (7,)},
        lambda i: {"y": i["x"] @ i["weight"] + i["bias"]}, 2,
    ),
    "linear_residual": (
        linear_residual.apply, {}, {"x": (3, 5), "weight": (5, 7), "residual": (3, 7)},
        lambda i: {"y": i["residual"] + i["x"] @ i["weight"]}, 2,
    ),
    "linear_gelu": (
        linear_gelu.apply, {}, {"x": (3, 5), "weight": (5, 7), "bias": (7,)},
        lambda i: {"y": _gelu(i["x"] @ i["weight"] + i["bias"])}, 11,
    ),
    "swiglu_mlp": (swiglu_mlp.apply, {"eps": _EPS}, _MLP, lambda i: _swiglu(i, _EPS), 10),
    # Gate, up, sigmoid, two products, down and y; the terms of the sums add further roundings.
    "moe": (moe.apply, {"top_k": 2}, _MOE, _moe, 10),
    "rope": (rope.apply, {"theta": _THETA}, _TURNED, _rope, 1),
    "attention": (attention.apply, {}, _QKV, _attention, 3),
    "attention, window": (attention.apply, {"window": 2}, _SHARED, lambda i: _attention(i, before=1), 3),
    "attention, full": (attention.apply, {"causal": 0}, _SHARED, lambda i: _attention(i, after=5), 3),
    "attention_bias": (attention_bias.apply, {}, _QKV | {"bias": (3, 5, 5)}, _attention_bias, 3),
    "attention_packed": (attention_packed.apply, {"longest": 3}, _PACKED, _attention_packed, 3),
    "decode_attention": (decode_attention.apply, {}, _DECODED, _decode_attention, 3),
    "decode_attention_paged": (decode_attention_paged.apply, {}, _PAGED, _decode_attention_paged, 3),
    "decoder_block": (
        decoder_block.apply, {"eps": _EPS, "theta": _THETA} | _HEADS, _LAYER, lambda i: _decoder_block(i, _EPS), 19,
    ),
    "gpt2_block": (
        lambda i, **attributes: gpt2_block.apply(i | {"seed": i["seeds"]}, **attributes),
        {"heads": 2, "p": _DROPPED, "eps": _EPS}, _GPT2_LAYER, lambda i: _gpt2_block(i, _EPS), 29,
    ),
    "embedding": (
        embedding.apply, {}, {"table": (5, 3), "ids": (7,)}, lambda i: {"y": i["table"][i["ids"].astype(int)]}, 0,
    ),
    "cross_entropy": (cross_entropy.apply, _ENTROPY, {"logits": (5, 7), "labels": (5,)}, _cross_entropy, 1),
    "linear_cross_entropy": (linear_cross_entropy.apply, _ENTROPY, _PROJECTED, _linear_cross_entropy, 2),
    # Chunks of 3, 3 and 1 classes.
    "linear_cross_entropy in chunks": (
        linear_cross_entropy.apply_in_chunks, _ENTROPY | {"largest": 4}, _PROJECTED, _linear_cross_entropy, 2,
    ),
}
FLOAT32 = {"loss", "balance_loss"}  # outputs that are float32 for any dtype of the inputs
FORWARD_ONLY = {"vector_add", "decode_attention", "decode_attention_paged"}
TRAINED = [name for name in BLOCKS if name not in FORWARD_ONLY]


def _inputs(shapes: Shapes, dtype: str) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(_INTEGERS[name], "int32") if name in _INTEGERS
        else jnp.asarray(random.standard_normal(shape), dtype)
        for name, shape in shapes.items()
    }


def _float64(arrays: dict[str, jax.Array]) -> Float64s:
    return {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in arrays.items()}


def _assert_close(actual: dict[str, jax.Array], expected: Float64s, roundings: int, dtype: str) -> None:
    """Allow an error of one eps of the result's size for each rounding, and that of float32 sums."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert x.dtype == ("float32" if name in FLOAT32 else dtype) and x.shape == expected[name].shape
        error = np.abs(np.asarray(x.astype(jnp.float32)) - expected[name]).max()
        size = max(np.abs(expected[name]).max(), 1.0)
        own = 8 * float(jnp.finfo(jnp.float32).eps)
        assert error <= (roundings * float(jnp.finfo(dtype).eps) + own) * size, name


def _gradients(formula: Callable[[Float64s], Float64s], inputs: Float64s, cotangents: Float64s) -> Float64s:
    """Return d(sum of outputs * cotangents)/d(inputs), by central differences in float64."""

    def value(changed: Float64s) -> float:
        return sum(float((y * cotangents[name]).sum()) for name, y in formula(changed).items())

    step, result = 1e-6, {}
    for name, x in inputs.items():
        if name in _INTEGERS:
            continue
        gradient = np.empty_like(x)
        for at in np.ndindex(x.shape):
            above, below = x.copy(), x.copy()
            above[at] += step
            below[at] -= step
            gradient[at] = (value(inputs | {name: above}) - value(inputs | {name: below})) / (2 * step)
        result[name] = gradient
    return result


# The training test checks the forward pass of other blocks in float32.
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "bfloat16") for name in BLOCKS] + [(name, "float32") for name in sorted(FORWARD_ONLY)]
)
def test_inference_equals_the_formula(name: str, dtype: str) -> None:
    apply, attributes, shapes, formula, roundings = BLOCKS[name]
    inputs = _inputs(shapes, dtype)
    compiled = compiler.compile(directions.forward(apply, attributes), (inputs,))
    assert compiled.executable is not None
    _assert_close(compiled.executable(inputs), formula(_float64(inputs)), roundings, dtype)


# tests/compare/test_every_implementation.py checks the gradients of the others.
@pytest.mark.parametrize("name", first_of_each(TRAINED, lambda name: "compared" if name in COMPARED else name))
def test_training_phases_return_outputs_and_gradients(name: str) -> None:
    apply, attributes, shapes, formula, roundings = BLOCKS[name]
    inputs = _inputs(shapes, "float32")
    forward, backward = directions.train_phases(apply, attributes)
    first = compiler.compile(forward, (inputs,))
    output_structs, residual_structs = first.output_structs
    second = compiler.compile(backward, (residual_structs, output_structs))
    assert first.executable is not None and second.executable is not None

    outputs, residuals = first.executable(inputs)
    _assert_close(outputs, formula(_float64(inputs)), roundings, "float32")
    random = np.random.default_rng(1)
    cotangents = {name: jnp.asarray(random.standard_normal(y.shape), y.dtype) for name, y in outputs.items()}
    gradients = second.executable(residuals, cotangents)
    expected = _gradients(formula, _float64(inputs), _float64(cotangents))
    # Backward repeats the roundings of forward, and adds one for the product with each saved value.
    _assert_close(gradients, expected, 3 * roundings + 2, "float32")


@pytest.mark.parametrize("name", TRAINED)
def test_outputs_and_gradients_have_the_dtype_of_the_inputs(name: str) -> None:
    apply, attributes, shapes, *_ = BLOCKS[name]
    forward, backward = directions.train_phases(apply, attributes)
    for dtype in ("float16", "bfloat16"):
        outputs, residuals = jax.eval_shape(forward, _inputs(shapes, dtype))
        gradients = jax.eval_shape(backward, residuals, outputs)
        for found in (outputs, gradients):
            assert {x.dtype for key, x in found.items() if key not in FLOAT32} <= {jnp.dtype(dtype)}
        assert {x.dtype for key, x in outputs.items() if key in FLOAT32} <= {jnp.dtype("float32")}


# Blocks that prepare arguments for cuDNN; jax's other implementation of the attention checks them on a CPU.
_PREPARED_FOR_CUDNN = {
    "attention_packed": attention_packed.apply_cudnn, "decode_attention_paged": decode_attention_paged.apply_cudnn,
}


@pytest.mark.parametrize("name", _PREPARED_FOR_CUDNN)
def test_arguments_prepared_for_cudnn_give_outputs_and_gradients(name: str) -> None:
    _, attributes, shapes, formula, roundings = BLOCKS[name]
    inputs = _inputs(shapes, "float32")
    forward, backward = directions.train_phases(_PREPARED_FOR_CUDNN[name], attributes | {"implementation": "xla"})
    outputs, residuals = forward(inputs)
    _assert_close(outputs, formula(_float64(inputs)), roundings, "float32")
    gradients = backward(residuals, outputs)
    expected = _gradients(formula, _float64(inputs), _float64(outputs))
    _assert_close(gradients, expected, 3 * roundings + 2, "float32")


def _structs(shapes: Shapes, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(shape, "int32" if name in _INTEGERS else dtype) for name, shape in shapes.items()
    }


@pytest.fixture
def cudnn_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend cuDNN and an H200: jax checks their versions before it checks its arguments."""
    monkeypatch.setattr(_jax_private.cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(_jax_private.cudnn, "check_compute_capability", lambda capability: True)


def _calls_of_cudnn(function: Callable[..., Any], *given: Any) -> list[tuple[str, str]]:
    """Return (function, types of its arguments) of each cuDNN call in the program for a GPU."""
    text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @__cudnn\$(\w+)\(.*: \((tensor<.*)\) ->", text)


@pytest.mark.usefixtures("cudnn_pretended")
def test_cudnn_takes_packed_sequences_as_one_with_a_bias_for_the_mask() -> None:
    def packed(tokens: int, dtype: str = "bfloat16") -> dict[str, jax.ShapeDtypeStruct]:
        shapes: Shapes = {"q": (tokens, 4, 16), "k": (tokens, 2, 16), "v": (tokens, 2, 16), "cu_seqlens": (4,)}
        return _structs(shapes, dtype)

    def step(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        outputs, residuals = forward(inputs)
        return backward(residuals, outputs)

    forward, backward = directions.train_phases(attention_packed.apply_cudnn, {"longest": 4})
    ((called, given), (called_back, _)) = _calls_of_cudnn(step, packed(6))
    assert (called, called_back) == ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward")
    assert given == "tensor<1x6x4x16xbf16>, tensor<1x6x2x16xbf16>, tensor<1x6x2x16xbf16>, tensor<1x1x6x6xbf16>"
    # The `unsupported` rule of its implementation states these limits of jax.
    inference = directions.forward(attention_packed.apply_cudnn, {"longest": 4})
    assert _calls_of_cudnn(inference, packed(7))
    with pytest.raises(NotImplementedError, match="Unsupported sequence length Q 7"):
        _calls_of_cudnn(step, packed(7))
    with pytest.raises(ValueError, match="Unsupported dtype"):
        _calls_of_cudnn(inference, packed(6, "float32"))


@pytest.mark.usefixtures("cudnn_pretended")
def test_cudnn_takes_gathered_pages_and_lengths() -> None:
    pages = (9, 5, 2, 16)
    given = {"q": (3, 4, 16), "k_pages": pages, "v_pages": pages, "page_table": (3, 3), "lengths": (3,)}
    ((called, types),) = _calls_of_cudnn(decode_attention_paged.apply_cudnn, _structs(given, "bfloat16"))
    kv = "tensor<3x15x2x16xbf16>"
    assert (called, types) == ("fmhaSoftmax", f"tensor<3x1x4x16xbf16>, {kv}, {kv}, tensor<3xi32>, tensor<3xi32>")


def test_attention_ignores_later_keys() -> None:
    inputs = _inputs(_QKV, "float32")
    changed = inputs | {name: inputs[name].at[..., -1, :].set(9.0) for name in ("k", "v")}
    before, after = attention.apply(inputs)["out"], attention.apply(changed)["out"]
    assert (before[..., :-1, :] == after[..., :-1, :]).all()
    assert (before[..., -1, :] != after[..., -1, :]).any()


def test_matmul_fp8_equals_the_formula() -> None:
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(8 * random.standard_normal((rows, 32)), "float8_e4m3fn") for rows in (7, 48))
    inputs = {"a": a, "b": b, "a_scale": jnp.float32(0.37), "b_scale": jnp.float32(0.011)}
    exact = _float64(inputs)
    expected = {"c": exact["a"] @ exact["b"].T * exact["a_scale"] * exact["b_scale"]}
    _assert_close(jax.jit(matmul_fp8.apply)(inputs), expected, 1, "bfloat16")


def test_a_query_without_keys_gives_zeros_and_no_gradient() -> None:
    inputs = _inputs(_QKV | {"bias": (3, 5, 5)}, "float32")
    inputs["bias"] = inputs["bias"].at[:, 2].set(-jnp.inf)
    out, vjp = jax.vjp(lambda given: attention_bias.apply(given)["out"], inputs)
    (gradients,) = vjp(out)
    assert not out[:, :, 2].any() and out[:, :, 3].all()
    assert not gradients["q"][:, :, 2].any() and not gradients["bias"][:, 2].any()
    assert all(jnp.isfinite(x).all() and x.any() for x in gradients.values())


def test_softmax_of_large_logits_is_finite() -> None:
    x = jnp.asarray([[1e4, 1e4, -1e4]], jnp.float32)
    assert np.allclose(softmax.apply({"x": x})["y"], [[0.5, 0.5, 0.0]])


def test_softmax_of_a_row_of_minus_infinity_is_zero_without_gradient() -> None:
    x = np.asarray(np.random.default_rng(0).standard_normal((7, 37)), np.float32)
    x[1], x[2, :-1], x[3, ::2] = -np.inf, -np.inf, -np.inf
    x[4] = np.finfo(np.float32).min
    x[5, 3], x[6, 3] = np.inf, np.nan
    for dtype in ("float32", "float16", "bfloat16"):
        y, vjp = jax.vjp(lambda x: softmax.apply({"x": x}, masked=1)["y"], jnp.asarray(x).astype(dtype))
        (gradient,) = vjp(jnp.full_like(y, 1e4))
        assert not y[1].any() and not gradient[1].any()
        expected = np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32), np.float64)
        empty = np.isneginf(expected).all(axis=1)
        seen = [row for row in (0, 2, 3, 4) if not empty[row]]
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(y.astype(jnp.float32)[np.array(seen)], _softmax(expected[seen]), 32 * eps, eps**2)
        assert jnp.isfinite(gradient[:5]).all()
        assert jnp.isnan(y[5:]).all()


@pytest.mark.parametrize("masked", [0, 1])
def test_maxima_start_at_minus_infinity(masked: int) -> None:
    """XLA's Triton code pads rows with the start value of a reduction, so it must be neutral."""
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    lowered = jax.jit(lambda x: softmax.apply({"x": x}, masked=masked)["y"]).lower(x).as_text()
    starts = dict(re.findall(r"(%\w+) = stablehlo.constant dense<(\S+)> : tensor<f32>", lowered))
    reductions = re.findall(r"stablehlo.reduce\(%\w+ init: (%\w+)\) applies stablehlo.(\w+)", lowered)
    assert [(starts[init], applied) for init, applied in reductions] == [
        ("0xFF800000", "maximum"), ("0.000000e+00", "add"),
    ]
    assert ("dense<-3.40282347E+38>" in lowered) == bool(masked)


def test_only_floating_inputs_have_gradients() -> None:
    def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"y": inputs["table"][inputs["rows"]]}

    inputs = {"table": jnp.ones((4, 2)), "rows": jnp.asarray([1, 1, 3])}
    forward, backward = directions.train_phases(apply, {})
    outputs, residuals = forward(inputs)
    gradients = backward(residuals, outputs)
    assert gradients.keys() == {"table"}
    assert gradients["table"][:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]
