"""One training step of a small language model with Llama's layers: the loss, and every parameter after AdamW.

    x = table[tokens];  x = decoder_block(x) for each layer;  logits = rmsnorm(x) w_head^T
    loss = mean(logsumexp(logits) - logit[label])
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xlafuse.triton_side.blocks import attention, decoder_block, embedding, rmsnorm
from xlafuse.triton_side.blocks.adamw import adamw
from xlafuse.triton_side.blocks.cross_entropy import at_label
from xlafuse.triton_side.calls.stages import stage

LAYER_PARAMETERS = ("attention_norm", "w_qkv", "w_o", "mlp_norm", "w_gate", "w_up", "w_down")
PARAMETERS = ("table", *LAYER_PARAMETERS, "final_norm", "w_head")

Layer = Callable[..., Tensor]


def mean_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [tokens, classes] and labels [tokens], in float32."""
    with stage("logsumexp"):
        logits = logits.float()
        # The logsumexp does not depend on the subtracted value, so the gradient through the maximum is zero.
        maximum = logits.amax(dim=-1, keepdim=True).detach()
        lse = maximum[:, 0] + torch.exp(logits - maximum).sum(dim=-1).log()
    with stage("target"):
        losses = lse - at_label(logits, labels)
    with stage("mean"):
        return losses.mean()


def loss_of(parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor], layer: Layer, eps: float) -> Tensor:
    with stage("embedding"):
        x = embedding.apply({"table": parameters["table"], "ids": inputs["tokens"]})["y"]
    each = zip(*(parameters[name].unbind() for name in LAYER_PARAMETERS), strict=True)
    for weights in each:
        with stage("layer"):
            x = layer(x, dict(zip(LAYER_PARAMETERS, weights, strict=True)), inputs["positions"])
    with stage("final_norm"):
        h = rmsnorm.apply({"x": x, "weight": parameters["final_norm"]}, eps=eps)["y"]
    with stage("head"):
        logits = h @ parameters["w_head"].T
    with stage("loss"):
        return mean_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def differentiated(
    loss_at: Callable[[Mapping[str, Tensor]], Tensor], inputs: Mapping[str, Tensor], remat: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of the parameters among the inputs.

    torch.func computes them, because Dynamo accepts it in a compiled function. With remat it is autograd, because
    torch.func refuses checkpoint's hooks (torch 2.13); Dynamo accepts that from torch 2.12 on.
    """
    parameters = {name: inputs[name].detach() for name in PARAMETERS}
    if not remat:
        gradients, loss = torch.func.grad_and_value(loss_at)(parameters)
        return loss, gradients
    parameters = {name: parameter.requires_grad_() for name, parameter in parameters.items()}
    with torch.enable_grad():
        loss = loss_at(parameters)
        found = torch.autograd.grad(loss, list(parameters.values()))
    return loss.detach(), dict(zip(PARAMETERS, found, strict=True))


def step(
    inputs: Mapping[str, Tensor], *, heads: int, kv_heads: int, eps: float, theta: float,
    optimizer: Mapping[str, float], attend: decoder_block.Attend = attention.apply, remat: bool = False,
) -> dict[str, Tensor]:
    """Return what `apply` returns. remat: keep only each layer's input for the backward pass."""
    layer: Layer = partial(decoder_block.stages, heads=heads, kv_heads=kv_heads, eps=eps, theta=theta, attend=attend)
    if remat:
        layer = partial(checkpoint, layer, use_reentrant=False)
    loss, gradients = differentiated(partial(loss_of, inputs=inputs, layer=layer, eps=eps), inputs, remat)
    results = {"loss": loss}
    for name, gradient in gradients.items():
        names = (name, f"mu_{name}", f"nu_{name}")
        with stage("adamw"), stage(name):
            new = adamw(inputs[name], gradient, inputs[names[1]], inputs[names[2]], inputs["step"], **optimizer)
        results |= {f"new_{name}": tensor for name, tensor in zip(names, new, strict=True)}
    return results


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """tokens, labels, positions [batch, sequence] int32, step [] int32, parameters, moments -> loss [], new values.

    The new values of a parameter p are new_p, new_mu_p and new_nu_p.

    Parameters: table [vocabulary, width], the weights of `decoder_block.apply` with an axis of layers before the
    others, final_norm [width], w_head [vocabulary, width]; the moments of p are mu_p and nu_p, float32.
    """
    return step(inputs, **attributes)


def apply_remat(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """Do the same step with each layer under torch.utils.checkpoint."""
    return step(inputs, **attributes, remat=True)
