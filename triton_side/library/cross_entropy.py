"""Cross-entropy by `torch.nn.functional.cross_entropy`, plus z-loss."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from xlafuse.triton_side.blocks.cross_entropy import IGNORED


def summed(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """Return the sum of the losses of logits [tokens, classes] with labels [tokens] int32: [] in float32.

    The logits are converted to float32, because the function returns its input's dtype, and the labels to int64.
    """
    logits, labels = logits.float(), labels.long()
    entropies = F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    z_losses = torch.where(labels != IGNORED, z_loss * torch.logsumexp(logits, dim=-1).square(), 0.0)
    return entropies + z_losses.sum()


def count(labels: Tensor) -> Tensor:
    """Return how many tokens have a label that is not ignored, at least 1."""
    return (labels != IGNORED).sum().clamp(min=1)


def apply(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """logits [tokens, classes], labels [tokens] int32 -> loss [] in float32.

    The function's own mean is NaN if all labels are ignored. It therefore sums, and `count` divides the sum.
    """
    return {"loss": summed(inputs["logits"], inputs["labels"], smoothing, z_loss) / count(inputs["labels"])}
