"""A user's function of JAX as an implementation, with JAX's gradient or the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ...plan.own_function import Function, differentiable, loaded
from ...spec.blocks import BLOCKS
from ...spec.implementation import OwnFunction


def implementation(own: OwnFunction) -> Callable[..., dict[str, jax.Array]]:
    """Import the user's function. JAX differentiates it where no gradient is named."""
    run, differentiate = loaded(own)
    if differentiate is None:
        return lambda inputs, **attributes: run(inputs, attributes)
    block = BLOCKS[own.block]
    return with_gradient(run, differentiate, differentiable(block), [t.name for t in block.outputs])


def with_gradient(
    run: Function, differentiate: Function, wanted: Sequence[str], outputs: Sequence[str]
) -> Callable[..., dict[str, jax.Array]]:
    """Return the user's function `run` with the gradients of the inputs `wanted` by `differentiate`."""

    def apply(inputs: Mapping[str, jax.Array], **attributes: Any) -> dict[str, jax.Array]:
        @jax.custom_vjp
        def own(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return run(values, attributes)

        def forward(values: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
            found = run(values, attributes)
            return found, (values, found)

        def backward(saved: Any, cotangents: dict[str, jax.Array]) -> tuple[dict[str, Any]]:
            values, found = saved
            given = {**values, **found, **{f"d_{name}": cotangents[name] for name in outputs}}
            gradients = differentiate(given, attributes)
            return ({name: gradients[name] if name in wanted else None for name in values},)

        own.defvjp(forward, backward)
        return own(dict(inputs))

    return apply
