"""Launches of Pallas kernels on Mosaic GPU (Hopper), and the layouts and dtypes that they share.

A program of a launch is a CUDA block of one or more warpgroups of 128 threads. Mosaic runs a kernel's body once for
each warpgroup, and an array of the body is distributed over its threads.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.xla_metadata import set_xla_metadata

from xlafuse.hlo import custom_calls

PROGRAM, WARPGROUP = "program", "warpgroup"  # the axes of a launch
SHARED_MEMORY = 227 * 1024  # bytes that one program may have
DTYPES = (jnp.bfloat16, jnp.float16)


def operation(op: str, stage: str, result: str = "", *, backward: bool = False) -> dict[str, Any]:
    """Return an operation that a kernel computes, in a stage of the plain block (`xlafuse.hlo.custom_calls`).

    result: distinguishes operations of the same name in a stage. backward: it belongs to the gradient.
    """
    site = f"{'gradient of ' if backward else ''}{stage}:{op}:{result}"
    return {"op": op, "stage": stage, "site": site, "backward": backward}


def kernel(body: Callable[..., None]) -> Callable[..., Any]:
    """Return a launcher of a kernel's body, which gets references of operands and results, the scratch and constants.

    The launcher takes the operands and:

    results: the results' shapes and dtypes, a pytree.
    programs, warpgroups: the size of the launch; a program has one warpgroup if not said otherwise.
    scratch: shared memory and barriers, by parameter name; a program's warpgroups share them.
    computes, cost: the operations, FLOPs and bytes of the kernel, which is opaque to XLA. Mosaic GPU leaves the cost in
        the jaxpr (jax 0.11.2), so a frontend attribute of the call has the operations and FLOPs, too.
    barriers: Mosaic adds barriers of a warpgroup around its accesses to shared memory. Without them the kernel is
        faster, but only right if no thread both reads and writes an address.
    constants: values of the body's other parameters.
    """

    @functools.wraps(body)
    def launch(
        *operands: jax.Array, results: Any, programs: int, scratch: Mapping[str, Any],
        computes: Sequence[Mapping[str, Any]], cost: pl.CostEstimate, warpgroups: int = 1, barriers: bool = True,
        **constants: Any,
    ) -> Any:
        def with_scratch(*references: Any) -> None:
            run = functools.partial(body, *references, **constants)
            pl.run_scoped(run, **scratch, collective_axes=WARPGROUP)

        mesh = plgpu.Mesh(grid=(programs,), grid_names=(PROGRAM,), num_threads=warpgroups, thread_name=WARPGROUP)
        declared = json.dumps({"flops": cost.flops, "operations": list(computes)})
        with set_xla_metadata(**{custom_calls.ATTRIBUTE: declared}):
            parameters = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not barriers)
            return pl.kernel(
                with_scratch, results, mesh=mesh, compiler_params=parameters, cost_estimate=cost, name=body.__name__
            )(*operands)

    return launch


def multiprocessors() -> int:
    """Return the GPU's number of multiprocessors; 2 in the interpreter, so that a program has several tiles."""
    device: Any = jax.extend.backend.get_default_device()
    return 2 if device.platform == "cpu" else int(device.core_count)


def tiles_in_shared_memory(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return shared memory for tiles [..., rows, columns], laid out as tensor cores read and TMA writes them.

    Pieces of 8 rows and at most 128 bytes are contiguous, and swizzled against bank conflicts.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def rings(
    steps: int, shape: tuple[int, ...], dtype: Any, inputs: int, outputs: int = 0, out_steps: int = 1
) -> dict[str, Any]:
    """Return the scratch of `stream`: `steps` tiles for each input, `out_steps` for each output, and barriers."""
    return {
        "in_rings": [plgpu.SMEM((steps, *shape), dtype)] * inputs,
        "out_rings": [plgpu.SMEM((out_steps, *shape), dtype)] * outputs,
        "loaded": plgpu.Barrier(num_arrivals=inputs, num_barriers=steps),
    }


def stream(
    compute: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], *, tile_of: Callable[[Any], Any],
    tiles: int, carry: Any = None, in_rings: Sequence[Any], out_rings: Sequence[Any], loaded: Any,
) -> Any:
    """Run compute(tile, carry, *input tiles, *output tiles) for each tile of a warpgroup, and return the last carry.

    TMA copies the next tiles into shared memory meanwhile, and stores the last ones. tile_of(i): the index of the i-th
    tile in each array. Beyond an array's edges, tiles of inputs are zero and tiles of outputs are not stored.
    """
    in_steps, out_steps = (rings[0].shape[0] if rings else 1 for rings in (in_rings, out_rings))

    def load(tile: Any) -> None:
        slot = lax.rem(tile, in_steps)
        for array, ring in zip(inputs, in_rings, strict=True):
            plgpu.copy_gmem_to_smem(array.at[tile_of(tile)], ring.at[slot], loaded.at[slot])

    def step(tile: Any, carry: Any) -> Any:
        slot = lax.rem(tile, in_steps)
        plgpu.barrier_wait(loaded.at[slot])
        plgpu.wait_smem_to_gmem((out_steps - 1) * len(outputs), wait_read_only=True)
        results = [ring.at[lax.rem(tile, out_steps)] for ring in out_rings]
        carry = compute(tile, carry, *(ring.at[slot] for ring in in_rings), *results)
        plgpu.commit_smem()
        for array, result in zip(outputs, results, strict=True):
            store(result, array, tile_of(tile))
        pl.when(tile + in_steps < tiles)(lambda: load(tile + in_steps))
        return carry

    pl.loop(0, min(in_steps, tiles))(load)
    carry = lax.fori_loop(0, tiles, step, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry


def store(tile: Any, array: Any, index: Any) -> None:
    """Start the copy of a tile in shared memory, which has no swizzle, to array[index], in a kernel.

    index: an integer or a slice for each of the first axes of the array. Nothing is stored beyond the array's end.

    Raises ValueError where a tile may pass the end of a row, because it would overwrite the next row. Mosaic copies a
    slice that is contiguous in memory as a run of bytes, which only the array's end cuts off
    (`LaunchContext.async_copy` of jax 0.10.2 and 0.11.2). The interpreter cuts it off at the end of the row.
    """
    parts = index if isinstance(index, tuple) else (index,)
    given = [
        len(range(*part.indices(axis))) if isinstance(part, slice) else getattr(part, "size", 1)
        for part, axis in zip(parts, array.shape, strict=False)
    ]
    lengths = (*given, *array.shape[len(given) :])
    first = next((axis for axis, length in enumerate(lengths) if length > 1), array.ndim - 1)
    contiguous = lengths[first + 1 :] == array.shape[first + 1 :]
    if contiguous and math.prod(array.shape[:first]) > 1 and array.shape[first] % lengths[first]:
        raise ValueError(
            f"tiles of {list(lengths)} do not divide the rows of {list(array.shape)}, so the last tile would overwrite "
            "the next row: pad the array to whole tiles"
        )
    plgpu.copy_smem_to_gmem(tile, array.at[index])


def check_dtypes(*arrays: jax.Array) -> None:
    """Raise TypeError unless the arrays are all bfloat16 or all float16."""
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1 or not dtypes <= set(map(jnp.dtype, DTYPES)):
        given = ", ".join(str(array.dtype) for array in arrays)
        raise TypeError(f"the arrays must be all bfloat16 or all float16, got {given}")
