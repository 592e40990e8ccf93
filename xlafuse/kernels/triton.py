"""Hand-written Triton kernels as functions on tensors of PyTorch, each called like its block.

    attention(q, k, v, causal=True)

Those of blocks that train have gradients. `help(attention)` lists arguments, shapes, dtypes and errors.
"""

from typing import Any

from xlafuse.kernels import function_of

NAMES = (
    "adamw", "attention", "attention_bias", "attention_packed", "bias_gelu", "cross_entropy", "decode_attention",
    "decode_attention_paged", "decoder_block", "dropout_residual_norm", "embedding", "geglu", "gelu", "gpt2_block",
    "layernorm", "linear", "linear_cross_entropy", "linear_gelu", "lm_step", "matmul", "matmul_fp8", "moe", "rmsnorm",
    "rope", "softmax", "swiglu", "swiglu_mlp", "vector_add",
)


def __getattr__(name: str) -> Any:
    return function_of("triton_side.kernels", name, NAMES)


def __dir__() -> list[str]:
    return sorted(NAMES)
