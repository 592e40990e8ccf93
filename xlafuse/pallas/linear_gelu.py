"""A linear layer followed by GELU as Pallas kernels on Mosaic GPU, forward and backward.

    y = gelu(pre)    pre = x @ weight + bias
    dpre = dy gelu'(pre)    dbias = sum over rows of dpre    dx = dpre weight^T    dweight = x^T dpre

Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415, in its tanh form (`gelu.py`). The forward pass is
one kernel with bias and GELU in its epilogue (`matmul.py`). The backward pass is one pass over dy and pre, which writes
dpre and each program's share of dbias; the sum of the shares, which XLA compiles; and two products.

With gradients, the forward pass saves x, weight and pre.

Shapes: x [m, k], weight [k, n], bias [n]; pre, y [m, n], of sizes that `matmul.py` takes. dtypes: bfloat16, float16,
one for all; float32 inside. The forward pass takes GELU of the float32 sum; the gradient is taken at the stored pre.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.column_sums import COLUMNS, DBIAS, ROWS, add_shares, choose_shares
from xlafuse.pallas.gelu import gelu_slope
from xlafuse.pallas.matmul import BIAS, GELU, PRODUCT, check_product, input_gradient, launch_matmul, weight_gradient
from xlafuse.pallas.mosaic import kernel, operation, rings, stream

STEPS = 3  # tiles of dy, pre and dpre in shared memory: 72 KiB
RESIDENT = 3  # programs on a multiprocessor

FORWARD = (PRODUCT, BIAS, *GELU)
DPRE = (operation("tanh", "gelu", backward=True), operation("mul", "gelu", "dx", backward=True))


@kernel
def dpre_kernel(dy, pre, dpre, partial, *, buffer, shares, **rings):
    """Compute dpre and, for each program, the sum of its rows."""

    def compute_tile(_, total, dy_tile, pre_tile, dpre_tile):
        for row in range(ROWS):
            gradient = dy_tile[row].astype(jnp.float32) * gelu_slope(pre_tile[row].astype(jnp.float32))
            dpre_tile[row] = gradient.astype(dpre.dtype)
            total += gradient
        return total

    zero = jnp.zeros(COLUMNS, jnp.float32)
    total = stream(compute_tile, [dy, pre], [dpre], tile_of=shares.tile, tiles=shares.steps, carry=zero, **rings)
    shares.store(total, buffer, partial)


def pre_and_bias_gradients(dy: jax.Array, pre: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return dpre [m, n] and dbias [n]."""
    rows, columns = pre.shape
    shares = choose_shares(rows, columns, RESIDENT)
    cost = pl.CostEstimate(
        flops=18 * rows * columns, transcendentals=rows * columns,
        bytes_accessed=3 * rows * columns * pre.dtype.itemsize + 4 * shares.partial.size,
    )
    dpre, partial = dpre_kernel(
        dy, pre,
        results=(jax.ShapeDtypeStruct(pre.shape, pre.dtype), shares.partial),
        programs=shares.count * shares.blocks,
        scratch=rings(STEPS, (ROWS, COLUMNS), pre.dtype, 2, 1) | {"buffer": plgpu.SMEM((COLUMNS,), jnp.float32)},
        computes=[*DPRE, DBIAS], cost=cost, shares=shares,
    )
    return dpre, add_shares(partial, columns, pre.dtype)


@jax.custom_vjp
def linear_gelu(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Return gelu(x @ weight + bias): x [m, k], weight [k, n], bias [n] -> y [m, n], in their dtype.

    Raises TypeError and ValueError as `matmul` does.
    """
    check_product(x, weight, bias)
    return launch_matmul(x, weight, bias, epilogue=("gelu",), computes=FORWARD)[0]


def linear_gelu_forward(x: jax.Array, weight: jax.Array, bias: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    check_product(x, weight, bias)
    pre, y = launch_matmul(x, weight, bias, epilogue=("sum", "gelu"), computes=FORWARD)
    return y, (x, weight, pre)


def linear_gelu_backward(saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, weight, pre = saved
    dpre, dbias = pre_and_bias_gradients(dy, pre)
    return input_gradient(dpre, weight), weight_gradient(x, dpre), dbias


linear_gelu.defvjp(linear_gelu_forward, linear_gelu_backward)


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Run the block `linear_gelu`: x [m, k], weight [k, n], bias [n] -> y [m, n]."""
    return {"y": linear_gelu(**inputs)}
