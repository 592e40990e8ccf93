import pytest
import torch
import triton
import triton.language as tl
from row_kernel_checks import DEVICE, random

from xlafuse.triton_side.kernels.attention import attention
from xlafuse.triton_side.kernels.matmul import matmul
from xlafuse.triton_side.kernels.shared import tiles


@triton.jit
def _round(x_ptr, y_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(y_ptr + at, tiles.round_to_tf32(tl.load(x_ptr + at)))


def rounded(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _round[(1,)](x, y, COUNT=x.numel())
    return y


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_tf32_is_the_nearest_with_ten_bits_of_mantissa() -> None:
    x = random(1024) * torch.logspace(-30, 30, 1024, device=DEVICE)
    mantissa, exponent = torch.frexp(x.double())
    scaled = mantissa * 2**11
    nearest = torch.ldexp(torch.sign(scaled) * torch.floor(scaled.abs() + 0.5), exponent - 11)
    assert (rounded(x).double() == nearest).all()
    assert (rounded(x) != x).any()


def test_tf32_of_ties_and_special_values() -> None:
    ulp, largest_nan = 2.0**-10, torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
    inf = float("inf")
    x = torch.tensor([1 + ulp / 2, -1 - 1.5 * ulp, 2 - ulp / 4, 0.0, 3.4e38, inf, -inf, largest_nan], device=DEVICE)
    expected = torch.tensor([1 + ulp, -1 - 2 * ulp, 2.0, 0.0, 3.4e38, inf, -inf, largest_nan], device=DEVICE)
    expected[4] = rounded(x)[4]
    assert torch.equal(rounded(x).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert abs(rounded(x)[4].item() / 3.4e38 - 1) < ulp


def test_tf32_products_take_rounded_operands(tf32) -> None:
    a, b = random(32, 64), random(64, 32, seed=1)
    exact = rounded(a.flatten()).view_as(a).double() @ rounded(b.flatten()).view_as(b).double()
    assert (matmul(a, b).double() - exact).abs().max() < 1e-4
    assert (matmul(a, b).double() - a.double() @ b.double()).abs().max() > 1e-3


def test_tf32_attention_rounds(tf32) -> None:
    q, k, v = (random(1, 1, 48, 16, seed=seed) for seed in range(3))
    error = (attention(q, k, v) - torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)).abs().max()
    assert 1e-5 < error < 1e-2
