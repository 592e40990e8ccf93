"""Matrix product of two float8_e4m3fn matrices with a scale each, forward only: c = (a @ b^T) a_scale b_scale.

`matmul.py`'s kernel applies the scales in its epilogue. Both operands have the inner axis last, as torch.nn.Linear
stores its weight. Hopper's tensor cores read eight-bit operands in no other layout (PTX ISA, wgmma: only 16-bit types
can be transposed).

Tensor cores sum fp8 products with some 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2, which found errors of 2%
after 4096 terms). So every BLOCK_K terms (128, as in that paper) the kernel adds that sum to a float32 sum, 64
additions a thread for every four `wgmma`. The second accumulator halves the tile that fits in registers: 128 x 256 with
8 warps, the 16-bit tile, spills.

Shapes: a [m, k], b [n, k], float8_e4m3fn; a_scale, b_scale [] or [1], float32; c [m, n], bfloat16.
"""

from functools import lru_cache

import torch

from triton_side.calls.declare import computing, forward
from triton_side.kernels.matmul import choose_config, few_rows_config, launch_scaled, pointer_config
from triton_side.kernels.shared.launch import INTERPRETED, check_matrix
from triton_side.kernels.shared.matmul_tiles import MatmulConfig

FORWARD = (forward("dot", "product"), forward("mul", "scale"))


@lru_cache
def fp8_config(dtype: torch.dtype, precision: str, descriptors: bool, m: int, n: int) -> MatmulConfig:
    """Tiles of an fp8 product, chosen from code compiled for an H200 (Triton 3.7), not timed.

    They take 176 of 255 registers a thread and 160 of 227 KiB of shared memory. Two others also compile without spills:
    256 x 128 x 128 with 8 warps and 3 stages (255 registers), and 64 x 256 x 128 with 8 warps and 4 stages (173).
    """
    if not descriptors:
        return pointer_config(64, 64, 64, 4, 3)  # 16 bytes do not divide a row
    if m <= 64:
        return few_rows_config(dtype.itemsize)
    return MatmulConfig(128, 128, 128, num_warps=8, num_stages=4, group_m=16)


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
    with computing(*FORWARD, c_ptr="c"):
        return launch_scaled(a, b.T, a_scale, b_scale, choose_config(fp8_config, a, b.T))


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
