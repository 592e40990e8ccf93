"""Matrix product as a Triton kernel, forward and backward: c = a @ b (+ residual), and the epilogues of linear layers.

    da = dc b^T    db = a^T dc    dresidual = dc

Its tile order and loads are in `shared/matmul_tiles.py`. Either operand may be stored transposed: pass `x.T`.

One kernel has every epilogue: residual (here and in `linear_residual.py`), bias (`linear.py`), and bias and GELU in its
tanh form (`linear_gelu.py`). It can also sum the rows of b, if one step of the loop reads all of them (`linear.py`).

Shapes: a [m, k], b [k, n], c and residual [m, n], bias [n]. dtypes: bfloat16, float16, float32, one for all. The
product accumulates in float32, and the epilogue computes in it. float32 products follow
`torch.get_float32_matmul_precision()` (`product_precision`). Large ones read copies of a and b
(`shared/tf32_operand.py`). The forward pass saves a and b.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import Shapes, computing, declare, forward, gradient
from xlafuse.triton_side.configs.tuned import has_small_blocks, has_wgmma, tuned
from xlafuse.triton_side.kernels.gelu import gelu_value
from xlafuse.triton_side.kernels.shared.counters import zero_counters
from xlafuse.triton_side.kernels.shared.launch import cdiv, check_matrix, check_tensors, device_of, next_power_of_2
from xlafuse.triton_side.kernels.shared.matmul_tiles import (
    MatmulConfig,
    load_strided_tile,
    load_tile,
    open_operand,
    operands_fit_descriptors,
    programs_for_output,
    store_tile,
    stored_transposed,
    tile_at,
    tile_product,
)
from xlafuse.triton_side.kernels.shared.split_tiles import add_shares, steps_of_split, store_share
from xlafuse.triton_side.kernels.shared.tf32_operand import PARTS, prepare_operands
from xlafuse.triton_side.kernels.shared.tiles import product_precision, provide_descriptor_memory

PRODUCT = (forward("dot", "product"),)
RESIDUAL = (forward("add", "residual"),)
DA = (gradient("dot", "product", "da"),)
DB = (gradient("dot", "product", "db"),)
FEW_ROWS = 64  # or less: the product is limited by reading b
MULTIPROCESSORS = 132  # of the H100 and H200, for which the rules are written
SHARED_BYTES = 227 * 1024  # of their multiprocessors, for programs
SHORT_SUM = 32  # terms or fewer: the product is limited by writing c
MANY_ROWS = 512  # and as many columns, or more: a float32 product reads copies of a and b
SHORTEST_SPLIT = 512  # terms of the inner axis; a shorter split takes less time than adding it


@triton.jit
def finish_tile(
    value, residual_ptr, bias_ptr, c_ptr, gelu_ptr, row, column, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store value + residual + bias to c at (row, column), and its GELU to gelu; None is neither added nor stored."""
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
def store_column_sums(
    x_ptr, sums_ptr, column, columns, rows, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store the sums of COLUMNS columns of a matrix of at most ROWS rows."""
    x = load_strided_tile(x_ptr, 0, column, rows, columns, stride_row, stride_column, ROWS, COLUMNS)
    at = column + tl.arange(0, COLUMNS)
    tl.store(sums_ptr + at, tl.sum(x.to(tl.float32), axis=0).to(sums_ptr.dtype.element_ty), mask=at < columns)


def matmul_flops(shapes: Shapes) -> float:
    (m, k), n = shapes["a_ptr"], shapes["c_ptr" if "c_ptr" in shapes else "gelu_ptr"][1]
    residual, bias, gelu = (f"{name}_ptr" in shapes for name in ("residual", "bias", "gelu"))
    sums = k * n if "b_sums_ptr" in shapes else 0
    return 2 * m * n * k + m * n * (residual + bias + 9 * gelu) + sums


@declare(flops=matmul_flops)  # the caller declares the operation
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, residual_ptr, bias_ptr, c_ptr, gelu_ptr, b_sums_ptr, shares_ptr, counters_ptr,
    m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Compute c = a @ b + residual + bias, and its GELU; None is left out or not stored.

    PARTS is 0 for a and b themselves, else the number of matrices in each copy by `prepare_operands`.

    b_sums [n]: sums over the rows of b itself, which are at most BLOCK_K.
    shares [SPLITS, m, n] and a counter for each tile are None if SPLITS is 1.
    """
    matrices = PARTS if PARTS else 1
    a = open_operand(a_ptr, matrices * m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
    b = open_operand(b_ptr, k, matrices * n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    # A flattened loop loads the next tile before it stores this one: 810 against 803 TFLOP/s on an H200. With two
    # matrices of each operand, a third stage needs the memory (`copied_operands_config`).
    for part in tl.range(tl.program_id(0), tiles * SPLITS, tl.num_programs(0), flatten=DESCRIPTORS and PARTS < 2):
        if SPLITS == 1:
            tile = part
            begin, end = 0, tl.cdiv(k, BLOCK_K)
        else:
            tile = part % tiles
            begin, end = steps_of_split(part // tiles, k, BLOCK_K, SPLITS)
        row, column = tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        if b_sums_ptr is not None:
            if row == 0:
                store_column_sums(b_ptr, b_sums_ptr, column, n, k, stride_bk, stride_bn, BLOCK_K, BLOCK_N)
        c = tile_product(
            a, b, row, column, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, begin, end,
            BLOCK_M, BLOCK_N, BLOCK_K, A_TRANSPOSED, B_TRANSPOSED, DESCRIPTORS, PRECISION, PARTS,
        )
        if SPLITS == 1:
            finish_tile(c, residual_ptr, bias_ptr, c_ptr, gelu_ptr, row, column, m, n, BLOCK_M, BLOCK_N)
        elif store_share(
            shares_ptr, counters_ptr + tile, c, part // tiles, row, column, m, n, BLOCK_M, BLOCK_N, SPLITS
        ):
            c = add_shares(shares_ptr, counters_ptr + tile, row, column, m, n, BLOCK_M, BLOCK_N, SPLITS)
            finish_tile(c, residual_ptr, bias_ptr, c_ptr, gelu_ptr, row, column, m, n, BLOCK_M, BLOCK_N)


def pointer_config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> MatmulConfig:
    """Tiles for operands read through pointers, one program a tile; only TMA makes a persistent loop pay."""
    return MatmulConfig(block_m, block_n, block_k, num_warps, num_stages, descriptors=False)


def few_rows_config(m: int, n: int, element_bytes: int, transposed: bool) -> MatmulConfig:
    """Tiles for an output of one tile of rows, as fast as b can be read, not split; transposed: b is stored so.

    One wave of programs reads b, each with 80 to 150 kB of prefetched tiles, which hide the latency. Each also reads
    its part of a, from L2. Pointers read 16 rows of a; a TMA tile would have the 64 rows of a `wgmma`. On one H200
    (bfloat16, 16 rows, CUPTI, L2 flushed by reading), in us:

        | k x n                                           4096 x 4096   14336 x 4096   4096 x 14336
        | 64 columns, 256 bytes, 5 stages, 2 splits              11.0           29.1
        |   8 stages                                             11.7           30.3
        | 128 columns, 256 bytes, 5 stages                                                     29.2
        | cuBLAS                                                 12.4           31.6           28.8
        | transposed: 32 columns, 512 bytes, 5 stages            10.7           29.5           31.6
        |   64 columns, 256 bytes, 8 stages, 2 splits            12.3           31.5
        |   128 columns, 256 bytes, 5 stages                                                   30.3
        |   cuBLAS                                               12.0           29.5           28.7
    """
    step_bytes = 256 // (2 if m > 32 else 1)
    if transposed and n <= 32 * MULTIPROCESSORS:
        # 512 bytes of a column are contiguous, so columns can be few enough for all multiprocessors without a split.
        block_n, step_bytes = 32, 2 * step_bytes
    else:
        block_n = 128 if 64 * MULTIPROCESSORS < n <= 128 * MULTIPROCESSORS else 64
    rows = max(16, next_power_of_2(m))
    return pointer_config(rows, block_n, step_bytes // element_bytes, num_warps=4, num_stages=5)


def splits_of_inner_axis(tiles: int, k: int, bytes_of_program: int) -> int:
    """Return how many programs share a tile's inner axis, a power of two.

    Programs double while they are at most half as many as the multiprocessors: the 64 tiles of 4096 columns leave 68
    idle, and took 43.5 us for 14336 rows of b, where cuBLAS takes 31.6 (CUPTI, one H200). Where two programs with
    `bytes_of_program` of shared memory fit a multiprocessor, they double up to three quarters: 45 tiles took 21.3 us in
    90 programs and 14.1 in 180 (2872 columns, k of 2608, `xlafuse tune`).
    """
    few = MULTIPROCESSORS * 3 // 4 if 2 * bytes_of_program <= SHARED_BYTES else MULTIPROCESSORS // 2
    splits = 1
    while splits * tiles <= few and 2 * splits * SHORTEST_SPLIT <= k:
        splits *= 2
    return splits


def short_sums_config(k: int) -> MatmulConfig:
    """Tiles for sums of at most SHORT_SUM terms, as in the gradient of a weight for few tokens: c is written.

    One step holds the whole inner axis. Four programs a multiprocessor load while others store. On one H200 (bfloat16,
    16 terms, CUPTI, L2 flushed by reading), in us:

        | m x n                                            4096 x 14336   14336 x 4096   4096 x 4096
        | 64 x 128 tiles, 4 programs a multiprocessor              32.4           32.0          12.4
        | 128 x 128 tiles, 2 programs a multiprocessor             32.5           31.7          12.3
        | 64 x 128 tiles through pointers                          34.1           33.3          11.9
        | many_rows_config                                         44.6           42.8          16.6
        | cuBLAS                                                   38.3           36.6          12.9
    """
    return MatmulConfig(64, 128, max(16, next_power_of_2(k)), num_warps=4, num_stages=3, group_m=16, programs=4)


def many_rows_config(dtype: torch.dtype, precision: str, descriptors: bool) -> MatmulConfig:
    """Tiles for a dtype and precision; `descriptors`: TMA can read the operands.

    float32 takes pointers: IEEE products run on the ordinary cores, and operands of the tensor cores are rounded or
    split after they are loaded (`copied_operands_config` for many rows). The pointer tiles of three TF32 products were
    chosen from compiled code, not timed. Others are the fastest of a sweep on an H200 (Triton 3.6; 8192 x 4096 x 14336,
    float32 8192 x 768 x 2048), in TFLOP/s:

        | operands stored                NN     NT     TN
        | 16-bit                         806    790    810
        |   cuBLAS                       833    811    754 to 816
        |   tiles of 128 x 128           641
        |   warp specialisation          786    773    786
        | IEEE                           38     13     40      (see `_launch` for NT)
        |   cuBLAS                       48     49     49
        |   8 warps                      30     7      31
        | 16-bit, 2048 rows, group_m 16  797    783    752
        |   group_m 8                    682    702    697
        |   cuBLAS                       695    785    757
    """
    if dtype == torch.float32:
        tiles = {"ieee": (64, 64, 16, 4, 2), "tf32": (128, 128, 32, 8, 3), "tf32x3": (64, 64, 32, 4, 3)}
        return pointer_config(*tiles[precision])
    if not descriptors:
        return pointer_config(64, 64, 32, 4, 3)  # 16 bytes do not divide a row: two-byte loads, many addresses
    if has_small_blocks():  # tiles of 128 x 256 need 104 KiB
        return MatmulConfig(128, 128, 64, num_warps=8, num_stages=3, group_m=16)
    return MatmulConfig(128, 256, 64, num_warps=8, num_stages=3, group_m=16)


def copied_operands_config(precision: str) -> MatmulConfig:
    """Tiles for float32 products on the tensor cores that read copies of a and b (`shared/tf32_operand.py`).

    The fastest of a sweep on an H200 (Triton 3.6, do_bench), in us, copies included. A product in three TF32 products
    does not load the next tile before it stores this one: the tiles of a third stage need the memory. With five stages
    `xlafuse tune` measured 121.3 us where four took 128.8 (8192 x 2048 x 768, TF32), and splits of the inner axis made
    the 96 tiles of a weight's gradient slower: 150.1 us with four, 134.7 with none.

        | m x k x n                           4096 x 4096 x 4096   8192 x 768 x 2048   768 x 8192 x 2048 (TN)
        | TF32: 128 x 128, 4 stages                          464                 109                     152
        |   3 stages                                         600                 122                     190
        |   256 x 128, 3 stages                              441                 109                     227
        |   the copies                                        74                  25                      54
        |   only b copied, a rounded in registers            733                 139
        |   cuBLAS                                           343                  87                     165
        | three products: 128 x 128, 3 stages               1370                 296                     391
        |   64 x 128, 4 warps, 3 stages                     1601                 331                     451
        |   2 stages, the next tile loaded early            2146                 387                     586
        |   the copies                                       107                  31                      76
        |   only b copied, a split in registers             1617                 319
        |   cuBLAS, IEEE                                    2674                 546                     528

    Tiles of 256 x 128 spill where an epilogue has a bias or a residual.
    """
    return MatmulConfig(128, 128, 32, num_warps=8, num_stages={"tf32": 5, "tf32x3": 3}[precision])


@tuned
def matmul_config(
    dtype: torch.dtype, precision: str, descriptors: bool, m: int, n: int, k: int, transposed: bool
) -> MatmulConfig:
    """Tiles for an output [m, n]; those for few rows or short sums take aligned 16-bit operands.

    transposed: b is stored so.
    """
    if descriptors and precision in PARTS and min(m, n) >= MANY_ROWS and k > SHORT_SUM and has_wgmma():
        return copied_operands_config(precision)
    if descriptors and dtype != torch.float32:
        if m <= FEW_ROWS:
            config = few_rows_config(m, n, dtype.itemsize, transposed)
            step = (config.block_m + config.block_n) * config.block_k * dtype.itemsize
            splits = splits_of_inner_axis(cdiv(n, config.block_n), k, config.num_stages * step)
            return replace(config, splits=splits)
        if k <= SHORT_SUM:
            return short_sums_config(k)
    return many_rows_config(dtype, precision, descriptors)


Choose = Callable[[torch.dtype, str, bool, int, int, int, bool], MatmulConfig]


def choose_config(choose: Choose, *operands: torch.Tensor) -> MatmulConfig:
    """Return the tiles that `choose`, such as `matmul_config`, gives for the product of the first two operands."""
    a, b, *_ = operands
    (m, k), n = a.shape, b.shape[1]
    precision, descriptors = product_precision(a.dtype), operands_fit_descriptors(*operands)
    return choose(a.dtype, precision, descriptors, m, n, k, stored_transposed(b))


def launch_matmul(
    a: torch.Tensor, b: torch.Tensor, config: MatmulConfig, residual: torch.Tensor | None = None, *,
    bias: torch.Tensor | None = None, b_sums: torch.Tensor | None = None, out: torch.Tensor | None = None,
    a_is_tf32: bool = False,
) -> torch.Tensor:
    """Return a @ b (+ residual) (+ bias), contiguous, written to `out` if given.

    a_is_tf32: the kernel that wrote a rounded it to TF32, so a product in TF32 needs no copy of it.

    `residual`, `bias` and `out` are contiguous. `b_sums` [n] becomes the sum of b's rows, of which there may be at most
    `config.block_k`; c must have a row.
    """
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device) if out is None else out
    _launch(a, b, config, residual=residual, bias=bias, c=c, b_sums=b_sums, a_is_tf32=a_is_tf32)
    return c


def launch_bias_gelu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, config: MatmulConfig, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return gelu(pre) and, with `save`, pre = a @ b + bias; all contiguous."""
    y = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    pre = torch.empty_like(y) if save else None
    _launch(a, b, config, bias=bias, c=pre, gelu=y)
    return y, pre


def _launch(
    a: torch.Tensor, b: torch.Tensor, config: MatmulConfig, *, residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, c: torch.Tensor | None = None, gelu: torch.Tensor | None = None,
    b_sums: torch.Tensor | None = None, a_is_tf32: bool = False,
) -> None:
    (m, k), n = a.shape, b.shape[1]
    precision, parts = product_precision(a.dtype), 0
    if config.descriptors and precision in PARTS and b_sums is None:
        (a, b), parts = prepare_operands(a, b, precision, a_is_tf32), PARTS[precision]
    elif a.dtype == torch.float32 and precision == "ieee" and stored_transposed(b):
        # The ordinary cores read b's rows. Rows of a transposed b cause bank conflicts: 13 TFLOP/s against 38.
        b = b.contiguous()
    programs = programs_for_output(m, n, config, a.device)
    shares = counters = None
    if config.splits > 1:  # one program a tile
        shares = torch.empty((config.splits, m, n), dtype=torch.float32, device=a.device)
        counters = zero_counters(a, programs)
    with device_of(a):
        if config.descriptors:
            provide_descriptor_memory(a.device)
        matmul_kernel[(config.splits * programs,)](
            a, b, residual, bias, c, gelu, b_sums, shares, counters, m, n, k, *a.stride(), *b.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            GROUP_M=config.group_m, SPLITS=config.splits,
            A_TRANSPOSED=stored_transposed(a), B_TRANSPOSED=stored_transposed(b),
            DESCRIPTORS=config.descriptors, PRECISION=precision, PARTS=parts,
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
    """Return a @ b, or a @ b + residual, in one kernel; differentiable once.

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
    """Run the block `matmul`: a [m, k], b [k, n] -> c [m, n]."""
    return {"c": matmul(inputs["a"], inputs["b"])}
