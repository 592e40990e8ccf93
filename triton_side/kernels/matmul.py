"""Matrix product as a Triton kernel, forward and backward: c = a @ b (+ residual), and the epilogues of linear layers.

    da = dc b^T    db = a^T dc    dresidual = dc

Programs walk the output tiles in groups of rows, so that the operands' tiles in use stay in L2 (the order of Triton's
persistent matmul tutorial). Where their strides allow, operands come through TMA tensor descriptors and one program a
multiprocessor walks many tiles; else they come through masked pointers, one program a tile. Either operand may be
stored transposed: pass `x.T`.

Shapes: a [m, k], b [k, n], c and residual [m, n], bias [n]. dtypes: bfloat16, float16, float32, one for all;
accumulated in float32, where the epilogue computes as well. float32 products follow
`torch.get_float32_matmul_precision()`. The forward pass saves a and b.

The pieces (`tile_at`, `open_operand`, `tile_product`, ...) serve the fused kernels of `swiglu_mlp.py` and
`linear_cross_entropy.py` as well. One kernel has every epilogue: residual (here and `linear_residual.py`), bias
(`linear.py`), bias and GELU in its tanh form (`linear_gelu.py`), the scales of fp8 operands (`matmul_fp8.py`), and sums
in float32 of products of 16-bit dtypes (`linear_cross_entropy.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_side.calls.declare import Shapes, computing, declare, forward, gradient
from triton_side.kernels._launch import cdiv, check_matrix, check_tensors, device_of, multiprocessors
from triton_side.kernels._tiles import add_product, fits_descriptor, product_precision, provide_descriptor_memory
from triton_side.kernels.gelu import gelu_value

PRODUCT = (forward("dot", "product"),)
RESIDUAL = (forward("add", "residual"),)
DA = (gradient("dot", "product", "da"),)
DB = (gradient("dot", "product", "db"),)


@dataclass(frozen=True)
class MatmulConfig:
    """How a product is tiled: [block_m, block_n] of the output a program at a time, block_k of the inner axis a step.

    group_m: tiles of block_m rows that are walked together before the next columns (for L2).
    descriptors: operands come through TMA, and programs are persistent; else one program a tile.
    programs: persistent ones a multiprocessor; more than one where one's tile leaves room for another.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    descriptors: bool = True
    programs: int = 1


