"""Kernels over the rows of a matrix, which memory bounds: their tiles, and sums and maxima of a row.

A program has one tile of rows, or two of long rows, and the GPU starts the next program where one ends. Only a kernel
that sums over rows is persistent: a program takes every programs-th tile, and TMA copies its next tiles meanwhile
(`mosaic.stream`). Persistent programs all have equally many tiles, so the last ones leave multiprocessors idle.

Each thread of a warpgroup has pieces of a row, of 16 bytes where the row is long enough. Several warpgroups share a
long row: each has its own part, tiles and barriers, and they only meet to add up a row.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.mosaic import PROGRAM, SHARED_MEMORY, WARPGROUP, check_dtypes, multiprocessors, stream

WIDEST = 4096  # columns of a warpgroup: 32 elements a thread
TILE = 4096  # elements of a tile of short rows
THREADS = 128  # of a warpgroup
MEETINGS, SHARES = 2, 2  # of warpgroups in a row, and values that each brings


@dataclass(frozen=True)
class Rows:
    """The tiles of a launch over rows of a matrix.

    part: the columns of a warpgroup, in pieces that TMA copies: at most 256 elements.
    tile_rows: rows of a tile. tiles: of each program, of which the last ones may lie below the matrix.
    in_steps, out_steps: tiles of each input and output in shared memory.
    """

    part: tuple[int, int]
    warpgroups: int
    tile_rows: int
    programs: int
    tiles: int
    in_steps: int
    out_steps: int

    def pieces(self, x: jax.Array) -> jax.Array:
        """Return x [..., columns] as [..., pieces, elements of a piece]."""
        return x.reshape(*x.shape[:-1], -1, self.part[1])

    @property
    def layout(self) -> Any:
        """The threads' pieces of a part: 16 bytes, or as much as divides the part evenly."""
        return plgpu.Layout.WG_STRIDED(self.part, vec_size=math.gcd(math.prod(self.part) // THREADS, 8))

    def scratch(self, dtype: Any, inputs: int, outputs: int) -> dict[str, Any]:
        """Return the scratch of `each_row`."""
        tile = (self.tile_rows, *self.part)
        alone = self.warpgroups == 1
        return {
            "in_rings": [plgpu.SMEM((self.warpgroups, self.in_steps, *tile), dtype)] * inputs,
            "out_rings": [plgpu.SMEM((self.warpgroups, self.out_steps, *tile), dtype)] * outputs,
            "loaded": plgpu.Barrier(num_arrivals=inputs, num_barriers=(self.warpgroups, self.in_steps)),
            "shares": None if alone else plgpu.SMEM((2, MEETINGS, self.warpgroups, SHARES), jnp.float32),
            "met": None if alone else plgpu.Barrier(num_arrivals=self.warpgroups),
        }


@dataclass
class Row:
    """Sums and maxima of a row, in a kernel; warpgroups that share the row meet at each call.

    tile: the number of the program's tile. met, shares: as in `Rows.scratch`.
    """

    tile: Any
    met: Any
    shares: Any
    meetings: int = 0

    def sums(self, *values: jax.Array) -> list[jax.Array]:
        """Return the sum of each array over the row."""
        return self._joined([jnp.sum(value) for value in values], jnp.add)

    def maximum(self, value: jax.Array) -> jax.Array:
        return self._joined([jnp.max(value)], jnp.maximum)[0]

    def _joined(self, own: list[jax.Array], combine: Callable[..., jax.Array]) -> list[jax.Array]:
        if self.shares is None:
            return own
        # The next tile has other places, so a warpgroup may still read these when another one has gone on.
        shares = self.shares.at[lax.rem(self.tile, 2), self.meetings]
        self.meetings += 1
        for number, value in enumerate(own):
            shares[lax.axis_index(WARPGROUP), number] = value
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)
        warpgroups = range(self.shares.shape[2])
        return [functools.reduce(combine, [shares[i, number] for i in warpgroups]) for number in range(len(own))]


def own_pieces(rows: Rows) -> Any:
    """Return the index of a warpgroup's part in the pieces of a row, in a kernel."""
    return pl.ds(lax.axis_index(WARPGROUP) * rows.part[0], rows.part[0])


def each_row(
    rows: Rows, compute: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], carry: Any = None, *,
    in_rings: Any, out_rings: Any, loaded: Any, shares: Any, met: Any,
) -> Any:
    """Run compute(row, carry, *values) -> (carry, results) for each row of a program, and return the last carry.

    row: a `Row`. values, results: of each input and output, a warpgroup's part of the row.
    """
    program = lax.axis_index(PROGRAM)

    def tile_of(tile: Any) -> Any:
        return pl.ds((program + tile * rows.programs) * rows.tile_rows, rows.tile_rows), own_pieces(rows)

    def read(tile):
        return [plgpu.load(tile.at[row], layout=rows.layout) for row in range(rows.tile_rows)]

    def compute_tile(tile: Any, carry: Any, *tiles: Any) -> Any:
        for row in range(rows.tile_rows):
            values = [each[row] for each in tiles[: len(inputs)]]
            carry, results = compute(Row(tile, met, shares), carry, *values)
            for target, result in zip(tiles[len(inputs) :], results, strict=True):
                target[row] = result.astype(target.dtype)
        return carry

    return stream(
        compute_tile, inputs, outputs, tile_of=tile_of, tiles=rows.tiles, carry=carry, read=read,
        in_rings=in_rings, out_rings=out_rings, loaded=loaded, owner=(lax.axis_index(WARPGROUP),),
    )


