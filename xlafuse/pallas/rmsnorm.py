"""RMSNorm as Pallas kernels on Mosaic GPU, forward and backward, along rows.

    y = x r w,  r = 1 / sqrt(mean(x^2) + eps)

    dx = r (w dy - x r^2 mean(w dy x))    dw = sum over rows of dy x r

Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467. Each row is read once (`rows.py`). The
backward pass computes r again from x, which it reads anyway, and a program keeps the weight and the sum of its rows' dw
in registers. XLA adds the programs' sums in a second, small kernel. There are no atomics, so results
repeat bit for bit.

Shapes: x, y, dy, dx [rows, columns], w, dw [columns]; columns as in `rows.check_rows`. dtypes: bfloat16 or float16;
float32 inside. The forward pass saves x and w.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.mosaic import PROGRAM, kernel, operation
from xlafuse.pallas.rows import check_rows, each_row, launch_rows

FORWARD = (
    *(operation(op, "mean_square", op) for op in ("mul", "reduce_sum", "div")),
    *(operation(op, "normalize", op) for op in ("add", "rsqrt", "mul")),
    operation("mul", "weight"),
)
BACKWARD = (
    *(operation(op, "weight", result, backward=True) for op, result in (("mul", "dx"), ("reduce_sum", "partial"))),
    *(operation(op, "normalize", op, backward=True) for op in ("mul", "reduce_sum")),
    operation("mul", "mean_square", backward=True),
)


@kernel
def rmsnorm_kernel(x, w, y, *, rows, columns, eps, **scratch):
    weight = plgpu.load(w, layout=rows.layout)

    def compute(_, x):
        x = x.astype(jnp.float32)
        squares = jnp.sum(x * x)
        return _, [x * lax.rsqrt(squares * (1 / columns) + eps) * weight.astype(jnp.float32)]

    each_row(rows, compute, [x], [y], **scratch)


@kernel
def rmsnorm_backward_kernel(x, dy, w, dx, partial, *, rows, columns, eps, **scratch):
    """Compute dx and, for each program, the sum of its rows' dw."""
    weight = plgpu.load(w, layout=rows.layout)

    def compute(dw, x, dy):
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
        gradient = dy * weight.astype(jnp.float32)
        squares, products = jnp.sum(x * x), jnp.sum(gradient * x)
        r = lax.rsqrt(squares * (1 / columns) + eps)
        return dw + dy * (x * r), [r * gradient - x * (r * r * r * products * (1 / columns))]

    zero = plgpu.layout_cast(jnp.zeros(rows.row, jnp.float32), rows.layout)
    partial[lax.axis_index(PROGRAM)] = each_row(rows, compute, [x, dy], [dx], zero, **scratch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rmsnorm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * weight along the rows of x [rows, columns], in its dtype.

    Raises TypeError and ValueError as `rows.check_rows` does.
    """
    check_rows(x, weight)
    return launch_rows(
        rmsnorm_kernel, x, vectors=[weight], computes=FORWARD, flops=4 * x.size, transcendentals=len(x),
        columns=x.shape[1], eps=eps,
    )[0]


def rmsnorm_forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rmsnorm(x, weight, eps), (x, weight)


def rmsnorm_backward(eps: float, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    # A thread has 190 registers for its 32 elements of x, dy, weight, dw and dx.
    dx, partial = launch_rows(
        rmsnorm_backward_kernel, x, dy, vectors=[weight], threads=512 if x.shape[1] <= 2048 else 256, computes=BACKWARD,
        flops=9 * x.size, transcendentals=len(x), columns=x.shape[1], eps=eps,
    )
    with jax.named_scope("weight"):
        return dx, partial.sum(0).astype(weight.dtype)


rmsnorm.defvjp(rmsnorm_forward, rmsnorm_backward)


def apply(inputs: dict[str, jax.Array], *, eps: float) -> dict[str, jax.Array]:
    """Run the block `rmsnorm`: x [rows, columns], weight [columns] -> y [rows, columns]; eps is added to the mean."""
    return {"y": rmsnorm(inputs["x"], inputs["weight"], eps)}
