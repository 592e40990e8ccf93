"""Calls of compiled functions on random arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from xlafuse.compile import random_calls, user_functions


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def test_a_call_with_static_values_keys_and_keywords_is_repeated() -> None:
    @partial(jax.jit, static_argnames="scale")
    def function(key, x, scale, *, indices):
        return x[indices] * scale + jax.random.normal(key, x.shape[1:])

    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    given = (key, struct(8, 4, dtype="bfloat16"))
    call = user_functions.compile_call(function, given, {"scale": 2.0, "indices": struct(3, dtype="int32")})
    again = random_calls.call_of(call.compiled)
    assert again().shape == (3, 4) and jnp.array_equal(again(), again())


def test_a_training_step_is_repeated() -> None:
    def function(x, w, mode):
        return {"tanh": jnp.tanh}[mode](x @ w)

    args = (struct(4, 8), struct(8, 2), "tanh")
    forward, backward = user_functions.compile_phases(function, args, {})
    _, inputs = user_functions.bind(function, args, {})
    (outputs, _), gradients = random_calls.step_of(forward.executable, backward.executable, inputs)()
    assert [y.shape for y in outputs] == [(4, 2)] and [g.shape for g in gradients] == [(4, 8), (8, 2)]
    assert all(float(abs(g).max()) > 0 for g in gradients)


def test_a_call_that_donates_cannot_be_repeated() -> None:
    call = user_functions.compile_call(jax.jit(lambda x: x + 1, donate_argnums=0), (struct(4),), {})
    with pytest.raises(random_calls.NotCallable):
        random_calls.call_of(call.compiled)