@triton.jit
def tile_at(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of the tile-th output tile: down GROUP_M tiles of rows, then on to the next columns."""
    n_tiles = tl.cdiv(n, BLOCK_N)
    group = tile // (GROUP_M * n_tiles)
    first = group * GROUP_M
    height = tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP_M)
    within = tile % (GROUP_M * n_tiles)
    return (first + within % height) * BLOCK_M, within // height * BLOCK_N


@triton.jit
def open_operand(
    pointer, rows, columns, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """What `load_operand` reads a [rows, columns] matrix from; TRANSPOSED: neighbours of a column lie side by side."""
    if DESCRIPTOR:
        if TRANSPOSED:
            return tl.make_tensor_descriptor(pointer, [columns, rows], [stride_column, 1], [COLUMNS, ROWS])
        else:
            return tl.make_tensor_descriptor(pointer, [rows, columns], [stride_row, 1], [ROWS, COLUMNS])
    else:
        return pointer


@triton.jit
def load_operand(
    source, row, column, rows, columns, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """The [ROWS, COLUMNS] tile at (row, column), zero outside the matrix."""
    if DESCRIPTOR:
        if TRANSPOSED:
            return source.load([column, row]).T
        else:
            return source.load([row, column])
    else:
        r = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        c = (column + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
        return tl.load(source + r * stride_row + c * stride_column, mask=(r < rows) & (c < columns), other=0.0)


# Offsets inside a tile are 32-bit, its origin is one 64-bit scalar: with 64-bit offsets the epilogues spill registers.
@triton.jit
def store_tile(pointer, value, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a tile of a contiguous [rows, columns] matrix in its dtype."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows - row) & (c < columns - column)
    origin = pointer + (tl.cast(row, tl.int64) * columns + column)
    tl.store(origin + (r * columns + c), value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_tile(pointer, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of a contiguous [rows, columns] matrix, in float32."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows - row) & (c < columns - column)
    origin = pointer + (tl.cast(row, tl.int64) * columns + column)
    return tl.load(origin + (r * columns + c), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def tile_product(
    a, b, row, column, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """The [BLOCK_M, BLOCK_N] tile of a @ b at (row, column) in float32, of operands that `open_operand` gave."""
    c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        at = step * BLOCK_K
        x = load_operand(a, row, at, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
        y = load_operand(b, at, column, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
        c = add_product(c, x, y, PRECISION)
    return c


@triton.jit
def finish_tile(
    value, residual_ptr, bias_ptr, c_ptr, gelu_ptr, row, column, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """value + residual + bias goes to c at (row, column), its GELU to gelu; None: not added, not stored."""
    if residual_ptr is not None:
        value += load_tile(residual_ptr, row, column, m, n, ROWS, COLUMNS)
    if bias_ptr is not None:
        at_column = column + tl.arange(0, COLUMNS)
        value += tl.load(bias_ptr + at_column, mask=at_column < n, other=0.0).to(tl.float32)[None, :]
    if c_ptr is not None:
        store_tile(c_ptr, value, row, column, m, n, ROWS, COLUMNS)
    if gelu_ptr is not None:
        accurate: tl.constexpr = gelu_ptr.dtype.element_ty == tl.float32
        store_tile(gelu_ptr, gelu_value(value, accurate), row, column, m, n, ROWS, COLUMNS)


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a [ROWS, COLUMNS] tile."""
    return tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


def matmul_flops(shapes: Shapes) -> float:
    (m, k), n = shapes["a_ptr"], shapes["b_ptr"][1]
    scaled, residual, bias, gelu = (f"{name}_ptr" in shapes for name in ("a_scale", "residual", "bias", "gelu"))
    return 2 * m * n * k + m * n * (scaled + residual + bias + 9 * gelu)


@declare(flops=matmul_flops)  # of what, the caller says
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, residual_ptr, bias_ptr, c_ptr, gelu_ptr, m, n, k,
    stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """c = a @ b * a_scale * b_scale + residual + bias, and its GELU; None: not multiplied by, not added, not stored.

    WIDE: residual or c is float32, and a and b are not. Tiles pass through shared memory on their way to c and from
    residual, and 128 x 256 in float32 at once would take 279 kB of it with the operands, and spill 376 bytes of
    registers; in halves it is 213 kB and none (compiled for an H200).
    """
    a = open_operand(a_ptr, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
    b = open_operand(b_ptr, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    # Flattened, the loads of the next tile start before this one is stored: 1% on an H200 (810 against 803 TFLOP/s).
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        row, column = tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        c = tile_product(
            a, b, row, column, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, A_TRANSPOSED, B_TRANSPOSED, DESCRIPTORS, PRECISION,
        )
        if a_scale_ptr is not None:
            c *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
        if WIDE:
            half: tl.constexpr = BLOCK_N // 2
            left, right = halves(c, BLOCK_M, BLOCK_N)
            finish_tile(left, residual_ptr, bias_ptr, c_ptr, gelu_ptr, row, column, m, n, BLOCK_M, half)
            finish_tile(right, residual_ptr, bias_ptr, c_ptr, gelu_ptr, row, column + half, m, n, BLOCK_M, half)
        else:
            finish_tile(c, residual_ptr, bias_ptr, c_ptr, gelu_ptr, row, column, m, n, BLOCK_M, BLOCK_N)


def stored_transposed(matrix: torch.Tensor) -> bool:
    """Whether neighbours of a column, not of a row, lie side by side in memory."""
    return matrix.stride(1) != 1 and matrix.stride(0) == 1


def operands_fit_descriptors(*operands: torch.Tensor) -> bool:
    """Whether TMA can read every operand, as stored or transposed."""
    return all(fits_descriptor(x.T if stored_transposed(x) else x) for x in operands)


def programs(m: int, n: int, config: MatmulConfig, device: torch.device) -> int:
    """Programs to launch for an output [m, n]."""
    return programs_of(cdiv(m, config.block_m) * cdiv(n, config.block_n), config, device)


def programs_of(tiles: int, config: MatmulConfig, device: torch.device) -> int:
    """With descriptors as many as the multiprocessors hold, else one a tile."""
    return min(tiles, config.programs * multiprocessors(device)) if config.descriptors else tiles


def pointer_config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> MatmulConfig:
    """Operands through pointers, one program a tile: what a persistent walk gains, it needs TMA to use."""
    return MatmulConfig(block_m, block_n, block_k, num_warps, num_stages, descriptors=False)


def few_rows_config(element_bytes: int) -> MatmulConfig:
    """Tiles of an output of one tile of rows: what counts is that much of b is on its way at once.

    64 rows are the fewest that a `wgmma` takes. Fastest of a sweep on an H200 (Triton 3.6, bfloat16, 16 x 4096 x 4096,
    launches included): 24 us; half as wide and twice as deep, with 8 stages, took 48.
    """
    return MatmulConfig(64, 64, 128 // element_bytes, num_warps=4, num_stages=6)


def many_rows_config(dtype: torch.dtype, precision: str, descriptors: bool) -> MatmulConfig:
    """Tiles for a dtype and precision; `descriptors`: TMA can read the operands.

    float32 takes pointers: IEEE products run on the ordinary cores, TF32 operands are rounded on their way. Fastest of
    a sweep on an H200 (Triton 3.6; 8192 x 4096 x 14336, float32 8192 x 768 x 2048), TFLOP/s for operands stored NN, NT
    and TN: 16-bit 806, 790, 810 (cuBLAS 833, 811, 754 to 816; 128 x 128 tiles 641; warp specialisation 786, 773, 786);
    IEEE 38, 13, 40 (cuBLAS 48, 49, 49; with 8 warps 30, 7, 31), see `launch_matmul` for NT. With 2048 rows, groups of
    16 tiles reach 797, 783, 752 and groups of 8 reach 682, 702, 697 (cuBLAS 695, 785, 757).
    """
    if dtype == torch.float32:
        return pointer_config(64, 64, 16, 4, 2) if precision == "ieee" else pointer_config(128, 128, 32, 8, 3)
    if not descriptors:
        return pointer_config(64, 64, 32, 4, 3)  # rows that 16 bytes do not divide: two-byte loads, many addresses
    return MatmulConfig(128, 256, 64, num_warps=8, num_stages=3, group_m=16)


@lru_cache
def matmul_config(dtype: torch.dtype, precision: str, descriptors: bool, m: int, n: int) -> MatmulConfig:
    """Tiles for an output [m, n]: those of few rows where 16-bit operands come through TMA."""
    if m <= 64 and descriptors and dtype != torch.float32:
        return few_rows_config(dtype.itemsize)
    return many_rows_config(dtype, precision, descriptors)


Choose = Callable[[torch.dtype, str, bool, int, int], MatmulConfig]


def choose_config(choose: Choose, *operands: torch.Tensor) -> MatmulConfig:
    """What `choose` (`matmul_config`, say) takes for the product of the first two of these operands."""
    a, b, *_ = operands
    return choose(a.dtype, product_precision(a.dtype), operands_fit_descriptors(*operands), a.shape[0], b.shape[1])


def launch_matmul(
    a: torch.Tensor, b: torch.Tensor, config: MatmulConfig, residual: torch.Tensor | None = None, *,
    bias: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b (+ residual) (+ bias), contiguous: written to `out`, which may be `residual`, or else new in the operands'
    dtype. `residual`, `bias` and `out` are contiguous, each of a dtype of its own."""
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device) if out is None else out
    _launch(a, b, config, residual=residual, bias=bias, c=c)
    return c


def launch_bias_gelu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, config: MatmulConfig, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """gelu(a @ b + bias) and, with `save`, what GELU is taken of; both contiguous. `bias` is contiguous."""
    y = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    pre = torch.empty_like(y) if save else None
    _launch(a, b, config, bias=bias, c=pre, gelu=y)
    return y, pre


def launch_scaled(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, config: MatmulConfig
) -> torch.Tensor:
    """a @ b * a_scale * b_scale, contiguous, in bfloat16. The scales are one float32 number each."""
    c = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device)
    _launch(a, b, config, a_scale=a_scale, b_scale=b_scale, c=c)
    return c


def _launch(
    a: torch.Tensor, b: torch.Tensor, config: MatmulConfig, *, a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None, residual: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None, gelu: torch.Tensor | None = None,
) -> None:
    (m, k), n = a.shape, b.shape[1]
    precision = product_precision(a.dtype)
    wide = a.dtype != torch.float32 and any(x is not None and x.dtype == torch.float32 for x in (residual, c))
    if a.dtype == torch.float32 and precision == "ieee" and stored_transposed(b):
        # The ordinary cores read b's rows; where they lie across shared memory, banks conflict: 13 TFLOP/s against 38.
        b = b.contiguous()
    with device_of(a):
        if config.descriptors:
            provide_descriptor_memory(a.device)
        matmul_kernel[(programs(m, n, config, a.device),)](
            a, b, a_scale, b_scale, residual, bias, c, gelu, m, n, k, *a.stride(), *b.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            GROUP_M=config.group_m, A_TRANSPOSED=stored_transposed(a), B_TRANSPOSED=stored_transposed(b),
            DESCRIPTORS=config.descriptors, PRECISION=precision, WIDE=wide,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.adds_residual = residual is not None
        with computing(*PRODUCT, *(RESIDUAL if ctx.adds_residual else ()), c_ptr="c"):
            return launch_matmul(a, b, choose_config(matmul_config, a, b), residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        with computing(*DA, c_ptr="da"):
            da = launch_matmul(dc, b.T, choose_config(matmul_config, dc, b.T))
        with computing(*DB, c_ptr="db"):
            db = launch_matmul(a.T, dc, choose_config(matmul_config, a.T, dc))
        return da, db, dc if ctx.adds_residual else None


def matmul(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, or a @ b + residual in one kernel, differentiable once.

    Args:
        a: [m, k], any strides.
        b: [k, n], any strides.
        residual: [m, n] or None.

    Returns:
        c [m, n], contiguous, in the inputs' dtype.

    Raises:
        ValueError: shapes do not fit, devices differ or are not a GPU (outside the interpreter), or float32 products
            are set to "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    tensors = {"a": a, "b": b} | ({} if residual is None else {"residual": residual})
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        check_matrix(name, tensor)
    if a.shape[1] != b.shape[0] or (residual is not None and residual.shape != (a.shape[0], b.shape[1])):
        raise ValueError(
            "a [m, k], b [k, n] and residual [m, n] must fit, got "
            + ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            + "; transpose an operand with .T"
        )
    return _Matmul.apply(a, b, None if residual is None else residual.contiguous())


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The block `matmul`: a [m, k], b [k, n] -> c [m, n]."""
    return {"c": matmul(inputs["a"], inputs["b"])}
