import math

import pytest
import torch
from full_marks import first_of_each
from row_kernel_checks import DEVICE, is_accurate, random

from xlafuse.triton_side.kernels import matmul_fp8
from xlafuse.triton_side.kernels.shared.fp8_sums import kept_factor
from xlafuse.triton_side.kernels.shared.launch import INTERPRETED
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

SCALES = torch.tensor([0.37, 0.011], device=DEVICE)
# Sizes that no tile covers exactly through pointers; multiples of 16 bytes through descriptors.
CONFIGS = [
    MatmulConfig(16, 32, 32, num_warps=4, num_stages=2, group_m=3, descriptors=False),
    MatmulConfig(32, 32, 64, num_warps=4, num_stages=2, group_m=2),
]


def operands(m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple((random(rows, k, seed=rows) * 8).to(torch.float8_e4m3fn) for rows in (m, n))  # type: ignore[return-value]


def agrees(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare with float64. The interpreter truncates to bfloat16 where a GPU rounds, within the allowed ulp."""
    a_scale, b_scale = SCALES
    reference = (a.double() @ b.double().T) * a_scale.double() * b_scale.double()
    plain = ((a.float() @ b.float().T) * a_scale * b_scale).to(torch.bfloat16)
    return is_accurate(c, plain, reference)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (17, 37, 67), (1, 64, 48), (96, 320, 136)])
def test_agrees_with_float64(m: int, k: int, n: int) -> None:
    a, b = operands(m, k, n)
    assert agrees(matmul_fp8.apply({"a": a, "b": b, "a_scale": SCALES[0], "b_scale": SCALES[1:]})["c"], a, b)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_configuration_agrees(config: MatmulConfig) -> None:
    a, b = operands(56, 96, 72) if config.descriptors else operands(53, 41, 67)
    assert agrees(matmul_fp8.launch_fp8(a, b.T, *SCALES, config), a, b)


@pytest.mark.parametrize("chunk", first_of_each([100, 64, 32]))
@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_sums_in_chunks_agree(descriptors: bool, chunk: int) -> None:
    """Several tiles a program, and a last chunk that is not full."""
    config = MatmulConfig(64, 32, 32, num_warps=4, num_stages=2, descriptors=descriptors)
    a, b = operands(150, 208, 330)
    assert agrees(matmul_fp8.launch_fp8(a, b.T, *SCALES, config, chunk), a, b)


@pytest.mark.parametrize("value", [448.0, 2.0**-9], ids=["largest", "smallest"])
def test_extreme_operands_agree(value: float) -> None:
    """The sum of the earlier chunks is kept in float16, in which the sums of the largest numbers would overflow."""
    config = MatmulConfig(64, 32, 32, num_warps=4, num_stages=2)
    a, b = (torch.full((64, 208), value, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    exact = torch.full((64, 64), value**2 * 208, device=DEVICE, dtype=torch.float64)
    assert is_accurate(matmul_fp8.launch_fp8(a, b.T, one, one, config, 64), exact.to(torch.bfloat16), exact)


@pytest.mark.parametrize("terms", [1, 208, 4096, 8192, 65536, 10**6])
def test_no_sum_overflows_the_16_bits_in_which_it_is_kept(terms: int) -> None:
    factor = kept_factor(terms)
    largest = 448.0**2 * terms
    assert math.log2(factor) == int(math.log2(factor))
    assert torch.finfo(torch.float16).max / 4 < largest * factor < torch.finfo(torch.float16).max / 1.05


def test_strides() -> None:
    a, b = operands(17, 90, 40)
    assert agrees(matmul_fp8.matmul_fp8(a[:, ::2], b[:, 3:48], *SCALES), a[:, ::2], b[:, 3:48])
    assert agrees(matmul_fp8.matmul_fp8(a, b.T.contiguous().T, *SCALES), a, b)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter sums in float32 throughout")
def test_long_sums_leave_the_tensor_cores_accumulator() -> None:
    """With 14 bits, a sum of ones stops at 2^14."""
    a, b = (torch.ones((128, 65536), device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    assert (matmul_fp8.matmul_fp8(a, b, one, one) == 65536).all()


@pytest.mark.skipif(not INTERPRETED, reason="a Hopper GPU could take other operands")
def test_the_kernel_for_hopper_gpus_is_not_replaced_where_it_cannot_run() -> None:
    with pytest.raises(ValueError, match=r"for Hopper GPUs cannot take these operands: it runs on GPUs of compute"):
        matmul_fp8.matmul_fp8(*operands(128, 64, 128), *SCALES, kernels="hopper")
