"""Product of two float8_e4m3fn matrices for Hopper GPUs: c = (a @ b^T) a_scale b_scale, in bfloat16.

The formula and shapes are those of `kernels/matmul_fp8.py`. One persistent program runs on each multiprocessor:

- A producer warp loads tiles of a and b by TMA into a ring of buffers. It runs ahead across output tiles.
- Two consumers of four warps each own 64 rows of an output tile of 128 x 256, and multiply without meeting.

A sum of the tensor cores ends after CHUNK terms. The sum of the chunks so far stays in registers as float16, two
numbers in each (`shared.fp8_sums`): 128 registers for the tensor cores' sum and 64 for this one fit in 240. After the
last chunk the 64 registers are c in bfloat16. They reach memory while the tensor cores work on the next tile.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from xlafuse.triton_side.calls.declare import Shapes, declare, forward
from xlafuse.triton_side.kernels.hopper.parts import barriers, buffers, descriptor, halves, thread_barrier
from xlafuse.triton_side.kernels.shared import matmul_tiles
from xlafuse.triton_side.kernels.shared.fp8_sums import kept_factor
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of, multiprocessors

CHUNK = 2048  # terms of one sum of the tensor cores
MOST_TERMS = 16 * CHUNK  # each chunk's sum is rounded once

ROWS = gl.constexpr(64)  # of one consumer
BLOCK_M = gl.constexpr(128)  # rows of a tile: those of both consumers
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(128)
STAGES = gl.constexpr(4)
GROUP_M = gl.constexpr(16)  # tiles, one below the other, before the next column: L2 keeps their operands

OPERAND_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
RESULT_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

tile_at = gluon.jit(matmul_tiles.tile_at.fn)  # the same order of tiles, compiled as Gluon


def fp8_flops(shapes: Shapes) -> float:
    (m, k), n = shapes["a_descriptor"], shapes["b_descriptor"][0]
    return 2 * m * n * k + m * n


@gluon.jit
def _produce(m, n, steps, tiles, smem, bars, a_descriptor, b_descriptor):
    step_bytes: gl.constexpr = a_descriptor.block_type.nbytes + b_descriptor.block_type.nbytes
    g = 0  # number of the step, over all tiles
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        for step in range(steps):
            i = g % STAGES
            full = bars[0].index(i)
            mbarrier.wait(bars[1].index(i), (g // STAGES & 1) ^ 1)
            mbarrier.expect(full, step_bytes)
            tma.async_copy_global_to_shared(a_descriptor, [row, step * BLOCK_K], full, smem[0].index(i))
            tma.async_copy_global_to_shared(b_descriptor, [column, step * BLOCK_K], full, smem[1].index(i))
            g += 1


@gluon.jit
def _step(PART: gl.constexpr, acc, g, FIRST: gl.constexpr, smem, bars):
    """Start the product of step g, add it to acc unless it is the FIRST of a sum, and wait for the step before."""
    i = g % STAGES
    mbarrier.wait(bars[0].index(i), g // STAGES & 1)
    a = smem[0].index(i).slice(PART * ROWS, ROWS)
    b = smem[1].index(i).permute((1, 0))
    return mma_wait(1, deps=[mma(a, b, acc, use_acc=not FIRST, is_async=True)])


@gluon.jit
def _steps(PART: gl.constexpr, acc, g, end, smem, bars):
    """Add steps g .. end - 1 to acc. Step g - 1 runs when this begins, step end - 1 when it ends."""
    for j in range(g, end):
        acc = _step(PART, acc, j, False, smem, bars)
        mbarrier.arrive(bars[1].index((j - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _finished(acc, g, bars):
    """Wait for step g - 1, the last of a sum."""
    acc = mma_wait(0, deps=[acc])
    mbarrier.arrive(bars[1].index((g - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _pack(x, y, dtype: gl.constexpr):
    """Return x and y, rounded to a 16-bit dtype, in one integer. Triton would use a register for each number."""
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(convert, "=r,f,f", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(packed, dtype: gl.constexpr):
    x = packed.to(gl.int16).to(dtype, bitcast=True)
    return x, (packed >> 16).to(gl.int16).to(dtype, bitcast=True)


@gluon.jit
def _pairs(x):
    """Return the even and the odd columns. No data moves: each thread holds columns of both."""
    return x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()


@gluon.jit
def _store(packed, buffer, descriptor, row, column):
    """Start to store half of a consumer's packed results. Rows and columns outside c are not written."""
    c = gl.join(*_unpack(packed, gl.bfloat16)).reshape([packed.shape[0], 2 * packed.shape[1]])
    tma.store_wait(0)
    thread_barrier()
    buffer.store(c)
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(descriptor, [row, column], buffer)


