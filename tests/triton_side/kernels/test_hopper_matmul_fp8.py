"""The fp8 product for Hopper GPUs against float64. It runs on such a GPU only; Gluon has no interpreter."""

import pytest
import torch
from row_kernel_checks import DEVICE, NanEmpty, random
from test_hopper_attention import on_hopper
from test_matmul_fp8 import SCALES, agrees, operands

from xlafuse.triton_side.kernels.hopper.matmul_fp8 import MOST_TERMS, launch_fp8
from xlafuse.triton_side.kernels.matmul_fp8 import hopper_problem, matmul_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper(), reason="needs a GPU of compute capability 9.0")]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with NanEmpty():
        return matmul_fp8(a, b, *SCALES, kernels="hopper")


def fresh_operands(m: int, k: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = ((random(rows, k, seed=seed + i) * 8).to(torch.float8_e4m3fn) for i, rows in enumerate((m, n)))
    return a, b


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 16, 8), (64, 128, 256), (65, 144, 264), (300, 1040, 520), (1021, 2064, 1000),
        (3000, 4112, 2504),  # several tiles and sums a program
    ],
)
def test_agrees_with_float64(m: int, k: int, n: int, seed: int) -> None:
    a, b = fresh_operands(m, k, n, seed)
    assert agrees(product(a, b), a, b)


@pytest.mark.parametrize("chunk", [1, 128, 300, 1024, 100_000])
def test_sums_in_chunks_agree(chunk: int) -> None:
    a, b = operands(2100, 1040, 2072)
    assert agrees(launch_fp8(a, b, *SCALES, chunk), a, b)


def test_strides() -> None:
    a, b = fresh_operands(513, 1024, 800, 3)
    assert agrees(product(a[:, 16:976], b[8:, 64:]), a[:, 16:976], b[8:, 64:])
    assert agrees(product(a[::3], b[::5]), a[::3], b[::5])


def test_repetitions_are_equal() -> None:
    a, b = operands(2000, 4112, 3000)
    first = product(a, b)
    assert all(torch.equal(product(a, b), first) for _ in range(50))


@pytest.mark.parametrize("value", [448.0, 1.0, 2.0**-3])
def test_equal_terms(value: float) -> None:
    """The longest sums, which the tensor cores alone would not reach, and the largest, which would overflow float16."""
    a, b = (torch.full((130, MOST_TERMS), value, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    c = matmul_fp8(a, b[:128], one, one, kernels="hopper")
    # The tensor cores cut each product off at the 14th bit of the sum, so the last of 2048 equal terms lose most. 1.5%
    # was seen for 448, and nothing for powers of two.
    assert (c.double() / (value**2 * MOST_TERMS) - 1).abs().max() < 2**-5


def test_nan_stays() -> None:
    a, b = operands(200, 4112, 264)
    a[3, 4000] = float("nan")
    c = product(a, b)
    assert c[3].isnan().all() and c.isnan().sum() == 264


def test_operands_that_it_cannot_take() -> None:
    a, b = operands(128, 256, 128)
    assert hopper_problem(a, b) is None
    assert hopper_problem(a[:, 1:], b[:, 1:]) and hopper_problem(a, b[:127]) and hopper_problem(a.T, b.T)
    assert hopper_problem(a.repeat(1, MOST_TERMS // 256 + 1), b.repeat(1, MOST_TERMS // 256 + 1))
    with pytest.raises(ValueError, match="cannot take these operands: TMA reads and writes rows of whole 16 bytes"):
        matmul_fp8(a, b[:127], *SCALES, kernels="hopper")
    assert agrees(matmul_fp8(a, b[:127], *SCALES), a, b[:127])
