"""The last projection and its loss, chunk by chunk of tokens: what users of PyTorch write to save the logits' memory.

`torch.nn.functional.linear_cross_entropy` (PyTorch 2.13) yields no logsumexp, of which z-loss is made, and the
projection would have to be made once more for it.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from triton_side.library.cross_entropy import count, summed

TOKENS = 1024  # a chunk


def apply(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """h [tokens, width], w [classes, width], labels [tokens] int32 -> loss [] in float32.

    Each chunk's logits are made once more for the gradients, and autograd adds the chunks' gradients of w up in w's
    dtype.
    """
    w, labels = inputs["w"], inputs["labels"]

    def of_chunk(h: Tensor, labels: Tensor) -> Tensor:
        return summed(F.linear(h, w), labels, smoothing, z_loss)

    chunks = zip(inputs["h"].split(TOKENS), labels.split(TOKENS), strict=True)
    total = sum(checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks)
    return {"loss": total / count(labels)}
