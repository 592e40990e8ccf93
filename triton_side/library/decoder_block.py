"""A decoder layer of Llama: attention by cuDNN through `F.scaled_dot_product_attention`, the rest in plain PyTorch.

It is meant for torch.compile, which calls the library for the attention and fuses the other operations.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from xlafuse.triton_side.blocks import decoder_block
from xlafuse.triton_side.library import attention


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """The block decoder_block; inputs, attributes and output are those of `triton_side.blocks.decoder_block.apply`."""
    return decoder_block.apply(inputs, **attributes, attend=attention.apply_cudnn)
