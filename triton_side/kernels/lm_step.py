"""One training step of a small language model of Llama layers: the loss, and every parameter after AdamW.

    x = table[tokens];  x = decoder_block(x) for each layer;  logits = rmsnorm(x) w_head^T
    loss = mean(logsumexp(logits) - logit[label])

PyTorch's autograd calls the kernels' backward passes in turn. linear_cross_entropy computes the head: only a chunk's
logits are in memory at a time. One launch updates all parameters. It takes a stacked parameter with one gradient a
layer, so they need not be stacked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from xlafuse.triton_side.blocks.lm_step import LAYER_PARAMETERS, PARAMETERS
from xlafuse.triton_side.calls.declare import computing
from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.kernels.adamw import OPERATIONS, Update, update_all
from xlafuse.triton_side.kernels.decoder_block import decoder_block
from xlafuse.triton_side.kernels.embedding import embedding
from xlafuse.triton_side.kernels.linear_cross_entropy import linear_cross_entropy
from xlafuse.triton_side.kernels.rmsnorm import rmsnorm

PREFIXES = ("", "mu_", "nu_")  # of a parameter and its moments

UPDATES = tuple(replace(each, stage=f"{name}/{each.stage}") for name in PARAMETERS for each in OPERATIONS)

def compute_loss(
    parts: Mapping[str, Sequence[torch.Tensor]], inputs: Mapping[str, torch.Tensor], layers: int,
    sizes: Mapping[str, Any],
) -> torch.Tensor:
    """Return the loss. `parts` has one tensor for a parameter, and one for each layer for a layer's parameter."""
    tokens = inputs["tokens"]
    with stage("embedding"):
        x = embedding(parts["table"][0], tokens.flatten()).unflatten(0, tokens.shape)
    for layer in range(layers):
        with stage("layer"):
            weights = {name: parts[name][layer] for name in LAYER_PARAMETERS}
            x = decoder_block(x, weights, inputs["positions"], **sizes)
    with stage("final_norm"):
        h = rmsnorm(x.flatten(0, 1), parts["final_norm"][0], sizes["eps"])
    with stage("loss", product="head"):
        return linear_cross_entropy(h, parts["w_head"][0], inputs["labels"].flatten())


def lm_step(
    inputs: Mapping[str, torch.Tensor], *, optimizer: Mapping[str, Any], **sizes: Any
) -> dict[str, torch.Tensor]:
    """Return the results of `xlafuse.triton_side.blocks.lm_step.apply` for the same inputs.

    Args:
        inputs: tokens, labels, positions, step; parameters of one dtype (bfloat16, float16, float32) and their float32
            moments; all on one GPU.
        optimizer: rate, beta1, beta2, eps, decay of `adamw`.
        sizes: heads, kv_heads, eps and theta of `decoder_block`.

    Raises:
        ValueError, TypeError: a kernel raises it.
    """
    layers = inputs["w_qkv"].shape[0]
    parts = {
        name: inputs[name].detach().unbind() if name in LAYER_PARAMETERS else (inputs[name].detach(),)
        for name in PARAMETERS
    }
    leaves = [part.requires_grad_() for each in parts.values() for part in each]
    # In this thread the backward pass needs no wait for autograd's thread of the GPU.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        loss = compute_loss(parts, inputs, layers, sizes)
        gradients = iter(torch.autograd.grad(loss, leaves))
    new = {
        f"new_{prefix}{name}": torch.empty_like(inputs[prefix + name], memory_format=torch.contiguous_format)
        for name in PARAMETERS for prefix in PREFIXES
    }
    updates = [
        Update(
            inputs[name], tuple(islice(gradients, len(parts[name]))), inputs[f"mu_{name}"], inputs[f"nu_{name}"],
            new[f"new_{name}"], new[f"new_mu_{name}"], new[f"new_nu_{name}"],
        )
        for name in PARAMETERS
    ]
    with stage("adamw"), computing(*UPDATES):
        update_all(updates, inputs["step"], **optimizer)
    return {"loss": loss.detach(), **new}


def apply(inputs: Mapping[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `lm_step`.

    tokens, labels, positions, step, parameters and moments -> loss, new parameters and new moments.
    """
    return lm_step(inputs, **attributes)
