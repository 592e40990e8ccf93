"""Attention of sequences of a few tokens, forward, from 16-bit operands.

A program computes one head whole. It loads q, k and v at once and multiplies them without tensor cores, so nothing is
copied to shared memory and no loop starts. The formula, shapes and results are those of `attention.py`. Products and
probabilities are float32.
"""

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls.declare import Shapes, computing, declare
from xlafuse.triton_side.kernels.shared.attention_operations import FORWARD, FORWARD_BY_CASE, products_flops
from xlafuse.triton_side.kernels.shared.attention_tiles import empty_output, is_visible
from xlafuse.triton_side.kernels.shared.constants import LOG2_E
from xlafuse.triton_side.kernels.shared.launch import device_of, next_power_of_2

MOST_TOKENS = 4  # products of all pairs of tokens take 16 registers a thread at head_dim 128


def few_tokens_flops(shapes: Shapes) -> float | None:
    return products_flops(2)({**shapes, "PACKED": 0})


@triton.jit
def _load(x_ptr, strides, batch, head, token, sequence, HEAD_DIM: tl.constexpr):
    """Return a head's rows at `token`, [..., HEAD_DIM], float32, zeros past the end. strides: of x's four axes."""
    x_ptr += batch * strides[0] + head * strides[1]
    offset = token.to(tl.int64) * strides[2] + tl.arange(0, HEAD_DIM)[None, None, :] * strides[3]
    return tl.load(x_ptr + offset, mask=token < sequence, other=0.0).to(tl.float32)


@declare(*FORWARD, flops=few_tokens_flops)
@triton.jit
def attention_few_tokens_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, logsumexp2_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, heads, sequence, scale_log2e,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):
    """Compute out, contiguous, for one head. GROUP heads of q share a head of k and v."""
    head_index = tl.program_id(0).to(tl.int64)
    batch, head = head_index // heads, head_index % heads
    row, column = tl.arange(0, TOKENS)[:, None, None], tl.arange(0, TOKENS)[None, :, None]
    q = _load(q_ptr, (stride_qb, stride_qh, stride_qs, stride_qd), batch, head, row, sequence, HEAD_DIM)
    k = _load(k_ptr, (stride_kb, stride_kh, stride_ks, stride_kd), batch, head // GROUP, column, sequence, HEAD_DIM)
    v = _load(v_ptr, (stride_vb, stride_vh, stride_vs, stride_vd), batch, head // GROUP, column, sequence, HEAD_DIM)

    scores = tl.sum(q * k, axis=2, keep_dims=True)  # [rows, columns, 1]
    visible = is_visible(row, column, sequence, CAUSAL, WINDOW) & (column < sequence)
    scores = tl.where(visible, scores, float("-inf"))
    row_max = tl.max(scores, axis=1, keep_dims=True) * scale_log2e
    p = tl.exp2(scores * scale_log2e - row_max)
    row_sum = tl.sum(p, axis=1, keep_dims=True)
    out = tl.sum(p * v, axis=1, keep_dims=True) / row_sum

    offset = (head_index * sequence + row) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, None, :]
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=row < sequence)
    if logsumexp2_ptr is not None:
        tl.store(logsumexp2_ptr + head_index * sequence + row, row_max + tl.log2(row_sum), mask=row < sequence)


def takes(q: torch.Tensor, offsets: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Return whether the kernel computes attention of these operands. float32 products follow a precision setting."""
    return offsets is None and bias is None and q.shape[2] <= MOST_TOKENS and q.dtype != torch.float32


def launch_few_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, save_logsumexp: bool, causal: bool, window: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out, contiguous, and with save_logsumexp logsumexp2, which the backward pass reads."""
    heads, sequence, head_dim = q.shape[1:]
    out = empty_output(q, None)
    logsumexp2 = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if save_logsumexp else None
    if q.numel() == 0:
        return out, logsumexp2
    tokens = next_power_of_2(sequence)
    with device_of(q), computing(*FORWARD_BY_CASE[causal, False]):
        attention_few_tokens_kernel[(q.shape[0] * heads,)](
            q, k, v, out, logsumexp2, *q.stride(), *k.stride(), *v.stride(), heads, sequence,
            head_dim**-0.5 * LOG2_E.value, GROUP=heads // k.shape[1], HEAD_DIM=head_dim, TOKENS=tokens, CAUSAL=causal,
            WINDOW=window, num_warps=max(1, min(8, tokens * tokens * head_dim // 1024)),
        )
    return out, logsumexp2
