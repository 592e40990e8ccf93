"""Products by the example kernels that jax ships (jax.experimental.pallas.ops.gpu, Pallas on Mosaic GPU, jax 0.11.2).

They have no gradients. Their tiles are those that were fast on an H200 in bfloat16: 128 x 128 x 64, four steps. The
arguments are those of each block's `apply` in `xlafuse/blocks/`.
"""

import jax
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu, ragged_dot_mgpu

from xlafuse.blocks import moe as plain_moe

ROWS, COLUMNS, INNER, STEPS = 128, 128, 64, 4


def matmul(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return hopper_matmul_mgpu.matmul. Sizes are multiples of the tiles, with two tiles of columns a program."""
    config = hopper_matmul_mgpu.TuningConfig(ROWS, COLUMNS, INNER, STEPS)
    with jax.named_scope("product"):
        return {"c": hopper_matmul_mgpu.matmul(inputs["a"], inputs["b"], None, config)}


def moe(inputs: dict[str, jax.Array], *, top_k: int) -> dict[str, jax.Array]:
    """Return the mixture with its grouped products by ragged_dot_mgpu.ragged_dot."""

    def ragged_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return ragged_dot_mgpu.ragged_dot(
            rows, weights, group_sizes=sizes, block_m=ROWS, block_n=COLUMNS, block_k=INNER,
            max_concurrent_steps=STEPS, grid_block_n=1,
        )

    return plain_moe.apply(inputs, top_k=top_k, ragged_dot=ragged_dot)
