"""Mean cross-entropy with label smoothing (arXiv:1512.00567), ignored labels and z-loss (arXiv:2204.02311)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from triton_side.calls.stages import stage

IGNORED = -100


def apply(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """logits [tokens, classes], labels [tokens] int32 -> loss [], in float32 throughout.

    The loss is the mean, over the tokens whose label is not IGNORED, of
    (1 - smoothing) (lse - logit[label]) + smoothing (lse - mean(logits)) + z_loss lse^2, lse = logsumexp(logits).
    It is 0 if all labels are IGNORED.
    """
    labels = inputs["labels"]
    with stage("logsumexp"):
        logits = inputs["logits"].float()
        # The logsumexp does not depend on the subtracted value, so the gradient through the maximum is zero.
        maximum = logits.amax(dim=-1, keepdim=True).detach()
        lse = maximum[:, 0] + torch.exp(logits - maximum).sum(dim=-1).log()
    with stage("target"):
        counted = labels != IGNORED
        label = torch.where(counted, labels, 0).long()
        target = lse - logits.gather(-1, label[:, None])[:, 0]
    with stage("smoothing"):
        losses = (1 - smoothing) * target + smoothing * (lse - logits.mean(dim=-1))
    with stage("z_loss"):
        losses = losses + z_loss * lse * lse
    with stage("mean"):
        loss = torch.where(counted, losses, 0.0).sum() / counted.sum().clamp(min=1)
    return {"loss": loss}
