"""Blocks in JAX against the float64 references, outputs and gradients."""

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
    decode_attention,
    decode_attention_paged,
    softmax,
)
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compile import _jax_private, compiler, directions

torch = pytest.importorskip("torch", reason="the float64 references run in PyTorch")

from float64_reference import ONE_GPU, attributes_of, case_of, cotangents_of, exact, inputs_of  # noqa: E402

Shapes = dict[str, tuple[int, ...]]
_QKV = dict.fromkeys(("q", "k", "v"), (2, 3, 5, 4))
# The most roundings to the dtype from input to output. Terms of the sums add further ones in the layers.
ROUNDINGS = {
    "vector_add": 1, "gelu": 9, "swiglu": 5, "bias_gelu": 10, "geglu": 10, "softmax": 1, "rmsnorm": 2, "layernorm": 1,
    "dropout_residual_norm": 5, "matmul": 1, "matmul_fp8": 1, "linear": 2, "linear_residual": 2, "linear_gelu": 11,
    "swiglu_mlp": 10, "moe": 10, "rope": 1, "attention": 3, "attention_bias": 3, "attention_packed": 3,
    "decode_attention": 3, "decode_attention_paged": 3, "decoder_block": 19, "gpt2_block": 29, "embedding": 0,
    "cross_entropy": 1, "linear_cross_entropy": 2, "adamw": 8,
}
# Block, implementation, shape: every block, and those whose code has further paths.
ROWS = [
    *((block.name, "xla", None) for block in ONE_GPU if block.name != "lm_step"),
    ("attention", "xla", "odd-window"), ("attention", "xla", "odd-full"), ("softmax", "xla", "odd-masked"),
    ("linear_cross_entropy", "xla-chunked", None), ("moe", "xla-dense", None),
    *((block, "xla", shape) for block in ("decode_attention", "decode_attention_paged")
      for shape in ("odd-5-queries", "fewer-keys-than-queries")),
]
TRAINED = [row for row in ROWS if len(BLOCKS[row[0]].directions) > 1]


def _arrays(tensors: dict[str, Any]) -> dict[str, jax.Array]:
    """Return the same values in JAX, whose arrays NumPy makes: it has no bfloat16 and no fp8."""
    return {
        name: jnp.asarray((x.float() if x.is_floating_point() else x).numpy()).astype(str(x.dtype).split(".")[-1])
        for name, x in tensors.items()
    }


