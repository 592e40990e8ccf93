"""What is compiled of a block: its forward pass, or the two halves of a training step."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]
Apply = Callable[..., Arrays]


def forward(apply: Apply, attributes: Mapping[str, Any]) -> Callable[[Arrays], Arrays]:
    """`apply` with its attributes bound: inputs -> outputs."""

    def forward(inputs: Arrays) -> Arrays:
        return apply(inputs, **attributes)

    return forward


def train_halves(
    apply: Apply, attributes: Mapping[str, Any]
) -> tuple[Callable[[Arrays], tuple[Arrays, Any]], Callable[[Any, Arrays], Arrays]]:
    """(forward, backward), to be compiled apart, as a training step runs them.

    forward(inputs) -> (outputs, residuals); residuals are whatever JAX's vjp saves, a pytree whose leaves are arrays.
    backward(residuals, cotangents) -> gradients; cotangents are named and shaped as the outputs, gradients as the inputs, one
    for every input of a floating dtype.

    Residuals that are inputs or outputs are the same arrays, not copies, when both halves go through `compiler.compile`.
    Compile backward from the `output_structs` of forward's compilation, whose pytree carries this very trace.
    """

    def forward(inputs: Arrays) -> tuple[Arrays, Any]:
        floating = {name: x for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {name: x for name, x in inputs.items() if name not in floating}
        return jax.vjp(lambda differentiated: apply(differentiated | others, **attributes), floating)

    def backward(residuals: Any, cotangents: Arrays) -> Arrays:
        (gradients,) = residuals(cotangents)
        return gradients

    return forward, backward
