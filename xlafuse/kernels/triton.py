"""Hand-written Triton kernels as functions on tensors of PyTorch, each called like its block.

    attention(q, k, v, causal=True)

Those of blocks that train have gradients. `help(attention)` lists arguments, shapes, dtypes and errors. Products of
float32 tensors follow `torch.get_float32_matmul_precision()`; `ieee_products` keeps them off the tensor cores.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from xlafuse.kernels import function_of

NAMES = (
    "adamw", "attention", "attention_bias", "attention_packed", "bias_gelu", "cross_entropy", "decode_attention",
    "decode_attention_paged", "decoder_block", "dropout_residual_norm", "embedding", "geglu", "gelu", "gpt2_block",
    "layernorm", "linear", "linear_cross_entropy", "linear_gelu", "lm_step", "matmul", "matmul_fp8", "moe", "rmsnorm",
    "rope", "softmax", "swiglu", "swiglu_mlp", "vector_add",
)


def ieee_products() -> AbstractContextManager[None]:
    """Return a context in which float32 products of precision "highest" are IEEE products, in all threads.

    A backward pass has them if it runs within the context, too. Without the context, "highest" is three TF32 products
    on a Hopper GPU, which are as accurate and faster (docs/kernels/products.md).
    """
    tiles = import_module("xlafuse.triton_side.kernels.shared.tiles")
    context: AbstractContextManager[None] = tiles.ieee_products()
    return context


def __getattr__(name: str) -> Any:
    return function_of("triton_side.kernels", name, NAMES)


def __dir__() -> list[str]:
    return sorted(NAMES)
