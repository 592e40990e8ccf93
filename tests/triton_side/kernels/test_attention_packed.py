import pytest
import torch
from row_kernel_checks import DEVICE, random, with_gradients
from test_attention import DK_DV, DQ, FORWARD, agrees

from xlafuse.triton_side.kernels import attention, attention_backward
from xlafuse.triton_side.kernels.attention_packed import attention_packed

LENGTHS = [[37], [1, 33, 16, 5], [16, 16, 32, 1, 1], [0, 20, 0, 0, 40, 0]]


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)


def tensors(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32):
    counts = (heads, kv_heads, kv_heads, heads)
    return [random(tokens, n, head_dim, dtype=dtype, seed=seed) for seed, n in enumerate(counts)]


def each_alone(lengths: list[int]):
    """Run the kernel for sequences of one length on one sequence after the other."""

    def function(q, k, v):
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        outs = [attention.attention(*(x.transpose(0, 1)[None] for x in part)) for part in parts]
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    return function


@pytest.mark.parametrize(
    ("lengths", "dtype"), [*((lengths, torch.float32) for lengths in LENGTHS), (LENGTHS[1], torch.float16)]
)
def test_a_sequence_is_computed_as_if_alone(lengths: list[int], dtype: torch.dtype) -> None:
    q, k, v, dout = tensors(sum(lengths), 2, 1, 16, dtype)
    cu_seqlens = boundaries(lengths)
    packed = with_gradients(lambda *x: attention_packed(*x, cu_seqlens), q, k, v, dy=dout)
    alone = with_gradients(each_alone(lengths), q, k, v, dy=dout)
    assert packed[0].is_contiguous()
    # Both use the same tiles and kernels. A lone token's dq and dk are exact zeros without a kernel. With one they hold
    # the rounding of dp - delta, two sums of 16 terms, times k or q; two heads share dk.
    lone = torch.tensor([n == 1 for n in lengths for _ in range(n)], device=DEVICE)
    largest = [x.abs().max().item() for x in (q, k, v, dout)]
    left = 2 * (2 * 16) * torch.finfo(torch.float32).eps * 16 * largest[2] * largest[3] * max(largest[:2]) / 4
    for got, expected in zip(packed, alone, strict=True):
        assert torch.equal(got[~lone], expected[~lone])
        assert ((got - expected)[lone].abs() <= left).all()


@pytest.mark.parametrize(("forward", "dk_dv", "dq"), list(zip(FORWARD, DK_DV, DQ, strict=True)))
def test_any_configuration_agrees(forward, dk_dv, dq) -> None:
    """Compare two sequences with float64; the first may only leave its own rows."""
    first, second = 21, 50
    offsets = boundaries([first, second])

    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            before = (random(1, x.shape[1], first, 16, dtype=x.dtype, seed=9) for x in (q, k, v))
            q, k, v = (torch.cat(pair, dim=2) for pair in zip(before, (q, k, v), strict=True))
            out, logsumexp2 = attention.launch_forward(q, k, v, forward, True, offsets=offsets)
            ctx.save_for_backward(q, k, v, out, logsumexp2)
            return out[:, :, first:].contiguous()

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, logsumexp2 = ctx.saved_tensors
            dout = torch.cat([torch.ones_like(out[:, :, :first]), dout], dim=2)
            arguments = (q, k, v, dout, logsumexp2, attention_backward.launch_delta(out, dout))
            dk, dv = attention_backward.launch_dk_dv(*arguments, dk_dv, offsets=offsets)
            gradient = attention_backward.launch_dq(*arguments, dq, offsets=offsets)
            return tuple(x[:, :, first:] for x in (gradient, dk, dv))

    q, k, v, dout = (x.transpose(0, 1)[None].contiguous() for x in tensors(second, 4, 2, 16, torch.float16))
    assert agrees(Configured.apply, q, k, v, dout)


def test_strides_and_inference() -> None:
    q, k, v, dout = (x.transpose(0, 2).contiguous().transpose(0, 2) for x in tensors(40, 2, 1, 16))
    cu_seqlens = boundaries([9, 31])
    out = attention_packed(q, k, v, cu_seqlens)
    assert out.grad_fn is None and torch.equal(out, attention_packed(*(x.contiguous() for x in (q, k, v)), cu_seqlens))
