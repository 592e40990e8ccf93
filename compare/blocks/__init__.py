"""The table of blocks: one line a block."""

from compare.blocks import (
    adamw,
    attention,
    attention_packed,
    bias_gelu,
    cross_entropy,
    decoder_block,
    dropout_residual_norm,
    embedding,
    geglu,
    gelu,
    gpt2_block,
    layernorm,
    linear_cross_entropy,
    linear_gelu,
    lm_step,
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
        linear_cross_entropy.BLOCK,
        decoder_block.BLOCK,
        gpt2_block.BLOCK,
        adamw.BLOCK,
        lm_step.BLOCK,
    )
}
