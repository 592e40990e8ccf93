"""Parts that the Gluon kernels share: barriers, buffers, and matrices in registers.

Gluon is an experimental part of Triton. Every name of it that differs between the tested series stands here. It has no
interpreter: its kernels run on a GPU only.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.6 calls it thread_barrier, 3.7 barrier.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

L2_BYTES = 32 << 20  # the part of L2 that the tensors which programs work on at a time should fit in
ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@gluon.jit
def buffers(descriptor, NUMBER: gl.constexpr):
    """Return shared memory for NUMBER blocks of a descriptor."""
    return gl.allocate_shared_memory(descriptor.dtype, [NUMBER] + descriptor.block_type.shape, descriptor.layout)


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return NUMBER barriers, each of which completes a phase after ARRIVALS arrivals and its announced bytes."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def matrix(block):
    """Return a block in shared memory of shape [1, 1, rows, columns] as a matrix."""
    return block.reshape([block.shape[2], block.shape[3]])


@gluon.jit
def halves(x):
    """Return the left and the right columns. No data moves: each thread holds columns of both."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def joined(a, b, layout: gl.constexpr, dtype: gl.constexpr):
    """Return [a, b] in `dtype` as an operand in registers."""
    x = gl.join(a.to(dtype), b.to(dtype)).permute(0, 2, 1).reshape([a.shape[0], 2 * a.shape[1]])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def per_row(x, like):
    """Return the vector x, a number a row, as a column that broadcasts with the matrix `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def store_rows(block, pointer, stride_row, start, length):
    """Store a block's rows, which begin at row `start`, to `pointer` as far as they are less than `length`.

    TMA would also write the rows behind a packed sequence, which belong to the next one.
    """
    columns: gl.constexpr = block.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
    row = start + gl.arange(0, block.shape[2], gl.SliceLayout(1, layout))
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))
    offset = row.to(gl.int64) * stride_row
    gl.store(pointer + offset[:, None] + column[None, :], matrix(block).load(layout), mask=(row < length)[:, None])


@gluon.jit
def store_pairs(x, pointer, stride_row, start, length):
    """Store a tensor core's result from registers, rows start .. of which those less than `length` exist.

    Each thread stores pairs of numbers. Where shared memory is left, `store_rows` and TMA store wider.
    """
    row = start + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    offset = row.to(gl.int64) * stride_row
    gl.store(pointer + offset[:, None] + column[None, :], x, mask=(row < length)[:, None])


@gluon.jit
def packed_place(slot, offsets_ptr, sequences, BLOCK: gl.constexpr, WARPS: gl.constexpr, PACKED: gl.constexpr):
    """Return the packed sequence of a slot: its first row, its length, its tile in this slot, and its first slot.

    Sequence i has the slots from offsets[i] // BLOCK + i on: enough for its tiles of BLOCK rows, and none shared with
    another sequence. In a surplus slot the tile begins at or past the length. PACKED: a power of two, at least the
    number of sequences.
    """
    i = gl.arange(0, PACKED, gl.BlockedLayout([1], [32], [WARPS], [0]))
    begin = gl.load(offsets_ptr + i, mask=i < sequences, other=0) // BLOCK + i
    number = gl.sum(((begin <= slot) & (i < sequences)).to(gl.int32), 0) - 1
    first = gl.load(offsets_ptr + number)
    length = gl.load(offsets_ptr + number + 1) - first
    base = first // BLOCK + number
    return first, length, slot - base, base


def descriptor(x: torch.Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Return a TMA descriptor of x, which the caller has found to fit (`shared.tiles.fits_descriptor`).

    The checks of `TensorDescriptor` are left out: they take host time, and read an address that a fake tensor lacks.
    """
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, list(x.shape), list(x.stride())
    made.block_shape, made.layout, made.padding = block, layout, "zero"
    return made


def rows_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the descriptor of [batch, heads, sequence, head_dim] in 16 bits, with blocks of `rows` of one head."""
    return descriptor(x, [1, 1, rows, x.shape[-1]], ROWS_LAYOUT)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device has the instructions of sm_90a, which no later GPU has."""
    return torch.cuda.get_device_capability(device) == (9, 0)
