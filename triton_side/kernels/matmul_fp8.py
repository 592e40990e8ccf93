"""Matrix product of two float8_e4m3fn matrices with a scale each, forward only: c = (a @ b^T) a_scale b_scale.

Both operands have the inner axis last, as torch.nn.Linear stores its weight. Hopper's tensor cores read eight-bit
operands in no other layout (PTX ISA, wgmma: only 16-bit types can be transposed).

Hopper's tensor cores sum fp8 products with some 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), so errors grow
with the number of terms. DeepSeek adds the tensor cores' sum to a float32 sum every 128 terms. The second accumulator
halves the tile that fits in registers, and the tensor cores wait for the additions: 1060 TFLOP/s at most on an H200,
where one accumulator of 128 x 256 reaches 1466. This kernel keeps one, and starts another sum every CHUNK terms. The
finished sum waits in memory, mostly in L2, and is added in the last chunk's epilogue. With 8192 terms in one sum the
largest error was 0.042 of the result's standard deviation, with 4096 terms 0.028; storing c in bfloat16 alone costs
0.010 to 0.016. (H200, Triton 3.6; `docs/kernels/products.md`.)

Shapes: a [m, k], b [n, k], float8_e4m3fn; a_scale, b_scale [] or [1], float32; c [m, n], bfloat16.
"""


import torch
import triton
import triton.language as tl

from triton_side.calls.declare import Shapes, declare, forward
from triton_side.configs.tuned import tuned
from triton_side.kernels.matmul import FEW_ROWS, few_rows_config, pointer_config
from triton_side.kernels.shared.launch import INTERPRETED, cdiv, check_matrix, device_of
from triton_side.kernels.shared.matmul_tiles import (
    MatmulConfig,
    load_operand,
    load_tile,
    open_operand,
    operands_fit_descriptors,
    programs_for_output,
    store_tile,
    stored_transposed,
    tile_at,
)
from triton_side.kernels.shared.tiles import product_precision, provide_descriptor_memory

FORWARD = (forward("dot", "product"), forward("mul", "scale"))
CHUNK = 4096  # terms of one sum of the tensor cores


def fp8_flops(shapes: Shapes) -> float:
    (m, k), n = shapes["a_ptr"], shapes["b_ptr"][1]
    return 2 * m * n * k + m * n


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left and the right half of a [ROWS, COLUMNS] tile."""
    return tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


@triton.jit
def finish_chunk(
    c, scale, sums_ptr, c_ptr, chunk, CHUNKS: tl.constexpr, row, column, offset, m, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Add the earlier chunks' sum to half a tile of c, from column `offset` of the tile on, and store the result.

    Bounds on rows, instead of conditions, choose what is read and written. Triton cannot flatten a loop whose `if` uses
    the inner loop's result (3.7.1). Whole tiles of float32 would spill 448 bytes a thread; halves spill nothing.
    """
    first = tl.program_id(0) * ROWS
    earlier, later = (chunk > 0).to(tl.int32), (chunk < CHUNKS - 1).to(tl.int32)
    # The inner loop's barriers order a thread's write before another's read in the next chunk.
    c += load_tile(sums_ptr, first, offset, first + earlier * ROWS, 2 * COLUMNS, ROWS, COLUMNS)
    store_tile(sums_ptr, c, first, offset, first + later * ROWS, 2 * COLUMNS, ROWS, COLUMNS)
    store_tile(c_ptr, c * scale, row, column + offset, (1 - later) * m, n, ROWS, COLUMNS)


