import pytest
import torch
from row_kernel_checks import DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import linear, linear_residual
from xlafuse.triton_side.kernels.shared.column_sums import partial_sums
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

DESCRIPTORS = MatmulConfig(32, 32, 32, num_warps=4, num_stages=2)


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight + bias


def tensors(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return x, weight, bias, dy."""
    weight = (random(k, n, seed=1) * max(k, 1) ** -0.5).to(dtype)
    return [random(m, k, dtype=dtype), weight, random(n, dtype=dtype, seed=2), random(m, n, dtype=dtype, seed=3)]


def agrees(function, *inputs: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, *inputs, dy=dy)
    low = with_gradients(plain, *inputs, dy=dy)
    reference = with_gradients(plain, *(x.double() for x in inputs), dy=dy.double())
    return all(is_accurate(*three) for three in zip(got, low, reference, strict=True))


def applied(*inputs: torch.Tensor) -> torch.Tensor:
    return linear.apply(dict(zip(("x", "weight", "bias"), inputs, strict=True)))["y"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(17, 37, 67), (40, 64, 136)])
def test_agrees_with_float64(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    *inputs, dy = tensors(m, k, n, dtype)
    assert agrees(applied, *inputs, dy=dy)


def test_agrees_through_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "matmul_config", lambda *chosen: DESCRIPTORS)
    *inputs, dy = tensors(40, 64, 136, torch.float16)
    assert agrees(applied, *inputs, dy=dy)


@pytest.mark.parametrize("shape", [(1, 1), (67, 3), (2000, 67), (40, 1030)])
def test_partial_sums_by_several_programs_of_several_tiles(shape: tuple[int, int]) -> None:
    x = random(*shape).round()  # sums of small integers are exact
    assert torch.equal(partial_sums(x).sum(0), x.sum(0))


@pytest.mark.parametrize("rows", [1, 64, 65, 300])
def test_the_gradient_of_the_bias_sums_few_and_many_rows(rows: int) -> None:
    dy = random(rows, 67, dtype=torch.float16).mul(4).round()  # sums of small integers are exact
    for stored in (dy, dy.T.contiguous().T):
        assert torch.equal(linear.bias_gradient(stored), dy.sum(0))


def test_the_residual_has_the_output_s_gradient() -> None:
    x, weight, _, dy = tensors(17, 37, 67)
    residual = random(17, 67, seed=4)

    def applied(*inputs: torch.Tensor) -> torch.Tensor:
        return linear_residual.apply(dict(zip(("x", "weight", "residual"), inputs, strict=True)))["y"]

    got = with_gradients(applied, x, weight, residual, dy=dy)
    expected = with_gradients(plain, x, weight, residual, dy=dy)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
