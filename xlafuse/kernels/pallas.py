"""Hand-written Pallas kernels for Hopper GPUs as functions on arrays of JAX, each called like its block.

    attention(q, k, v, True)    # causal

They work under `jax.jit`, have gradients, and need jax 0.11 or newer. The header of a kernel's file in
`xlafuse/pallas/` has shapes and dtypes.
"""

from typing import Any

from xlafuse.kernels import function_of

NAMES = ("attention", "linear", "linear_gelu", "matmul", "moe", "rmsnorm", "softmax", "swiglu")


def __getattr__(name: str) -> Any:
    return function_of("pallas", name, NAMES)


def __dir__() -> list[str]:
    return sorted(NAMES)
