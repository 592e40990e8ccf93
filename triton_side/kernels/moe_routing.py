"""Routing of a mixture of experts, forward and backward: router, top-k, load-balancing loss and the order of the slots.

    logits = x router^T    p = softmax(logits)    chosen: the top_k largest, of equal ones the lowest index first

    w_j = exp(logits[chosen_j]) / sum over the chosen of exp(logits)
    balance_loss = experts sum_e fraction_e mean_t p[t, e]    fraction_e = count_e / (tokens top_k)

Fedus et al., Switch Transformers, arXiv:2101.03961; Jiang et al., Mixtral of Experts, arXiv:2401.04088. Backward, with
dw the gradients of the weights:

    dlogits[t, e] = [e = chosen_j] w_j (dw_j - sum_i w_i dw_i) + p[t, e] (g_e - sum_f p[t, f] g_f)
    g_e = dloss experts fraction_e / tokens    drouter = dlogits^T x

Forward takes three kernels:

1. One program a tile of TOKENS tokens computes logits, choices and weights in one pass over x, and the tile's share of
   the counts and mean probabilities.
2. One program adds the shares. It computes the loss, each expert's first slot, and each tile's first slot in it.
3. One program a tile numbers the slots: by expert, then by token, then by choice.

Few tokens take two kernels: a tile is one token, so programs are many, and the second kernel numbers the slots.

This is a counting sort without atomics, so it repeats bit for bit.

Shapes: x [tokens, width], router [experts, width]; chosen, weights, slots [tokens, top_k]; rows [tokens top_k], the
token in each slot; offsets [experts + 1]; logits [tokens, experts].

x and router are bfloat16, float16 or float32; chosen, slots, rows and offsets are int32. Everything else is float32;
logits never use TF32. A token with a NaN logit chooses experts that exist, and its weights are NaN.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls.declare import again, computing, declare, forward, gradient
from xlafuse.triton_side.kernels.shared.column_sums import sum_columns
from xlafuse.triton_side.kernels.shared.grouped_product import experts_block
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of, next_power_of_2
from xlafuse.triton_side.kernels.shared.tiles import add_product, add_separate_product

SOFTMAX = ("reduce_max", "exp", "reduce_sum", "div")
TOKENS = 32  # of a program: 4096 tokens take 128 programs, nearly one for each multiprocessor of an H200
FEW_TOKENS = 32  # or less: one program took 7.3 us for 16 tokens of width 2048 (CUPTI, one H200)
MIN_STEP = 16  # terms of a product that tensor cores accept
TOKENS_PER_PARTIAL = 512  # tokens whose share of drouter one program sums


OFFSETS = (
    forward("cumsum", "dispatch", "starts"), forward("mul", "balance", "product"),
    forward("reduce_sum", "balance", "balance_loss"),
)
SLOTS = (forward("sort", "dispatch", "slots"),)


@triton.jit
def top_k_of(logits, expert, experts, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """Return (chosen, their logits), both [tokens, CHOICES]; columns past TOP_K hold 0 and -inf."""
    choice = tl.arange(0, CHOICES)[None, :]
    comparable = tl.where(logits == logits, logits, -float("inf"))
    free = tl.broadcast_to(expert < experts, logits.shape)
    chosen = tl.zeros([logits.shape[0], CHOICES], tl.int32)
    values = tl.full([logits.shape[0], CHOICES], -float("inf"), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(tl.where(free, comparable, -float("inf")), axis=1)
        which = tl.min(tl.where(free & (comparable == best[:, None]), expert, 2**30), axis=1)
        taken = expert == which[:, None]
        value = tl.sum(tl.where(taken, logits, 0.0), axis=1)
        free = free & ~taken
        chosen = tl.where(choice == j, which[:, None], chosen)
        values = tl.where(choice == j, value[:, None], values)
    return chosen, values


@declare(
    forward("dot", "router", "logits"), forward("sort", "topk", "chosen"),
    *(forward(op, "topk", "weights") for op in SOFTMAX), *(forward(op, "balance", "probabilities") for op in SOFTMAX),
    forward("reduce_sum", "balance", "counts"), forward("reduce_sum", "balance", "mean"),
    flops=lambda shapes: 2 * math.prod(shapes["x_ptr"]) * shapes["router_ptr"][0],
)
@triton.jit
def moe_router_kernel(
    x_ptr, router_ptr, logits_ptr, chosen_ptr, weights_ptr, counts_ptr, sums_ptr, tokens, width, experts,
    stride_xt, stride_xw, stride_re, stride_rw,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """Route a tile of tokens, or one token.

    counts, sums [tiles, experts]: the tile's choices of each expert, and the sum of the expert's probabilities.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    at = tl.arange(0, BLOCK_K)
    logits = tl.zeros([TOKENS, EXPERTS], tl.float32)
    x_row = x_ptr + token.to(tl.int64)[:, None] * stride_xt
    r_row = router_ptr + expert.to(tl.int64)[None, :] * stride_re
    if TOKENS == 1:
        # One sum at the end, so the warps wait for each other once and not in each step.
        products = tl.zeros([BLOCK_K, EXPERTS], tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        k = (start + at).to(tl.int64)
        x = tl.load(x_row + k[None, :] * stride_xw, mask=(token < tokens)[:, None] & (k < width)[None, :], other=0.0)
        r = tl.load(r_row + k[:, None] * stride_rw, mask=(k < width)[:, None] & (expert < experts)[None, :], other=0.0)
        if TOKENS == 1:
            products += tl.trans(x).to(tl.float32) * r.to(tl.float32)
        else:
            # Tensor cores truncate additions, so all logits would be too near zero. On an H200 the balance loss of 4096
            # tokens was off by 1.2e-6, although float32 holds such a mean to 1e-7.
            logits = add_separate_product(logits, x, r, PRECISION)
    if TOKENS == 1:
        logits = tl.sum(products, axis=0)[None, :]
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    offset = token.to(tl.int64)[:, None] * experts + expert[None, :]
    if logits_ptr is not None:
        tl.store(logits_ptr + offset, logits, mask=inside)
    chosen, values = top_k_of(logits, expert[None, :], experts, TOP_K, CHOICES)
    largest = tl.max(values, axis=1)[:, None]
    exponentials = tl.exp(values - largest)
    weights = exponentials / tl.sum(exponentials, axis=1)[:, None]
    choice = tl.arange(0, CHOICES)[None, :]
    slot = token.to(tl.int64)[:, None] * TOP_K + choice
    stored = (token < tokens)[:, None] & (choice < TOP_K)
    tl.store(chosen_ptr + slot, chosen, mask=stored)
    tl.store(weights_ptr + slot, weights, mask=stored)
    exponentials = tl.where(expert[None, :] < experts, tl.exp(logits - largest), 0.0)
    probabilities = exponentials / tl.sum(exponentials, axis=1)[:, None]
    counts = tl.zeros([EXPERTS], tl.int32)
    for j in tl.static_range(TOP_K):
        which = tl.sum(tl.where(choice == j, chosen, 0), axis=1)
        counts += tl.sum(((which[:, None] == expert[None, :]) & inside).to(tl.int32), axis=0)
    share = tl.program_id(0) * experts + expert
    tl.store(counts_ptr + share, counts, mask=expert < experts)
    tl.store(sums_ptr + share, tl.sum(tl.where(inside, probabilities, 0.0), axis=0), mask=expert < experts)


@triton.jit
def store_slots(slot_of, token, expert, chosen_ptr, slots_ptr, rows_ptr, tokens, TOP_K: tl.constexpr):
    """Store the slots of the tokens' choices; slot_of [tokens, experts] is the slot of a choice of the expert."""
    for j in tl.static_range(TOP_K):
        chosen = tl.load(chosen_ptr + token * TOP_K + j, mask=token < tokens, other=-1)
        slot = tl.sum(tl.where(chosen[:, None] == expert[None, :], slot_of, 0), axis=1)
        tl.store(slots_ptr + token * TOP_K + j, slot, mask=token < tokens)
        tl.store(rows_ptr + slot, token, mask=token < tokens)


@declare(*OFFSETS, flops=lambda shapes: math.prod(shapes["sums_ptr"]))
@triton.jit
def moe_offsets_kernel(
    counts_ptr, sums_ptr, offsets_ptr, starts_ptr, balance_loss_ptr, chosen_ptr, slots_ptr, rows_ptr,
    tiles, tokens, experts, TILES: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
):
    """Compute, in one program, offsets, the loss, and starts [tiles, experts]: the first slot of a tile's choices.

    Without starts each tile is one token, and the slots are numbered.
    """
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    sums = tl.zeros([EXPERTS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & (expert < experts)[None, :]
        offset = tile[:, None] * experts + expert[None, :]
        total += tl.sum(tl.load(counts_ptr + offset, mask=mask, other=0), axis=0)
        sums += tl.sum(tl.load(sums_ptr + offset, mask=mask, other=0.0), axis=0)
    end = tl.cumsum(total, axis=0)
    tl.store(offsets_ptr + 1 + expert, end, mask=expert < experts)
    tl.store(offsets_ptr + expert, tl.zeros_like(end), mask=expert == 0)
    fraction = total.to(tl.float32) / (tokens * TOP_K)
    tl.store(balance_loss_ptr, tl.sum(fraction * (sums / tokens), axis=0) * experts)
    start = end - total
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & (expert < experts)[None, :]
        offset = tile[:, None] * experts + expert[None, :]
        counts = tl.load(counts_ptr + offset, mask=mask, other=0)
        start_of_tile = start[None, :] + tl.cumsum(counts, axis=0) - counts
        if starts_ptr is not None:
            tl.store(starts_ptr + offset, start_of_tile, mask=mask)
        else:
            store_slots(start_of_tile, tile, expert, chosen_ptr, slots_ptr, rows_ptr, tokens, TOP_K)
        start += tl.sum(counts, axis=0)


@declare(*SLOTS, flops=lambda shapes: 0)
@triton.jit
def moe_slots_kernel(
    chosen_ptr, starts_ptr, slots_ptr, rows_ptr, tokens, experts,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
):
    """Number a tile's slots: an expert's slots go to its tokens in their order."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    choices = tl.zeros([TOKENS, EXPERTS], tl.int32)
    for j in tl.static_range(TOP_K):
        chosen = tl.load(chosen_ptr + token * TOP_K + j, mask=token < tokens, other=-1)
        choices += (chosen[:, None] == expert[None, :]).to(tl.int32)
    start = tl.load(starts_ptr + tl.program_id(0) * experts + expert, mask=expert < experts, other=0)
    slot_of = start[None, :] + tl.cumsum(choices, axis=0) - choices
    store_slots(slot_of, token, expert, chosen_ptr, slots_ptr, rows_ptr, tokens, TOP_K)


@declare(
    *(again(op, "balance", "probabilities") for op in SOFTMAX), gradient("mul", "balance", "dprobabilities"),
    gradient("mul", "topk", "dlogits"), gradient("reduce_sum", "topk", "dlogits"), gradient("add", "topk", "dlogits"),
    flops=lambda shapes: 10 * math.prod(shapes["logits_ptr"]),
)
@triton.jit
def moe_dlogits_kernel(
    logits_ptr, chosen_ptr, weights_ptr, dweights_ptr, offsets_ptr, dloss_ptr, dlogits_ptr, tokens, experts,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    offset = token.to(tl.int64)[:, None] * experts + expert[None, :]
    logits = tl.load(logits_ptr + offset, mask=inside, other=-float("inf"))
    largest = tl.where(token < tokens, tl.max(logits, axis=1), 0.0)[:, None]
    exponentials = tl.exp(logits - largest)
    total = tl.where(token < tokens, tl.sum(exponentials, axis=1), 1.0)[:, None]
    probabilities = exponentials / total
    begin = tl.load(offsets_ptr + expert, mask=expert < experts, other=0)
    end = tl.load(offsets_ptr + 1 + expert, mask=expert < experts, other=0)
    fraction = (end - begin).to(tl.float32) / TOP_K / tokens
    dprobabilities = (tl.load(dloss_ptr) * experts * fraction / tokens)[None, :]
    dlogits = probabilities * (dprobabilities - tl.sum(probabilities * dprobabilities, axis=1)[:, None])
    slot = token.to(tl.int64) * TOP_K
    mean = tl.zeros([TOKENS], tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + slot + j, mask=token < tokens, other=0.0)
        mean += weight * tl.load(dweights_ptr + slot + j, mask=token < tokens, other=0.0)
    for j in tl.static_range(TOP_K):
        chosen = tl.load(chosen_ptr + slot + j, mask=token < tokens, other=-1)
        weight = tl.load(weights_ptr + slot + j, mask=token < tokens, other=0.0)
        dweight = tl.load(dweights_ptr + slot + j, mask=token < tokens, other=0.0)
        dlogits += tl.where(chosen[:, None] == expert[None, :], (weight * (dweight - mean))[:, None], 0.0)
    tl.store(dlogits_ptr + offset, dlogits, mask=inside)


@declare(
    gradient("dot", "router", "drouter"),
    flops=lambda shapes: 2 * math.prod(shapes["x_ptr"]) * shapes["dlogits_ptr"][1],
)
@triton.jit
def moe_drouter_kernel(
    x_ptr, dlogits_ptr, partial_ptr, tokens, width, experts, stride_xt, stride_xw,
    TOKENS_PER_PARTIAL: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dlogits^T x for TOKENS_PER_PARTIAL tokens and WIDTH columns; partial [parts, experts, width]."""
    expert = tl.arange(0, EXPERTS)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([EXPERTS, WIDTH], tl.float32)
    for start in range(0, TOKENS_PER_PARTIAL, TOKENS):
        token = (tl.program_id(1) * TOKENS_PER_PARTIAL + start + tl.arange(0, TOKENS)).to(tl.int64)
        dlogits = tl.load(
            dlogits_ptr + token[None, :] * experts + expert[:, None],
            mask=(token < tokens)[None, :] & (expert < experts)[:, None], other=0.0,
        )
        x = tl.load(
            x_ptr + token[:, None] * stride_xt + column.to(tl.int64)[None, :] * stride_xw,
            mask=(token < tokens)[:, None] & (column < width)[None, :], other=0.0,
        )
        total = add_product(total, dlogits, x.to(tl.float32), PRECISION)
    row = tl.program_id(1).to(tl.int64) * experts + expert
    mask = (expert < experts)[:, None] & (column < width)[None, :]
    tl.store(partial_ptr + row[:, None] * width + column[None, :], total, mask=mask)


@dataclass(frozen=True)
class Route:
    """Experts, weights and slots of all tokens; logits only if a backward pass follows."""

    chosen: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    logits: torch.Tensor | None


def gradient_precision(dtype: torch.dtype) -> str:
    """Return the precision of products of float32 dlogits and a factor in `dtype`.

    TF32 holds bfloat16 and float16 exactly, and rounds dlogits to float16's 11 bits.
    """
    return "ieee" if dtype == torch.float32 else "tf32"


def router_warps(block: int) -> int:
    """Return the warps of kernels that hold a tile of tokens x experts; over 64 experts would spill with 4."""
    return 4 if block <= 64 else 8


def router_step(tile: int, block: int, element_bytes: int) -> int:
    """Return how many columns of x one step reads for a tile of tokens.

    One token's step has at most 1024 columns, and 64 products a thread: they stay in registers. With 8 experts and 3
    stages it takes 3.0 us on an H100, with 512 columns and 5 stages 3.5. Three prefetched steps of a tile take at most
    128 KiB of shared memory. IEEE float32 products hold a step in registers.
    """
    if tile == 1:
        return min(1024, max(16, 2**13 // block))
    fits = 2**17 // (3 * (TOKENS + block) * element_bytes)
    return min(128 if element_bytes == 2 else 32, 2 ** (fits.bit_length() - 1))


def route_tokens(x: torch.Tensor, router: torch.Tensor, top_k: int, save: bool) -> tuple[Route, torch.Tensor]:
    """Return the route, and balance_loss [] in float32.

    Raises ValueError for more experts than the router of many tokens can hold: 1024 of 16 bits, 512 of float32.
    """
    (tokens, width), experts = x.shape, len(router)
    few = tokens <= FEW_TOKENS
    tile, block = (1, next_power_of_2(experts)) if few else (TOKENS, experts_block(experts))
    tiles, step = cdiv(tokens, tile), router_step(tile, block, x.element_size())
    if not few and step < MIN_STEP:
        raise ValueError(
            f"{experts} experts of {x.dtype} are too many for more than {FEW_TOKENS} tokens: tiles of "
            f"{TOKENS} tokens and all experts do not fit shared memory"
        )

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    logits = empty(tokens, experts, dtype=torch.float32) if save else None
    chosen, weights, slots = empty(tokens, top_k), empty(tokens, top_k, dtype=torch.float32), empty(tokens, top_k)
    counts, sums = empty(tiles, experts), empty(tiles, experts, dtype=torch.float32)
    starts = None if few else empty(tiles, experts)
    rows, offsets, balance_loss = empty(tokens * top_k), empty(experts + 1), empty(dtype=torch.float32)
    with device_of(x):
        moe_router_kernel[(tiles,)](
            x, router, logits, chosen, weights, counts, sums, tokens, width, experts, *x.stride(), *router.stride(),
            TOKENS=tile, EXPERTS=block, BLOCK_K=step, TOP_K=top_k,
            CHOICES=next_power_of_2(top_k), PRECISION="ieee", STAGES=3 if few else 4, num_warps=router_warps(block),
        )
        with computing(*OFFSETS, *(SLOTS if few else ())):
            moe_offsets_kernel[(1,)](
                counts, sums, offsets, starts, balance_loss, *((chosen, slots, rows) if few else (None, None, None)),
                tiles, tokens, experts, TILES=32, EXPERTS=block, TOP_K=top_k, num_warps=router_warps(block),
            )
        if not few:
            moe_slots_kernel[(tiles,)](
                chosen, starts, slots, rows, tokens, experts,
                TOKENS=tile, EXPERTS=block, TOP_K=top_k, num_warps=router_warps(block),
            )
    return Route(chosen, weights, slots, rows, offsets, logits), balance_loss


def launch_dlogits(route: Route, dweights: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """Return dlogits [tokens, experts] in float32, from the gradients of the weights and of balance_loss."""
    assert route.logits is not None
    dlogits = torch.empty_like(route.logits)
    tokens, experts = dlogits.shape
    block = experts_block(experts)
    tile = max(1, 2048 // block)
    with device_of(dlogits):
        moe_dlogits_kernel[(cdiv(tokens, tile),)](
            route.logits, route.chosen, route.weights, dweights, route.offsets, dloss, dlogits, tokens, experts,
            TOKENS=tile, EXPERTS=block, TOP_K=route.chosen.shape[1], num_warps=4,
        )
    return dlogits


def launch_drouter(x: torch.Tensor, dlogits: torch.Tensor) -> torch.Tensor:
    """Return drouter [experts, width] in x's dtype."""
    (tokens, width), experts = x.shape, dlogits.shape[1]
    parts, columns = cdiv(tokens, TOKENS_PER_PARTIAL), 128
    partial = torch.empty((parts, experts, width), dtype=torch.float32, device=x.device)
    with device_of(x):
        moe_drouter_kernel[(cdiv(width, columns), parts)](
            x, dlogits, partial, tokens, width, experts, *x.stride(),
            TOKENS_PER_PARTIAL=TOKENS_PER_PARTIAL, TOKENS=32, WIDTH=columns, EXPERTS=experts_block(experts),
            PRECISION=gradient_precision(x.dtype), num_warps=8, num_stages=3,
        )
    with computing(gradient("reduce_sum", "router", "drouter"), sum_ptr="drouter"):
        return sum_columns(partial.view(parts, -1), x.dtype).view(experts, width)
