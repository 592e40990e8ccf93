from types import ModuleType

import pytest
import torch
from row_kernel_checks import DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import swiglu_mlp
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

EPS = 1e-5
NAMES = ("x", "norm_weight", "gate_weight", "up_weight", "down_weight")
DESCRIPTORS = MatmulConfig(32, 32, 32, num_warps=4, num_stages=2)


def plain(x, norm_weight, gate_weight, up_weight, down_weight) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = (wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + EPS)).to(x.dtype)
    h = normalised * norm_weight
    return x + (torch.nn.functional.silu(h @ gate_weight) * (h @ up_weight)) @ down_weight


def of_activation(module: ModuleType):
    """Return the kernel of the activation's gradients as a launch of (gate, up, dact): act, dgate, dup."""

    def launch(gate: torch.Tensor, up: torch.Tensor, dact: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dgate, dup, act = module.launch_activation_gradients(dact, gate, up)
        return act, dgate, dup

    return launch


def tensors(
    tokens: int, width: int, hidden: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.Tensor]:
    """Return x, the weights and dy."""
    return [
        random(tokens, width, dtype=dtype, seed=seed),
        (1 + 0.1 * random(width, seed=seed + 1)).to(dtype),
        (random(width, hidden, seed=seed + 2) * width**-0.5).to(dtype),
        (random(width, hidden, seed=seed + 3) * width**-0.5).to(dtype),
        (random(hidden, width, seed=seed + 4) * hidden**-0.5).to(dtype),
        random(tokens, width, dtype=dtype, seed=seed + 5),
    ]


def agrees(function, *inputs: torch.Tensor, dy: torch.Tensor) -> bool:
    """Compare output and gradients with float64.

    The errors of plain code are those of several draws, because the maximum over so few elements, and the order in
    which a library sums, are luck.
    """
    got = with_gradients(function, *inputs, dy=dy)
    x, gate = inputs[0], inputs[2]
    draws = [(list(inputs), dy)]
    for seed in range(10, 90, 10):
        *drawn, other_dy = tensors(*x.shape, gate.shape[1], x.dtype, seed)
        draws.append((drawn, other_dy))
    plainly = [
        (with_gradients(plain, *drawn, dy=dy), with_gradients(plain, *(x.double() for x in drawn), dy=dy.double()))
        for drawn, dy in draws
    ]
    (low, reference), *others = plainly
    return all(
        is_accurate(got[i], low[i], reference[i], others=[(lows[i], references[i]) for lows, references in others])
        for i in range(len(got))
    )


def applied(*inputs: torch.Tensor) -> torch.Tensor:
    return swiglu_mlp.apply(dict(zip(NAMES, inputs, strict=True)), eps=EPS)["y"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "hidden"), [(17, 37, 67), (40, 64, 136)])
def test_agrees_with_float64(tokens: int, width: int, hidden: int, dtype: torch.dtype) -> None:
    *inputs, dy = tensors(tokens, width, hidden, dtype)
    assert agrees(applied, *inputs, dy=dy)


@pytest.mark.parametrize(("tokens", "width", "hidden"), [(1, 1, 1), (1, 32, 48)])
def test_one_token(tokens: int, width: int, hidden: int) -> None:
    """Only in float32: the largest of a few 16-bit rounding errors is luck, for plain code as for ours."""
    *inputs, dy = tensors(tokens, width, hidden)
    assert agrees(applied, *inputs, dy=dy)


def test_agrees_through_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu_mlp, "matmul_config", lambda *chosen: DESCRIPTORS)
    *inputs, dy = tensors(40, 64, 136, torch.float16)
    assert agrees(applied, *inputs, dy=dy)


def test_saturated_gates_stay_finite() -> None:
    x, norm_weight, gate_weight, up_weight, down_weight, dy = tensors(8, 16, 24)
    inputs = (x, norm_weight, 100 * gate_weight, up_weight, down_weight)
    assert all(part.isfinite().all() for part in with_gradients(applied, *inputs, dy=dy))
