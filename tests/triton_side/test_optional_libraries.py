"""What the rows of optional packages hand to them and make of what comes back: with stand-ins of the same signatures,
written in PyTorch, because the packages' own kernels need a GPU. A call that is recorded shows each kernel as one
operation."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from triton_side import dispatch
from triton_side.library import layernorm, rmsnorm, softmax

ROWS, COLUMNS, EPS = 5, 12, 1e-5


def rmsnorm_fwd(x: Tensor, weight: Tensor, *, eps: float, store_rstd: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd[:, None] * weight, x, rstd if store_rstd else None


def rmsnorm_bwd(x: Tensor, weight: Tensor, dout: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, None, None]:
    normed, scaled = x * rstd[:, None], dout * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd[:, None]
    return dx, (dout * normed).sum(0), None, None


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, return_rstd: bool = False, return_mean: bool = False
) -> Any:
    assert weight.dtype == bias.dtype == torch.float32
    mean = x.float().mean(-1)
    rstd = (x.float().var(-1, correction=0) + eps).rsqrt()
    y = ((x - mean[:, None]) * rstd[:, None] * weight + bias).to(x.dtype)
    return (y, rstd, mean) if return_rstd and return_mean else y


def layernorm_bwd(
    x: Tensor, weight: Tensor, dout: Tensor, rstd: Tensor, mean: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, _, _ = rmsnorm_bwd(x - mean[:, None], weight, dout, rstd)
    dx -= ((dout * weight).mean(-1, keepdim=True)) * rstd[:, None]
    return dx, dweight, dout.sum(0)


def softmax_fwd(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (y * dy).sum(-1, keepdim=True))


def flash_scores(q: Tensor, k: Tensor, causal: bool, window_size_left: int | None) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) / q.shape[-1] ** 0.5
    hidden = torch.zeros(scores.shape[-2:]).bool()
    if causal:
        hidden |= torch.ones_like(hidden).triu(1)
    if window_size_left is not None:
        hidden |= torch.ones_like(hidden).tril(-window_size_left - 1)
    return scores.masked_fill(hidden, -torch.inf)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size_left: int | None, return_lse: bool
) -> tuple[Any, ...]:
    scores = flash_scores(q, k, causal, window_size_left)
    lse = scores.logsumexp(-1)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v)
    return out.contiguous(), lse if return_lse else None, None, None, None


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, causal: bool,
    window_size_left: int | None,
) -> tuple[Tensor, ...]:
    """By "FlashAttention-2", arXiv 2307.08691: probabilities again from lse, delta = sum(out dout)."""
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    p = (flash_scores(q, k, causal, window_size_left) - lse[..., None]).exp()
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    delta = torch.einsum("bqhd,bqhd->bhq", out, dout)
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta[..., None]) * q.shape[-1] ** -0.5
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bqhd->bkhd", p, dout)
    summed = (x.unflatten(2, (kv_heads, group)).sum(3) for x in (dk, dv))
    return torch.einsum("bhqk,bkhd->bqhd", ds, k), *summed


STAND_INS: dict[str, dict[str, Any]] = {
    "quack": {}, "flash_attn": {}, "flash_attn.cute": {},
    "quack.rmsnorm": {f.__name__: f for f in (rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd)},
    "quack.softmax": {"softmax_fwd": softmax_fwd, "softmax_bwd": softmax_bwd},
    "flash_attn.cute.interface": {"_flash_attn_fwd": flash_forward, "_flash_attn_bwd": flash_backward},
}


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, functions in STAND_INS.items():
            module = ModuleType(name)
            module.__dict__.update(functions)
            patch.setitem(sys.modules, name, module)
        yield
    for name in ("quack", "flash_attention_4"):
        sys.modules.pop(f"triton_side.library.{name}", None)


def library(name: str) -> Any:
    return importlib.import_module(f"triton_side.library.{name}")


def attention(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    seen = torch.ones(q.shape[2], q.shape[2]).bool()
    seen = seen.tril() if causal else seen
    seen = seen.triu(1 - window) if window else seen
    return {"out": F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)}


def inputs_of(row: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"x": (ROWS, COLUMNS), "weight": (COLUMNS,), "bias": (COLUMNS,)}
    if row == "attention":
        shapes = {"q": (2, 6, 7, 8), "k": (2, 3, 7, 8), "v": (2, 3, 7, 8)}
    names = {"rmsnorm": ["x", "weight"], "softmax": ["x"]}.get(row, list(shapes))
    return {name: torch.randn(shapes[name], generator=generator, requires_grad=True) for name in names}


ROWS_OF_QUACK = [("rmsnorm", rmsnorm.apply, {"eps": EPS}), ("layernorm", layernorm.apply, {"eps": EPS}),
                 ("softmax", softmax.apply, {})]
CASES = [*(("quack", row, plain, attributes) for row, plain, attributes in ROWS_OF_QUACK),
         *(("flash_attention_4", "attention", attention, mask)
           for mask in ({}, {"causal": 0}, {"causal": 1, "window": 3}))]
IDS = [f"{package}-{row}-{attributes}" for package, row, _, attributes in CASES]


@pytest.mark.parametrize(("package", "row", "plain", "attributes"), CASES, ids=IDS)
def test_outputs_and_gradients_are_pytorchs(package: str, row: str, plain: Any, attributes: dict[str, Any]) -> None:
    apply = getattr(library(package), "apply" if row == "attention" else row)
    inputs = inputs_of(row)
    (found,), (expected,) = apply(inputs, **attributes).values(), plain(inputs, **attributes).values()
    torch.testing.assert_close(found, expected)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    for mine, other in zip(
        torch.autograd.grad(found, list(inputs.values()), dy), torch.autograd.grad(expected, list(inputs.values()), dy),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)
    with torch.no_grad():
        (inference,) = apply(inputs, **attributes).values()
    torch.testing.assert_close(inference, expected)


@pytest.mark.parametrize(("package", "row", "plain", "attributes"), CASES, ids=IDS)
def test_a_recorded_call_shows_each_as_one_operation(
    package: str, row: str, plain: Any, attributes: dict[str, Any]
) -> None:
    apply = getattr(library(package), "apply" if row == "attention" else row)
    name = package if row == "attention" else f"{package}_{row}"
    recorded = dispatch.record_call(lambda inputs: apply(inputs, **attributes), inputs_of(row), train=True)
    operations = {part: [event.op for event in events] for part, events in recorded.parts.items()}
    assert operations["forward"] == [f"xlafuse.{name}.default"]
    assert operations["backward"] == [f"xlafuse.{name}_backward.default"]
    (forward,), (backward,) = recorded.parts["forward"], recorded.parts["backward"]
    assert recorded.outputs["out" if row == "attention" else "y"].storage in {t.storage for t in forward.writes}
    assert {recorded.outputs[f"d{n}"].storage for n in inputs_of(row)} <= {t.storage for t in backward.writes}
