import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from row_kernel_checks import DEVICE, DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import geglu, swiglu
from xlafuse.triton_side.kernels.shared import gated_unit
from xlafuse.triton_side.kernels.shared.launch import FlatConfig

FUNCTIONS = {"swiglu": swiglu.swiglu, "geglu": geglu.geglu}
units = pytest.mark.parametrize("unit", FUNCTIONS)


def plain(unit: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate) if unit == "swiglu" else F.gelu(gate, approximate="tanh")) * up


def agrees(unit: str, function, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, gate, up, dy=dy)
    low = with_gradients(lambda *x: plain(unit, *x), gate, up, dy=dy)
    reference = with_gradients(lambda *x: plain(unit, *x), gate.double(), up.double(), dy=dy.double())
    return all(is_accurate(*values) for values in zip(got, low, reference, strict=True))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return gate, up, dy."""
    return [2 * random(*shape, dtype=dtype), *(random(*shape, dtype=dtype, seed=seed) for seed in (1, 2))]


def launched_as(module: ModuleType, unit: str, config: FlatConfig | None = None):
    """Return the unit's forward and backward kernel in the module as a launch of (gate, up, dy): y, dgate, dup."""
    forward_kernel, backward_kernel = (getattr(module, f"{unit}_{part}_kernel") for part in ("forward", "backward"))

    def launch(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = gated_unit.forward(forward_kernel, gate, up, config)
        return y, *gated_unit.backward(backward_kernel, gate, up, dy, config)

    return launch


@units
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1031), (1031, 1), (16, 128), (3, 1367)])
def test_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype, unit: str) -> None:
    gate, up, dy = drawn(*shape, dtype=dtype)
    assert agrees(unit, FUNCTIONS[unit], gate, up, dy)


@units
def test_any_configuration_gives_the_same(unit: str) -> None:
    module, inputs = sys.modules[FUNCTIONS[unit].__module__], drawn(1000)
    one, other = (launched_as(module, unit, config)(*inputs) for config in (None, FlatConfig(block=64, num_warps=1)))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@units
def test_far_from_zero_the_activation_is_the_identity_or_zero(unit: str) -> None:
    gate = torch.tensor([-1e18, -1e4, -200.0, 200.0, 1e4, 1e18], device=DEVICE)
    up, dy = torch.full_like(gate, 3.0), torch.full_like(gate, 2.0)
    y, dgate, dup = with_gradients(FUNCTIONS[unit], gate, up, dy=dy)
    assert torch.equal(y, 3 * gate.clamp(min=0.0)) and torch.equal(dup, 2 * gate.clamp(min=0.0))
    assert torch.equal(dgate, 6 * (gate > 0).float())
