"""Matrix product of two float8_e4m3fn matrices with a scale each, forward only: c = (a @ b^T) a_scale b_scale.

Both operands have the inner axis last, as torch.nn.Linear stores its weight. Hopper's tensor cores read eight-bit
operands in no other layout (PTX ISA, wgmma: only 16-bit types can be transposed).

Hopper's tensor cores sum fp8 products with some 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), so errors grow
with the number of terms. DeepSeek adds the tensor cores' sum to a float32 sum every 128 terms. The second accumulator
halves the tile that fits in registers, and the tensor cores wait for the additions: 1060 TFLOP/s at most on an H200,
where one accumulator of 128 x 256 reaches 1466 (Triton 3.6; `docs/kernels/products.md`). This kernel keeps one, and
starts another sum every CHUNK terms. The sum so far stays in registers as float16 (`shared/fp8_sums.py`).

On a Hopper GPU `hopper/matmul_fp8.py` can compute the same; `hopper_problem` names the conditions.

Shapes: a [m, k], b [n, k], float8_e4m3fn; a_scale, b_scale [] or [1], float32; c [m, n], bfloat16.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls.declare import Shapes, declare, forward
from xlafuse.triton_side.configs.tuned import has_small_blocks, tuned
from xlafuse.triton_side.kernels.hopper import matmul_fp8 as hopper
from xlafuse.triton_side.kernels.hopper.parts import is_hopper
from xlafuse.triton_side.kernels.matmul import FEW_ROWS, MULTIPROCESSORS, few_rows_config, pointer_config
from xlafuse.triton_side.kernels.shared.fp8_sums import kept_factor
from xlafuse.triton_side.kernels.shared.launch import INTERPRETED, cdiv, check_matrix, device_of
from xlafuse.triton_side.kernels.shared.matmul_tiles import (
    MatmulConfig,
    load_operand,
    open_operand,
    operands_fit_descriptors,
    programs_for_output,
    store_tile,
    stored_transposed,
    tile_at,
)
from xlafuse.triton_side.kernels.shared.tiles import fits_descriptor, product_precision, provide_descriptor_memory

FORWARD = (forward("dot", "product"), forward("mul", "scale"))
CHUNK = 4096  # terms of one sum of the tensor cores


def fp8_flops(shapes: Shapes) -> float:
    (m, k), n = shapes["a_ptr"], shapes["b_ptr"][1]
    return 2 * m * n * k + m * n


# A 16-bit tensor that stays in registers across a loop takes a register for each number.
@triton.jit
def pack(x, y):
    """Return integers with x and y, rounded to float16, in their lower and upper halves."""
    low = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = y.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high << 16)


@triton.jit
def unpack(packed):
    """Return the numbers of `pack` in float32."""
    low = packed.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (packed >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@declare(*FORWARD, flops=fp8_flops)
@triton.jit
def matmul_fp8_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, kept_factor, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, CHUNKS: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):
    """Compute c = a @ b * a_scale * b_scale, the inner axis in CHUNKS equal parts.

    The sum of the earlier parts stays in registers, times kept_factor.
    """
    a = open_operand(a_ptr, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
    b = open_operand(b_ptr, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K * CHUNKS)
    kept = tl.zeros([BLOCK_M, BLOCK_N // 2], tl.uint32)
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
            x, y = tl.split(tl.reshape(c, [BLOCK_M, BLOCK_N // 2, 2]))
            earlier_x, earlier_y = unpack(tl.where(chunk > 0, kept, 0))
            x = x * kept_factor + earlier_x
            y = y * kept_factor + earlier_y
            kept = pack(x, y)
            # A bound on rows, instead of a condition, chooses what is written. Triton cannot flatten a loop whose `if`
            # uses the inner loop's result (3.7.1).
            rows = m * (chunk == CHUNKS - 1).to(tl.int32)
            result = tl.reshape(tl.join(x, y), [BLOCK_M, BLOCK_N]) * (scale / kept_factor)
            store_tile(c_ptr, result, row, column, rows, n, BLOCK_M, BLOCK_N)


@tuned
def fp8_config(dtype: torch.dtype, precision: str, descriptors: bool, m: int, n: int) -> MatmulConfig:
    """Tiles of an fp8 product, fastest of a sweep on an H200 (Triton 3.6); see the table in `products.md`."""
    if not descriptors:
        return pointer_config(64, 64, 64, 4, 3)  # 16 bytes do not divide a row
    if m <= FEW_ROWS:
        config = few_rows_config(m, n, dtype.itemsize, transposed=False)
        # Narrow outputs then have few programs, so each prefetches more.
        return replace(config, num_stages=8) if n <= 64 * MULTIPROCESSORS else config
    if has_small_blocks():
        return MatmulConfig(128, 128, 128, num_warps=8, num_stages=3, group_m=16)
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
    with device_of(a):
        if config.descriptors:
            provide_descriptor_memory(a.device)
        matmul_fp8_kernel[(programs,)](
            a, b, a_scale, b_scale, c, kept_factor(k), m, n, k, *a.stride(), *b.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            CHUNKS=chunks, A_TRANSPOSED=stored_transposed(a), B_TRANSPOSED=stored_transposed(b),
            DESCRIPTORS=config.descriptors, num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return c


def hopper_problem(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Return why the kernel of `hopper/` cannot take a [m, k] and b [n, k], or None."""
    if INTERPRETED or not is_hopper(a.device):
        return "it runs on GPUs of compute capability 9.0 only"
    if not (fits_descriptor(a) and fits_descriptor(b)) or b.shape[0] % 8:
        return "TMA reads and writes rows of whole 16 bytes, 16 bytes aligned: of a, b and c"
    if not 0 < a.shape[1] <= hopper.MOST_TERMS:
        return f"it sums 1 to {hopper.MOST_TERMS} terms"
    return None


def matmul_fp8(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, kernels: str = "auto"
) -> torch.Tensor:
    """Return (a @ b.T) * a_scale * b_scale, without gradients.

    Args:
        a: [m, k], float8_e4m3fn, any strides.
        b: [n, k], float8_e4m3fn, any strides.
        a_scale, b_scale: one float32 number each.
        kernels: "hopper" for the kernel of `hopper/`, "portable" for that of this file, or "auto" for the former
            where it can take the operands and there are more than FEW_ROWS rows.

    Returns:
        c [m, n], contiguous, bfloat16.

    Raises:
        ValueError: shapes do not fit, devices differ or are not a GPU (outside the interpreter), or the kernel asked
            for cannot take the operands.
        TypeError: a dtype is not the one above.
    """
    _check(a, b, a_scale, b_scale)
    if kernels not in ("auto", "hopper", "portable"):
        raise ValueError(f"kernels must be 'auto', 'hopper' or 'portable', got {kernels!r}")
    wanted = kernels == "hopper" or kernels == "auto" and a.shape[0] > FEW_ROWS
    problem = hopper_problem(a, b) if wanted else None
    if kernels == "hopper" and problem:
        raise ValueError(f"the kernel for Hopper GPUs cannot take these operands: {problem}")
    if wanted and problem is None:
        return hopper.launch_fp8(a, b, a_scale, b_scale)
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


def apply(inputs: dict[str, torch.Tensor], kernels: str = "auto") -> dict[str, torch.Tensor]:
    """Run the block `matmul_fp8`: a [m, k], b [n, k], a_scale [], b_scale [] -> c [m, n]."""
    return {"c": matmul_fp8(**inputs, kernels=kernels)}
