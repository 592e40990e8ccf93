"""SwiGLU as Pallas kernels on Mosaic GPU, forward and backward, elementwise.

    y = g s up,  s = 1 / (1 + exp(-g))    dup = dy g s    dgate = dy up s (1 + g (1 - s))

Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202; g is the gate. Programs are persistent; TMA copies a
program's next tiles into shared memory and stores its last ones (`mosaic.stream`). The launch allows approximate
mathematics, so s takes two instructions of the special function units, `ex2.approx` and `rcp.approx`.

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

from xlafuse.pallas.mosaic import (
    PROGRAM,
    SHARED_MEMORY,
    check_dtypes,
    kernel,
    multiprocessors,
    operation,
    rings,
    stream,
)

ROWS, COLUMNS = 8, 256  # of a tile: 4 KB
STEPS = 3  # tiles of each array in shared memory
FORWARD = (operation("logistic", "silu"), operation("mul", "silu"), operation("mul", "multiply"))
BACKWARD = (
    operation("mul", "multiply", "dup", backward=True), operation("mul", "silu", backward=True),
    operation("logistic", "silu", backward=True),
)


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def each_tile(compute, inputs, outputs, *, tiles, **scratch):
    """Run compute(*values) -> results for each tile of a program."""
    program, programs = lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)
    tile = ROWS, inputs[0].shape[1]
    layout = plgpu.Layout.WG_STRIDED(tile, vec_size=math.gcd(math.prod(tile) // 128, 8))

    def tile_of(number):
        return pl.ds((program + number * programs) * ROWS, ROWS), slice(None)

    def compute_tile(number, carry, *references):
        values = [plgpu.load(each, layout=layout).astype(jnp.float32) for each in references[: len(inputs)]]
        for target, result in zip(references[len(inputs) :], compute(*values), strict=True):
            target[...] = result.astype(target.dtype)
        return carry

    stream(compute_tile, inputs, outputs, tile_of=tile_of, tiles=tiles, **scratch)


@kernel
def swiglu_kernel(gate, up, y, **launch):
    each_tile(lambda gate, up: [gate * sigmoid(gate) * up], [gate, up], [y], **launch)


@kernel
def swiglu_backward_kernel(gate, up, dy, dgate, dup, **launch):
    def compute(gate, up, dy):
        s = sigmoid(gate)
        return dy * up * s * (1 + gate * (1 - s)), dy * gate * s

    each_tile(compute, [gate, up, dy], [dgate, dup], **launch)


def launch_elementwise(
    kernel: Callable[..., Any], *inputs: jax.Array, outputs: int, computes: Sequence[Mapping[str, Any]], flops: int
) -> tuple[jax.Array, ...]:
    """Launch a kernel over the tiles of arrays of one shape; return its outputs, of the same shape."""
    x = inputs[0]
    columns = math.gcd(x.size, COLUMNS)
    arrays = len(inputs) + outputs
    tiles = pl.cdiv(x.size // columns, ROWS)
    # Beside its tiles, a program has barriers and 1 KB that CUDA reserves.
    resident = min(8, SHARED_MEMORY // (arrays * STEPS * ROWS * columns * x.dtype.itemsize + 1536))
    programs = min(tiles, resident * multiprocessors())
    found = kernel(
        *(each.reshape(-1, columns) for each in inputs),
        results=(jax.ShapeDtypeStruct((x.size // columns, columns), x.dtype),) * outputs, programs=programs,
        scratch=rings(STEPS, (ROWS, columns), x.dtype, len(inputs), outputs), barriers=False, computes=computes,
        cost=pl.CostEstimate(flops=flops, bytes_accessed=arrays * x.nbytes, transcendentals=2 * x.size),
        tiles=pl.cdiv(tiles, programs),
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
