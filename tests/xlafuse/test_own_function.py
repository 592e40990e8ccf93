"""A user's backward function takes the place of JAX's own gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from xlafuse.compare.workers.xla.own_function import with_gradient


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_the_gradient_is_the_named_one(transform) -> None:
    def run(values, attributes):
        return {"y": values["x"] * attributes["scale"], "rows": values["index"] + 1}

    def differentiate(values, attributes):
        return {"x": 3 * values["d_y"] + values["y"]}

    apply = with_gradient(run, differentiate, ["x"], ["y", "rows"])
    x, index = jnp.arange(4.0), jnp.arange(4)

    def loss(x):
        return apply({"x": x, "index": index}, scale=2.0)["y"].sum()

    assert apply({"x": x, "index": index}, scale=2.0)["rows"].tolist() == [1, 2, 3, 4]
    assert transform(jax.grad(loss))(x).tolist() == [3.0, 5.0, 7.0, 9.0]
