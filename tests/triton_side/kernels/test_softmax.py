import pytest
import torch
from row_kernel_checks import DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import softmax
from xlafuse.triton_side.kernels.shared.launch import RowConfig

# Tiles of several rows, persistent grids with a prefetch, looped kernels; none covers 13 x 203 exactly. In 16 bits a
# prefetching tile of one row takes the kernel with one reduction.
CONFIGS = [
    RowConfig(block_rows=1, block_columns=256, num_warps=1, num_stages=1, programs=37),
    RowConfig(block_rows=4, block_columns=256, num_warps=4, num_stages=1, programs=10),
    RowConfig(block_rows=2, block_columns=256, num_warps=2, num_stages=3, programs=5),
    RowConfig(block_rows=1, block_columns=64, num_warps=2, num_stages=1, programs=37),
    RowConfig(block_rows=1, block_columns=64, num_warps=1, num_stages=2, programs=5),
    RowConfig(block_rows=1, block_columns=256, num_warps=1, num_stages=2, programs=5),
]
configs_of_rows = pytest.mark.parametrize("config", [None, *CONFIGS[-2:]], ids=["row", "looped", "prefetched"])


def plain(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    maximum = wide.amax(dim=1, keepdim=True)
    numerator = torch.exp(wide - torch.where(maximum == -torch.inf, 0.0, maximum))
    total = numerator.sum(dim=1, keepdim=True)
    return (numerator / torch.where(total == 0, 1.0, total)).to(x.dtype)


def agrees(function, x: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, x, dy=dy)
    low = with_gradients(plain, x, dy=dy)
    reference = with_gradients(plain, x.double(), dy=dy.double())
    y_term, dx_term = reference[0], reference[0] * dy.double()
    return is_accurate(got[0], low[0], reference[0], y_term) and is_accurate(got[1], low[1], reference[1], dx_term)


def configured(config: RowConfig, module=softmax):
    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = module.forward(x, config)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            return module.backward(*ctx.saved_tensors, dy, config)

    return Configured.apply


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 1021), (31, 1), (64, 64), (7, 127), (3, 1025), (2, 9001), (2, 40001)])
def test_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, dy = 3 * random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    assert agrees(lambda x: softmax.apply({"x": x})["y"], x, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [203, 208])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_configuration_agrees(config: RowConfig, columns: int, dtype: torch.dtype) -> None:
    x, dy = 3 * random(13, columns, dtype=dtype), random(13, columns, dtype=dtype, seed=1)
    assert agrees(configured(config), x, dy)


# Rows that begin and end anywhere in a 16-byte vector, with up to two whole vectors.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", range(9, 20))
def test_looped_rows_at_any_alignment(columns: int, dtype: torch.dtype) -> None:
    x, dy = 3 * random(3, columns, dtype=dtype), random(3, columns, dtype=dtype, seed=1)
    config = RowConfig(1, block_columns=8, num_warps=1, num_stages=1, programs=2)
    assert agrees(configured(config), x, dy)
    apart = 3 * random(3, columns + 3, dtype=dtype)[:, 1:-2]
    assert torch.equal(softmax.forward(apart, config), softmax.forward(apart.contiguous(), config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@configs_of_rows
def test_large_and_infinite_entries(config: RowConfig | None, dtype: torch.dtype) -> None:
    x = random(5, 200, dtype=dtype)
    x[0] *= 1e4
    x[1] += 1e4
    x[2, :150] = -torch.inf
    x[3] = torch.finfo(dtype).min
    x[4, 7:] = -torch.inf
    y = softmax.forward(x, config)
    assert is_accurate(y, plain(x), plain(x.double()))
    assert (y[2, :150] == 0).all() and (y[4, 7:] == 0).all()


# Rows with and without elements outside whole vectors; 16-bit results use the other exponential and quotient.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 203, 208])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_of_nothing_but_minus_infinity_are_zeros(config: RowConfig, columns: int, dtype: torch.dtype) -> None:
    x, dy = random(9, columns, dtype=dtype), random(9, columns, dtype=dtype, seed=1)
    x[3:5] = x[8] = -torch.inf
    y, dx = with_gradients(configured(config), x, dy=dy)
    empty = [3, 4, 8]
    assert not y[empty].any() and not dx[empty].any()
    assert agrees(configured(config), x, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@configs_of_rows
def test_rows_with_nan_or_infinity_are_nan(config: RowConfig | None, dtype: torch.dtype) -> None:
    x = random(5, 203, dtype=dtype)
    x[0, 5] = x[1, 202] = torch.nan
    x[2, 5] = x[3, 202] = torch.inf
    x[1, :202] = x[3, :202] = -torch.inf
    y = softmax.forward(x, config)
    assert y[:4].isnan().all() and y[4].isfinite().all()


@configs_of_rows
def test_fp32_keeps_the_relative_accuracy_of_plain_code(config: RowConfig | None) -> None:
    # exp2(x log2(e)) and fp32 sums erred twice as much: 42 against 18 eps.
    x = 8 * random(7, 257)
    reference = plain(x.double())
    values = (softmax.forward(x, config), plain(x))
    error, plain_error = (((y.double() - reference) / reference).abs().max() for y in values)
    assert error <= 1.2 * plain_error
