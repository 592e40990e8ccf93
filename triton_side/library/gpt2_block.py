"""A layer of GPT-2: attention by cuDNN through `F.scaled_dot_product_attention`, the rest in plain PyTorch.

It is meant for torch.compile, which calls the library for the attention and fuses the other operations.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from xlafuse.triton_side.blocks import gpt2_block
from xlafuse.triton_side.library import attention


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """The block gpt2_block; inputs, attributes and output are those of `triton_side.blocks.gpt2_block.apply`."""
    return gpt2_block.apply(inputs, **attributes, attend=attention.apply_cudnn)
