import pytest
import torch
import torch.nn.functional as F
from row_kernel_checks import DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import layernorm
from xlafuse.triton_side.kernels.shared.launch import RowConfig

EPS = 1e-6

# Tiles of several rows, persistent programs with a prefetch, the looped kernels, and two programs that share a row in
# the backward pass; none covers 13 x 203 exactly.
CONFIGS = [
    RowConfig(block_rows=1, block_columns=256, num_warps=1, num_stages=1, programs=37),
    RowConfig(block_rows=4, block_columns=256, num_warps=4, num_stages=1, programs=10),
    RowConfig(block_rows=2, block_columns=256, num_warps=2, num_stages=3, programs=5),
    RowConfig(block_rows=1, block_columns=64, num_warps=2, num_stages=1, programs=37),
    RowConfig(block_rows=1, block_columns=64, num_warps=1, num_stages=2, programs=5),
    RowConfig(block_rows=1, block_columns=128, num_warps=1, num_stages=2, programs=5),
]


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    wide, weight, bias = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, weight, bias))
    centred = wide - wide.mean(dim=1, keepdim=True)
    normalised = centred * torch.rsqrt(centred.pow(2).mean(dim=1, keepdim=True) + EPS)
    return (normalised * weight + bias).to(x.dtype)


def agrees(function, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, x, weight, bias, dy=dy)
    low = with_gradients(plain, x, weight, bias, dy=dy)
    reference = with_gradients(plain, x.double(), weight.double(), bias.double(), dy=dy.double())
    rstd = torch.rsqrt(x.double().var(dim=1, keepdim=True, correction=0) + EPS)
    # A sum of n terms errs by up to about sqrt(n) ulps of its value, in the order of either implementation.
    sums = (x.shape[0] ** 0.5 * total for total in reference[2:])
    terms = (reference[0], rstd * dy.double() * weight.double(), *sums)
    return all(is_accurate(*values) for values in zip(got, low, reference, terms, strict=True))


def configured(config: RowConfig, module=layernorm):
    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            y, mean, rstd = module.forward(x, weight, bias, EPS, save=True, config=config)
            ctx.save_for_backward(x, weight, mean, rstd)
            return y

        @staticmethod
        def backward(ctx, dy):
            return module.backward(*ctx.saved_tensors, dy, config)

    return Configured.apply


def default(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return layernorm.layernorm(x, weight, bias, EPS)


@pytest.mark.parametrize("config", [CONFIGS[1], *CONFIGS[4:]], ids=str)
def test_another_gradient_of_x_is_added_before_the_rounding(config: RowConfig) -> None:
    x, weight, bias, dy = operands(13, 203)
    dsum = random(13, 203, seed=9)
    _, mean, rstd = layernorm.forward(x, weight, bias, EPS, save=True, config=config)
    dx, *sums = layernorm.backward(x, weight, mean, rstd, dy, config, dsum=dsum)
    alone, *sums_alone = layernorm.backward(x, weight, mean, rstd, dy, config)
    assert all(torch.equal(one, other) for one, other in zip(sums, sums_alone, strict=True))
    off = torch.finfo(torch.float32).eps * (alone.abs() + dsum.abs())  # sums of fp32 numbers; `alone` was rounded
    assert ((dx - (alone + dsum)).abs() <= off).all()


def operands(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return x, whose rows have means other than zero, weight, bias and dy."""
    return (
        2 * random(rows, columns, dtype=dtype) + 3,
        random(columns, dtype=dtype, seed=1),
        random(columns, dtype=dtype, seed=3),
        random(rows, columns, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(31, 2), (7, 127), (3, 1025)])
def test_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return layernorm.apply({"x": x, "weight": weight, "bias": bias}, eps=EPS)["y"]

    assert agrees(apply, *operands(*shape, dtype))


@pytest.mark.parametrize("columns", [8195, 16387])  # of one program, and of two
def test_rows_too_long_for_registers(columns: int) -> None:
    assert agrees(default, *operands(1, columns))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_configuration_agrees(config: RowConfig) -> None:
    assert agrees(configured(config), *operands(13, 203))


@pytest.mark.parametrize("config", [CONFIGS[1], *CONFIGS[4:]], ids=str)
def test_rows_of_one_value_give_the_bias_and_no_gradient(config: RowConfig) -> None:
    _, weight, bias, dy = operands(11, 203)
    x = torch.arange(11.0, device=dy.device)[:, None].expand(11, 203)
    y, _, dweight, dbias = with_gradients(configured(config), x, weight, bias, dy=dy)
    assert torch.equal(y, bias.expand(11, 203))
    assert (dweight == 0).all() and torch.allclose(dbias, dy.sum(dim=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS[1::3], ids=str)
def test_variance_of_rows_far_from_zero(config: RowConfig) -> None:
    """mean(x^2) - mean(x)^2 in fp32 would be a few units of 6e4^2 2^-24 = 215, or negative."""
    x, weight, bias, _ = operands(5, 203)
    x = (x + 6e4).round()  # integers, so x holds every bit of the variance
    y, mean, rstd = layernorm.forward(x, weight, bias, EPS, save=True, config=config)
    expected = torch.rsqrt(x.double().var(dim=1, correction=0) + EPS)
    assert torch.allclose(mean.double(), x.double().mean(dim=1), rtol=1e-6)
    assert torch.allclose(rstd.double(), expected, rtol=1e-2)


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e15])
def test_small_and_large_values(scale: float) -> None:
    x, weight, bias, dy = operands(5, 200)
    assert agrees(default, scale * x, weight, bias, dy)


def test_rows_too_large_for_their_squares_give_the_bias() -> None:
    x = 3e30 * random(2, 40)
    assert torch.equal(default(x, torch.ones_like(x[0]), torch.ones_like(x[0])), torch.ones_like(x))


def test_agrees_with_torch() -> None:
    x, weight, bias, _ = operands(7, 127)
    assert torch.allclose(default(x, weight, bias), F.layer_norm(x, (127,), weight, bias, EPS), atol=1e-5)


@pytest.mark.parametrize("columns", [1, 100, 4096, 8193, 16384, 16385, 131072])
def test_configurations_cover_the_matrix_and_fit_an_h200(columns: int) -> None:
    for rows in (1, 133, 8192):
        for element_bytes in (2, 4):
            config = layernorm.configure_backward(rows, columns, element_bytes, 132)
            tile = config.block_rows * config.block_columns
            # x, dy and dsum, or both halves of x and dy, the other half's weight, and dsum.
            buffers = 6 if config.block_columns < columns <= 2 * config.block_columns else 3
            assert buffers * (config.num_stages - 1) * tile * element_bytes < 232448 - 1024
            assert 1 <= config.programs <= -(-rows // config.block_rows)
            assert config.block_columns >= columns or config.block_rows == 1
