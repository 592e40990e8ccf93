"""A linear layer as Pallas kernels on Mosaic GPU, forward and backward: y = x @ weight + bias.

    dx = dy weight^T    dweight = x^T dy    dbias = sum over rows of dy

The forward pass is one kernel with the bias in its epilogue (`matmul.py`). The backward pass is two products and a pass
over dy, which sums its columns (`column_sums.py`).

Shapes: x [m, k], weight [k, n], bias [n], y [m, n], of sizes that `matmul.py` takes. dtypes: bfloat16, float16, one for
all. Sums and the bias are float32. The forward pass saves x and weight.
"""

import jax

from xlafuse.pallas.column_sums import column_sums
from xlafuse.pallas.matmul import BIAS, PRODUCT, check_product, input_gradient, launch_matmul, weight_gradient


@jax.custom_vjp
def linear(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Return x @ weight + bias: x [m, k], weight [k, n], bias [n] -> y [m, n], in their dtype.

    Raises TypeError and ValueError as `matmul` does.
    """
    check_product(x, weight, bias)
    return launch_matmul(x, weight, bias, computes=[PRODUCT, BIAS])[0]


def linear_forward(x: jax.Array, weight: jax.Array, bias: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return linear(x, weight, bias), (x, weight)


def linear_backward(saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, weight = saved
    return input_gradient(dy, weight), weight_gradient(x, dy), column_sums(dy)


linear.defvjp(linear_forward, linear_backward)


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Run the block `linear`: x [m, k], weight [k, n], bias [n] -> y [m, n]."""
    return {"y": linear(**inputs)}