@declare(*FORWARD, flops=fp8_flops)
@triton.jit
def matmul_fp8_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, sums_ptr, c_ptr, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, CHUNKS: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):
    """Compute c = a @ b * a_scale * b_scale, the inner axis in CHUNKS equal parts.

    sums [programs * BLOCK_M, BLOCK_N]: each program's sum of the earlier parts of its tile.
    """
    a = open_operand(a_ptr, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
    b = open_operand(b_ptr, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K * CHUNKS)
    for part in tl.range(0, tl.cdiv(tiles - program, programs) * CHUNKS, flatten=DESCRIPTORS):
        chunk = part % CHUNKS
        row, column = tile_at(program + part // CHUNKS * programs, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(steps):
            at = (chunk * steps + step) * BLOCK_K
            x = load_operand(a, row, at, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
            y = load_operand(b, at, column, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
            c = tl.dot(x, y, c)
        scale = tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
        if CHUNKS == 1:
            store_tile(c_ptr, c * scale, row, column, m, n, BLOCK_M, BLOCK_N)
        else:
            half: tl.constexpr = BLOCK_N // 2
            left, right = halves(c, BLOCK_M, BLOCK_N)
            finish_chunk(left, scale, sums_ptr, c_ptr, chunk, CHUNKS, row, column, 0, m, n, BLOCK_M, half)
            finish_chunk(right, scale, sums_ptr, c_ptr, chunk, CHUNKS, row, column, half, m, n, BLOCK_M, half)


@tuned
def fp8_config(dtype: torch.dtype, precision: str, descriptors: bool, m: int, n: int) -> MatmulConfig:
    """Tiles of an fp8 product, fastest of a sweep on an H200 (Triton 3.6); see the table in `products.md`."""
    if not descriptors:
        return pointer_config(64, 64, 64, 4, 3)  # 16 bytes do not divide a row
    if m <= FEW_ROWS:
        return few_rows_config(m, n, dtype.itemsize)
    return MatmulConfig(128, 256, 128, num_warps=8, num_stages=4, group_m=16)


def launch_fp8(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, config: MatmulConfig,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Return a @ b * a_scale * b_scale, contiguous, in bfloat16; each scale is one float32 number.

    chunk: the terms of one sum. Tiles of fewer than the 64 rows of a `wgmma` have one sum: Triton multiplies them as
    float16, whose sums are not short of bits.
    """
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    programs = programs_for_output(m, n, config, a.device)
    chunks = max(1, cdiv(k, chunk)) if config.block_m >= 64 else 1
    sums = None
    if chunks > 1:
        sums = torch.empty((programs * config.block_m, config.block_n), dtype=torch.float32, device=a.device)
    with device_of(a):
        if config.descriptors:
            provide_descriptor_memory(a.device)
        matmul_fp8_kernel[(programs,)](
            a, b, a_scale, b_scale, sums, c, m, n, k, *a.stride(), *b.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            CHUNKS=chunks, A_TRANSPOSED=stored_transposed(a), B_TRANSPOSED=stored_transposed(b),
            DESCRIPTORS=config.descriptors, num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return c


def matmul_fp8(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """Return (a @ b.T) * a_scale * b_scale, without gradients.

    Args:
        a: [m, k], float8_e4m3fn, any strides.
        b: [n, k], float8_e4m3fn, any strides.
        a_scale, b_scale: one float32 number each.

    Returns:
        c [m, n], contiguous, bfloat16.

    Raises:
        ValueError: shapes do not fit, devices differ or are not a GPU (outside the interpreter).
        TypeError: a dtype is not the one above.
    """
    _check(a, b, a_scale, b_scale)
    fits = operands_fit_descriptors(a, b.T)
    config = fp8_config(a.dtype, product_precision(a.dtype), fits, a.shape[0], b.shape[0])
    return launch_fp8(a, b.T, a_scale, b_scale, config)


def _check(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> None:
    tensors = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    for name, tensor in tensors.items():
        expected = torch.float32 if "scale" in name else torch.float8_e4m3fn
        if tensor.dtype != expected:
            raise TypeError(f"{name} must be {expected}, got {tensor.dtype}; cast it with .to({expected})")
        if tensor.device != a.device or not (tensor.is_cuda or INTERPRETED):
            raise ValueError(f"all tensors must be on one GPU, got {name} on {tensor.device}; move it with .cuda()")
    check_matrix("a", a)
    check_matrix("b", b)
    if a.shape[1] != b.shape[1] or a_scale.numel() != 1 or b_scale.numel() != 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"a [m, k], b [n, k] and two scales of one element must fit, got {shapes}")


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `matmul_fp8`: a [m, k], b [n, k], a_scale [], b_scale [] -> c [m, n]."""
    return {"c": matmul_fp8(**inputs)}
