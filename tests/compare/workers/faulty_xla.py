"""Blocks that are wrong in JAX, that the device has no room for, and that XLA refuses to compile."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]


def xla_right(inputs: Arrays) -> Arrays:
    return {"y": jax.nn.softmax(inputs["x"])}


def xla_wrong_scale(inputs: Arrays) -> Arrays:
    """Off by one part in two thousand."""
    return {"y": jax.nn.softmax(inputs["x"]) * 1.0005}


def xla_out_of_memory(inputs: Arrays) -> Arrays:
    """A second output, larger than any address space."""
    x = inputs["x"]
    return {"y": jax.nn.softmax(x), "huge": jnp.broadcast_to(x[0, 0], (1 << 16, 1 << 30))}


def xla_error(inputs: Arrays) -> Arrays:
    """A call of a function that is not registered."""
    x = inputs["x"]
    return {"y": jax.ffi.ffi_call("no_such_function", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)}
