"""The table of blocks: one line a block."""

from ..block import Block
from . import (
    adamw,
    attention,
    attention_bias,
    attention_packed,
    bias_gelu,
    cross_entropy,
    decode_attention,
    decode_attention_paged,
    decoder_block,
    dropout_residual_norm,
    embedding,
    geglu,
    gelu,
    gpt2_block,
    layernorm,
    linear,
    linear_cross_entropy,
    linear_gelu,
    linear_residual,
    lm_step,
    matmul,
    matmul_fp8,
    mlp_parallel,
    moe,
    moe_parallel,
    rmsnorm,
    rope,
    softmax,
    swiglu,
    swiglu_mlp,
    vector_add,
)

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
        matmul_fp8.BLOCK,
        linear.BLOCK,
        linear_residual.BLOCK,
        linear_gelu.BLOCK,
        swiglu_mlp.BLOCK,
        moe.BLOCK,
        rope.BLOCK,
        attention.BLOCK,
        attention_bias.BLOCK,
        attention_packed.BLOCK,
        decode_attention.BLOCK,
        decode_attention_paged.BLOCK,
        embedding.BLOCK,
        cross_entropy.BLOCK,
        linear_cross_entropy.BLOCK,
        decoder_block.BLOCK,
        gpt2_block.BLOCK,
        adamw.BLOCK,
        lm_step.BLOCK,
        mlp_parallel.BLOCK,
        moe_parallel.BLOCK,
    )
}

# The implementations that fuse nothing on purpose, by the one that computes the same with fusion.
UNFUSED: dict[str, str] = {
    implementation.unfused_of: implementation.name
    for block in BLOCKS.values() for implementation in block.implementations if implementation.unfused_of
}

# The implementations that replay another one's kernels from CUDA graphs, with the name of the other.
REPLAYS: dict[str, str] = {
    implementation.name: implementation.name.removesuffix("-cudagraphs")
    for block in BLOCKS.values() for implementation in block.implementations if implementation.backend.replays_graphs
}


def requirements(worker: str) -> tuple[str, ...]:
    """Return the optional packages that implementations of a worker ("xla", "torch") need, as pip takes them."""
    rows = [i for block in BLOCKS.values() for i in block.implementations if i.backend.worker == worker]
    return tuple(dict.fromkeys(requirement for row in rows for requirement in row.requires))
