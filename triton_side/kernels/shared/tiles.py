"""Parts of kernels built on matrix products: tile loads, tensor descriptors, precision of float32 products."""

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.configs.tuned import has_wgmma

LARGEST_TF32 = tl.constexpr((2 - 2**-10) * 2.0**127)
DESCRIPTOR_ALIGNMENT = 16  # bytes; CUDA driver API, cuTensorMapEncodeTiled: globalAddress and globalStrides


@triton.jit
def load_rows(
    matrix, start, rows, BLOCK: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTOR: tl.constexpr, CHECK: tl.constexpr
):
    """Return rows start .. start + BLOCK of a [rows, WIDTH] matrix, zero past its end.

    matrix: (source, row stride, column stride), where the source is a descriptor with blocks [BLOCK, WIDTH] or a
    pointer. Without CHECK the caller knows that the rows exist; a descriptor always checks.
    """
    source, stride_row, stride_column = matrix
    if DESCRIPTOR:
        return source.load([start, 0])
    else:
        row = tl.arange(0, BLOCK)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        pointers = source + tl.cast(start, tl.int64) * stride_row + (row * stride_row + column * stride_column)
        if CHECK:
            return tl.load(pointers, mask=row < rows - start, other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def round_to_tf32(x):
    """Round float32 to the nearest TF32 (10 bits of mantissa), ties away from zero; NaN stays NaN.

    Tensor cores drop the 13 low bits of a float32 operand. Without rounding, products erred five times as much as
    cuBLAS's (H200, Triton 3.6). The arithmetic is on integers because the interpreter has no inline PTX for
    `cvt.rna.tf32.f32`. Finite numbers from 3.402e38 on become infinite.
    """
    rounded = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return a @ b of two tiles, in float32."""
    if PRECISION == "tf32":
        a = round_to_tf32(a)
        b = round_to_tf32(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_separate_product(c, a, b, PRECISION: tl.constexpr):
    """Return c + a @ b, with the product summed over its inner axis first.

    Tensor cores truncate each addition instead of rounding it, and lose more the larger the running sum is. The fma
    keeps Triton from turning c + dot(a, b) back into one accumulation.
    """
    return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, c)


@triton.jit
def add_product(c, a, b, PRECISION: tl.constexpr):
    """Return c + a @ b; float32 products that are not TF32 are summed over the tile's inner axis first.

    One sequential sum over a long inner axis erred 3 to 4 times as much as cuBLAS (H200, IEEE, 1021 and 1536 terms).
    """
    if PRECISION == "tf32":
        return tl.dot(round_to_tf32(a), round_to_tf32(b), c, input_precision=PRECISION)
    elif a.dtype == tl.float32:
        return add_separate_product(c, a, b, PRECISION)
    else:
        return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def split_tf32(x):
    """Return (big, rest) with x = big + rest: `big` is TF32, and rest is NaN where x is not finite.

    Tensor cores cut rest to TF32, which loses at most 2^-22 of x. Numbers above the largest TF32 number are cut off,
    because rounding would make them infinite.
    """
    cut = (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    big = tl.where(tl.abs(x) > LARGEST_TF32, cut, round_to_tf32(x))
    return big, x - big


_descriptors = True


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """Read tiles through pointers within the context, for runtimes that give kernels no memory for descriptors."""
    global _descriptors
    outer, _descriptors = _descriptors, False
    try:
        yield
    finally:
        _descriptors = outer


def fits_descriptor(matrix: torch.Tensor) -> bool:
    """Return whether TMA can read tiles of the last two axes: last stride 1, everything else 16-byte aligned.

    PyTorch's allocators align the start of a storage, so no address is read: imported memory (DLPack) must begin at a
    multiple of 16 bytes. False within `without_descriptors`.
    """
    *strides, last = matrix.stride()
    if last != 1 or not _descriptors:
        return False
    bits = matrix.storage_offset()  # or-ed with every stride: the alignment is a power of two
    for stride in strides:
        bits |= stride
    return bits * matrix.element_size() % DESCRIPTOR_ALIGNMENT == 0


def provide_descriptor_memory(device: torch.device) -> None:
    """Give Triton memory for the descriptors that the next kernel of this thread builds on the device.

    Call it before each launch: Triton keeps its allocator per context, and autograd runs backward in its own thread.
    """

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)


_ieee = False


@contextlib.contextmanager
def ieee_products() -> Iterator[None]:
    """Compute float32 products outside the tensor cores within the context, in all threads.

    Backward passes take the precision of the time at which they run.
    """
    global _ieee
    outer, _ieee = _ieee, True
    try:
        yield
    finally:
        _ieee = outer


def product_precision(dtype: torch.dtype) -> str:
    """Return tl.dot's `input_precision`: float32 follows torch.get_float32_matmul_precision(), 16 bits are exact.

    "high" is "tf32": operands are rounded to 11 significant bits. "highest" is "tf32x3": each operand is the sum of two
    TF32 numbers, and three products of these are added. Their sum is as accurate as IEEE arithmetic
    (docs/kernels/products.md). Within `ieee_products`, and on GPUs that are no Hopper GPUs, "highest" is "ieee": the
    tiles of three products were chosen for Hopper GPUs.

    Raises ValueError for "medium" (bfloat16 products), which no kernel here has.
    """
    if dtype != torch.float32:
        return "ieee"
    setting = torch.get_float32_matmul_precision()
    precisions = {"highest": "tf32x3" if has_wgmma() and not _ieee else "ieee", "high": "tf32"}
    if setting not in precisions:
        raise ValueError(
            f"float32 products have float32's accuracy ('highest') or TF32's ('high'), got float32_matmul_precision "
            f"{setting!r}; call torch.set_float32_matmul_precision('high') or ('highest')"
        )
    return precisions[setting]
