"""The modules for optional packages call them correctly.

The packages' kernels need a GPU, so fakes with the same signatures, written in PyTorch, replace them. A recorded call
has one operation for each kernel.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import float64_reference
import pytest
import torch
import torch.nn.functional as F
from float64_reference import case_of
from torch import Tensor

from xlafuse.triton_side.blocks import attention, attention_packed, decode_attention
from xlafuse.triton_side.calls import dispatch
from xlafuse.triton_side.library import layernorm, linear_cross_entropy, rmsnorm, softmax

ROWS, COLUMNS, EPS = 5, 12, 1e-5
LABELS = torch.tensor([3, -100, 0, 6, 3], dtype=torch.int32)
CU_SEQLENS = torch.tensor([0, 1, 5, 7], dtype=torch.int32)


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


def flash_scores(
    q: Tensor, k: Tensor, causal: bool, window_size_left: int | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None,
) -> Tensor:
    """Return the scores of q, k [batch, tokens, heads, head_dim]; cu_seqlens needs a batch of one."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) / q.shape[-1] ** 0.5
    hidden = torch.zeros(scores.shape[-2:]).bool()
    if causal:
        hidden |= torch.ones_like(hidden).triu(1)
    if window_size_left is not None:
        hidden |= torch.ones_like(hidden).tril(-window_size_left - 1)
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q.diff()
        assert max_seqlen_q == lengths.max()
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        hidden |= sequence[:, None] != sequence
    return scores.masked_fill(hidden, -torch.inf)


def flash_decode(q: Tensor, k: Tensor, v: Tensor, seqused_k: Tensor) -> Tensor:
    """Attend to the first keys of each sequence; its last query sees all of them."""
    outputs = []
    for queries, keys, values, count in zip(q, k, v, seqused_k.tolist(), strict=True):
        mask = torch.ones(len(queries), count).bool().tril(count - len(queries))
        heads_first = (x.transpose(0, 1) for x in (queries, keys[:count], values[:count]))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.stack(outputs)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, seqused_k: Tensor | None = None, **seen: Any
) -> tuple[Any, ...]:
    if seqused_k is not None:
        assert seen == {"causal": True}
        return flash_decode(q, k, v, seqused_k), None
    if q.ndim == 3:
        out, lse, *rest = flash_forward(q[None], k[None], v[None], return_lse=return_lse, **seen)
        return out[0], lse[0] if return_lse else None, *rest
    scores = flash_scores(q, k, **seen)
    lse = scores.logsumexp(-1)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v)
    return out.contiguous(), lse if return_lse else None, None, None, None


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **seen: Any
) -> tuple[Tensor, ...]:
    """Follow "FlashAttention-2", arXiv 2307.08691: recompute probabilities from lse, delta = sum(out dout)."""
    if q.ndim == 3:
        return tuple(x[0] for x in flash_backward(*(x[None] for x in (q, k, v, out, dout, lse)), **seen))
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    p = (flash_scores(q, k, **seen) - lse[..., None]).exp()
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    delta = torch.einsum("bqhd,bqhd->bhq", out, dout)
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta[..., None]) * q.shape[-1] ** -0.5
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bqhd->bkhd", p, dout)
    summed = (x.unflatten(2, (kv_heads, group)).sum(3) for x in (dk, dv))
    return torch.einsum("bhqk,bkhd->bqhd", ds, k), *summed


