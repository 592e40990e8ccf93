"""Float32 products on the tensor cores: what three TF32 products lose, and the copies that kernels read."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from row_kernel_checks import DEVICE, random

from xlafuse.triton_side.configs import tuned
from xlafuse.triton_side.configs.table import Gpu
from xlafuse.triton_side.kernels.attention import attention
from xlafuse.triton_side.kernels.decode_attention import choose_product
from xlafuse.triton_side.kernels.matmul import (
    copied_operands_config,
    launch_matmul,
    many_rows_config,
    matmul,
    matmul_config,
)
from xlafuse.triton_side.kernels.shared import tiles
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig
from xlafuse.triton_side.kernels.shared.tf32_operand import prepare_operands
from xlafuse.triton_side.kernels.shared.tiles import split_tf32

LARGEST_TF32 = (2 - 2**-10) * 2.0**127
OVERFLOWS = (2 - 2**-11) * 2.0**127
LARGEST = torch.finfo(torch.float32).max
THREE = copied_operands_config("tf32x3")
INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, 1.0, -1 - 2**-12, 3.4019e38, -LARGEST_TF32, LARGEST, -LARGEST, 1e-30, 2.0**-126, INF, -INF, NAN]

Product = Callable[[np.ndarray, np.ndarray], np.ndarray]


def cut(x: np.ndarray) -> np.ndarray:
    """Drop the 13 low bits, as tensor cores do with an operand."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """Round as PTX's `cvt.rna.tf32.f32` does."""
    return np.where(np.isnan(x), x, ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32))


def saturated(x: np.ndarray) -> np.ndarray:
    """Round as `split_tf32` does."""
    return np.where(np.abs(x) > LARGEST_TF32, cut(x), rounded(x))


def three_products(a: np.ndarray, b: np.ndarray, big: Callable[[np.ndarray], np.ndarray] = rounded) -> np.ndarray:
    """Return a @ b as Triton's "tf32x3" computes it, with exact sums of 32 terms, added in float32."""
    with np.errstate(all="ignore"):
        (a_big, b_big), c = (big(a), big(b)), np.zeros((len(a), b.shape[1]), np.float32)
        a_rest, b_rest = cut(a - a_big), cut(b - b_big)
        for start in range(0, a.shape[1], 32):
            k = slice(start, start + 32)
            left = [x[:, k].astype(np.float64) for x in (a_rest, a_big, a_big)]
            right = [x[k].astype(np.float64) for x in (b_big, b_rest, b_big)]
            small = left[0] @ right[0] + left[1] @ right[1]
            c += (np.where(np.isnan(small), 0, small) + left[2] @ right[2]).astype(np.float32)
    return c