@gluon.jit
def _consume(
    PART: gl.constexpr, m, n, steps, chunk_steps, tiles, smem, bars, c_descriptor, a_scale_ptr, b_scale_ptr, kept_factor
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    scale = gl.load(a_scale_ptr) * gl.load(b_scale_ptr) / kept_factor
    buffer = smem[2].index(PART)
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    c = _pack(*_pairs(acc), gl.bfloat16)
    # Results wait for the next tile's first products. Before the first tile, they lie outside c.
    c_row = m
    c_column = n
    g = 0  # number of the step, over all tiles
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        last = g + steps
        acc = _step(PART, acc, g, True, smem, bars)
        left, right = halves(c)
        _store(left, buffer, c_descriptor, c_row, c_column)
        end = gl.minimum(g + chunk_steps, last)
        acc = _steps(PART, acc, g + 1, end, smem, bars)
        _store(right, buffer, c_descriptor, c_row, c_column + BLOCK_N // 2)
        x, y = _pairs(_finished(acc, end, bars) * kept_factor)
        while end < last:
            kept = _pack(x, y, gl.float16)
            acc = _step(PART, acc, end, True, smem, bars)
            begin = end
            end = gl.minimum(begin + chunk_steps, last)
            acc = _steps(PART, acc, begin + 1, end, smem, bars)
            x, y = _pairs(_finished(acc, end, bars) * kept_factor)
            earlier_x, earlier_y = _unpack(kept, gl.float16)
            x += earlier_x.to(gl.float32)
            y += earlier_y.to(gl.float32)
        c = _pack(x * scale, y * scale, gl.bfloat16)
        c_row, c_column = tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        c_row += PART * ROWS
        g = last
    left, right = halves(c)
    _store(left, buffer, c_descriptor, c_row, c_column)
    _store(right, buffer, c_descriptor, c_row, c_column + BLOCK_N // 2)
    tma.store_wait(0)


@declare(forward("dot", "product"), forward("mul", "scale"), flops=fp8_flops)
@gluon.jit(do_not_specialize=["m", "n", "steps", "chunk_steps"])
def hopper_matmul_fp8_kernel(
    a_descriptor, b_descriptor, c_descriptor, a_scale_ptr, b_scale_ptr, m, n, steps, chunk_steps, kept_factor,
):
    """Compute c [m, n] from a [m, k] and b [n, k], k in `steps` tiles, of which `chunk_steps` have one sum."""
    smem = (buffers(a_descriptor, STAGES), buffers(b_descriptor, STAGES), buffers(c_descriptor, 2))
    bars = (barriers(STAGES, 1), barriers(STAGES, 2))  # full and empty
    fence_async_shared()
    tiles = gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N)
    gl.warp_specialize(
        [
            (_consume, (
                0, m, n, steps, chunk_steps, tiles, smem, bars, c_descriptor, a_scale_ptr, b_scale_ptr, kept_factor,
            )),
            (_consume, (
                1, m, n, steps, chunk_steps, tiles, smem, bars, c_descriptor, a_scale_ptr, b_scale_ptr, kept_factor,
            )),
            (_produce, (m, n, steps, tiles, smem, bars, a_descriptor, b_descriptor)),
        ],
        [4, 1],
        [240, 24],  # warps and registers of the second consumer and the producer
    )


def launch_fp8(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """Return a @ b.T * a_scale * b_scale, contiguous, in bfloat16; each scale is one float32 number.

    chunk: the most terms of one sum, or those of one step; the sums of an element of c are of about equal length.
    """
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if c.numel() == 0:
        return c
    steps = cdiv(k, BLOCK_K.value)
    chunk_steps = cdiv(steps, cdiv(steps, max(1, chunk // BLOCK_K.value)))
    tiles = cdiv(m, BLOCK_M.value) * cdiv(n, BLOCK_N.value)
    with device_of(a):
        hopper_matmul_fp8_kernel[(min(multiprocessors(a.device), tiles),)](
            descriptor(a, [BLOCK_M.value, BLOCK_K.value], OPERAND_LAYOUT),
            descriptor(b, [BLOCK_N.value, BLOCK_K.value], OPERAND_LAYOUT),
            descriptor(c, [ROWS.value, BLOCK_N.value // 2], RESULT_LAYOUT),
            a_scale, b_scale, m, n, steps, chunk_steps, kept_factor(k), num_warps=4,
        )
    return c
