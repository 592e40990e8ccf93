"""The functions that are compiled for a block: inference, the two phases of a training step, or both as one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]
Apply = Callable[..., Arrays]


def forward(apply: Apply, attributes: Mapping[str, Any]) -> Callable[[Arrays], Arrays]:
    """Return `apply` with its attributes bound: inputs -> outputs."""

    def forward(inputs: Arrays) -> Arrays:
        return apply(inputs, **attributes)

    return forward


def joint(apply: Apply, attributes: Mapping[str, Any], outputs: Sequence[str]) -> Callable[[Arrays], Arrays]:
    """Return a function that computes outputs and gradients in one program, as a jitted training step does.

    XLA may fuse and recompute across the two phases. The function takes the inputs and a cotangent d_y for each output
    y of `outputs`. It returns the outputs and a gradient d_x for each input x of a floating dtype.
    """
    forward, backward = train_phases(apply, attributes)
    cotangents = {f"d_{name}": name for name in outputs}

    def joint(arrays: Arrays) -> Arrays:
        results, residuals = forward({name: x for name, x in arrays.items() if name not in cotangents})
        gradients = backward(residuals, {output: arrays[name] for name, output in cotangents.items()})
        return results | {f"d_{name}": gradient for name, gradient in gradients.items()}

    return joint


def train_phases(
    apply: Apply, attributes: Mapping[str, Any], *, recompute: bool = False
) -> tuple[Callable[[Arrays], tuple[Arrays, Any]], Callable[[Any, Arrays], Arrays]]:
    """Return the (forward, backward) functions of a training step, to be compiled separately.

    forward(inputs) -> (outputs, residuals): residuals are the arrays that jax.vjp saves, in a pytree.
    backward(residuals, cotangents) -> gradients: cotangents have the names and shapes of the outputs; gradients have
    those of the inputs of a floating dtype.

    recompute: save only the results of products and recompute the rest in backward (jax.checkpoint with dots_saveable).
        A plain vjp saves each array that a derivative needs: a bfloat16 GELU saves five (jax 0.11) or six (0.10) arrays
        of its input's size. XLA can fuse them away inside one jit, but not across two.

    If both phases are compiled by `compiler.compile`, a residual that is an input or an output is not copied. Compile
    backward from the `output_structs` of the compiled forward, because their pytree belongs to this trace.
    """

    def forward(inputs: Arrays) -> tuple[Arrays, Any]:
        floating = {name: x for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {name: x for name, x in inputs.items() if name not in floating}

        def of_floating(floating: Arrays) -> Arrays:
            return apply(floating | others, **attributes)

        if recompute:
            policy = jax.checkpoint_policies.dots_saveable
            # The phases are compiled separately, so XLA cannot undo the recomputation and no barrier is needed.
            of_floating = jax.checkpoint(of_floating, policy=policy, prevent_cse=False)
        return jax.vjp(of_floating, floating)

    def backward(residuals: Any, cotangents: Arrays) -> Arrays:
        (gradients,) = residuals(cotangents)
        return gradients

    return forward, backward
