"""The matrix product of two float8_e4m3fn matrices, with a scale each: c = (a @ b^T) * a_scale * b_scale."""

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`a` [m, k], `b` [n, k], `a_scale` [], `b_scale` [] -> `c` [m, n], bfloat16.

    Of this form, in which the scales follow the product, XLA (jaxlib 0.10, for an H200) makes one Triton fusion that
    reads fp8 or, unfused, cuBLASLt's fp8 product (`__cublas$lt$matmul$f8`) with the scales inside and a conversion
    after it; on a GPU its autotuning may take cuBLASLt where it fuses, too. Operands that are scaled in bfloat16 before
    the product are written out by two more kernels. XLA asks cuBLASLt for fast accumulation, in the tensor cores alone,
    unless the product's precision is above the default (xla/stream_executor/cuda/cuda_blas_lt.cc), as "highest" is, at
    which this project compiles; its Triton fusions leave it to the tensor cores at any precision ("disable accumulator
    promotion to mimick cuBLAS", xla/backends/gpu/codegen/triton/dot_algorithms.cc).
    """
    with jax.named_scope("product"):
        product = jax.lax.dot_general(
            inputs["a"], inputs["b"], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
    with jax.named_scope("scale"):
        return {"c": (product * (inputs["a_scale"] * inputs["b_scale"])).astype(jnp.bfloat16)}
