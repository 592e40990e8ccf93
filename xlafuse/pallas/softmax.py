"""Softmax over the columns as Pallas kernels on Mosaic GPU, forward and backward, along rows.

    y_j = exp(x_j - max x) / sum_k exp(x_k - max x)    dx_j = y_j (dy_j - sum_k y_k dy_k)

Each row is read once and stays in registers (`rows.py`). A row of nothing but -inf gives zeros and zero gradients.
Exponentials are `ex2.approx.f32`, exact to two units in the last place of float32.

Shapes: x, y, dy, dx [rows, columns]; columns as in `rows.check_rows`. dtypes: bfloat16 or float16; float32 inside. The
forward pass saves y.
"""

import jax
import jax.numpy as jnp

from xlafuse.pallas.mosaic import kernel, operation
from xlafuse.pallas.rows import check_rows, each_row, launch_rows

LOG2_E = 1.4426950408889634
FORWARD = (
    operation("reduce_max", "max"), operation("sub", "exp"), operation("exp", "exp"), operation("reduce_sum", "sum"),
    operation("div", "divide"),
)
BACKWARD = tuple(operation(op, "divide", backward=True) for op in ("mul", "reduce_sum", "sub"))


@kernel
def softmax_kernel(x, y, *, rows, **scratch):
    def compute(_, x):
        exponent = x.astype(jnp.float32) * LOG2_E
        largest = jnp.max(exponent)
        numerator = jnp.exp2(exponent - jnp.where(largest == -jnp.inf, 0.0, largest))
        total = jnp.sum(numerator)
        return _, [numerator * (1 / jnp.where(total == 0, 1.0, total))]

    each_row(rows, compute, [x], [y], **scratch)


@kernel
def softmax_backward_kernel(y, dy, dx, *, rows, **scratch):
    def compute(_, y, dy):
        y, dy = y.astype(jnp.float32), dy.astype(jnp.float32)
        total = jnp.sum(y * dy)
        return _, [y * (dy - total)]

    each_row(rows, compute, [y, dy], [dx], **scratch)


def forward(x: jax.Array) -> jax.Array:
    return launch_rows(softmax_kernel, x, computes=FORWARD, flops=5 * x.size, transcendentals=x.size)[0]


@jax.custom_vjp
def softmax(x: jax.Array) -> jax.Array:
    """Return softmax over the columns of x [rows, columns], in its dtype.

    A row of nothing but -inf gives zeros. Raises TypeError and ValueError as `rows.check_rows` does.
    """
    check_rows(x)
    return forward(x)


def softmax_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = softmax(x)
    return y, y


def softmax_backward(y: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    return launch_rows(softmax_backward_kernel, y, dy, computes=BACKWARD, flops=4 * y.size, transcendentals=0)


softmax.defvjp(softmax_forward, softmax_backward)


def apply(inputs: dict[str, jax.Array], masked: int = 0) -> dict[str, jax.Array]:
    """Run the block `softmax`: x [rows, columns] -> y [rows, columns]. `masked` is not used."""
    return {"y": softmax(inputs["x"])}
