"""A language model's training step: attention by cuDNN through `F.scaled_dot_product_attention`, the rest plain.

It is meant for torch.compile, which calls the library for the attention and fuses the other operations.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from xlafuse.triton_side.blocks import lm_step
from xlafuse.triton_side.library import attention


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """The block lm_step; inputs, attributes and outputs are those of `xlafuse.triton_side.blocks.lm_step.apply`."""
    return lm_step.apply(inputs, **attributes, attend=attention.apply_cudnn)
