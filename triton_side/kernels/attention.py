"""Attention as Triton kernels: out = softmax(masked(q k^T / sqrt(head_dim) + bias)) v, the bias left out or given.

Tiled with an online softmax (Dao et al., "FlashAttention-2", arXiv 2307.08691): one program owns BLOCK_Q query
rows, walks the keys that they see and keeps the running maximum, the running sum and the unnormalised output, so that
no sequence x sequence matrix exists anywhere. Exponentials are base 2 with log2(e) folded into the scale.
The gradient is in `attention_backward.py`; from the forward it needs only `out` and one number a row,
logsumexp2[row] = log2(sum_j exp(score[row, j])).

Shapes: q, out [batch, heads, sequence, head_dim]; k, v [batch, kv_heads, sequence, head_dim], where each head of k and
v serves heads / kv_heads heads of q that follow one another (grouped queries, arXiv 2305.13245) and is read in place;
bias [heads, sequence, sequence], where a row of -inf alone gives zeros; logsumexp2 [batch, heads, sequence], float32.
dtypes: bfloat16, float16, float32. Scores, softmax and accumulators are float32; the probabilities are cast to v's
dtype for the second product. float32 products follow `torch.get_float32_matmul_precision()`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_side.calls.declare import computing, declare, forward
from triton_side.kernels._attention_configs import (
    HEAD_DIMS,
    TileConfig,
    chosen,
    dbias_config,
    dk_dv_config,
    dq_config,
    forward_config,
)
from triton_side.kernels._attention_tiles import (
    bias_strides,
    bias_tile,
    empty_rows,
    keys_seen,
    packing,
    place,
    place_number,
    programs_of,
    rows_written,
    sees,
    written_strides,
)
from triton_side.kernels._constants import LOG2_E, LOWEST
from triton_side.kernels._launch import check_tensors, device_of
from triton_side.kernels._tiles import add_product, load_rows, product, product_precision, provide_descriptor_memory
from triton_side.kernels.attention_backward import (
    by_case,
    launch_dbias,
    launch_delta,
    launch_dk_dv,
    launch_dq,
    products,
)

FORWARD = (
    forward("dot", "scores"), forward("div", "scores"), forward("add", "bias"), forward("select", "mask"),
    forward("reduce_max", "softmax/max"), forward("sub", "softmax/exp"), forward("exp", "softmax/exp"),
    forward("reduce_sum", "softmax/sum"), forward("div", "softmax/divide"), forward("dot", "values"),
)
FORWARD_BY_CASE = by_case(*FORWARD)


@triton.jit
def _attend(
    accumulator, row_sum, row_max, q, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
    bias_ptr, bias_stride_q, bias_stride_k, q_start, kv_begin, kv_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Fold keys kv_begin .. kv_end into the running softmax; MASKED tiles may pass the end."""
    for kv_start in tl.range(kv_begin, kv_end, BLOCK_KV):
        k = load_rows(k_source, stride_ks, stride_kd, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, MASKED)
        scores = product(q, k.T, PRECISION)
        if bias_ptr is not None:
            scores += bias_tile(
                bias_ptr, bias_stride_q, bias_stride_k, q_start, kv_start, sequence, HEAD_DIM, BLOCK_Q, BLOCK_KV
            )
        if MASKED:
            row = q_start + tl.arange(0, BLOCK_Q)
            column = kv_start + tl.arange(0, BLOCK_KV)
            seen = sees(row[:, None], column[None, :], sequence, CAUSAL, WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2e)
        p = tl.exp2(scores * scale_log2e - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        accumulator = accumulator * correction[:, None]
        v = load_rows(v_source, stride_vs, stride_vd, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, MASKED)
        accumulator = add_product(accumulator, p.to(v.dtype), v, PRECISION)
        row_max = new_max
    return accumulator, row_sum, row_max


@declare(*FORWARD, flops=products(2))
@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, logsumexp2_ptr, offsets_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, ROW: tl.constexpr,
    bias_stride_h, bias_stride_q, bias_stride_k, heads, sequence, sequences, PACKED: tl.constexpr, scale_log2e,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """out (whose columns lie side by side) of BLOCK_Q rows of one head; GROUP heads of q share a head of k and v."""
    # In order of start: one head's tiles together, so that its keys and values stay in L2, and the rows that see the
    # most keys first.
    head_index, tile, q_tiles, first, length = place(
        place_number(bias_ptr, sequence, heads, BLOCK_Q), sequence, offsets_ptr, sequences, BLOCK_Q, PACKED
    )
    if PACKED:
        if tile >= q_tiles:
            return
    batch = head_index // heads
    head = head_index % heads
    q_start = (q_tiles - 1 - tile) * BLOCK_Q
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // GROUP * stride_kh
    v_ptr += batch * stride_vb + head // GROUP * stride_vh
    if bias_ptr is not None:
        bias_ptr += head * bias_stride_h
    out_start, out_stride = rows_written(
        head_index, first, heads, sequence, stride_ob, stride_oh, HEAD_DIM, ROW, PACKED
    )
    out_ptr += out_start
    if PACKED:
        q_ptr += first.to(tl.int64) * stride_qs
        k_ptr += first.to(tl.int64) * stride_ks
        v_ptr += first.to(tl.int64) * stride_vs
    if DESCRIPTORS:
        q_source = tl.make_tensor_descriptor(q_ptr, [length, HEAD_DIM], [stride_qs, 1], [BLOCK_Q, HEAD_DIM])
        k_source = tl.make_tensor_descriptor(k_ptr, [length, HEAD_DIM], [stride_ks, 1], [BLOCK_KV, HEAD_DIM])
        v_source = tl.make_tensor_descriptor(v_ptr, [length, HEAD_DIM], [stride_vs, 1], [BLOCK_KV, HEAD_DIM])
    else:
        q_source = q_ptr
        k_source = k_ptr
        v_source = v_ptr

    q = load_rows(q_source, stride_qs, stride_qd, q_start, length, BLOCK_Q, HEAD_DIM, DESCRIPTORS, True)
    # float32's lowest number, not -inf: of a first tile of scores of -inf, the maximum must not be -inf, or what is
    # taken from it is NaN.
    row_max = tl.full([BLOCK_Q], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    accumulator = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)

    begin, whole_from, whole_until, end = keys_seen(q_start, length, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    if WINDOW:
        accumulator, row_sum, row_max = _attend(
            accumulator, row_sum, row_max, q, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
            bias_ptr, bias_stride_q, bias_stride_k, q_start, begin, whole_from, length, scale_log2e,
            HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, DESCRIPTORS, PRECISION,
        )
    accumulator, row_sum, row_max = _attend(
        accumulator, row_sum, row_max, q, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
        bias_ptr, bias_stride_q, bias_stride_k, q_start, whole_from, whole_until, length, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, False, DESCRIPTORS, PRECISION,
    )
    accumulator, row_sum, row_max = _attend(
        accumulator, row_sum, row_max, q, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
        bias_ptr, bias_stride_q, bias_stride_k, q_start, whole_until, end, length, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, DESCRIPTORS, PRECISION,
    )

    if bias_ptr is not None:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # a row of -inf alone has summed nothing: out is 0, not 0 / 0
    row = q_start + tl.arange(0, BLOCK_Q)
    at = row[:, None] * out_stride + tl.arange(0, HEAD_DIM)[None, :]
    out = accumulator / row_sum[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=row[:, None] < length)
    if logsumexp2_ptr is not None:
        logsumexp2_ptr += head_index * sequence + first
        tl.store(logsumexp2_ptr + row, row_max + tl.log2(row_sum), mask=row < length)


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: TileConfig, save_logsumexp: bool,
    causal: bool = True, window: int = 0, offsets: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out (see `empty_rows`) and, where a backward pass will follow, logsumexp2. offsets: of packed sequences. out:
    where to write it, the last stride 1."""
    heads, sequence, head_dim = q.shape[1:]
    strides = written_strides(out)
    out = empty_rows(q, offsets) if out is None else out
    logsumexp2 = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if save_logsumexp else None
    if q.numel() == 0:
        return out, logsumexp2
    with device_of(q), computing(*FORWARD_BY_CASE[causal, bias is not None]):
        if config.descriptors:
            provide_descriptor_memory(q.device)
        attention_forward_kernel[(programs_of(q, config.block_q, offsets),)](
            q, k, v, bias, out, logsumexp2, offsets, *q.stride(), *k.stride(), *v.stride(), *strides,
            *bias_strides(bias), heads, sequence, *packing(offsets), head_dim**-0.5 * LOG2_E.value,
            GROUP=heads // k.shape[1], HEAD_DIM=head_dim, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
            CAUSAL=causal, WINDOW=window, DESCRIPTORS=config.descriptors, PRECISION=product_precision(q.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return out, logsumexp2


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool,
        window: int, offsets: torch.Tensor | None,
    ) -> torch.Tensor:
        config = chosen(forward_config, q, k, v, windowed=window > 0, biased=bias is not None)
        out, logsumexp2 = launch_forward(q, k, v, config, True, causal, window, offsets, bias)
        ctx.save_for_backward(q, k, v, out, logsumexp2, offsets, bias)
        ctx.mask = causal, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, logsumexp2, offsets, bias = ctx.saved_tensors
        causal, window = ctx.mask
        if q.numel() == 0:
            return *(None if x is None else torch.zeros_like(x) for x in (q, k, v, bias)), None, None, None
        if bias is None and (q.shape[2] == 1 or window == 1):
            # A lone key has weight 1 whatever q and k are: exact zeros, where dp - delta would leave rounding errors.
            dv = dout.unflatten(1, (k.shape[1], -1)).sum(dim=2)
            return torch.zeros_like(q), torch.zeros_like(k), dv, None, None, None, None
        delta = launch_delta(out, dout)
        given = (q, k, v, dout, logsumexp2, delta)
        of = {
            "shared": q.shape[1] != k.shape[1], "windowed": window > 0, "packed": offsets is not None,
            "biased": bias is not None,
        }
        dk, dv = launch_dk_dv(*given, chosen(dk_dv_config, q, dout, **of), causal, window, offsets, bias)
        dbias = None
        if bias is not None and ctx.needs_input_grad[3]:
            dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        # Of a batch of one ds is dbias. Rows off 16 numbers are stored one number at a time, for whose addresses the
        # kernel for dq has no registers: it would spill up to 304 bytes.
        alone = len(q) == 1 and q.shape[2] % 16 == 0
        dq = launch_dq(
            *given, chosen(dq_config, k, v, **of), causal, window, offsets, bias, dbias if alone else None
        )
        if dbias is not None and not alone:
            launch_dbias(*given, bias, dbias, chosen(dbias_config, q, k, v, dout))
        return dq, dk, dv, dbias, None, None, None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, window: int = 0
) -> torch.Tensor:
    """softmax(masked(q k^T / sqrt(head_dim))) v, differentiable once in q, k and v.

    Any strides are read in place. Heads of k and v that several heads of q share are not repeated: q's heads
    g * group .. (g + 1) * group use head g of k and v.

    Args:
        q: [batch, heads, sequence, head_dim], in bfloat16, float16 or float32.
        k, v: [batch, kv_heads, sequence, head_dim], kv_heads a divisor of heads, in q's dtype.
        causal: a query sees the keys at its own position and before, else all.
        window: with causal, a query sees the latest `window` of these alone, its own included; 0: all of them.

    Returns:
        out [batch, heads, sequence, head_dim], contiguous, in the inputs' dtype.

    Raises:
        ValueError: the shapes do not fit, head_dim is not one of HEAD_DIMS, a window is negative or not causal, a
            tensor is on another device or not on a GPU (outside the interpreter), or float32 products are set to
            "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    check_tensors(q=q, k=k, v=v)
    check_shapes(q, k, v)
    if window < 0 or window and not causal:
        raise ValueError(f"window must be 0 (none) or a number of keys under a causal mask, got {window=}, {causal=}")
    window = 0 if window >= q.shape[2] else int(window)
    return run(q, k, v, bool(causal), window)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int,
    offsets: torch.Tensor | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of checked arguments; packed sequences, with their `offsets`, as [1, heads, tokens, head_dim]."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias)):
        return _Attention.apply(q, k, v, bias, causal, window, offsets)
    config = chosen(forward_config, q, k, v, windowed=window > 0, biased=bias is not None)
    out, _ = launch_forward(q, k, v, config, False, causal, window, offsets, bias)
    return out


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or (q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1])):
        raise ValueError(
            "q must be [batch, heads, sequence, head_dim], k and v [batch, kv_heads, sequence, head_dim] with heads "
            f"a multiple of kv_heads, got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(
            f"head_dim must be one of {HEAD_DIMS}, got {q.shape[-1]}; pad q, k and v with zeros to the next of them "
            "and scale q by sqrt(padded / head_dim)"
        )


def apply(inputs: dict[str, torch.Tensor], causal: int = 1, window: int = 0) -> dict[str, torch.Tensor]:
    """The attention block: inputs q, k, v; output out."""
    return {"out": attention(inputs["q"], inputs["k"], inputs["v"], causal=bool(causal), window=window)}