def _assert_close(case: Case, actual: dict[str, jax.Array], expected: dict[str, Any], roundings: int) -> None:
    """Allow an error of one eps of the result's size for each rounding, and that of float32 sums."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        values = expected[name].numpy()
        assert x.dtype == BLOCKS[case.block].tensor(name.removeprefix("d_")).dtype_in(case)
        assert x.shape == values.shape
        error = np.abs(np.asarray(x.astype(jnp.float32)) - values).max()
        size = max(np.abs(values).max(), 1.0)
        eps = max(float(jnp.finfo(dtype).eps) for dtype in (case.dtype, x.dtype))
        assert error <= (roundings * eps + 8 * float(jnp.finfo(jnp.float32).eps)) * size, name


# The training test checks the forward pass of other blocks in float32.
@pytest.mark.parametrize(
    ("block", "implementation", "shape", "dtype"),
    [(*row, "bfloat16") for row in ROWS] + [(*row, "float32") for row in ROWS if row not in TRAINED],
)
def test_inference_equals_the_reference(block: str, implementation: str, shape: str | None, dtype: str) -> None:
    case = case_of(block, dtype, shape)
    inputs = inputs_of(case)
    apply = BLOCKS[block].implementation(implementation).load()
    compiled = compiler.compile(directions.forward(apply, attributes_of(case)), (_arrays(inputs),))
    assert compiled.executable is not None
    _assert_close(case, compiled.executable(_arrays(inputs)), exact(case, inputs, {}), ROUNDINGS[block])


# tests/compare/test_every_implementation.py checks the gradients of the others.
@pytest.mark.parametrize(
    ("block", "implementation", "shape"),
    first_of_each(TRAINED, lambda row: row[1:] if row[2] or row[1] == "xla-chunked" else "compared"),
)
def test_training_phases_return_outputs_and_gradients(block: str, implementation: str, shape: str | None) -> None:
    case = case_of(block, "float32", shape)
    inputs, cotangents = inputs_of(case), cotangents_of(case)
    apply = BLOCKS[block].implementation(implementation).load()
    forward, backward = directions.train_phases(apply, attributes_of(case))
    first = compiler.compile(forward, (_arrays(inputs),))
    output_structs, residual_structs = first.output_structs
    second = compiler.compile(backward, (residual_structs, output_structs))
    assert first.executable is not None and second.executable is not None

    outputs, residuals = first.executable(_arrays(inputs))
    gradients = second.executable(residuals, _arrays(cotangents))
    expected = exact(case, inputs, cotangents)
    _assert_close(case, outputs, {name: expected.pop(name) for name in outputs}, ROUNDINGS[block])
    # Backward repeats the roundings of forward, and adds one for the product with each saved value.
    _assert_close(case, {f"d_{name}": x for name, x in gradients.items()}, expected, 3 * ROUNDINGS[block] + 2)


@pytest.mark.parametrize("row", TRAINED, ids=str)
def test_outputs_and_gradients_have_the_dtype_of_the_inputs(row: tuple[str, str, str | None]) -> None:
    name, implementation, shape = row
    block = BLOCKS[name]
    for dtype in ("float16", "bfloat16"):
        case = case_of(name, dtype, shape)
        structs = {t.name: jax.ShapeDtypeStruct(t.shape(case.sizes), t.dtype_in(case)) for t in block.inputs}
        forward, backward = directions.train_phases(block.implementation(implementation).load(), attributes_of(case))
        outputs, residuals = jax.eval_shape(forward, structs)
        gradients = jax.eval_shape(backward, residuals, outputs)
        found = {key: x.dtype for key, x in {**outputs, **gradients}.items()}
        assert found == {key: block.tensor(key).dtype_in(case) for key in found}


# Blocks that prepare arguments for cuDNN; jax's other implementation of the attention checks them on a CPU.
_PREPARED_FOR_CUDNN = {
    "attention_packed": attention_packed.apply_cudnn, "decode_attention_paged": decode_attention_paged.apply_cudnn,
}
_QUERIES = [("decode_attention_paged", shape) for shape in ("odd-5-queries", "fewer-keys-than-queries")]


@pytest.mark.parametrize(("block", "shape"), [*((block, None) for block in _PREPARED_FOR_CUDNN), *_QUERIES])
def test_arguments_prepared_for_cudnn_give_the_reference(block: str, shape: str | None) -> None:
    case = case_of(block, "float32", shape)
    inputs, cotangents = inputs_of(case), cotangents_of(case)
    attributes = attributes_of(case) | {"implementation": "xla"}
    if cotangents:
        program = directions.joint(_PREPARED_FOR_CUDNN[block], attributes, list(cotangents))
    else:
        program = directions.forward(_PREPARED_FOR_CUDNN[block], attributes)
    found = jax.jit(program)(_arrays(inputs | {f"d_{name}": x for name, x in cotangents.items()}))
    _assert_close(case, found, exact(case, inputs, cotangents), 3 * ROUNDINGS[block] + 2)


def _structs(shapes: Shapes, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    integers = ("cu_seqlens", "page_table", "lengths")
    return {name: jax.ShapeDtypeStruct(shape, "int32" if name in integers else dtype) for name, shape in shapes.items()}


def _random(shapes: Shapes) -> dict[str, jax.Array]:
    generator = np.random.default_rng(0)
    return {name: jnp.asarray(generator.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


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


@pytest.mark.usefixtures("cudnn_pretended")
def test_cudnn_takes_a_bias_for_the_mask_of_several_queries() -> None:
    """Its own causal mask is aligned to the first key, and these queries are the last tokens of their sequences."""
    cache, pages = (3, 2, 15, 16), (9, 5, 2, 16)
    given = {"q": (3, 4, 7, 16), "k_cache": cache, "v_cache": cache, "lengths": (3,)}
    ((called, types),) = _calls_of_cudnn(decode_attention.apply_cudnn, _structs(given, "bfloat16"))
    kv, bias = "tensor<3x2x15x16xbf16>", "tensor<3x1x7x15xbf16>"
    assert (called, types) == ("fmhaScaleBiasSoftmax", f"tensor<3x4x7x16xbf16>, {kv}, {kv}, {bias}")
    given = {"q": (3, 7, 4, 16), "k_pages": pages, "v_pages": pages, "page_table": (3, 3), "lengths": (3,)}
    ((called, types),) = _calls_of_cudnn(decode_attention_paged.apply_cudnn, _structs(given, "bfloat16"))
    kv = "tensor<3x15x2x16xbf16>"
    assert (called, types) == ("fmhaScaleBiasSoftmax", f"tensor<3x7x4x16xbf16>, {kv}, {kv}, {bias}")


def test_attention_ignores_later_keys() -> None:
    inputs = _random(_QKV)
    changed = inputs | {name: inputs[name].at[..., -1, :].set(9.0) for name in ("k", "v")}
    apply = jax.jit(attention.apply)
    before, after = apply(inputs)["out"], apply(changed)["out"]
    assert (before[..., :-1, :] == after[..., :-1, :]).all()
    assert (before[..., -1, :] != after[..., -1, :]).any()


def test_a_query_without_keys_gives_zeros_and_no_gradient() -> None:
    inputs = _random(_QKV | {"bias": (3, 5, 5)})
    inputs["bias"] = inputs["bias"].at[:, 2].set(-jnp.inf)

    @jax.jit
    def step(inputs: dict[str, jax.Array]) -> Any:
        out, vjp = jax.vjp(lambda given: attention_bias.apply(given)["out"], inputs)
        return out, *vjp(out)

    out, gradients = step(inputs)
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

    @jax.jit
    def step(x: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda x: softmax.apply({"x": x}, masked=1)["y"], x)
        return y, *vjp(jnp.full_like(y, 1e4))

    for dtype in ("float32", "float16", "bfloat16"):
        y, gradient = step(jnp.asarray(x).astype(dtype))
        assert not y[1].any() and not gradient[1].any()
        expected = np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32), np.float64)
        empty = np.isneginf(expected).all(axis=1)
        seen = [row for row in (0, 2, 3, 4) if not empty[row]]
        eps = float(jnp.finfo(dtype).eps)
        weights = torch.softmax(torch.from_numpy(expected[seen]), -1)
        np.testing.assert_allclose(y.astype(jnp.float32)[np.array(seen)], weights, 32 * eps, eps**2)
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
