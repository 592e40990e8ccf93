"""Cross-entropy by `torch.nn.functional.cross_entropy`, with z-loss beside it."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_side.blocks.cross_entropy import IGNORED


def apply(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """logits [tokens, classes], labels [tokens] int32 -> loss [] in float32.

    The logits go in as float32, because the function returns its input's dtype. Its own mean is NaN where all labels
    are ignored, so it sums, and the sum is divided by the number of tokens that count, or 1. It takes int64 labels.
    """
    logits, labels = inputs["logits"].float(), inputs["labels"].long()
    entropies = F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    counted = labels != IGNORED
    z_losses = torch.where(counted, z_loss * torch.logsumexp(logits, dim=-1).square(), 0.0)
    return {"loss": (entropies + z_losses.sum()) / counted.sum().clamp(min=1)}
