import pytest
import torch
from row_kernel_checks import DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import rmsnorm
from xlafuse.triton_side.kernels.shared.launch import RowConfig

EPS = 1e-6

# Tiles of several rows, persistent programs with a prefetch, and the looped kernels; none covers 13 x 203 exactly.
CONFIGS = [
    RowConfig(block_rows=1, block_columns=256, num_warps=1, num_stages=1, programs=37),
    RowConfig(block_rows=4, block_columns=256, num_warps=4, num_stages=1, programs=10),
    RowConfig(block_rows=2, block_columns=256, num_warps=2, num_stages=3, programs=5),
    RowConfig(block_rows=1, block_columns=64, num_warps=2, num_stages=1, programs=37),
    RowConfig(block_rows=1, block_columns=64, num_warps=1, num_stages=2, programs=5),
]


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.pow(2).mean(dim=1, keepdim=True) + EPS)
    return normalised.to(x.dtype) * weight


def agrees(function, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, x, weight, dy=dy)
    low = with_gradients(plain, x, weight, dy=dy)
    reference = with_gradients(plain, x.double(), weight.double(), dy=dy.double())
    rstd = torch.rsqrt(x.double().pow(2).mean(dim=1, keepdim=True) + EPS)
    # A sum of n terms errs by up to about sqrt(n) ulps of its value, in the order of either implementation.
    terms = (reference[0], rstd * dy.double() * weight.double(), x.shape[0] ** 0.5 * reference[2])
    return all(is_accurate(*values) for values in zip(got, low, reference, terms, strict=True))


def configured(config: RowConfig, module=rmsnorm):
    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            y, rstd = module.forward(x, weight, EPS, save_rstd=True, config=config)
            ctx.save_for_backward(x, weight, rstd)
            return y

        @staticmethod
        def backward(ctx, dy):
            return module.backward(*ctx.saved_tensors, dy, config)

    return Configured.apply


def of_sum(config: RowConfig | None, module=rmsnorm):
    """Return a launch of the kernels with a residual: x, residual, weight, dy, dsum -> y, sum, and both gradients."""

    def launch(x, residual, weight, dy, dsum):
        y, total, rstd = module.forward_with_residual(x, residual, weight, EPS, save_rstd=True, config=config)
        return y, total, *module.backward(total, weight, rstd, dy, config, dsum=dsum)

    return launch


def operands(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return (
        2 * random(rows, columns, dtype=dtype),
        random(columns, dtype=dtype, seed=1),
        random(rows, columns, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 1021), (31, 1), (64, 64), (7, 127), (3, 1025), (5, 8192), (2, 17001)])
def test_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert agrees(lambda x, weight: rmsnorm.apply({"x": x, "weight": weight}, eps=EPS)["y"], *operands(*shape, dtype))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_configuration_agrees(config: RowConfig) -> None:
    assert agrees(configured(config), *operands(13, 203))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [None, CONFIGS[4]], ids=str)
def test_the_norm_is_of_the_rounded_sum(config, dtype: torch.dtype) -> None:
    x, weight, dy = operands(9, 203, dtype)
    residual, dsum = (random(9, 203, dtype=dtype, seed=seed) for seed in (3, 4))
    y, total, dx, dweight = of_sum(config)(x, residual, weight, dy, dsum)
    expected, rstd = rmsnorm.forward(x + residual, weight, EPS, save_rstd=True, config=config)
    assert torch.equal(total, x + residual) and torch.equal(y, expected)
    alone, dweight_alone = rmsnorm.backward(total, weight, rstd, dy, config)
    assert torch.equal(dweight, dweight_alone)
    # Both are sums of fp32 numbers; `alone` was rounded.
    off = torch.finfo(dtype).eps * (alone.float().abs() + dsum.float().abs())
    assert ((dx.float() - (alone.float() + dsum.float())).abs() <= off).all()


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e15])
def test_small_and_large_values(scale: float) -> None:
    x, weight, dy = operands(5, 200)
    assert agrees(lambda x, weight: rmsnorm.rmsnorm(x, weight, EPS), scale * x, weight, dy)


def test_rows_of_zeros_give_zero() -> None:
    x, weight, _ = operands(3, 50)
    assert (rmsnorm.rmsnorm(torch.zeros_like(x), weight, EPS) == 0).all()


def test_gradient_of_one_input_alone() -> None:
    x, weight, dy = operands(7, 127)
    _, dx, dweight = with_gradients(lambda x, weight: rmsnorm.rmsnorm(x, weight, EPS), x, weight, dy=dy)
    _, dx_alone = with_gradients(lambda x: rmsnorm.rmsnorm(x, weight, EPS), x, dy=dy)
    _, dweight_alone = with_gradients(lambda weight: rmsnorm.rmsnorm(x, weight, EPS), weight, dy=dy)
    assert torch.equal(dx, dx_alone) and torch.equal(dweight, dweight_alone)
