"""Matrix product as a Pallas kernel on Mosaic GPU, forward and backward: c = a @ b, and the epilogues of linear layers.

    da = dc b^T    db = a^T dc

A persistent kernel for Hopper. One warpgroup copies tiles of a and b by TMA into a ring in shared memory. Two
warpgroups multiply them with `wgmma`, 64 of a tile's 128 rows each, and store c through shared memory by TMA
(`product_warpgroups.py`).

Tensor cores read operands from shared memory in either order, so the gradients' transposed operands are not copied.
TMA fills tiles with zeros beyond an array's edges and drops what is stored there, so sizes need not be multiples of
tiles, but of the 8 x 64 pieces that a tile consists of.

One kernel has every epilogue: bias (`linear.py`), and bias and GELU in its tanh form (`linear_gelu.py`).

Shapes: a [m, k], b [k, n], c [m, n], bias [n]; m is at most 8 or a multiple of 8; k and n are multiples of 64, or
multiples of 8 below 64.
dtypes: bfloat16, float16, one for all. The product accumulates in float32, and the epilogue computes in it. The forward
pass saves a and b.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.gelu import gelu_value
from xlafuse.pallas.mosaic import (
    PROGRAM,
    SHARED_MEMORY,
    WARPGROUP,
    check_dtypes,
    kernel,
    multiprocessors,
    operation,
    tiles_in_shared_memory,
)
from xlafuse.pallas.product_warpgroups import (
    CONSUMERS,
    INNER,
    OWN_ROWS,
    ROWS,
    STORED,
    STORES,
    own_rows,
    product_scratch,
    run_warpgroups,
    store_tile,
)

PRODUCT, BIAS = operation("dot", "product"), operation("add", "bias")
GELU = tuple(
    operation(op, "gelu", result)
    for op, result in (("mul", "cube"), ("add", "inner"), ("tanh", "tanh"), ("add", "1 + tanh"), ("mul", "y"))
)


@dataclass(frozen=True)
class Config:
    """columns: of a tile of c. steps: of the ring. group: rows of tiles computed together, to share b in L2."""

    columns: int
    steps: int
    group: int = 16


@kernel
def matmul_kernel(
    *references, a_ring, b_ring, c_parts, loaded, consumed, bias_tiles, bias_loaded,
    epilogue, config, a_transposed, b_transposed,
):
    """Compute the outputs that `epilogue` names from a, b and, where there is one, the bias.

    a_ring, b_ring, c_parts, bias_tiles: shared memory. loaded, consumed: a barrier for each step of the rings.
    """
    (a, b, *bias), outputs = references[: -len(epilogue)], references[-len(epilogue) :]
    m, n = outputs[0].shape
    grid = pl.cdiv(m, ROWS), pl.cdiv(n, config.columns)
    steps = pl.cdiv(a.shape[0 if a_transposed else 1], INNER)
    warpgroup = lax.axis_index(WARPGROUP)

    def each_tile(compute):
        @plgpu.nd_loop((grid[0] * grid[1],), collective_axes=PROGRAM, init_carry=jnp.int32(0))
        def total(loop, carry):
            row, column = plgpu.planar_snake(loop.index[0], grid, 0, config.group)
            return compute((row * ROWS, column * config.columns), carry)

        return total

    def copy_step(tile, step, slot):
        rows, columns, inner = pl.ds(tile[0], ROWS), pl.ds(tile[1], config.columns), pl.ds(step * INNER, INNER)
        a_tile = a.at[inner, rows] if a_transposed else a.at[rows, inner]
        b_tile = b.at[columns, inner] if b_transposed else b.at[inner, columns]
        plgpu.copy_gmem_to_smem(a_tile, a_ring.at[slot], loaded.at[slot])
        plgpu.copy_gmem_to_smem(b_tile, b_ring.at[slot], loaded.at[slot])

    def operands_of(slot):
        a_tile = a_ring.at[slot, :, own_rows()].transpose((1, 0)) if a_transposed else a_ring.at[slot, own_rows()]
        b_tile = b_ring.at[slot].transpose((1, 0)) if b_transposed else b_ring.at[slot]
        return [(a_tile, b_tile)]

    def begin(tile):
        if bias:
            source = bias[0].at[pl.ds(tile[1], config.columns)]
            plgpu.copy_gmem_to_smem(source, bias_tiles.at[warpgroup], bias_loaded.at[warpgroup])

    def finish(tile, value):
        if bias:
            plgpu.barrier_wait(bias_loaded.at[warpgroup])
            value += lax.broadcast_in_dim(bias_tiles[warpgroup].astype(jnp.float32), value.shape, (1,))

        def value_of(number, part):
            return gelu_value(value[:, part]) if epilogue[number] == "gelu" else value[:, part]

        store_tile(outputs, value_of, config.columns, *tile, c_parts)

    run_warpgroups(
        each_tile, lambda tile: steps, copy_step, operands_of, finish, begin=begin,
        columns=config.columns, ring=config.steps, loaded=loaded, consumed=consumed,
    )


def check_product(a: jax.Array, b: jax.Array, bias: jax.Array | None = None) -> None:
    """Raise ValueError or TypeError unless a [m, k], b [k, n] and bias [n] fit, of sizes that the kernel takes."""
    check_dtypes(a, b, *(() if bias is None else (bias,)))
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or (bias is not None and bias.shape != b.shape[1:]):
        given = ", ".join(str(list(x.shape)) for x in (a, b, bias) if x is not None)
        raise ValueError(f"a [m, k], b [k, n] and bias [n] must fit, got {given}")
    (m, k), n = a.shape, b.shape[1]
    if (m > 8 and m % 8) or any(size % 8 or (size > 64 and size % 64) for size in (k, n)):
        raise ValueError(
            "m must be at most 8 or a multiple of 8, k and n multiples of 64, or of 8 below 64; "
            f"got m {m}, k {k}, n {n}: pad the arrays with zeros"
        )


def choose_config(m: int, n: int, itemsize: int, accumulators: int = 1) -> Config:
    """Return tiles of 256 columns, or narrower ones while twice as many tiles have a multiprocessor each.

    The ring takes the shared memory that the parts of c leave: 4 steps of 48 KiB, 6 of 32 or 8 of 24.

    accumulators: products of the same a that a tile has, whose columns are as many together.
    """
    columns = 256 // accumulators
    while columns > STORED and 2 * pl.cdiv(m, ROWS) * pl.cdiv(n, columns) <= multiprocessors():
        columns //= 2
    parts, bias_and_barriers = CONSUMERS * STORES * OWN_ROWS * STORED * itemsize, 3 * 1024
    steps = (SHARED_MEMORY - parts - bias_and_barriers) // ((ROWS + accumulators * columns) * INNER * itemsize)
    return Config(columns, min(8, steps))


def launch_matmul(
    a: jax.Array, b: jax.Array, bias: jax.Array | None = None, *, epilogue: tuple[str, ...] = ("sum",),
    a_transposed: bool = False, b_transposed: bool = False, config: Config | None = None,
    computes: Sequence[Mapping[str, Any]] = (PRODUCT,),
) -> tuple[jax.Array, ...]:
    """Return the outputs that `epilogue` names: "sum" of the product and the bias, and "gelu" of that sum.

    a is [m, k], or [k, m] if a_transposed; b is [k, n], or [n, k] if b_transposed. computes: the declared operations.
    """
    m, k = reversed(a.shape) if a_transposed else a.shape
    n = b.shape[0 if b_transposed else 1]
    config = config or choose_config(m, n, a.dtype.itemsize)

    def ring(outer: int, inner_first: bool) -> Any:
        shape = (INNER, outer) if inner_first else (outer, INNER)
        return tiles_in_shared_memory((config.steps, *shape), a.dtype)

    scratch = {
        "a_ring": ring(ROWS, inner_first=a_transposed),
        "b_ring": ring(config.columns, inner_first=not b_transposed),
        **product_scratch(config.steps, a.dtype, copies=2),
        "bias_tiles": None if bias is None else plgpu.SMEM((CONSUMERS, config.columns), a.dtype),
        "bias_loaded": None if bias is None else plgpu.Barrier(num_barriers=CONSUMERS),
    }
    elements = m * k + k * n + (0 if bias is None else n) + len(epilogue) * m * n
    cost = pl.CostEstimate(
        flops=2 * m * n * k, bytes_accessed=elements * a.dtype.itemsize,
        transcendentals=m * n if "gelu" in epilogue else 0,
    )
    return matmul_kernel(
        a, b, *(() if bias is None else (bias,)), results=(jax.ShapeDtypeStruct((m, n), a.dtype),) * len(epilogue),
        programs=min(multiprocessors(), pl.cdiv(m, ROWS) * pl.cdiv(n, config.columns)), warpgroups=CONSUMERS + 1,
        scratch=scratch, computes=computes, cost=cost,
        epilogue=epilogue, config=config, a_transposed=a_transposed, b_transposed=b_transposed,
    )


def input_gradient(dc: jax.Array, b: jax.Array) -> jax.Array:
    """Return da = dc b^T for dc [m, n] and b [k, n]."""
    return launch_matmul(dc, b, b_transposed=True, computes=[operation("dot", "product", "da", backward=True)])[0]


def weight_gradient(a: jax.Array, dc: jax.Array) -> jax.Array:
    """Return db = a^T dc for a [m, k] and dc [m, n]."""
    return launch_matmul(a, dc, a_transposed=True, computes=[operation("dot", "product", "db", backward=True)])[0]


@jax.custom_vjp
def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a @ b: a [m, k], b [k, n] -> c [m, n], in their dtype.

    Raises TypeError for other dtypes than bfloat16 and float16, and ValueError for other sizes than the header's.
    """
    check_product(a, b)
    return launch_matmul(a, b)[0]


def matmul_forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(a, b), (a, b)


def matmul_backward(saved: tuple[jax.Array, jax.Array], dc: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = saved
    return input_gradient(dc, b), weight_gradient(a, dc)


matmul.defvjp(matmul_forward, matmul_backward)


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Run the block `matmul`: a [m, k], b [k, n] -> c [m, n]."""
    return {"c": matmul(**inputs)}
