"""A training step of a small language model whose attention is `F.scaled_dot_product_attention`, by cuDNN; the rest is
plain.

Made for torch.compile, which leaves the attention to the library and fuses what is around it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from triton_side.blocks import lm_step
from triton_side.library import attention


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """The block lm_step; inputs, attributes and outputs are those of `triton_side.blocks.lm_step.apply`."""
    return lm_step.apply(inputs, **attributes, attend=attention.apply_cudnn)
