"""One training step of a small language model of Llama layers: the loss, and every parameter after AdamW.

    x = table[tokens];  x = decoder_block(x) for each layer;  logits = rmsnorm(x) w_head^T
    loss = mean(logsumexp(logits) - logit[label])

PyTorch's autograd calls the kernels' backward passes in turn. linear_cross_entropy computes the head: only a chunk's
logits are in memory at a time. Each layer's parameters are updated separately, directly in the stacked results, so
their gradients need not be stacked.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from triton_side.blocks.lm_step import LAYER_PARAMETERS, PARAMETERS
from triton_side.calls.stages import stage
from triton_side.kernels.adamw import adamw
from triton_side.kernels.decoder_block import decoder_block
from triton_side.kernels.embedding import embedding
from triton_side.kernels.linear_cross_entropy import linear_cross_entropy
from triton_side.kernels.rmsnorm import rmsnorm

PREFIXES = ("", "mu_", "nu_")  # of a parameter and its moments

ParameterKey = tuple[str, int | None]  # a parameter's name, and the layer of a stacked one


def parameter_keys(layers: int) -> Iterator[ParameterKey]:
    for name in PARAMETERS:
        yield from ((name, layer) for layer in range(layers)) if name in LAYER_PARAMETERS else [(name, None)]


def parameter(tensors: Mapping[str, torch.Tensor], key: ParameterKey, prefix: str = "") -> torch.Tensor:
    name, layer = key
    return tensors[prefix + name] if layer is None else tensors[prefix + name][layer]


def compute_loss(
    parameters: Mapping[ParameterKey, torch.Tensor], inputs: Mapping[str, torch.Tensor], layers: int,
    sizes: Mapping[str, Any],
) -> torch.Tensor:
    tokens = inputs["tokens"]
    with stage("embedding"):
        x = embedding(parameters["table", None], tokens.flatten()).unflatten(0, tokens.shape)
    for layer in range(layers):
        with stage("layer"):
            weights = {name: parameters[name, layer] for name in LAYER_PARAMETERS}
            x = decoder_block(x, weights, inputs["positions"], **sizes)
    with stage("final_norm"):
        h = rmsnorm(x.flatten(0, 1), parameters["final_norm", None], sizes["eps"])
    with stage("loss", product="head"):
        return linear_cross_entropy(h, parameters["w_head", None], inputs["labels"].flatten())


def lm_step(
    inputs: Mapping[str, torch.Tensor], *, optimizer: Mapping[str, Any], **sizes: Any
) -> dict[str, torch.Tensor]:
    """Return the results of `triton_side.blocks.lm_step.apply` for the same inputs.

    Args:
        inputs: tokens, labels, positions, step; parameters of one dtype (bfloat16, float16, float32) and their float32
            moments; all on one GPU.
        optimizer: rate, beta1, beta2, eps, decay of `adamw`.
        sizes: heads, kv_heads, eps and theta of `decoder_block`.

    Raises:
        ValueError, TypeError: a kernel raises it.
    """
    layers = len(inputs["w_qkv"])
    parameters = {key: parameter(inputs, key).detach().requires_grad_() for key in parameter_keys(layers)}
    with torch.enable_grad():
        loss = compute_loss(parameters, inputs, layers, sizes)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
    new = {f"new_{prefix}{name}": torch.empty_like(inputs[prefix + name]) for prefix in PREFIXES for name in PARAMETERS}
    for key, gradient in zip(parameters, gradients, strict=True):
        param, mu, nu = (parameter(inputs, key, prefix) for prefix in PREFIXES)
        out = parameter(new, key, "new_"), parameter(new, key, "new_mu_"), parameter(new, key, "new_nu_")
        with stage("adamw"), stage(key[0]):
            adamw(param, gradient, mu, nu, inputs["step"], **optimizer, out=out)
    return {"loss": loss.detach(), **new}


def apply(inputs: Mapping[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `lm_step`.

    tokens, labels, positions, step, parameters and moments -> loss, new parameters and new moments.
    """
    return lm_step(inputs, **attributes)
