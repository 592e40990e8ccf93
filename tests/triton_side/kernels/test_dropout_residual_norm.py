import pytest
import torch
from kernel_properties import dropout_residual_norm as problem_of
from row_kernel_checks import DEVICE, random

from xlafuse.triton_side.blocks import threefry
from xlafuse.triton_side.kernels import dropout_residual_norm
from xlafuse.triton_side.kernels.shared.launch import RowConfig

P, EPS = 0.3, 1e-5
# Tiles of several rows, and persistent programs with a prefetch; none covers 13 x 203 exactly.
CONFIGS = [
    RowConfig(block_rows=4, block_columns=256, num_warps=4, num_stages=1, programs=3),
    RowConfig(block_rows=1, block_columns=256, num_warps=1, num_stages=3, programs=5),
]


def seed_of(*words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32, device=DEVICE)


SEED = seed_of(-5, 2**31 - 1)


def kept(rows: int, columns: int, p: float = P, seed: torch.Tensor = SEED) -> torch.Tensor:
    return threefry.uniforms(rows, columns, seed) >= dropout_residual_norm.dropout_constants(p)[0]


def training(config: RowConfig | None = None, module=dropout_residual_norm, p: float = P, seed: torch.Tensor = SEED):
    """Return a launch of the forward and backward pass on x, bias, residual, weight, shift, dy and dh."""

    def configured(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, dy, dh = tensors
        y, h, mean, rstd = module.forward(*inputs, seed, p, EPS, save_statistics=True, config=config)
        return y, h, *module.backward(h, inputs[3], seed, mean, rstd, dy, dh, p, config)

    def default(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:5]]
        outputs = module.dropout_residual_norm(*leaves, seed, p=p, eps=EPS)
        return *(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, tensors[5:])

    return configured if config else default


def operands(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return x, bias, residual, weight, shift, dy, dh."""
    shapes = [(rows, columns), (columns,), (rows, columns), (columns,), (columns,), *2 * [(rows, columns)]]
    return tuple(random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def problem(
    *shape: int, config: RowConfig | None = None, module=dropout_residual_norm, p: float = P, inputs=None
) -> str | None:
    inputs = inputs or operands(*shape)
    scale = dropout_residual_norm.dropout_constants(p)[1]
    return problem_of(training(config, module, p), inputs, kept(*inputs[0].shape, p), scale, EPS)


@pytest.mark.parametrize("config", [None, *CONFIGS])
def test_h_is_the_same_without_the_norm(config: RowConfig | None) -> None:
    x, bias, residual, weight, shift, dy, dh = operands(5, 67)
    h = dropout_residual_norm.forward_without_norm(x, bias, residual, SEED, P, config)
    _, expected, mean, rstd = dropout_residual_norm.forward(
        x, bias, residual, weight, shift, SEED, P, EPS, save_statistics=True, config=config
    )
    assert torch.equal(h, expected)
    dx, dbias = dropout_residual_norm.backward_without_norm(dh, SEED, P, config)
    of_norm = dropout_residual_norm.backward(h, weight, SEED, mean, rstd, torch.zeros_like(dy), dh, P, config)
    assert torch.equal(dx, of_norm[0]) and torch.equal(dbias, of_norm[1])


@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 3), (16, 64), (3, 1025), pytest.param((1, 16384), marks=pytest.mark.gpu)]
)
def test_shapes(shape: tuple[int, int]) -> None:
    assert not problem(*shape)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations(config: RowConfig) -> None:
    assert not problem(13, 203, config=config)


@pytest.mark.parametrize("p", [0.0, 0.125, 65534.5 / 65536])
def test_probabilities(p: float) -> None:
    assert not problem(7, 200, p=p)
    assert kept(7, 200, p).all() == (p == 0)


def test_backward_draws_the_mask_of_forward() -> None:
    ones, zeros = torch.ones(9, 203, device=DEVICE), torch.zeros(9, 203, device=DEVICE)
    inputs = (ones, zeros[0], zeros, ones[0], zeros[0], zeros, ones)
    for seed in (seed_of(0, 0), seed_of(1, 0), seed_of(0, 1), SEED):
        _, h, dx, *_ = training(seed=seed)(*inputs)
        assert torch.equal(h, dx)
        assert torch.equal(h != 0, kept(9, 203, seed=seed))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    y, h, dx, dbias, dresidual, dweight, dshift = training()(*operands(*shape))
    assert y.shape == h.shape == dx.shape == dresidual.shape == shape
    assert all(torch.equal(sums, torch.zeros_like(sums)) for sums in (dbias, dweight, dshift))


def test_one_output_alone_has_gradients() -> None:
    *inputs, dy, dh = operands(7, 127)
    zeros = torch.zeros_like(dy)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    for number, (output, cotangents) in enumerate([(dy, (dy, zeros)), (dh, (zeros, dh))]):
        made = dropout_residual_norm.dropout_residual_norm(*leaves, SEED, p=P, eps=EPS)[number]
        gradients = torch.autograd.grad(made, leaves, output)
        expected = training()(*inputs, *cotangents)[2:]
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("configure", [
    dropout_residual_norm.configure_forward, dropout_residual_norm.configure_backward,
])
@pytest.mark.parametrize("columns", [1, 100, 4096, 8193, 16384])
def test_configurations_cover_the_matrix_and_fit_an_h200(configure, columns: int) -> None:
    for rows in (1, 133, 8192):
        for element_bytes in (2, 4):
            config = configure(rows, columns, element_bytes, 132)
            tile = config.block_rows * config.block_columns
            buffers = 3 * (config.num_stages - 1) * tile * element_bytes
            assert buffers + 4 * tile < 232448 - 1024  # a row with edges changes its layout in shared memory
            assert 1 <= config.programs <= -(-rows // config.block_rows)
            assert config.block_columns >= max(4, columns) and 1 <= config.num_warps <= 32
