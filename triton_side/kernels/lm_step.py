"""One training step of a small language model of Llama layers: the loss, and every parameter after AdamW.

    x = table[tokens];  x = decoder_block(x) for each layer;  logits = rmsnorm(x) w_head^T
    loss = mean(logsumexp(logits) - logit[label])

PyTorch's autograd calls the kernels' backward passes in turn. linear_cross_entropy computes the head: it takes four
products instead of three, but the logits are never in memory, and their gradients only one workspace at a time. One
launch updates all parameters, each layer's directly in the stacked results, so their gradients need not be stacked.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from triton_side.blocks.lm_step import LAYER_PARAMETERS, PARAMETERS
from triton_side.calls.declare import computing
from triton_side.calls.stages import stage
from triton_side.kernels.adamw import OPERATIONS, Update, update_all
from triton_side.kernels.decoder_block import decoder_block
from triton_side.kernels.embedding import embedding
from triton_side.kernels.linear_cross_entropy import linear_cross_entropy
from triton_side.kernels.rmsnorm import rmsnorm

PREFIXES = ("", "mu_", "nu_")  # of a parameter and its moments

UPDATES = tuple(replace(each, stage=f"{name}/{each.stage}") for name in PARAMETERS for each in OPERATIONS)

ParameterKey = tuple[str, int | None]  # a parameter's name, and the layer of a stacked one


def parameters_of(tensors: Mapping[str, torch.Tensor], prefix: str = "") -> dict[ParameterKey, torch.Tensor]:
    """Return each parameter, and a view of each layer's of the stacked ones."""
    found: dict[ParameterKey, torch.Tensor] = {}
    for name in PARAMETERS:
        tensor = tensors[prefix + name]
        layers = enumerate(tensor.unbind()) if name in LAYER_PARAMETERS else [(None, tensor)]
        found |= {(name, layer): each for layer, each in layers}
    return found


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
    parameters = {key: each.detach().requires_grad_() for key, each in parameters_of(inputs).items()}
    # In this thread the backward pass needs no wait for autograd's thread of the GPU.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        loss = compute_loss(parameters, inputs, inputs["w_qkv"].shape[0], sizes)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
    new = {f"new_{prefix}{name}": torch.empty_like(inputs[prefix + name]) for prefix in PREFIXES for name in PARAMETERS}
    mu, nu, new_param, new_mu, new_nu = (
        parameters_of(tensors, prefix).values()
        for tensors, prefix in ((inputs, "mu_"), (inputs, "nu_"), (new, "new_"), (new, "new_mu_"), (new, "new_nu_"))
    )
    updates = zip(parameters.values(), gradients, mu, nu, new_param, new_mu, new_nu, strict=True)
    with stage("adamw"), computing(*UPDATES):
        update_all([Update(*update) for update in updates], inputs["step"], **optimizer)
    return {"loss": loss.detach(), **new}


def apply(inputs: Mapping[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `lm_step`.

    tokens, labels, positions, step, parameters and moments -> loss, new parameters and new moments.
    """
    return lm_step(inputs, **attributes)
