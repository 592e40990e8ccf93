"""The last projection and its loss, with the logits in memory."""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.blocks import cross_entropy
from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """h [tokens, width], w [classes, width], labels [tokens] int32 -> loss [] in float32.

    The loss is that of the block `cross_entropy` for the logits h w^T, which are rounded to the inputs' dtype.
    """
    with stage("product"):
        logits = inputs["h"] @ inputs["w"].T
    return cross_entropy.apply({"logits": logits, "labels": inputs["labels"]}, smoothing=smoothing, z_loss=z_loss)
