"""The table of blocks: one line a block."""

from compare.blocks import (
    attention,
    attention_packed,
    bias_gelu,
    cross_entropy,
    dropout_residual_norm,
    embedding,
    geglu,
    gelu,
    layernorm,
    linear_gelu,
    matmul,
    rmsnorm,
    rope,
    softmax,
    swiglu,
    swiglu_mlp,
    vector_add,
)
from compare.spec import Block

BLOCKS: dict[str, Block] = {
    block.name: block
    for block in (
        vector_add.BLOCK,
        gelu.BLOCK,
        swiglu.BLOCK,
        geglu.BLOCK,
        bias_gelu.BLOCK,
        softmax.BLOCK,
        rmsnorm.BLOCK,
        layernorm.BLOCK,
        dropout_residual_norm.BLOCK,
        matmul.BLOCK,
        linear_gelu.BLOCK,
        swiglu_mlp.BLOCK,
        rope.BLOCK,
        attention.BLOCK,
        attention_packed.BLOCK,
        embedding.BLOCK,
        cross_entropy.BLOCK,
    )
}