def one_after_the_other(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a @ b by multiply-adds in float32, with sums of 32 terms."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for start in range(0, a.shape[1], 32):
        c = np.zeros_like(total)
        for k in range(start, min(start + 32, a.shape[1])):
            c = (c + a[:, k : k + 1].astype(np.float64) * b[k]).astype(np.float32)
        total += c
    return total


def drawn(k: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(k)
    return generator.standard_normal((96, k), "float32"), generator.standard_normal((k, 96), "float32")


def error(product: Product, k: int) -> float:
    """Return the largest error of products of k terms over the rms of the results."""
    a, b = drawn(k)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.abs(product(a, b) - exact).max() / np.sqrt(np.mean(exact**2)))


@pytest.mark.parametrize("k", [64, 768, 4096])
def test_three_products_are_as_accurate_as_ieee_arithmetic(k: int) -> None:
    assert error(three_products, k) < 2 * error(one_after_the_other, k)
    assert error(lambda a, b: three_products(rounded(a), rounded(b)), k) > 100 * error(one_after_the_other, k)


def with_special(value: float, *, in_b: bool) -> tuple[np.ndarray, np.ndarray]:
    a, b = drawn(64)
    if abs(value) > 1 and np.isfinite(value):
        (a if in_b else b)[:] *= np.float32(2**-10)  # so that no result overflows
    (b if in_b else a)[17, 23] = value
    return a, b


def agree(got: np.ndarray, a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether `got` is a @ b, the same where that is not finite, and within 2^-20 of its terms elsewhere."""
    with np.errstate(all="ignore"):
        wide = a.astype(np.float64) @ b.astype(np.float64)
        terms = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
        finite = np.isfinite(wide)
        same = np.array_equal(got[~finite], wide[~finite].astype(np.float32), equal_nan=True)
        return same and bool((np.abs(got - wide)[finite] <= 2**-20 * terms[finite] + 2.0**-120).all())


@pytest.mark.parametrize("in_b", [False, True])
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_in_a_simulation(value: float, in_b: bool) -> None:
    """Rounding makes numbers from OVERFLOWS on infinite, unless they are cut off."""
    a, b = with_special(value, in_b=in_b)
    assert agree(three_products(a, b, saturated), a, b)
    assert agree(three_products(a, b), a, b) == (not OVERFLOWS <= abs(value) < INF)


@pytest.mark.parametrize("in_b", [False, True])
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_in_a_product_with_copied_operands(value: float, in_b: bool) -> None:
    a, b = with_special(value, in_b=in_b)
    got = launch_matmul(*(torch.tensor(x, device=DEVICE) for x in (a, b)), THREE)
    assert agree(got.cpu().numpy(), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("in_b", [False, True])
@pytest.mark.parametrize("value", [x for x in SPECIAL if not OVERFLOWS <= abs(x) < INF])
def test_special_values_in_tritons_own_three_products(value: float, in_b: bool) -> None:
    a, b = with_special(value, in_b=in_b)
    config = many_rows_config(torch.float32, "tf32x3", False)
    got = launch_matmul(*(torch.tensor(x, device=DEVICE) for x in (a, b)), config)
    assert agree(got.cpu().numpy(), a, b)


@pytest.mark.parametrize(
    "config", [THREE, replace(THREE, splits=2), many_rows_config(torch.float32, "tf32x3", False)], ids=str
)
@pytest.mark.parametrize("exponent", [-100, 50])
def test_small_and_large_numbers_keep_their_accuracy(exponent: int, config: MatmulConfig) -> None:
    a, b = (torch.tensor(x, device=DEVICE) for x in drawn(64))
    exact = a.double() @ b.double()
    got = launch_matmul(a * 2.0**exponent, b, config).double() * 2.0**-exponent
    assert (got - exact).abs().max() <= 2**-20 * (a.abs() @ b.abs()).max()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_in_three_products_is_as_accurate_as_in_ieee_products(head_dim: int) -> None:
    q, k, v = (random(2, 4, 1024, head_dim, seed=seed) for seed in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    with tiles.ieee_products():
        ieee = (attention(q, k, v) - exact).abs().max()
    assert (attention(q, k, v) - exact).abs().max() < 2 * ieee


@triton.jit
def _split(x_ptr, big_ptr, rest_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    big, rest = split_tf32(tl.load(x_ptr + at))
    tl.store(big_ptr + at, big)
    tl.store(rest_ptr + at, rest)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    big, rest = torch.empty_like(x), torch.empty_like(x)
    _split[(1,)](x, big, rest, COUNT=x.numel())
    return big, rest


def low_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32) & 0x1FFF


def test_a_number_is_the_sum_of_two_tf32_numbers() -> None:
    x = random(1024) * torch.logspace(-30, 30, 1024, device=DEVICE)
    x[:4] = torch.tensor([LARGEST, -LARGEST, 3.40199e38, 0.0])
    big, rest = split(x)
    assert torch.equal(big.double() + rest.double(), x.double())
    assert not low_bits(big).any() and low_bits(x).any()
    assert (rest.abs() <= x.abs() * 2**-10).all() and (rest.abs()[4:] <= x.abs()[4:] * 2**-11).all()


def test_parts_of_a_number_that_is_not_finite_tell_it() -> None:
    big, rest = split(torch.tensor([INF, -INF, NAN, -NAN], device=DEVICE))
    assert big[0] == INF and big[1] == -INF and rest.isnan().all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("k", "n"), [(64, 64), (67, 130), (1, 5), (200, 3)])
def test_copies_hold_the_parts_along_the_inner_axis(k: int, n: int, transposed: bool) -> None:
    b = random(k, n)
    b = b.T.contiguous().T if transposed else b
    flat = torch.zeros(triton.next_power_of_2(k * n), device=DEVICE)
    flat[: k * n] = b.flatten()
    big, rest = (part[: k * n].view(k, n) for part in split(flat))
    for precision, parts in (("tf32", (big,)), ("tf32x3", (big, rest))):
        rows, columns = prepare_operands(b.T, b, precision)
        assert torch.equal(columns, torch.cat(parts, dim=1)) and torch.equal(rows, columns.T)
        assert tiles.fits_descriptor(rows) and tiles.fits_descriptor(columns.T)


def test_an_operand_that_is_rounded_already_is_not_copied() -> None:
    a, b = random(64, 32), random(32, 64)
    rows, _ = prepare_operands(a, b, "tf32")
    assert prepare_operands(rows, b, "tf32", a_is_tf32=True)[0] is rows
    for other, precision in ((rows.T, "tf32"), (rows, "tf32x3")):
        assert prepare_operands(other, random(other.shape[1], 64), precision, a_is_tf32=True)[0] is not other


@pytest.fixture
def setting() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("capability", "precision"), [((9, 0), "tf32x3"), ((8, 9), "ieee"), ((10, 0), "ieee")])
def test_only_hopper_gpus_take_three_products(
    capability: tuple[int, int], precision: str, setting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "gpu", lambda: Gpu("a GPU", capability, 100, 100 << 10))
    torch.set_float32_matmul_precision("highest")
    assert tiles.product_precision(torch.float32) == precision
    torch.set_float32_matmul_precision("high")
    config = matmul_config.__wrapped__(torch.float32, "tf32", True, 8192, 768, 2048, False)
    assert config.descriptors == (precision == "tf32x3")


def test_a_caller_may_ask_for_ieee_products(setting: None) -> None:
    torch.set_float32_matmul_precision("highest")
    assert tiles.product_precision(torch.float32) == "tf32x3"
    with tiles.ieee_products():
        assert tiles.product_precision(torch.float32) == "ieee"
        torch.set_float32_matmul_precision("high")
        assert tiles.product_precision(torch.float32) == "tf32"
    assert tiles.product_precision(torch.bfloat16) == "ieee"


@pytest.mark.gpu
def test_ieee_products_round_only_their_sums(setting: None) -> None:
    """The square of 1 + 2^-12 + 2^-23 has a term in 2^-24 from two rests, which three TF32 products leave out."""
    x = torch.full((512, 64), 1 + 2**-12 + 2**-23, device=DEVICE)
    y = torch.zeros(64, 512, device=DEVICE)
    y[0] = 1 + 2**-12 + 2**-23
    exact = (x.double() @ y.double()).float()
    with tiles.ieee_products():
        assert torch.equal(matmul(x, y), exact)
    assert not torch.equal(matmul(x, y), exact)


@pytest.mark.parametrize(("group", "precision", "rows"), [(1, "ieee", 1), (6, "ieee", 8), (16, "tf32x3", 16)])
def test_few_heads_of_a_cache_stay_off_the_tensor_cores(group: int, precision: str, rows: int, setting: None) -> None:
    torch.set_float32_matmul_precision("highest")
    assert choose_product(group, torch.float32) == (precision, rows)
    torch.set_float32_matmul_precision("high")
    assert choose_product(group, torch.float32) == ("tf32", max(16, rows))
    assert choose_product(group, torch.float16)[1] == max(16, rows)
