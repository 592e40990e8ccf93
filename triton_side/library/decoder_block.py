"""A decoder layer of Llama whose attention is `F.scaled_dot_product_attention`, by cuDNN; the rest is plain.

Made for torch.compile, which leaves the attention to the library and fuses what is around it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from triton_side.blocks import decoder_block
from triton_side.library import attention


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """The block decoder_block; inputs, attributes and output are those of `triton_side.blocks.decoder_block.apply`."""
    return decoder_block.apply(inputs, **attributes, attend=attention.apply_cudnn)
