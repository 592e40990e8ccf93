"""SwiGLU as Pallas kernels on Mosaic GPU, forward and backward, elementwise.

    y = g s up,  s = 1 / (1 + exp(-g))    dup = dy g s    dgate = dy up s (1 + g (1 - s))

Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202; g is the gate. A program has one tile, which TMA copies
into shared memory and back. The launch allows approximate mathematics, so s takes two instructions of the special
function units, `ex2.approx` and `rcp.approx`.

Shapes: gate, up, y and gradients [rows, columns], taken as rows of 256 or fewer elements, multiples of 8. dtypes:
bfloat16 or float16; float32 inside. The forward pass saves gate and up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.mosaic import PROGRAM, check_dtypes, kernel, operation, rings, stream

ROWS, COLUMNS = 8, 256  # of a tile: 4 KB
FORWARD = (operation("logistic", "silu"), operation("mul", "silu"), operation("mul", "multiply"))
BACKWARD = (
    operation("mul", "multiply", "dup", backward=True), operation("mul", "silu", backward=True),
    operation("logistic", "silu", backward=True),
)


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def one_tile(compute, inputs, outputs, **scratch):
    """Run compute(*values) -> results for the tile of a program."""
    tile = ROWS, inputs[0].shape[1]
    layout = plgpu.Layout.WG_STRIDED(tile, vec_size=math.gcd(math.prod(tile) // 128, 8))

    def tile_of(_):
        return pl.ds(lax.axis_index(PROGRAM) * ROWS, ROWS), slice(None)

    def compute_tile(_, carry, *references):
        values = [plgpu.load(each, layout=layout).astype(jnp.float32) for each in references[: len(inputs)]]
        for target, result in zip(references[len(inputs) :], compute(*values), strict=True):
            target[...] = result.astype(target.dtype)
        return carry

    stream(compute_tile, inputs, outputs, tile_of=tile_of, tiles=1, **scratch)


@kernel
def swiglu_kernel(gate, up, y, **launch):
    one_tile(lambda gate, up: [gate * sigmoid(gate) * up], [gate, up], [y], **launch)


@kernel
def swiglu_backward_kernel(gate, up, dy, dgate, dup, **launch):
    def compute(gate, up, dy):
        s = sigmoid(gate)
        return dy * up * s * (1 + gate * (1 - s)), dy * gate * s

    one_tile(compute, [gate, up, dy], [dgate, dup], **launch)


def launch_elementwise(
    kernel: Callable[..., Any], *inputs: jax.Array, outputs: int, computes: Sequence[Mapping[str, Any]], flops: int
) -> tuple[jax.Array, ...]:
    """Launch a kernel over the tiles of arrays of one shape; return its outputs, of the same shape."""
    x = inputs[0]
    columns = math.gcd(x.size, COLUMNS)
    arrays = len(inputs) + outputs
    found = kernel(
        *(each.reshape(-1, columns) for each in inputs),
        results=(jax.ShapeDtypeStruct((x.size // columns, columns), x.dtype),) * outputs,
        programs=pl.cdiv(x.size // columns, ROWS),
        scratch=rings(1, (ROWS, columns), x.dtype, len(inputs), outputs), barriers=False, computes=computes,
        cost=pl.CostEstimate(flops=flops, bytes_accessed=arrays * x.nbytes, transcendentals=2 * x.size),
    )
    return tuple(each.reshape(x.shape) for each in found)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return silu(gate) * up for arrays of one shape, in their dtype.

    Raises TypeError for other dtypes than bfloat16 and float16, and ValueError for shapes that differ or whose size is
    no multiple of 64.
    """
    check_dtypes(gate, up)
    if gate.shape != up.shape or gate.size % 64:
        raise ValueError(
            f"gate and up must have one shape, of a multiple of 64 elements; got {list(gate.shape)}, {list(up.shape)}"
        )
    return launch_elementwise(swiglu_kernel, gate, up, outputs=1, computes=FORWARD, flops=5 * gate.size)[0]


def swiglu_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return swiglu(gate, up), (gate, up)


def swiglu_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, ...]:
    gate, _ = saved
    return launch_elementwise(
        swiglu_backward_kernel, *saved, dy, outputs=2, computes=BACKWARD, flops=10 * gate.size
    )


swiglu.defvjp(swiglu_forward, swiglu_backward)


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Run the block `swiglu`: gate, up [rows, columns] -> y [rows, columns]."""
    return {"y": swiglu(**inputs)}
