"""Kernels over the rows of a matrix, which memory bounds: their tiles, and sums and maxima of a row.

A program has one tile of rows, and the GPU starts the next program where one ends. Only a kernel that sums over rows is
persistent: a program takes every programs-th tile, and TMA copies its next tiles meanwhile (`mosaic.stream`).
Persistent programs all have equally many tiles, so the last ones leave multiprocessors idle.

A program is one warpgroup, and each thread has pieces of a row, of 16 bytes where the row is long enough. Several
warpgroups could share longer rows, but Mosaic (jax 0.11.2) adds up an array through shared memory that all warpgroups
of a program have in common, so their sums would mix.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.mosaic import PROGRAM, SHARED_MEMORY, check_dtypes, multiprocessors, rings, stream

TILE = 4096  # elements of a tile, and of the longest row: 32 a thread
THREADS = 128  # of a warpgroup


@dataclass(frozen=True)
class Rows:
    """The tiles of a launch over rows of a matrix.

    row: its shape, in pieces that TMA copies: at most 256 elements.
    tile_rows: rows of a tile. tiles: of each program, of which the last ones may lie below the matrix.
    in_steps, out_steps: tiles of each input and output in shared memory.
    """

    row: tuple[int, int]
    tile_rows: int
    programs: int
    tiles: int
    in_steps: int
    out_steps: int

    def pieces(self, x: jax.Array) -> jax.Array:
        """Return x [..., columns] as [..., pieces, elements of a piece]."""
        return x.reshape(*x.shape[:-1], *self.row)

    @property
    def layout(self) -> Any:
        """The threads' pieces of a row: 16 bytes, or as much as divides the row evenly."""
        return plgpu.Layout.WG_STRIDED(self.row, vec_size=math.gcd(math.prod(self.row) // THREADS, 8))


def each_row(
    rows: Rows, compute: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], carry: Any = None,
    **scratch: Any,
) -> Any:
    """Run compute(carry, *values) -> (carry, results) for each row of a program, and return the last carry."""
    program = lax.axis_index(PROGRAM)

    def tile_of(tile: Any) -> Any:
        return pl.ds((program + tile * rows.programs) * rows.tile_rows, rows.tile_rows)

    def compute_tile(_: Any, carry: Any, *tiles: Any) -> Any:
        def read(tile):
            return [plgpu.load(tile.at[row], layout=rows.layout) for row in range(rows.tile_rows)]

        values = [read(tile) for tile in tiles[: len(inputs)]]
        for row in range(rows.tile_rows):
            carry, results = compute(carry, *(each[row] for each in values))
            for target, result in zip(tiles[len(inputs) :], results, strict=True):
                target[row] = result.astype(target.dtype)
        return carry

    return stream(compute_tile, inputs, outputs, tile_of=tile_of, tiles=rows.tiles, carry=carry, **scratch)


def choose_rows(rows: int, columns: int, itemsize: int, inputs: int, threads: int = 0) -> Rows:
    """Return tiles of whole rows, of at most 8 KB, for kernels with one output.

    threads: for persistent programs, as many as they have on each multiprocessor. They share its shared memory: at most
        three tiles of each input, and two of the output.
    """
    tile_rows = 1
    while 2 * tile_rows * columns <= TILE:
        tile_rows *= 2
    tiles = pl.cdiv(rows, tile_rows)
    resident = max(1, threads // THREADS)
    programs = min(tiles, resident * multiprocessors()) if threads else tiles
    tiles_each = pl.cdiv(tiles, programs)
    memory = SHARED_MEMORY // resident - 4096  # the rest is for barriers and Mosaic's sums
    fitting = memory // (tile_rows * columns * itemsize)  # tiles
    out_steps = min(tiles_each, 2)
    in_steps = min(tiles_each, 3, (fitting - out_steps) // inputs)
    piece = math.gcd(columns, 256)
    return Rows((columns // piece, piece), tile_rows, programs, tiles_each, in_steps, out_steps)


def launch_rows(
    kernel: Callable[..., Any], *inputs: jax.Array, vectors: Sequence[jax.Array] = (), threads: int = 0,
    computes: Sequence[Mapping[str, Any]], flops: int, transcendentals: int, **constants: Any,
) -> tuple[jax.Array, ...]:
    """Launch a kernel over the rows of inputs [rows, columns]; return its output of the same shape.

    The kernel gets references of the inputs, the vectors [columns] and the results, then `rows`, the scratch of
    `mosaic.stream` and the constants.

    threads: of a kernel that sums over rows. Its programs are persistent, and have so many threads on a multiprocessor,
        as many as its registers let run at once. There is a second result, float32 [programs, columns], whose sum over
        the first axis is one over all rows.
    """
    x, (count, columns) = inputs[0], inputs[0].shape
    rows = choose_rows(count, columns, x.dtype.itemsize, len(inputs), threads)
    output = jax.ShapeDtypeStruct(rows.pieces(x).shape, x.dtype)
    partial = jax.ShapeDtypeStruct((rows.programs, *output.shape[1:]), jnp.float32)
    results = (output, partial) if threads else (output,)
    moved = sum(each.size * each.dtype.itemsize for each in (*inputs, *vectors, *results))
    cost = pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=transcendentals)
    found = kernel(
        *map(rows.pieces, (*inputs, *vectors)), results=results, programs=rows.programs,
        scratch=rings(rows.in_steps, (rows.tile_rows, *rows.row), x.dtype, len(inputs), 1, rows.out_steps),
        barriers=False, computes=computes, cost=cost, rows=rows, **constants,
    )
    return tuple(each.reshape(-1, columns) for each in found)


def check_rows(*arrays: jax.Array) -> None:
    """Raise ValueError or TypeError unless the arrays fit the kernels: a matrix, and vectors with an element a column.

    They have one 16-bit dtype. Columns are multiples of 128 up to 4096.
    """
    check_dtypes(*arrays)
    matrix, *vectors = arrays
    if matrix.ndim != 2 or any(vector.shape != matrix.shape[1:] for vector in vectors):
        found = ", ".join(str(list(array.shape)) for array in arrays)
        raise ValueError(f"expected a matrix, and vectors of its columns, got arrays of {found}")
    for array in arrays:
        if array.shape[-1] % THREADS or array.shape[-1] > TILE:
            raise ValueError(f"columns must be multiples of 128 up to 4096, got an array of {list(array.shape)}")
