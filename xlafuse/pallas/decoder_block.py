"""The decoder layer of `xlafuse/blocks/decoder_block.py` with attention in Pallas.

XLA compiles the rest, and fuses nothing into the kernels of attention: rotated q and k, and out before its product, are
arrays in memory.
"""

from typing import Any

import jax

from xlafuse.blocks import decoder_block
from xlafuse.pallas import attention


def apply(inputs: dict[str, jax.Array], **attributes: Any) -> dict[str, jax.Array]:
    """Return the layer's output. Inputs, shapes and attributes are those of `xlafuse.blocks.decoder_block.apply`."""
    return decoder_block.apply(inputs, **attributes, attend=attention.apply)
