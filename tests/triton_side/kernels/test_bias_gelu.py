import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES, is_accurate, random, with_gradients
from test_gelu import plain as plain_gelu

from xlafuse.triton_side.kernels import bias_gelu
from xlafuse.triton_side.kernels.bias_gelu import TileConfig

# Tiles that do not divide the matrix, tiles of one row, and programs with several tiles.
CONFIGS = [
    TileConfig(block_rows=1, block_columns=64, num_warps=1, programs=3),
    TileConfig(block_rows=4, block_columns=32, num_warps=2, programs=2),
    TileConfig(block_rows=16, block_columns=256, num_warps=4, programs=1),
]


def plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return plain_gelu(x + bias)


def agrees(function, x: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, x, bias, dy=dy)
    low = with_gradients(plain, x, bias, dy=dy)
    reference = with_gradients(plain, x.double(), bias.double(), dy=dy.double())
    # A sum of n terms errs by up to about sqrt(n) ulps of its value, in the order of either implementation.
    terms = (reference[0], reference[1], x.shape[0] ** 0.5 * reference[2])
    return all(is_accurate(*values) for values in zip(got, low, reference, terms, strict=True))


def configured(config: TileConfig, module=bias_gelu):
    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bias):
            ctx.save_for_backward(x, bias)
            return module.forward(x, bias, config)

        @staticmethod
        def backward(ctx, dy):
            return module.backward(*ctx.saved_tensors, dy, config)

    return Configured.apply


def operands(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return (
        2 * random(rows, columns, dtype=dtype),
        random(columns, dtype=dtype, seed=1),
        random(rows, columns, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 1031), (1031, 1), (64, 64), (3, 2500)])
def test_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert agrees(lambda x, bias: bias_gelu.apply({"x": x, "bias": bias})["y"], *operands(*shape, dtype))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_configuration_agrees(config: TileConfig) -> None:
    assert agrees(configured(config), *operands(37, 203))


def test_the_sum_is_not_rounded_to_16_bits() -> None:
    """-3 + 2^-10 is a tie between two float16 numbers, and y's relative error there would be 11 times that of z."""
    x, bias = torch.full((1, 8), -3.0, device=DEVICE), torch.full((8,), 2.0**-10, device=DEVICE)
    y = bias_gelu.bias_gelu(x.half(), bias.half())
    torch.testing.assert_close(y.double(), plain(x.double(), bias.double()), rtol=2**-10, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_past_the_last_row_a_huge_bias_adds_nothing() -> None:
    """GELU's derivative is 0 * inf, NaN, at a huge bias."""
    x, bias, dy = torch.full((3, 5), -1e30), torch.full((5,), 1e30), torch.ones(3, 5)
    x, bias, dy = (tensor.to(DEVICE) for tensor in (x, bias, dy))
    _, dx, dbias = with_gradients(configured(CONFIGS[1]), x, bias, dy=dy)
    assert (dx == 0.5).all() and (dbias == 1.5).all()


def test_gradient_of_one_input_alone() -> None:
    x, bias, dy = operands(7, 127)
    _, dx, dbias = with_gradients(bias_gelu.bias_gelu, x, bias, dy=dy)
    _, dx_alone = with_gradients(lambda x: bias_gelu.bias_gelu(x, bias), x, dy=dy)
    _, dbias_alone = with_gradients(lambda bias: bias_gelu.bias_gelu(x, bias), bias, dy=dy)
    assert torch.equal(dx, dx_alone) and torch.equal(dbias, dbias_alone)


@pytest.mark.parametrize("columns", [1, 100, 4093, 16384, 131072])
def test_configurations_cover_the_matrix(columns: int) -> None:
    for rows in (1, 133, 8192):
        for element_bytes in (2, 4):
            forward = bias_gelu.configure_forward(rows, columns, element_bytes)
            backward = bias_gelu.configure_backward(rows, columns, element_bytes, 132)
            assert forward.programs * forward.block_rows >= rows  # one tile each
            assert 1 <= backward.programs <= forward.programs
            for config in (forward, backward):
                threads, elements = 32 * config.num_warps, config.block_rows * config.block_columns
                assert elements * element_bytes == 32 * threads  # two loads of 16 bytes
