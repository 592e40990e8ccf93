"""One training step of a small language model with Llama's layers: the loss, and every parameter after AdamW.

    x = table[tokens];  x = decoder_block(x) for each layer;  logits = rmsnorm(x) w_head^T
    loss = mean(logsumexp(logits) - logit[label])

Layers are flax nnx modules (decoder_block) with stacked weights. Unrolled, the gradient of a stack is the sum of its
layers' gradients padded with zeros, which XLA computes inside AdamW's kernel. Stacking results after AdamW instead took
three kernels for each parameter (jaxlib 0.10.2).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.blocks import attention, decoder_block, embedding
from xlafuse.blocks.adamw import adamw
from xlafuse.blocks.rmsnorm import rmsnorm

Arrays = dict[str, jax.Array]
Layer = Callable[[jax.Array, Arrays], jax.Array]

LAYER_PARAMETERS = tuple(decoder_block.PATHS)
PARAMETERS = ("table", *LAYER_PARAMETERS, "final_norm", "w_head")


def run_unrolled(layer: Layer, x: jax.Array, stacked: Arrays) -> jax.Array:
    """Run the layers in a Python loop."""
    for number in range(len(stacked["w_qkv"])):
        with jax.named_scope("layer"):
            x = layer(x, {name: array[number] for name, array in stacked.items()})
    return x


def run_scan(layer: Layer, x: jax.Array, stacked: Arrays) -> jax.Array:
    """Run the layers in jax.lax.scan."""
    with jax.named_scope("layer"):
        return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, stacked)[0]


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean loss of `logits` [tokens, classes] and `labels` [tokens], in float32."""
    with jax.named_scope("logsumexp"):
        wide = logits.astype(jnp.float32)
        # The maximum only guards against overflow and cancels in the result, so no gradient flows through it.
        largest = jax.lax.stop_gradient(jnp.max(wide, axis=-1))
        lse = largest + jnp.log(jnp.sum(jnp.exp(wide - largest[:, None]), axis=-1))
    with jax.named_scope("target"):
        losses = lse - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0].astype(jnp.float32)
    with jax.named_scope("mean"):
        return jnp.mean(losses)


def loss_of(
    parameters: Arrays, inputs: Mapping[str, jax.Array], layer: Layer, run_layers: Callable[..., jax.Array], eps: float
) -> jax.Array:
    with jax.named_scope("embedding"):
        # In float32, so the gradient is summed in float32, in which AdamW's moments show it. The two conversions of the
        # table are 0.8% of the step's bytes with 2 layers (jax 0.11.2).
        table = parameters["table"].astype(jnp.float32)
        x = embedding.apply({"table": table, "ids": inputs["tokens"]})["y"].astype(parameters["table"].dtype)
    x = run_layers(layer, x, {name: parameters[name] for name in LAYER_PARAMETERS})
    with jax.named_scope("final_norm"):
        h = rmsnorm(x, parameters["final_norm"], eps)
    with jax.named_scope("head"):
        logits = h @ parameters["w_head"].T
    with jax.named_scope("loss"):
        return mean_cross_entropy(logits.reshape(-1, logits.shape[-1]), inputs["labels"].reshape(-1))


def step(
    inputs: Arrays, run_layers: Callable[..., jax.Array], *, heads: int, kv_heads: int, eps: float, theta: float,
    optimizer: Mapping[str, float], attend: decoder_block.Attend = attention.apply, remat: bool = False,
) -> Arrays:
    """Return the results of `apply`; `run_layers` is `run_unrolled` or `run_scan`."""

    def layer(x: jax.Array, weights: Arrays) -> jax.Array:
        return decoder_block.run_layer(
            x, weights, inputs["positions"], heads=heads, kv_heads=kv_heads, eps=eps, theta=theta, attend=attend
        )

    if remat:
        # In a loop, forward and backward are separate bodies; unrolled layers need a barrier between them.
        layer = jax.checkpoint(layer, prevent_cse=run_layers is not run_scan)
    parameters = {name: inputs[name] for name in PARAMETERS}
    loss, gradients = jax.value_and_grad(loss_of)(parameters, inputs, layer, run_layers, eps)
    results = {"loss": loss}
    for name, gradient in gradients.items():
        names = (name, f"mu_{name}", f"nu_{name}")
        param, mu, nu = (inputs[each] for each in names)
        with jax.named_scope("adamw"), jax.named_scope(name):
            new = adamw(param, gradient, mu, nu, inputs["step"], **optimizer)
        results |= {f"new_{each}": array for each, array in zip(names, new, strict=True)}
    return results


def apply(inputs: Arrays, **attributes: Any) -> Arrays:
    """Return the loss and the new parameters and moments, with unrolled layers.

    `tokens`, `labels`, `positions` [batch, sequence] int32, `step` [] int32, parameters and their moments -> `loss` [],
    and `new_p`, `new_mu_p` and `new_nu_p` for each parameter p.

    Parameters: `table` [vocabulary, width], the weights of `decoder_block.apply` with a leading axis of layers,
    `final_norm` [width], `w_head` [vocabulary, width]. The moments of p are `mu_p` and `nu_p`, float32.
    """
    return step(inputs, run_unrolled, **attributes)


def apply_remat(inputs: Arrays, **attributes: Any) -> Arrays:
    """Return the same; only the input of each layer is kept for the backward pass."""
    return step(inputs, run_unrolled, **attributes, remat=True)


def apply_scan(inputs: Arrays, **attributes: Any) -> Arrays:
    """Return the same with jax.lax.scan over the layers."""
    return step(inputs, run_scan, **attributes)


def apply_scan_remat(inputs: Arrays, **attributes: Any) -> Arrays:
    """Return the same with jax.lax.scan; only the input of each layer is kept for the backward pass."""
    return step(inputs, run_scan, **attributes, remat=True)


def apply_cudnn(inputs: Arrays, **attributes: Any) -> Arrays:
    """Return the same with cuDNN's attention."""
    return step(inputs, run_unrolled, **attributes, attend=attention.apply_cudnn)
