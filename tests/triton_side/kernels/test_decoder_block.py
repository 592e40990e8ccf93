import math
from collections.abc import Sequence

import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES_OF_COMPOSITIONS, is_accurate, random, with_gradients

from xlafuse.triton_side.blocks import decoder_block as plain_block
from xlafuse.triton_side.kernels import decoder_block

NAMES = ("x", *decoder_block.WEIGHTS)
WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 37, 4, 2, 16, 67
ATTRIBUTES = {"heads": HEADS, "kv_heads": KV_HEADS, "eps": 1e-5, "theta": 100.0}


def tensors(
    batch: int, sequence: int, dtype: torch.dtype = torch.float32, draw: int = 0
) -> tuple[torch.Tensor, ...]:
    """Return x, the weights and dy. draw: its number; each has other random values."""
    attended = HEADS * HEAD_DIM

    def weight(inputs: int, outputs: int, seed: int) -> torch.Tensor:
        return (random(inputs, outputs, seed=10 * draw + seed) * inputs**-0.5).to(dtype)

    def norm(seed: int) -> torch.Tensor:
        return (1 + 0.1 * random(WIDTH, seed=10 * draw + seed)).to(dtype)

    x, dy = (random(batch, sequence, WIDTH, dtype=dtype, seed=10 * draw + seed) for seed in (0, 8))
    return (
        x, norm(1), weight(WIDTH, attended + 2 * KV_HEADS * HEAD_DIM, 2), weight(attended, WIDTH, 3), norm(4),
        weight(WIDTH, HIDDEN, 5), weight(WIDTH, HIDDEN, 6), weight(HIDDEN, WIDTH, 7), dy,
    )


def positions(batch: int, sequence: int) -> torch.Tensor:
    return (3 * torch.arange(batch)[:, None] + torch.arange(sequence)).to(DEVICE, torch.int32)


def applied(apply):
    """Return the block as a function of x and its weights."""

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        named = dict(zip(NAMES, inputs, strict=True))
        return apply(named | {"positions": positions(*inputs[0].shape[:2])}, **ATTRIBUTES)["y"]

    return function


def exact(*inputs: torch.Tensor) -> torch.Tensor:
    """Return the plain block in the inputs' dtype throughout; it normally computes some steps in float32."""
    x, attention_norm, w_qkv, w_o, mlp_norm, w_gate, w_up, w_down = inputs
    batch, sequence, _ = x.shape

    def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + ATTRIBUTES["eps"]) * weight

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = HEAD_DIM // 2
        frequencies = ATTRIBUTES["theta"] ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
        angles = positions(batch, sequence)[:, None, :, None] * frequencies
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], dim=-1)

    qkv = (normalised(x, attention_norm) @ w_qkv).view(batch, sequence, -1, HEAD_DIM).transpose(1, 2)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (turned(k), v))
    attended = torch.nn.functional.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
    x1 = x + attended.transpose(1, 2).flatten(2) @ w_o
    h = normalised(x1, mlp_norm)
    return x1 + (torch.nn.functional.silu(h @ w_gate) * (h @ w_up)) @ w_down


def agrees(function, *inputs: torch.Tensor, dy: torch.Tensor, draws: Sequence[tuple[torch.Tensor, ...]] = ()) -> bool:
    """Compare y and the gradients with float64.

    draws: more inputs, each ending in its dy, whose errors in plain code count. A maximum over few elements, and the
    order in which a CPU sums, are luck: on one CPU w_qkv's gradient erred by 2.1 times plain code's on one draw.
    """
    got = with_gradients(function, *inputs, dy=dy)
    low, reference = plainly(*inputs, dy=dy)
    others = [plainly(*draw[:-1], dy=draw[-1]) for draw in draws]
    return all(
        is_accurate(got[i], low[i], reference[i], others=[(lows[i], references[i]) for lows, references in others])
        for i in range(len(got))
    )


