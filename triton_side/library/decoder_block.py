"""A decoder layer of Llama whose attention is `F.scaled_dot_product_attention`, by cuDNN; the rest is plain.

Made for torch.compile, which leaves the attention to the library and fuses what is around it.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from triton_side.blocks import decoder_block


def attend(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Causal attention of q [batch, heads, sequence, head_dim] on k, v [batch, kv_heads, sequence, head_dim].

    Raises RuntimeError where cuDNN cannot take the case: on a CPU, in float32.
    """
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (inputs[name] for name in "qkv")
        return {"out": F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)}


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """The block decoder_block; inputs, attributes and output are those of `triton_side.blocks.decoder_block.apply`."""
    return decoder_block.apply(inputs, **attributes, attend=attend)
