"""The table of blocks: one line a block."""

from compare.blocks import attention, gelu, linear_gelu, matmul, rmsnorm, softmax, swiglu_mlp, vector_add
from compare.spec import Block

BLOCKS: dict[str, Block] = {
    block.name: block
    for block in (
        vector_add.BLOCK,
        gelu.BLOCK,
        softmax.BLOCK,
        rmsnorm.BLOCK,
        matmul.BLOCK,
        linear_gelu.BLOCK,
        swiglu_mlp.BLOCK,
        attention.BLOCK,
    )
}
