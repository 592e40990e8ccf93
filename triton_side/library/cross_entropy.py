"""Cross-entropy by `torch.nn.functional.cross_entropy`, with z-loss beside it."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_side.blocks.cross_entropy import IGNORED


def summed(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """The sum of the losses of logits [tokens, classes] with labels [tokens] int32, [] in float32.

    The logits go in as float32, because the function returns its input's dtype. It takes int64 labels.
    """
    logits, labels = logits.float(), labels.long()
    entropies = F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    z_losses = torch.where(labels != IGNORED, z_loss * torch.logsumexp(logits, dim=-1).square(), 0.0)
    return entropies + z_losses.sum()


def count(labels: Tensor) -> Tensor:
    """How many tokens count, or 1."""
    return (labels != IGNORED).sum().clamp(min=1)


def apply(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """logits [tokens, classes], labels [tokens] int32 -> loss [] in float32.

    The function's own mean is NaN where all labels are ignored, so it sums, and the sum is divided by the number of
    tokens that count, or 1.
    """
    return {"loss": summed(inputs["logits"], inputs["labels"], smoothing, z_loss) / count(inputs["labels"])}