def choose_rows(rows: int, columns: int, itemsize: int, inputs: int, outputs: int, threads: int = 0) -> Rows:
    """Return tiles of 8 KB, or whole rows.

    threads: for persistent programs, as many as they have on each multiprocessor. They share its shared memory: at most
        three tiles of each input, and two of each output if two of each input fit.
    """
    warpgroups = 1
    while columns > WIDEST * warpgroups:
        warpgroups *= 2
    tile_rows = 1
    while 2 * tile_rows * columns <= TILE:
        tile_rows *= 2
    tiles = pl.cdiv(rows, tile_rows)
    resident = max(1, threads // (THREADS * warpgroups))
    programs = min(tiles, resident * multiprocessors()) if threads else pl.cdiv(tiles, min(warpgroups, 2))
    tiles_each = pl.cdiv(tiles, programs)
    tile = tile_rows * columns * itemsize
    memory = SHARED_MEMORY // resident - 4096  # the rest is for barriers, shares, and Mosaic's sums
    out_steps = min(tiles_each, 2 if 2 * (inputs + outputs) * tile <= memory else 1)
    in_steps = max(1, min(tiles_each, 3, (memory - out_steps * outputs * tile) // (inputs * tile)))
    own = columns // warpgroups
    piece = math.gcd(own, 256)
    return Rows((own // piece, piece), warpgroups, tile_rows, programs, tiles_each, in_steps, out_steps)


def launch_rows(
    kernel: Callable[..., Any], *inputs: jax.Array, vectors: Sequence[jax.Array] = (), threads: int = 0,
    computes: Sequence[Mapping[str, Any]], flops: int, transcendentals: int, **constants: Any,
) -> tuple[jax.Array, ...]:
    """Launch a kernel over the rows of inputs [rows, columns]; return its output of the same shape.

    The kernel gets references of the inputs, the vectors [columns] and the results, then `rows`, the scratch of
    `each_row` and the constants.

    threads: of a kernel that sums over rows. Its programs are persistent, and have so many threads on a multiprocessor,
        as many as its registers let run at once. There is a second result, float32 [programs, columns], whose sum over
        the first axis is one over all rows.
    """
    x, (count, columns) = inputs[0], inputs[0].shape
    rows = choose_rows(count, columns, x.dtype.itemsize, len(inputs), 1, threads)
    output = jax.ShapeDtypeStruct(rows.pieces(x).shape, x.dtype)
    partial = jax.ShapeDtypeStruct((rows.programs, *output.shape[1:]), jnp.float32)
    results = (output, partial) if threads else (output,)
    moved = sum(each.size * each.dtype.itemsize for each in (*inputs, *vectors, *results))
    cost = pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=transcendentals)
    found = kernel(
        *map(rows.pieces, (*inputs, *vectors)), results=results, programs=rows.programs, warpgroups=rows.warpgroups,
        scratch=rows.scratch(x.dtype, len(inputs), 1), barriers=False, computes=computes, cost=cost, rows=rows,
        **constants,
    )
    return tuple(each.reshape(-1, columns) for each in found)


def check_rows(*arrays: jax.Array) -> None:
    """Raise ValueError or TypeError unless the arrays are matrices of one 16-bit dtype, with columns for the kernels.

    Columns are multiples of 128 up to 4096, or multiples of 1024 up to 32,768.
    """
    check_dtypes(*arrays)
    for array in arrays:
        columns = array.shape[-1]
        if columns % (128 if columns <= WIDEST else 1024) or columns > 8 * WIDEST:
            raise ValueError(
                "columns must be multiples of 128 up to 4096, or multiples of 1024 up to 32,768; "
                f"got an array of {list(array.shape)}"
            )
