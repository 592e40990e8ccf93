"""Attention as Triton kernels: out = softmax(masked(q k^T / sqrt(head_dim) + bias)) v, with or without the bias.

The kernel tiles with an online softmax (Dao et al., "FlashAttention-2", arXiv 2307.08691). One program owns BLOCK_Q
query rows and loops over the keys visible to them. It keeps the running maximum, the running sum and the unnormalised
output, so no sequence x sequence matrix exists anywhere. Exponentials are base 2 with log2(e) folded into the scale.

On a Hopper GPU the kernels of `hopper/` compute the same from 16-bit operands (`hopper_problem` names the conditions).
Sequences of at most four tokens have a forward kernel of their own (`attention_few_tokens.py`).

The gradient is in `attention_backward.py`. From the forward pass it needs only `out` and one number a row:
logsumexp2[row] = log2(sum_j exp(score[row, j])).

Shapes:

    q, out        [batch, heads, sequence, head_dim]
    k, v          [batch, kv_heads, sequence, head_dim]
    bias          [heads, sequence, sequence]; a row of nothing but -inf gives zeros
    logsumexp2    [batch, heads, sequence], float32

Each head of k and v serves heads / kv_heads consecutive heads of q (grouped queries, arXiv 2305.13245), without a copy.

dtypes: bfloat16, float16, float32. Scores, softmax and accumulators are float32; the probabilities are cast to v's
dtype for the second product. float32 products follow `torch.get_float32_matmul_precision()`
(`product_precision`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import computing, declare
from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.kernels import attention_few_tokens
from xlafuse.triton_side.kernels.attention_backward import (
    launch_dbias,
    launch_delta,
    launch_dk_dv,
    launch_dq,
)
from xlafuse.triton_side.kernels.hopper import attention_backward as hopper_backward
from xlafuse.triton_side.kernels.hopper import attention_forward as hopper_forward
from xlafuse.triton_side.kernels.hopper.parts import is_hopper
from xlafuse.triton_side.kernels.shared.attention_configs import (
    HEAD_DIMS,
    TileConfig,
    attention_precision,
    choose_attention_config,
    dbias_config,
    dk_dv_config,
    dq_config,
    forward_config,
)
from xlafuse.triton_side.kernels.shared.attention_operations import FORWARD, FORWARD_BY_CASE, products_flops
from xlafuse.triton_side.kernels.shared.attention_tiles import (
    bias_strides,
    empty_output,
    is_visible,
    load_bias,
    output_offset,
    output_strides,
    packed_sizes,
    program_count,
    program_number,
    rows_of_head,
    tile_of_program,
    visible_keys,
)
from xlafuse.triton_side.kernels.shared.constants import LOG2_E, LOWEST
from xlafuse.triton_side.kernels.shared.launch import INTERPRETED, check_tensors, device_of
from xlafuse.triton_side.kernels.shared.tiles import (
    add_product,
    fits_descriptor,
    load_rows,
    product,
    provide_descriptor_memory,
)


@triton.jit
def _attend(
    state, q, keys, values, bias, q_start, kv_begin, kv_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Fold keys kv_begin .. kv_end into the running softmax `state`; only MASKED tiles may pass the end.

    state: (accumulator, row_sum, row_max). keys, values: as `load_rows` takes them. bias: as `load_bias` takes it.
    """
    accumulator, row_sum, row_max = state
    for kv_start in tl.range(kv_begin, kv_end, BLOCK_KV):
        k = load_rows(keys, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, MASKED)
        scores = product(q, k.T, PRECISION)
        if bias[0] is not None:
            scores += load_bias(bias, q_start, kv_start, sequence, HEAD_DIM, BLOCK_Q, BLOCK_KV)
        if MASKED:
            row = q_start + tl.arange(0, BLOCK_Q)
            column = kv_start + tl.arange(0, BLOCK_KV)
            visible = is_visible(row[:, None], column[None, :], sequence, CAUSAL, WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2e)
        p = tl.exp2(scores * scale_log2e - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        accumulator = accumulator * correction[:, None]
        v = load_rows(values, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, MASKED)
        accumulator = add_product(accumulator, p.to(v.dtype), v, PRECISION)
        row_max = new_max
    return accumulator, row_sum, row_max


@declare(*FORWARD, flops=products_flops(2))
@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, logsumexp2_ptr, offsets_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, ROW: tl.constexpr,
    bias_stride_h, bias_stride_q, bias_stride_k, heads, sequence, sequences, PACKED: tl.constexpr, scale_log2e,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute out, whose columns are contiguous, for BLOCK_Q rows of one head.

    GROUP heads of q share a head of k and v.
    """
    # One head's tiles start together, so its keys and values stay in L2. The rows with the most visible keys start
    # first.
    head_index, tile, q_tiles, first, length = tile_of_program(
        program_number(bias_ptr, sequence, heads, BLOCK_Q), sequence, offsets_ptr, sequences, BLOCK_Q, PACKED
    )
    if PACKED:
        if tile >= q_tiles:
            return
    batch = head_index // heads
    head = head_index % heads
    q_start = (q_tiles - 1 - tile) * BLOCK_Q
    q_ptr = rows_of_head(q_ptr, (stride_qb, stride_qh, stride_qs), batch, head, first, PACKED)
    k_ptr = rows_of_head(k_ptr, (stride_kb, stride_kh, stride_ks), batch, head // GROUP, first, PACKED)
    v_ptr = rows_of_head(v_ptr, (stride_vb, stride_vh, stride_vs), batch, head // GROUP, first, PACKED)
    if bias_ptr is not None:
        bias_ptr += head * bias_stride_h
    bias = (bias_ptr, bias_stride_q, bias_stride_k)
    out_start, out_stride = output_offset(
        head_index, first, heads, sequence, stride_ob, stride_oh, HEAD_DIM, ROW, PACKED
    )
    out_ptr += out_start
    if DESCRIPTORS:
        q_source = tl.make_tensor_descriptor(q_ptr, [length, HEAD_DIM], [stride_qs, 1], [BLOCK_Q, HEAD_DIM])
        k_source = tl.make_tensor_descriptor(k_ptr, [length, HEAD_DIM], [stride_ks, 1], [BLOCK_KV, HEAD_DIM])
        v_source = tl.make_tensor_descriptor(v_ptr, [length, HEAD_DIM], [stride_vs, 1], [BLOCK_KV, HEAD_DIM])
    else:
        q_source = q_ptr
        k_source = k_ptr
        v_source = v_ptr
    keys = (k_source, stride_ks, stride_kd)
    values = (v_source, stride_vs, stride_vd)

    q = load_rows((q_source, stride_qs, stride_qd), q_start, length, BLOCK_Q, HEAD_DIM, DESCRIPTORS, True)
    # The lowest finite number, not -inf: after a first tile of -inf alone, subtracting a maximum of -inf gives NaN.
    row_max = tl.full([BLOCK_Q], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    accumulator = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)
    state = (accumulator, row_sum, row_max)

    begin, whole_from, whole_until, end = visible_keys(q_start, length, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    if WINDOW:
        state = _attend(
            state, q, keys, values, bias, q_start, begin, whole_from, length, scale_log2e,
            HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, DESCRIPTORS, PRECISION,
        )
    state = _attend(
        state, q, keys, values, bias, q_start, whole_from, whole_until, length, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, False, DESCRIPTORS, PRECISION,
    )
    accumulator, row_sum, row_max = _attend(
        state, q, keys, values, bias, q_start, whole_until, end, length, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, DESCRIPTORS, PRECISION,
    )

    if bias_ptr is not None:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # a row of -inf alone has sum 0: out is 0, not 0 / 0
    row = q_start + tl.arange(0, BLOCK_Q)
    offset = row[:, None] * out_stride + tl.arange(0, HEAD_DIM)[None, :]
    out = accumulator / row_sum[:, None]
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=row[:, None] < length)
    if logsumexp2_ptr is not None:
        logsumexp2_ptr += head_index * sequence + first
        tl.store(logsumexp2_ptr + row, row_max + tl.log2(row_sum), mask=row < length)


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: TileConfig, save_logsumexp: bool,
    causal: bool = True, window: int = 0, offsets: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out, made by `empty_output`, and with save_logsumexp logsumexp2, which the backward pass reads.

    offsets: of packed sequences. out: memory for the result, with last stride 1.
    """
    heads, sequence, head_dim = q.shape[1:]
    strides = output_strides(out)
    out = empty_output(q, offsets) if out is None else out
    logsumexp2 = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if save_logsumexp else None
    if q.numel() == 0:
        return out, logsumexp2
    with device_of(q), computing(*FORWARD_BY_CASE[causal, bias is not None]):
        if config.descriptors:
            provide_descriptor_memory(q.device)
        attention_forward_kernel[(program_count(q, config.block_q, offsets),)](
            q, k, v, bias, out, logsumexp2, offsets, *q.stride(), *k.stride(), *v.stride(), *strides,
            *bias_strides(bias), heads, sequence, *packed_sizes(offsets), head_dim**-0.5 * LOG2_E.value,
            GROUP=heads // k.shape[1], HEAD_DIM=head_dim, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
            CAUSAL=causal, WINDOW=window, DESCRIPTORS=config.descriptors,
            PRECISION=attention_precision(q.dtype, head_dim), num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return out, logsumexp2


def hopper_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Return why the kernels of `hopper/` cannot take the operands, or None."""
    if INTERPRETED or not is_hopper(q.device):
        return "they run on GPUs of compute capability 9.0 only"
    if q.dtype == torch.float32 or q.shape[-1] not in hopper_forward.TILES or bias is not None:
        dims = " or ".join(map(str, sorted(hopper_forward.TILES)))
        return f"they take bfloat16 and float16, head_dim {dims}, and no bias"
    if not all(map(fits_descriptor, (q, k, v))):
        return "TMA reads rows of whole 16 bytes, 16 bytes aligned"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, save_logsumexp: bool, *, hopper: bool, few_tokens: bool = False,
    causal: bool = True, window: int = 0, offsets: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and, with save_logsumexp, logsumexp2. hopper: by the kernel of `hopper/`.

    few_tokens: by the kernel of `attention_few_tokens.py`, if that takes the operands. offsets: of packed sequences.
    out: memory for the result, with last stride 1.
    """
    if few_tokens:
        return attention_few_tokens.launch_few_tokens(q, k, v, save_logsumexp, causal, window)
    if hopper:
        return hopper_forward.launch_forward(q, k, v, save_logsumexp, causal, window, offsets, out)
    config = choose_attention_config(
        forward_config, q, k, v, windowed=window > 0, packed=offsets is not None, biased=bias is not None
    )
    return launch_forward(q, k, v, config, save_logsumexp, causal, window, offsets, bias, out)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
    logsumexp2: torch.Tensor, *, hopper: bool, causal: bool = True, window: int = 0,
    offsets: torch.Tensor | None = None, gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of attention without a bias, from the results of `forward`.

    hopper: by the kernels of `hopper/`. Under `torch.use_deterministic_algorithms` the portable kernels compute them,
    because those of `hopper/` sum dq in an order that varies. offsets: of packed sequences. gradients: memory for the
    results, with last stride 1. dk and dv have equal strides.
    """
    if offsets is None and (q.shape[2] == 1 or window == 1):
        # A lone key has weight 1 whatever q and k are, so zeros are exact; dp - delta would have rounding errors.
        # Triton 3.7.1 also fails to compile the dk, dv kernel for one row with shared heads: its pipeliner rejects a
        # descriptor made within a loop of one step.
        dq, dk, dv = gradients or tuple(empty_output(x, None) for x in (q, k, v))
        with stage("values"):
            torch.sum(dout.unflatten(1, (v.shape[1], -1)), dim=2, out=dv)
        return dq.zero_(), dk.zero_(), dv
    if hopper and not torch.are_deterministic_algorithms_enabled():
        # A copy, because a contiguous dout that begins between two multiples of 16 bytes does not fit either.
        dout = dout if fits_descriptor(dout) else dout.clone(memory_format=torch.contiguous_format)
        return hopper_backward.launch_backward(q, k, v, out, dout, logsumexp2, causal, window, offsets, gradients)
    operands = (q, k, v, dout, logsumexp2, launch_delta(out, dout))
    facts = {"shared": q.shape[1] != k.shape[1], "windowed": window > 0, "packed": offsets is not None}
    config = choose_attention_config(dk_dv_config, q, dout, **facts)
    dk, dv = launch_dk_dv(*operands, config, causal, window, offsets, out=gradients and gradients[1:])
    config = choose_attention_config(dq_config, k, v, **facts)
    dq = launch_dq(*operands, config, causal, window, offsets, out=gradients and gradients[0])
    return dq, dk, dv


def _biased_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
    logsumexp2: torch.Tensor, bias: torch.Tensor, with_dbias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return dq, dk, dv, and dbias or None, of attention with a bias and without a mask."""
    operands = (q, k, v, dout, logsumexp2, launch_delta(out, dout))
    facts = {"shared": q.shape[1] != k.shape[1], "biased": True}
    dk, dv = launch_dk_dv(*operands, choose_attention_config(dk_dv_config, q, dout, **facts), False, bias=bias)
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if with_dbias else None
    # With batch size 1, ds equals dbias, and the dq kernel stores it. Rows of a length that 16 does not divide are
    # stored number by number; those addresses would make the dq kernel spill up to 304 bytes.
    dq_stores_dbias = len(q) == 1 and q.shape[2] % 16 == 0
    config = choose_attention_config(dq_config, k, v, **facts)
    dq = launch_dq(*operands, config, False, bias=bias, dbias=dbias if dq_stores_dbias else None)
    if dbias is not None and not dq_stores_dbias:
        launch_dbias(*operands, bias, dbias, choose_attention_config(dbias_config, q, k, v, dout))
    return dq, dk, dv, dbias


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
        offsets: torch.Tensor | None, options: dict[str, Any], few_tokens: bool, deterministic: bool,
    ) -> torch.Tensor:
        out, logsumexp2 = forward(q, k, v, True, few_tokens=few_tokens, offsets=offsets, bias=bias, **options)
        ctx.save_for_backward(q, k, v, out, logsumexp2, offsets, bias)
        ctx.options = {**options, "hopper": options["hopper"] and not deterministic}
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, logsumexp2, offsets, bias = ctx.saved_tensors
        if q.numel() == 0:
            return *(None if x is None else torch.zeros_like(x) for x in (q, k, v, bias)), *[None] * 4
        if bias is not None:
            with_dbias = ctx.needs_input_grad[3]
            return *_biased_backward(q, k, v, out, dout, logsumexp2, bias, with_dbias), *[None] * 4
        return *backward(q, k, v, out, dout, logsumexp2, offsets=offsets, **ctx.options), *[None] * 5


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, window: int = 0,
    kernels: str = "auto", deterministic: bool = False,
) -> torch.Tensor:
    """Return softmax(masked(q k^T / sqrt(head_dim))) v, differentiable once in q, k and v.

    Tensors of any strides are read without a copy. Shared heads of k and v are not repeated: q's heads
    g * group .. (g + 1) * group use head g of k and v.

    Args:
        q: [batch, heads, sequence, head_dim], in bfloat16, float16 or float32.
        k, v: [batch, kv_heads, sequence, head_dim], kv_heads a divisor of heads, in q's dtype.
        causal: only the keys at a query's own position and before are visible to it; otherwise all are.
        window: with causal, only the latest `window` of these keys are visible, its own included; 0 leaves all.
        kernels: "hopper" for those of `hopper/`, "portable" for those of this file and `attention_backward.py`, or
            "auto": `attention_few_tokens.py` for at most four tokens, else the first where they can take the operands.
        deterministic: gradients repeat bit for bit, by the kernels of `attention_backward.py`. Those of `hopper/` add
            dq in an order that varies. `torch.use_deterministic_algorithms(True)` does the same everywhere.

    Returns:
        out [batch, heads, sequence, head_dim], contiguous, in the inputs' dtype.

    Raises:
        ValueError: the shapes do not fit, head_dim is not one of HEAD_DIMS, or a window is negative or not causal. A
            tensor is on another device or not on a GPU (outside the interpreter). float32 products are set to "medium".
            The kernels asked for cannot take the operands.
        TypeError: a dtype is not supported, or they differ.
    """
    check_tensors(q=q, k=k, v=v)
    check_shapes(q, k, v)
    if window < 0 or window and not causal:
        raise ValueError(f"window must be 0 (none) or a number of keys under a causal mask, got {window=}, {causal=}")
    window = 0 if window >= q.shape[2] else int(window)
    return run(q, k, v, bool(causal), window, kernels=kernels, deterministic=deterministic)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int,
    offsets: torch.Tensor | None = None, bias: torch.Tensor | None = None, kernels: str = "auto",
    deterministic: bool = False,
) -> torch.Tensor:
    """Run attention on checked arguments; packed sequences come as [1, heads, tokens, head_dim] with `offsets`."""
    if kernels not in ("auto", "hopper", "portable"):
        raise ValueError(f"kernels must be 'auto', 'hopper' or 'portable', got {kernels!r}")
    problem = hopper_problem(q, k, v, bias)
    if kernels == "hopper" and problem:
        raise ValueError(f"the kernels for Hopper GPUs cannot take these operands: {problem}")
    options: dict[str, Any] = {"causal": causal, "window": window, "hopper": kernels != "portable" and problem is None}
    few_tokens = kernels == "auto" and attention_few_tokens.takes(q, offsets, bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias)):
        return _Attention.apply(q, k, v, bias, offsets, options, few_tokens, deterministic)
    return forward(q, k, v, False, few_tokens=few_tokens, offsets=offsets, bias=bias, **options)[0]


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError unless q, k and v fit each other and the kernels."""
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


def apply(
    inputs: dict[str, torch.Tensor], causal: int = 1, window: int = 0, kernels: str = "auto"
) -> dict[str, torch.Tensor]:
    """Run the block `attention`: q, k, v -> out. kernels: as in `attention`."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    return {"out": attention(q, k, v, causal=bool(causal), window=window, kernels=kernels)}


def apply_deterministic(
    inputs: dict[str, torch.Tensor], causal: int = 1, window: int = 0
) -> dict[str, torch.Tensor]:
    """Run the block `attention` with gradients that repeat bit for bit."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    return {"out": attention(q, k, v, causal=bool(causal), window=window, deterministic=True)}
