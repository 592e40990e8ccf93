"""What is compiled of a block: its forward pass, the two halves of a training step, or both in one program."""

from collections.abc import Callable, Mapping, Sequence
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


def joint(apply: Apply, attributes: Mapping[str, Any], outputs: Sequence[str]) -> Callable[[Arrays], Arrays]:
    """Outputs and gradients in one program, as jax.value_and_grad in a training step's jit: XLA is free to fuse, and to
    recompute, across the two. It takes the inputs, and for each of the `outputs` y its cotangent as d_y, and returns
    the outputs, and for each input x of a floating dtype its gradient as d_x."""
    forward, backward = train_phases(apply, attributes)
    given = {f"d_{name}": name for name in outputs}

    def joint(arrays: Arrays) -> Arrays:
        results, residuals = forward({name: x for name, x in arrays.items() if name not in given})
        gradients = backward(residuals, {own: arrays[name] for name, own in given.items()})
        return results | {f"d_{name}": gradient for name, gradient in gradients.items()}

    return joint


def train_phases(
    apply: Apply, attributes: Mapping[str, Any], *, recompute: bool = False
) -> tuple[Callable[[Arrays], tuple[Arrays, Any]], Callable[[Any, Arrays], Arrays]]:
    """(forward, backward), to be compiled apart, as a training step runs them.

    forward(inputs) -> (outputs, residuals); residuals are whatever JAX's vjp saves, a pytree whose leaves are
    arrays. backward(residuals, cotangents) -> gradients; cotangents are named and shaped as the outputs,
    gradients as the inputs, one for every input of a floating dtype.

    recompute: save the results of products only and recompute everything else in backward (jax.checkpoint
        with dots_saveable). A plain vjp saves what each operation's derivative asks for: a bfloat16 GELU then
        saves five (jax 0.11) or six (0.10) arrays of its input's size. A training step in one jit is free to
        fuse that away; two jits are not.

    Residuals that are inputs or outputs are the same arrays, not copies, when both halves go through
    `compiler.compile`. Compile backward from the `output_structs` of forward's compilation, whose pytree
    carries this very trace.
    """

    def forward(inputs: Arrays) -> tuple[Arrays, Any]:
        floating = {name: x for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {name: x for name, x in inputs.items() if name not in floating}

        def of_floating(floating: Arrays) -> Arrays:
            return apply(floating | others, **attributes)

        if recompute:
            policy = jax.checkpoint_policies.dots_saveable
            # The halves are compiled apart, so XLA cannot undo the recomputation and needs no barrier against
            # it.
            of_floating = jax.checkpoint(of_floating, policy=policy, prevent_cse=False)
        return jax.vjp(of_floating, floating)

    def backward(residuals: Any, cotangents: Arrays) -> Arrays:
        (gradients,) = residuals(cotangents)
        return gradients

    return forward, backward
