import math

import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import gelu
from xlafuse.triton_side.kernels.shared.launch import FlatConfig


def plain(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def agrees(function, x: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, x, dy=dy)
    low = with_gradients(plain, x, dy=dy)
    reference = with_gradients(plain, x.double(), dy=dy.double())
    return all(is_accurate(*values) for values in zip(got, low, reference, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 1031), (1031, 1), (8, 128), (16, 128), (3, 1367)])
def test_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, dy = 2 * random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    assert agrees(lambda x: gelu.apply({"x": x})["y"], x, dy)


def test_any_configuration_gives_the_same() -> None:
    x, dy, config = random(1000), random(1000, seed=1), FlatConfig(block=64, num_warps=1)
    assert torch.equal(gelu.forward(x, config), gelu.forward(x))
    assert torch.equal(gelu.backward(x, dy, config), gelu.backward(x, dy))


def test_far_from_zero_it_is_the_identity_or_zero() -> None:
    x = torch.tensor([-3e38, -1e4, -100.0, -20.0, 20.0, 100.0, 1e4, 1e18], device=DEVICE, requires_grad=True)
    y = gelu.gelu(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x.clamp(min=0.0))
    assert torch.equal(dx[1:], (x[1:] > 0).float())


def test_does_not_cancel_for_negative_x() -> None:
    # Plain fp32 code returns 0 here: 1 + tanh(u) rounds to 0 from x = -5.6 on.
    x = torch.linspace(-9.0, -5.0, 64, device=DEVICE)
    u = math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double() ** 3)
    torch.testing.assert_close(gelu.gelu(x).double(), x.double() * torch.sigmoid(2 * u), rtol=2e-5, atol=0)
