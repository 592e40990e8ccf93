"""The CUDA C++ kernels against float64 on a GPU: forward, gradients, odd shapes and special values."""

from collections.abc import Callable

import kernel_properties as properties
import pytest
import torch
from test_dropout_residual_norm import SEED
from test_dropout_residual_norm import operands as dropout_operands
from test_dropout_residual_norm import problem as dropout_residual_norm_problem
from test_dropout_residual_norm import training as dropout_training

from xlafuse.triton_side.cuda import (
    bias_gelu,
    dropout_residual_norm,
    gelu,
    layernorm,
    matmul,
    rmsnorm,
    softmax,
    vector_add,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-5


def random(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, device="cuda")).to(dtype)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element past a 16-byte boundary."""
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return storage[1:].copy_(tensor.flatten()).view(tensor.shape)


def layernorm_of_eps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return layernorm.layernorm(x, weight, bias, EPS)


def rmsnorm_of_eps(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rmsnorm.rmsnorm(x, weight, EPS)


def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    return (vector_add.vector_add(x, y),)


# (rows, columns) with one warp and with 16, aligned and not, with several rows to a block, and streamed.
LAYERNORM_SHAPES = [
    (1, 2), (5, 31), (5, 256), (3001, 131), (1500, 4096), (1021, 4093), (40, 8192), (40, 16384), (3, 16385),
    (300, 32768), (3, 50257),
]
# The columns select a warp, a block, a cluster of blocks and streaming.
SOFTMAX_COLUMNS = [
    1, 2, 8, 31, 127, 256, 509, 1000, 1024, 2048, 3001, 4096, 8191, 8192, 10007, 16384, 32003, 32768, 65536, 65539,
    128256, 131072, 150001, 262144,
]
# Property, launch, number of matrices and of vectors of their columns before the output's gradient, the shapes.
BOUNDED: dict[str, tuple[Callable[..., str | None], properties.Launch, int, list[tuple[int, int]]]] = {
    "gelu": (properties.gelu, properties.training(gelu.gelu), 0, [(1, 1), (3, 5), (17, 8), (127, 131), (64, 4096)]),
    "bias_gelu": (
        properties.bias_gelu, properties.training(bias_gelu.bias_gelu), 1,
        [(1, 1), (3, 5), (17, 8), (127, 131), (5000, 1032), (2, 40000)],
    ),
    "softmax": (
        properties.softmax, properties.training(softmax.softmax), 0, [(5, columns) for columns in SOFTMAX_COLUMNS],
    ),
    "layernorm": (
        lambda *given: properties.layernorm(*given, EPS), properties.training(layernorm_of_eps), 2, LAYERNORM_SHAPES,
    ),
    "rmsnorm": (
        lambda *given: properties.rmsnorm(*given, EPS), properties.training(rmsnorm_of_eps), 1, LAYERNORM_SHAPES,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in BOUNDED for shape in BOUNDED[name][-1]], ids=str)
def test_results_are_within_the_bounds_of_rounding_and_repeat(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    holds, launch, vectors, _ = BOUNDED[name]
    x, dy = random(shape, dtype, scale=3) + 2 * (name == "layernorm"), random(shape, dtype, seed=1)
    given = x, *(random(shape[1:], dtype, seed=seed) for seed in range(2, 2 + vectors)), dy
    assert not holds(launch, *given)
    assert all(torch.equal(a, b) for a, b in zip(launch(*given), launch(*given), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [0, 1, 7, 4095, 4096, 4097, 100003])
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "unaligned"])
def test_vector_add(elements: int, dtype: torch.dtype, shift: bool) -> None:
    x, y = random((elements,), dtype), random((elements,), dtype, seed=1)
    assert not properties.vector_add(sums, *(map(unaligned, (x, y)) if shift else (x, y)))


@pytest.mark.parametrize("function", [gelu.gelu, lambda x: bias_gelu.bias_gelu(x, x[:1].sum(0))])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_activations_of_no_elements(function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int]) -> None:
    x = random(shape, torch.float32).requires_grad_()
    y = function(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_far_from_zero(dtype: torch.dtype) -> None:
    far = torch.tensor([100.0, 6e4, -100.0, -6e4, float("inf"), float("nan")], dtype=dtype, device="cuda")
    if dtype != torch.float16:
        far = torch.cat((far, torch.tensor([1e30, -1e30], dtype=dtype, device="cuda")))
    y, dx = properties.trained(gelu.gelu, far, dy=torch.ones_like(far))
    positive, negative = far > 0, far < 0
    assert torch.equal(y[positive], far[positive]) and (dx[positive] == 1).all()
    assert (y[negative] == 0).all() and (dx[negative] == 0).all()
    assert y[far.isnan()].isnan().all() and dx[far.isnan()].isnan().all()


# The columns select a warp, a block, a cluster of blocks and streaming.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [100, 101, 4096, 30000, 150001])
def test_softmax_special_rows(columns: int, dtype: torch.dtype) -> None:
    """Special rows give what torch.softmax gives, except that a row of only -inf gives zeros and zero gradients."""
    x, dy = random((5, columns), dtype), random((5, columns), dtype, seed=1)
    x[0] = float("-inf")
    x[1, 3] = float("nan")
    x[2, 3] = float("inf")
    x[3, :-1] = float("-inf")
    y, dx = properties.trained(softmax.softmax, x, dy=dy)
    torch.testing.assert_close(y[1:], torch.softmax(x[1:], -1), equal_nan=True)
    assert not y[0].any() and not dx[0].any() and y[3, -1] == 1


def test_layernorm_takes_leading_axes_and_no_elements() -> None:
    x, weight, bias = random((2, 3, 40), torch.float32), *(random((40,), torch.float32, seed=i) for i in (1, 2))
    flat = layernorm_of_eps(x.view(6, 40), weight, bias)
    assert torch.equal(layernorm_of_eps(x, weight, bias), flat.view(2, 3, 40))
    # Single elements are summed in another order than packs of four.
    torch.testing.assert_close(layernorm_of_eps(unaligned(x), weight, bias), flat.view(2, 3, 40), rtol=0, atol=1e-5)
    empty = x[:0].requires_grad_()
    weight.requires_grad_()
    layernorm_of_eps(empty, weight, bias).sum().backward()
    assert empty.grad.shape == (0, 3, 40) and (weight.grad == 0).all()


def test_layernorm_without_gradients_saves_nothing_and_gives_the_same() -> None:
    x, weight, bias = random((64, 1000), torch.bfloat16), *(random((1000,), torch.bfloat16, seed=i) for i in (1, 2))
    y, mean, rstd = layernorm.forward_pass(x, weight, bias, EPS, save=False)
    assert mean is rstd is None
    saved, mean, rstd = layernorm.forward_pass(x, weight, bias, EPS, save=True)
    assert torch.equal(y, saved) and mean.shape == rstd.shape == (64,)


def test_rmsnorm_takes_leading_axes_and_no_elements() -> None:
    x, weight = random((2, 3, 40), torch.float32), random((40,), torch.float32, seed=1)
    flat = rmsnorm.rmsnorm(x.view(6, 40), weight, EPS)
    assert torch.equal(rmsnorm.rmsnorm(x, weight, EPS), flat.view(2, 3, 40))
    torch.testing.assert_close(rmsnorm.rmsnorm(unaligned(x), weight, EPS), flat.view(2, 3, 40), rtol=0, atol=1e-5)
    empty = x[:0].requires_grad_()
    weight.requires_grad_()
    rmsnorm.rmsnorm(empty, weight, EPS).sum().backward()
    assert empty.grad.shape == (0, 3, 40) and (weight.grad == 0).all()


# As above, and rows for a cluster of blocks.
DROPOUT_SHAPES = [
    (1, 1), (5, 31), (5, 256), (3001, 131), (1500, 4096), (1021, 4093), (40, 8192), (40, 8200), (40, 16384), (3, 16381),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DROPOUT_SHAPES)
def test_dropout_residual_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = dropout_operands(*shape, dtype)
    assert not dropout_residual_norm_problem(module=dropout_residual_norm, inputs=inputs)
    again = [dropout_training(module=dropout_residual_norm)(*inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*again, strict=True))


@pytest.mark.parametrize("p", [0.0, 0.125, 65534.5 / 65536])
def test_dropout_residual_norm_with_probabilities(p: float) -> None:
    assert not dropout_residual_norm_problem(7, 200, module=dropout_residual_norm, p=p)


def test_dropout_residual_norm_has_the_mask_of_triton_in_any_layout() -> None:
    *inputs, dy, dh = dropout_operands(300, 200, torch.bfloat16)
    _, h, dx, *_ = dropout_training(module=dropout_residual_norm)(*inputs, dy, dh)
    _, of_triton, dx_of_triton, *_ = dropout_training()(*inputs, dy, dh)
    torch.testing.assert_close(h, of_triton, rtol=0.01, atol=0)
    assert torch.equal(dx == 0, dx_of_triton == 0)
    wide = torch.cat([inputs[0], inputs[0]], dim=1)[:, :200]
    for x in (unaligned(inputs[0]), inputs[0].t().contiguous().t(), wide):
        other = dropout_training(module=dropout_residual_norm)(x, *inputs[1:], dy, dh)
        torch.testing.assert_close(other[1], h, rtol=0.01, atol=0)
        assert torch.equal(other[2] == 0, dx == 0)


def test_dropout_residual_norm_takes_no_elements_and_saves_for_gradients_alone() -> None:
    for shape in ((0, 5), (5, 0)):
        found = dropout_training(module=dropout_residual_norm)(*dropout_operands(*shape))
        assert all(each.shape == shape for each in (*found[:3], found[4]))
        assert all((sums == 0).all() for sums in (found[3], *found[5:]))
    *inputs, _, _ = dropout_operands(64, 1000, torch.bfloat16)
    y, h, mean, rstd = dropout_residual_norm.forward_pass(*inputs, SEED, 0.3, EPS, save=False)
    assert mean is rstd is None
    *saved, mean, rstd = dropout_residual_norm.forward_pass(*inputs, SEED, 0.3, EPS, save=True)
    assert torch.equal(y, saved[0]) and torch.equal(h, saved[1]) and mean.shape == rstd.shape == (64,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 1, 1), (3, 0, 5), (0, 4, 5), (17, 37, 67), (128, 16, 128), (129, 17, 257), (300, 1000, 200)],
)
def test_matmul(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    a, b, dc = random((m, k), dtype), random((k, n), dtype, seed=1), random((m, n), dtype, seed=2)
    assert not properties.trained_matmul(properties.training(matmul.matmul), a, b, dc)


def test_matmul_of_any_strides() -> None:
    a, b = random((140, 150), torch.float16), random((150, 260), torch.float16, seed=1)
    expected = matmul.matmul(a, b)
    for left in (a, a.T.contiguous().T, unaligned(a)):
        for right in (b, b.T.contiguous().T, unaligned(b)):
            assert torch.equal(matmul.matmul(left, right), expected)
    steps = a[::2, 1::3], b[1::3, ::2]
    assert torch.equal(matmul.matmul(*steps), matmul.matmul(*(operand.contiguous() for operand in steps)))
    row = random((1, 150), torch.float16, seed=2)
    assert torch.equal(matmul.matmul(row.expand(140, 150), b), matmul.matmul(row.repeat(140, 1), b))


@pytest.mark.parametrize("operation", [gelu.gelu, softmax.softmax, lambda x: bias_gelu.bias_gelu(x, x[0])])
def test_transposed_and_unaligned_inputs(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = random((40, 24), torch.bfloat16)
    assert torch.equal(operation(x.t()), operation(x.t().contiguous()))
    assert torch.equal(operation(unaligned(x)), operation(x))


def test_current_stream_is_used() -> None:
    x = random((512, 4096), torch.float32)
    expected = softmax.softmax(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(20_000_000)  # about 10 ms: a launch on another stream would read zeros
        late.copy_(x)
        y = softmax.softmax(late)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_cuda_graph_capture() -> None:
    x = random((64, 4096), torch.bfloat16)
    expected = softmax.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax.softmax(x)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_wrong_arguments() -> None:
    x = random((4, 4), torch.float32)
    with pytest.raises(TypeError, match=r"gelu: x must be float32, float16, bfloat16, got torch\.float64"):
        gelu.gelu(x.double())
    with pytest.raises(
        TypeError, match=r"vector_add: all tensors must have one dtype, got x torch\.float32, y torch\.float16"
    ):
        vector_add.vector_add(x, x.half())
    with pytest.raises(ValueError, match=r"one shape, got x \(4, 4\), y \(2, 4\)"):
        vector_add.vector_add(x, x[:2])
    with pytest.raises(ValueError, match=r"bias_gelu: bias must be \[4\], one element for each .*, got \(3,\)"):
        bias_gelu.bias_gelu(x, x[0, :3])
    with pytest.raises(TypeError, match=r"bias_gelu: all tensors must have one dtype"):
        bias_gelu.bias_gelu(x, x[0].half())
    with pytest.raises(ValueError, match=r"matmul: a \[m, k\] and b \[k, n\] must fit, got a \(4, 4\), b \(2, 4\)"):
        matmul.matmul(x, x[:2])
    with pytest.raises(TypeError, match=r"matmul: all tensors must have one dtype"):
        matmul.matmul(x, x.half())
    with pytest.raises(ValueError, match=r"softmax: x must have a last axis"):
        softmax.softmax(x[0, 0])
    with pytest.raises(ValueError, match=r"layernorm: bias must be \[4\], one element for each .*, got \(2,\)"):
        layernorm.layernorm(x, x[0], x[0, :2], EPS)
    with pytest.raises(TypeError, match=r"layernorm: all tensors must have one dtype, got x .*, weight .*float16"):
        layernorm.layernorm(x, x[0].half(), x[0], EPS)
    wide, row = torch.zeros(1, 16385, device="cuda"), torch.zeros(16385, device="cuda")
    with pytest.raises(ValueError, match=r"\d+ columns at most, got 16385"):
        dropout_residual_norm.dropout_residual_norm(wide, row, wide, row, row, SEED, p=0.1, eps=EPS)
    for given, p, error, message in (
        ((x, x[0], x[:2], x[0], x[0], SEED), 0.1, ValueError, r"one shape, got x \(4, 4\), residual \(2, 4\)"),
        ((x, x[0], x, x[0, :2], x[0], SEED), 0.1, ValueError, r"weight must be \[4\], one element for each"),
        ((x, x[0], x, x[0], x[0], SEED.long()), 0.1, TypeError, "seed must be int32, got torch.int64"),
        ((x, x[0], x, x[0], x[0], SEED), 1.0, ValueError, "p must be at least 0"),
    ):
        with pytest.raises(error, match=message):
            dropout_residual_norm.dropout_residual_norm(*given, p=p, eps=EPS)
