"""Calls of compiled functions on random arrays, to be timed on this process's device."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


class NotCallable(Exception):
    """The call takes the memory of its arguments, so it cannot be repeated."""


def call_of(compiled: jax.stages.Compiled) -> Callable[[], Any]:
    """Return a function that calls `compiled` with arrays that are drawn once.

    Floating arrays are normally distributed, others are zeros, which are valid indices. Raises NotCallable where the
    function takes its arguments' memory, and TypeError for a random key of another kind than jax's.
    """
    if any(info.donated for info in jax.tree.leaves(compiled.args_info)):
        raise NotCallable("the function takes the memory of its arguments (donate_argnums), so it can be called once")
    args, kwargs = draw(compiled.args_info)
    return lambda: compiled(*args, **kwargs)


def step_of(
    forward: Callable[..., Any], backward: Callable[..., Any], inputs: Mapping[str, Any]
) -> Callable[[], Any]:
    """Return a function that makes a training step of both executables of `user_functions.compile_phases`.

    inputs: the structs of `user_functions.bind`. The cotangents are ones.
    """
    drawn = draw(inputs)
    (outputs, _), _ = forward(drawn)
    cotangents = jax.tree.map(jnp.ones_like, outputs)

    def step() -> Any:
        results, residuals = forward(drawn)
        return results, backward(residuals, cotangents)

    return step


def draw(structs: Any) -> Any:
    """Return a pytree of arrays for one of structs. Raises TypeError for a random key of another kind than jax's."""
    leaves, tree = jax.tree.flatten(structs)
    keys = jax.random.split(jax.random.key(0), len(leaves) + 1)
    return jax.tree.unflatten(tree, map(_drawn, leaves, keys[1:]))


def key_implementation(dtype: str) -> str:
    """Return the name of the random generator whose keys have that dtype ("key<fry>"). Raises TypeError."""
    for name in _KEYS:
        if str(jax.eval_shape(functools.partial(jax.random.key, 0, impl=name)).dtype) == dtype:
            return name
    raise TypeError(f"jax ships no random keys of {dtype}")


def _drawn(struct: Any, key: Any) -> jax.Array:
    if jax.dtypes.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0, impl=key_implementation(str(struct.dtype))), struct.shape)
    if not jnp.issubdtype(struct.dtype, jnp.floating):
        return jnp.zeros(struct.shape, struct.dtype)
    return jax.random.normal(key, struct.shape, jnp.float32).astype(struct.dtype)
