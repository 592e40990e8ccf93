"""Matrix product of two float8_e4m3fn matrices with a scale each, forward only: c = (a @ b^T) a_scale b_scale.

`matmul`'s kernel, with the scales in its epilogue. Both operands have the inner axis last, as torch.nn.Linear stores
its weight: Hopper's tensor cores read eight-bit operands in no other layout (PTX ISA, wgmma: transposition is for
16-bit types alone).

They also sum fp8 products with some 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2, which saw errors of 2% where
4096 terms were summed so). Every BLOCK_K terms, 128 as there, that sum is therefore added to one in float32: 64
additions a thread for each four `wgmma`. The second accumulator halves the tile that fits in registers: 128 x 256 with
8 warps, as in 16-bit, spills.

Shapes: a [m, k], b [n, k], float8_e4m3fn; a_scale, b_scale [] or [1], float32; c [m, n], bfloat16.
"""

from functools import lru_cache

import torch

from triton_side.calls.declare import computing, forward
from triton_side.kernels._launch import INTERPRETED, check_matrix
from triton_side.kernels.matmul import MatmulConfig, choose_config, few_rows_config, launch_scaled, pointer_config

FORWARD = (forward("dot", "product"), forward("mul", "scale"))


@lru_cache
def fp8_config(dtype: torch.dtype, precision: str, descriptors: bool, m: int, n: int) -> MatmulConfig:
    """Tiles of a product of fp8, in registers and shared memory as compiled for an H200 (Triton 3.7): 176 of 255
    registers a thread and 160 of 227 KiB. Not yet timed; 256 x 128 x 128 with 8 warps and 3 stages (255 registers) and
    64 x 256 x 128 with 8 warps and 4 stages (173) compile without spills, too.
    """
    if not descriptors:
        return pointer_config(64, 64, 64, 4, 3)  # rows that 16 bytes do not divide
    if m <= 64:
        return few_rows_config(dtype.itemsize)
    return MatmulConfig(128, 128, 128, num_warps=8, num_stages=4, group_m=16)


def matmul_fp8(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """(a @ b.T) * a_scale * b_scale, without gradients.

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
    """The block `matmul_fp8`: a [m, k], b [n, k], a_scale [], b_scale [] -> c [m, n]."""
    return {"c": matmul_fp8(**inputs)}
