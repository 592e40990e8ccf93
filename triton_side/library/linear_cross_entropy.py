"""The last projection and its loss, one chunk of tokens at a time, as PyTorch users write it to save memory for logits.

`torch.nn.functional.linear_cross_entropy` (PyTorch 2.13) does not return the logsumexp that z-loss needs, so it would
require a second projection.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xlafuse.triton_side.library.cross_entropy import count, summed

TOKENS = 1024  # a chunk


def apply(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """h [tokens, width], w [classes, width], labels [tokens] int32 -> loss [] in float32.

    The backward pass computes each chunk's logits again, and autograd sums the chunks' gradients of w in w's dtype.
    """
    w, labels = inputs["w"], inputs["labels"]

    def of_chunk(h: Tensor, labels: Tensor) -> Tensor:
        return summed(F.linear(h, w), labels, smoothing, z_loss)

    chunks = zip(inputs["h"].split(TOKENS), labels.split(TOKENS), strict=True)
    total = sum(checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks)
    return {"loss": total / count(labels)}