class FusedLinearCrossEntropy:
    """Liger's function, with its order of arguments. It checks the arguments that our module fixes."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: None, ce_weight: None, ignore_index: int,
        lse_square_scale: float, label_smoothing: float, reduction: str, softcap: None, return_z_loss: bool,
        accum_dtype: torch.dtype,
    ) -> tuple[Any, ...]:
        assert (bias, ce_weight, reduction, softcap, return_z_loss) == (None, None, "mean", None, False)
        assert accum_dtype == torch.float32
        logits, counted = _input @ weight.T, target != ignore_index
        lse = logits.logsumexp(-1)
        chosen = logits.gather(1, target.clamp(min=0)[:, None].long())[:, 0]
        losses = lse - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1) + lse_square_scale * lse**2
        return losses[counted].mean(), None, None, None


LIGERS = {"geglu": "GELUMul", "layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "softmax": "Softmax",
          "swiglu": "SiLUMul"}
STAND_INS: dict[str, dict[str, Any]] = {
    "quack": {}, "flash_attn": {}, "flash_attn.cute": {},
    "quack.rmsnorm": {f.__name__: f for f in (rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd)},
    "quack.softmax": {"softmax_fwd": softmax_fwd, "softmax_bwd": softmax_bwd},
    "liger_kernel": {}, "liger_kernel.ops": {},
    **{f"liger_kernel.ops.{name}": {f"Liger{function}Function": None} for name, function in LIGERS.items()},
    "liger_kernel.ops.fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyFunction": FusedLinearCrossEntropy},
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
    for name in ("quack", "liger", "flash_attention_4"):
        sys.modules.pop(f"xlafuse.triton_side.library.{name}", None)


def library(name: str) -> Any:
    return importlib.import_module(f"xlafuse.triton_side.library.{name}")


def inputs_of(row: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"x": (ROWS, COLUMNS), "weight": (COLUMNS,), "bias": (COLUMNS,)}
    if row == "attention":
        shapes = {"q": (2, 6, 7, 8), "k": (2, 3, 7, 8), "v": (2, 3, 7, 8)}
    if row == "linear_cross_entropy":
        shapes = {"h": (ROWS, COLUMNS), "w": (7, COLUMNS)}
    if row == "attention_packed":
        shapes = {"q": (7, 6, 8), "k": (7, 3, 8), "v": (7, 3, 8)}
    names = {"rmsnorm": ["x", "weight"], "softmax": ["x"]}.get(row, list(shapes))
    drawn = {name: torch.randn(shapes[name], generator=generator, requires_grad=True) for name in names}
    integers = {"attention_packed": {"cu_seqlens": CU_SEQLENS}, "linear_cross_entropy": {"labels": LABELS}}
    return drawn | integers.get(row, {})


def differentiated(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [x for x in inputs.values() if x.requires_grad]


def applied(package: str, row: str) -> Any:
    return getattr(library(package), {"attention": "apply", "attention_packed": "apply_packed"}.get(row, row))


ROWS_OF_QUACK = [("rmsnorm", rmsnorm.apply, {"eps": EPS}), ("layernorm", layernorm.apply, {"eps": EPS}),
                 ("softmax", softmax.apply, {})]
CASES = [*(("quack", row, plain, attributes) for row, plain, attributes in ROWS_OF_QUACK),
         *(("flash_attention_4", "attention", attention.apply, mask)
           for mask in ({}, {"causal": 0}, {"causal": 1, "window": 3})),
         ("flash_attention_4", "attention_packed", attention_packed.apply, {"longest": 4})]
LIGER = ("liger", "linear_cross_entropy", linear_cross_entropy.apply, {"smoothing": 0.1, "z_loss": 0.01})
IDS = [f"{package}-{row}-{attributes}" for package, row, _, attributes in CASES]


@pytest.mark.parametrize(("package", "row", "plain", "attributes"), [*CASES, LIGER], ids=[*IDS, "liger"])
def test_outputs_and_gradients_are_pytorchs(package: str, row: str, plain: Any, attributes: dict[str, Any]) -> None:
    apply = applied(package, row)
    inputs = inputs_of(row)
    (found,), (expected,) = apply(inputs, **attributes).values(), plain(inputs, **attributes).values()
    torch.testing.assert_close(found, expected)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    for mine, other in zip(
        torch.autograd.grad(found, differentiated(inputs), dy),
        torch.autograd.grad(expected, differentiated(inputs), dy),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)
    with torch.no_grad():
        (inference,) = apply(inputs, **attributes).values()
    torch.testing.assert_close(inference, expected)


@pytest.mark.parametrize(("package", "row", "plain", "attributes"), CASES, ids=IDS)
def test_a_recorded_call_has_one_operation_per_library_kernel(
    package: str, row: str, plain: Any, attributes: dict[str, Any]
) -> None:
    apply = applied(package, row)
    name = package if row.startswith("attention") else f"{package}_{row}"
    recorded = dispatch.record_call(lambda inputs: apply(inputs, **attributes), inputs_of(row), train=True)
    operations = {part: [event.op for event in events] for part, events in recorded.parts.items()}
    assert operations["forward"] == [f"xlafuse.{name}.default"]
    assert operations["backward"] == [f"xlafuse.{name}_backward.default"]
    (forward,), (backward,) = recorded.parts["forward"], recorded.parts["backward"]
    output = "out" if row.startswith("attention") else "y"
    assert recorded.outputs[output].storage in {t.storage for t in forward.writes}
    gradients = {recorded.outputs[f"d{n}"].storage for n, x in inputs_of(row).items() if x.requires_grad}
    assert gradients <= {t.storage for t in backward.writes}


@pytest.mark.parametrize("shape", ["odd", "odd-5-queries", "fewer-keys-than-queries"])
def test_decoding_aligns_the_causal_mask_to_the_last_key(shape: str) -> None:
    inputs = float64_reference.inputs_of(case_of("decode_attention", "float32", shape))
    found, expected = library("flash_attention_4").apply_decode(inputs), decode_attention.apply(inputs)
    torch.testing.assert_close(found["out"], expected["out"])
    recorded = dispatch.record_call(library("flash_attention_4").apply_decode, inputs, train=False)
    assert "xlafuse.flash_attention_4_decode.default" in [event.op for event in recorded.parts["forward"]]