def plainly(*inputs: torch.Tensor, dy: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return the results of plain code in the same dtype and in float64."""
    low = with_gradients(applied(plain_block.apply), *inputs, dy=dy)
    return low, with_gradients(exact, *(x.double() for x in inputs), dy=dy.double())


@pytest.mark.parametrize("dtype", DTYPES_OF_COMPOSITIONS)
def test_agrees_with_float64(dtype: torch.dtype) -> None:
    *inputs, dy = tensors(2, 19, dtype)
    assert agrees(applied(decoder_block.apply), *inputs, dy=dy, draws=[tensors(2, 19, dtype, n) for n in range(1, 5)])


def test_strides() -> None:
    *inputs, dy = tensors(2, 5)
    apart = (x.mT.contiguous().mT if x.ndim > 1 else x for x in inputs)
    dy = random(1, 1, WIDTH, seed=9).expand_as(dy)
    assert agrees(applied(decoder_block.apply), *apart, dy=dy, draws=[tensors(2, 5, draw=n) for n in range(1, 5)])


def test_later_tokens_are_invisible() -> None:
    x, *weights, _ = tensors(2, 7)
    y = applied(decoder_block.apply)(x, *weights)
    x[:, 4:] += 1
    changed = applied(decoder_block.apply)(x, *weights)
    assert torch.equal(y[:, :4], changed[:, :4]) and not torch.equal(y[:, 4:], changed[:, 4:])


def test_inference_saves_nothing_and_training_each_intermediate_once() -> None:
    *inputs, _ = tensors(2, 5)
    assert applied(decoder_block.apply)(*inputs).grad_fn is None
    inputs[0].requires_grad_()
    tokens, attended, kv = 10, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    y = applied(decoder_block.apply)(*inputs)  # torch 2.11 frees the graph with it
    saved = y.grad_fn.next_functions[0][0].saved_tensors
    assert [tuple(x.shape) for x in saved] == [
        (tokens, WIDTH), (2, 5), *(tuple(x.shape) for x in inputs[1:]),
        (tokens, WIDTH), (tokens,), (tokens, attended + 2 * kv), (tokens, attended), (2, HEADS, 5),
        (tokens, WIDTH), (tokens, WIDTH), (tokens,), (tokens, HIDDEN), (tokens, HIDDEN),
    ]


def test_rejects() -> None:
    x, *weights, _ = tensors(2, 5)
    params = dict(zip(decoder_block.WEIGHTS, weights, strict=True))
    where = positions(2, 5)

    def call(x=x, where=where, attributes=ATTRIBUTES, **changed):
        return decoder_block.decoder_block(x, params | changed, where, **attributes)

    with pytest.raises(ValueError, match=r"x must be \[batch, sequence, width\] and not empty, got \[5, 37\]"):
        call(x[0])
    with pytest.raises(TypeError, match="positions must be int32 or int64, got torch.float32"):
        call(where=where.float())
    with pytest.raises(ValueError, match=r"positions must be \[batch, sequence\] = \[2, 5\] on .*, got \[1, 5\]"):
        call(where=where[:1])
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads, got 4 and 3"):
        call(attributes=ATTRIBUTES | {"kv_heads": 3})
    with pytest.raises(ValueError, match=r"w_qkv must have 4 \+ 2 \* 4 heads of .* columns, got 128"):
        call(attributes=ATTRIBUTES | {"kv_heads": 4})
    with pytest.raises(ValueError, match=r"the weights must fit x .*expected .*'w_down': \[67, 37\]"):
        call(w_down=params["w_down"].T)
    with torch.autocast(x.device.type), pytest.raises(RuntimeError, match="enabled=False"):
        call()
    with pytest.raises(TypeError, match="w_o in torch.float16"):
        call(w_o=params["w_o"].half())


def test_attention_to_a_lone_token_launches_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton does not compile this kernel for an H200 if heads share keys."""
    from xlafuse.triton_side.kernels import transformer_layer

    monkeypatch.setattr(transformer_layer.attention, "launch_dk_dv", None)
    monkeypatch.setattr(transformer_layer.attention.hopper_backward, "launch_backward", None)
    q, k, v, dout = (random(2, heads, 1, 16, seed=i) for i, heads in enumerate((4, 2, 2, 4)))
    merged, logsumexp2 = transformer_layer.attention_forward(q, k, v, True)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    transformer_layer.attention_backward(q, k, v, merged, logsumexp2, dout.reshape(2, 64), (dq, dk, dv))
    assert not dq.any() and not dk.any()
    torch.testing.assert_close(dv, dout.view(2, 2, 2, 1, 16).sum(2))
