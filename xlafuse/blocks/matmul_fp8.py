"""The matrix product of two float8_e4m3fn matrices, with a scale each: c = (a @ b^T) * a_scale * b_scale."""

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the scaled product: `a` [m, k], `b` [n, k], `a_scale` [], `b_scale` [] -> `c` [m, n], bfloat16.

    The scales follow the product. For an H200, XLA (jaxlib 0.10) compiles this form to one Triton fusion that reads
    fp8. Unfused it is cuBLASLt's fp8 product (`__cublas$lt$matmul$f8`), scales included, and a conversion. On a GPU,
    autotuning may also choose cuBLASLt in the fused variant. Operands that are scaled in bfloat16 before the product
    cost two more kernels that write them.

    XLA asks cuBLASLt for fast accumulation (only in the tensor cores), unless the product's precision is above the
    default (xla/stream_executor/cuda/cuda_blas_lt.cc). This project compiles at "highest", which is above it. XLA's
    Triton fusions accumulate in the tensor cores at any precision ("disable accumulator promotion to mimick cuBLAS",
    xla/backends/gpu/codegen/triton/dot_algorithms.cc).
    """
    with jax.named_scope("product"):
        product = jax.lax.dot_general(
            inputs["a"], inputs["b"], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
    with jax.named_scope("scale"):
        return {"c": (product * (inputs["a_scale"] * inputs["b_scale"])).astype(jnp.bfloat16)}
