"""A mixture of SwiGLU experts: a router sends each token to the top_k experts that it scores highest (Mixtral).

    y[t] = sum over t's choices j of w[t, j] (act[s] w_down[e])    s: the choice's slot, e: its expert
    act[s] = silu(gate[s]) up[s]    gate[s] = x[t] w_gate[e]    up[s] = x[t] w_up[e]

Jiang et al., Mixtral of Experts, arXiv:2401.04088. Slots are the choices sorted by expert. `moe_routing.py` computes
that order and the weights w[t, j], `shared/grouped_product.py` the products, and `shared/grouped_gradient.py` the
gradients of the experts' matrices. No token is dropped.

Forward: routing (two or three kernels), gate and up with the activation in their epilogue, the down projection, the
weighted sum. The rows of x are first copied into the order of the slots, if they are many and TMA can read them; else
the kernels gather rows.

Backward copies the rows of dy and x if TMA can read them, also few:

    dout[s] = dy[t] w_down[e]^T, without the weight
    dw[t, j] = dout[s] . act[s]    dgate, dup of dact = w dout    (one kernel, which also recomputes the weighted act)

    dw_down[e] = (w act)^T dy    dw_gate[e] = x^T dgate    dw_up[e] = x^T dup    over the slots of e
    dx[t] = sum over j of (dgate[s] w_gate[e]^T + dup[s] w_up[e]^T) + dlogits[t] router

dw needs no product of size width: (act w_down) . dy = act . (dy w_down^T). So the experts' outputs are not kept (Guo et
al., SonicMoE, arXiv:2512.14080). One program sums a token's choices, or an expert's tokens, in a fixed order, so
results repeat bit for bit.

Shapes: x, y [tokens, width]; router [experts, width]; w_gate, w_up [experts, width, hidden]; w_down [experts, hidden,
width]; gate, up, act [tokens top_k, hidden]. dtypes: bfloat16, float16, float32, one for all. Products accumulate in
float32; routing, activations and weighted sums are float32. With gradients, the forward pass saves gate and up.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import Computed, again, computing, declare, forward, gradient
from xlafuse.triton_side.configs.tuned import has_small_blocks, tuned
from xlafuse.triton_side.kernels import embedding, moe_routing
from xlafuse.triton_side.kernels.matmul import many_rows_config, pointer_config
from xlafuse.triton_side.kernels.moe_routing import Route
from xlafuse.triton_side.kernels.shared.grouped_gradient import launch_group_gradients
from xlafuse.triton_side.kernels.shared.grouped_product import (
    experts_block,
    fit_descriptors,
    launch_gate_up,
    launch_grouped_product,
)
from xlafuse.triton_side.kernels.shared.launch import (
    cdiv,
    check_matrix,
    check_tensors,
    device_of,
    next_power_of_2,
    with_unit_column_stride,
)
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig
from xlafuse.triton_side.kernels.shared.tiles import add_product, fits_descriptor, product_precision
from xlafuse.triton_side.kernels.swiglu import silu_value_and_slope
from xlafuse.triton_side.kernels.swiglu_mlp import ACTIVATION

GATHER_X, GATHER_X_AGAIN = forward("gather", "dispatch", "rows"), again("gather", "dispatch", "rows")
GATE_UP = (
    forward("dot", "gate"), forward("dot", "up"), *(forward(op, "act", result) for op, result in ACTIVATION),
)
DOWN = (forward("dot", "down"),)
GATHER_DY = gradient("gather", "combine", "dout")
DOUT = (gradient("dot", "down", "dact"),)
DDOWN = (gradient("dot", "down", "dw_down"),)
DGATE_UP = (gradient("dot", "gate", "dw_gate"), gradient("dot", "up", "dw_up"))
DX_OF_EXPERTS = (gradient("dot", "gate", "dx"), gradient("dot", "up", "dx"), gradient("add", "up", "dx"))


@declare(
    forward("gather", "combine", "out"), forward("mul", "combine", "weighted"), forward("reduce_sum", "combine", "y"),
    flops=lambda shapes: 2 * math.prod(shapes["out_ptr"]),
)
@triton.jit
def moe_combine_kernel(
    out_ptr, slots_ptr, weights_ptr, y_ptr, tokens, width, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Compute the weighted sum of the experts' outputs for a token."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = (token < tokens)[:, None] & (column < width)
    y = tl.zeros([TOKENS, WIDTH], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + j, mask=token < tokens, other=0).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + j, mask=token < tokens, other=0.0)
        out = tl.load(out_ptr + slot[:, None] * width + column, mask=mask, other=0.0)
        y += weight[:, None] * out.to(tl.float32)
    tl.store(y_ptr + token.to(tl.int64)[:, None] * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@declare(
    *(again(op, "act", result) for op, result in ACTIVATION), gradient("mul", "combine", "dact"),
    gradient("reduce_sum", "combine", "dweights"), gradient("mul", "act", "dsilu"), gradient("mul", "act", "dup"),
    gradient("logistic", "act", "dgate"), gradient("mul", "combine", "weighted_act"),
    flops=lambda shapes: 16 * math.prod(shapes["dout_ptr"]),
)
@triton.jit
def moe_activation_gradients_kernel(
    dout_ptr, gate_ptr, up_ptr, slots_ptr, weights_ptr, dgate_ptr, dup_ptr, weighted_act_ptr, dweights_ptr, hidden,
    BLOCK: tl.constexpr,
):
    """Compute a slot's dgate and dup, its weighted act, and its weight's gradient; one program a choice."""
    choice = tl.program_id(0)
    row = tl.load(slots_ptr + choice).to(tl.int64) * hidden
    weight = tl.load(weights_ptr + choice)
    dweights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < hidden
        gate = tl.load(gate_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
        silu, slope = silu_value_and_slope(gate, dgate_ptr.dtype.element_ty == tl.float32)
        act, dact = silu * up, weight * dout
        dweights += dout * act
        tl.store(dgate_ptr + row + column, (dact * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
        tl.store(dup_ptr + row + column, (dact * silu).to(dup_ptr.dtype.element_ty), mask=mask)
        tl.store(weighted_act_ptr + row + column, (weight * act).to(weighted_act_ptr.dtype.element_ty), mask=mask)
    tl.store(dweights_ptr + choice, tl.sum(dweights, axis=0))


@declare(
    gradient("dot", "router", "dx"), gradient("gather", "dispatch", "dx"), gradient("reduce_sum", "dispatch", "dx"),
    flops=lambda shapes: 2 * math.prod(shapes["router_ptr"]) * shapes["dx_ptr"][0]
    + math.prod(shapes["dx_of_experts_ptr"]),
)
@triton.jit
def moe_dx_kernel(
    dx_of_experts_ptr, slots_ptr, dlogits_ptr, router_ptr, dx_ptr, tokens, width, experts, stride_re, stride_rw,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the sum of a token's gradients through its experts and through the router."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (token < tokens)[:, None] & (column < width)[None, :]
    dx = tl.zeros([TOKENS, WIDTH], tl.float32)
    for first in range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        dlogits = tl.load(
            dlogits_ptr + token.to(tl.int64)[:, None] * experts + expert[None, :],
            mask=(token < tokens)[:, None] & (expert < experts)[None, :], other=0.0,
        )
        router = tl.load(
            router_ptr + expert.to(tl.int64)[:, None] * stride_re + column.to(tl.int64)[None, :] * stride_rw,
            mask=(expert < experts)[:, None] & (column < width)[None, :], other=0.0,
        )
        dx = add_product(dx, dlogits, router.to(tl.float32), PRECISION)
    for j in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + j, mask=token < tokens, other=0).to(tl.int64)
        dx += tl.load(dx_of_experts_ptr + slot[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    offset = token.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def two_products_config(dtype: torch.dtype, precision: str, descriptors: bool) -> MatmulConfig:
    """Tiles of a kernel with two accumulators: half as wide as a single product's."""
    if dtype == torch.float32:
        tiles = {"ieee": (64, 32, 16, 4, 2), "tf32": (128, 32, 32, 8, 2), "tf32x3": (64, 32, 32, 4, 2)}
        return pointer_config(*tiles[precision])
    if not descriptors:
        return pointer_config(64, 32, 32, 4, 3)
    if has_small_blocks():
        return MatmulConfig(128, 64, 64, num_warps=8, num_stages=3, group_m=16)
    return MatmulConfig(128, 128, 64, num_warps=8, num_stages=4, group_m=16)


def are_few(slots: int, experts: int) -> bool:
    """Return whether most experts have one tile of 16 rows: 8 slots or less, on average."""
    return slots <= 8 * experts


@tuned
def grouped_config(
    dtype: torch.dtype, precision: str, descriptors: bool, slots: int, accumulators: int, pairs: int,
    experts: int, k: int, n: int,
) -> MatmulConfig:
    """Tiles of a grouped product: those of the product without groups, with a stage more if TMA reads both operands.

    With few slots an expert, reading the weights takes most of the time. Then tiles have 16 rows and read through
    pointers. Two programs run on a multiprocessor, each with 90 to 100 kB of prefetched tiles. The tiles of 8 experts
    fill several waves, and the last wave then leaves fewer multiprocessors idle.

    IEEE and TF32 products with two accumulators, or two pairs of operands, would spill registers, and take half as many
    rows. On an H200 by do_bench, 8192 slots of 8 experts, 2048 by 3584: 588 to 606 TFLOP/s, as torch._grouped_mm. Three
    stages take 582 to 577, tiles of 128 x 128 with two programs a multiprocessor less than 567.
    """
    if dtype != torch.float32 and are_few(slots, experts):
        return pointer_config(16, 64, 128 // accumulators, num_warps=4, num_stages=6)
    choose = many_rows_config if accumulators == 1 else two_products_config
    config = choose(dtype, precision, descriptors)
    if dtype == torch.float32 and precision != "tf32x3" and accumulators * pairs == 2:
        return replace(config, block_m=config.block_m // 2)
    return replace(config, num_stages=4) if config.descriptors and not has_small_blocks() else config


def product_config(
    weights: torch.Tensor, *others: torch.Tensor, slots: int, accumulators: int = 1, pairs: int = 1
) -> MatmulConfig:
    """Return tiles of a product of slots and weights [experts, k, n]. others: what TMA must be able to read, too."""
    dtype, descriptors = weights.dtype, fit_descriptors(weights, *others)
    return grouped_config(dtype, product_precision(dtype), descriptors, slots, accumulators, pairs, *weights.shape)


@tuned
def weights_gradient_config(
    dtype: torch.dtype, precision: str, descriptors: bool, accumulators: int, rows: int, k: int, n: int
) -> MatmulConfig:
    """Tiles of the weights' gradients [experts, k, n], sums over `rows` slots.

    bfloat16 on an H200, 8192 slots of 8 experts, 2048 by 3584, by do_bench: one product 591 TFLOP/s, with 128 x 128 and
    two programs a multiprocessor 555; two products 602. Copies of gathered rows are not included. Gathering in the
    kernel reaches 419 and 452.
    """
    choose = many_rows_config if accumulators == 1 else two_products_config
    if descriptors and not has_small_blocks():
        return MatmulConfig(128, 256 if accumulators == 1 else 128, 64, num_warps=8, num_stages=4)
    return choose(dtype, precision, descriptors)


def gradient_config(a: torch.Tensor, b: torch.Tensor, accumulators: int = 1) -> MatmulConfig:
    """Return the tiles of the products of a [slots, k] and b [slots, n]."""
    descriptors = a.dtype != torch.float32 and fits_descriptor(a) and fits_descriptor(b)
    precision = product_precision(a.dtype)
    return weights_gradient_config(a.dtype, precision, descriptors, accumulators, len(a), a.shape[1], b.shape[1])


def copy_in_slot_order(
    x: torch.Tensor, rows: torch.Tensor, *operations: Computed, name: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a copy of x's rows in the order of the slots, and None; x itself and rows if TMA could not read the copy.

    A product over the slots gathers other rows at each step, by numbers that it must wait for, and every tile of the
    output gathers them again. With 8192 slots and 2048 16-bit columns a copy moves 67 MB: 17 us at 4 TB/s. The products
    that follow take 150 and 300 us at 800 TFLOP/s.

    operations: operations that a copy computes. name: the name of x.
    """
    if x.dtype == torch.float32 or not fits_descriptor(x.new_empty((0, x.shape[1]))):
        return x, rows
    with computing(*operations, table_ptr=name, ids_ptr="rows", y_ptr=f"{name}_in_slots"):
        return embedding.forward(x, rows), None


def launch_combine(out: torch.Tensor, route: Route) -> torch.Tensor:
    """Return y [tokens, width] from the experts' rows out [slots, width]."""
    (tokens, top_k), width = route.chosen.shape, out.shape[1]
    y = torch.empty((tokens, width), dtype=out.dtype, device=out.device)
    block_tokens, block_width = 4, 512  # 16 bytes a thread in each bfloat16 row
    with device_of(out):
        moe_combine_kernel[(cdiv(tokens, block_tokens), cdiv(width, block_width))](
            out, route.slots, route.weights, y, tokens, width,
            TOKENS=block_tokens, WIDTH=block_width, TOP_K=top_k, num_warps=4,
        )
    return y


def launch_activation_gradients(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, route: Route
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dgate, dup, weighted act [slots, hidden], and dweights [tokens, top_k] in float32."""
    dgate, dup, weighted_act = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    dweights = torch.empty_like(route.weights)
    slots, hidden = dout.shape
    block = min(next_power_of_2(hidden), 1024)
    with device_of(dout):
        moe_activation_gradients_kernel[(slots,)](
            dout, gate, up, route.slots, route.weights, dgate, dup, weighted_act, dweights, hidden,
            BLOCK=block, num_warps=4,
        )
    return dgate, dup, weighted_act, dweights


def launch_dx(
    dx_of_experts: torch.Tensor, dlogits: torch.Tensor, router: torch.Tensor, route: Route
) -> torch.Tensor:
    """Return dx [tokens, width]."""
    (tokens, top_k), (experts, width) = route.chosen.shape, router.shape
    dx = torch.empty((tokens, width), dtype=router.dtype, device=router.device)
    block_tokens, block_width = 32, 128
    with device_of(dx):
        moe_dx_kernel[(cdiv(tokens, block_tokens), cdiv(width, block_width))](
            dx_of_experts, route.slots, dlogits, router, dx, tokens, width, experts, *router.stride(),
            TOKENS=block_tokens, WIDTH=block_width, EXPERTS=min(32, experts_block(experts)), TOP_K=top_k,
            PRECISION=moe_routing.gradient_precision(router.dtype), num_warps=4,
        )
    return dx


def _experts(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, route: Route, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return y and, with `save`, gate and up."""
    slots = len(route.rows)
    rows: torch.Tensor | None = route.rows
    if not are_few(slots, len(w_gate)):  # The product gathers few: one launch less, 1.4 us of 138 (an H100).
        x, rows = copy_in_slot_order(x, route.rows, GATHER_X, name="x")
    config = product_config(w_gate, w_up, slots=slots, accumulators=2)
    with computing(
        *(() if rows is None else (GATHER_X,)), *GATE_UP, c_ptr="gate", c2_ptr="up", activated_ptr="act"
    ):
        act, gate, up = launch_gate_up(x, rows, w_gate, w_up, route.offsets, config, save)
    del x
    with computing(*DOWN, c_ptr="out"):
        out = launch_grouped_product(act, None, w_down, route.offsets, slots, product_config(w_down, act, slots=slots))
    return launch_combine(out, route), gate, up


class _MoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, router: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor,
        w_down: torch.Tensor, top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        route, balance_loss = moe_routing.route_tokens(x, router, top_k, save=True)
        y, gate, up = _experts(x, w_gate, w_up, w_down, route, save=True)
        saved_route = (route.chosen, route.weights, route.slots, route.rows, route.offsets, route.logits)
        ctx.save_for_backward(x, router, w_gate, w_up, w_down, gate, up, *saved_route)
        return y, balance_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, router, w_gate, w_up, w_down, gate, up, *saved_route = ctx.saved_tensors
        route = Route(*saved_route)
        offsets, slots = route.offsets, len(route.rows)
        dy, dy_rows = copy_in_slot_order(with_unit_column_stride(dy), route.rows, GATHER_DY, name="dy")
        with computing(*(() if dy_rows is None else (GATHER_DY,)), *DOUT, c_ptr="dout"):
            dout = launch_grouped_product(
                dy, dy_rows, w_down.mT, offsets, slots, product_config(w_down.mT, slots=slots)
            )
        dgate, dup, weighted_act, dweights = launch_activation_gradients(dout, gate, up, route)
        with computing(*DDOWN, c_ptr="dw_down"):
            dw_down, _ = launch_group_gradients(
                weighted_act, dy, dy_rows, offsets, gradient_config(weighted_act, dy), a_gathered=False
            )
        del dy, dout, weighted_act  # frees memory for the next products
        sorted_x, x_rows = copy_in_slot_order(x, route.rows, GATHER_X_AGAIN, name="x")
        with computing(*DGATE_UP, c_ptr="dw_gate", c2_ptr="dw_up"):
            dw_gate, dw_up = launch_group_gradients(
                sorted_x, dgate, x_rows, offsets, gradient_config(sorted_x, dgate, accumulators=2), a_gathered=True,
                b2=dup,
            )
        del sorted_x
        with computing(*DX_OF_EXPERTS, c_ptr="dx_of_experts"):
            dx_of_experts = launch_grouped_product(
                dgate, None, w_gate.mT, offsets, slots, product_config(w_gate.mT, w_up.mT, dgate, slots=slots, pairs=2),
                second=(dup, w_up.mT),
            )
        dlogits = moe_routing.launch_dlogits(route, dweights, dloss)
        drouter = moe_routing.launch_drouter(x, dlogits)
        return launch_dx(dx_of_experts, dlogits, router, route), drouter, dw_gate, dw_up, dw_down, None


def moe(
    x: torch.Tensor, router: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mixture's output and its load-balancing loss, differentiable once in all five tensors.

    Args:
        x: [tokens, width], at least one token; copied if its last stride is not 1.
        router: [experts, width].
        w_gate, w_up: [experts, width, hidden]; both are copied if their strides differ.
        w_down: [experts, hidden, width].
        top_k: how many experts a token goes to, 1 to experts.

    Returns:
        y [tokens, width], contiguous, in the inputs' dtype, and balance_loss [] in float32.

    Raises:
        ValueError: shapes or top_k do not fit, there are too many experts (`moe_routing.route_tokens`), devices differ
            or are not a GPU (outside the interpreter), or float32 products are set to "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    check_tensors(x=x, router=router, **weights)
    check_matrix("x", x)
    (tokens, width), experts, hidden = x.shape, router.shape[0], w_gate.shape[-1]
    up, down = [experts, width, hidden], [experts, hidden, width]
    expected = {"router": [experts, width], "w_gate": up, "w_up": up, "w_down": down}
    got = {name: list(tensor.shape) for name, tensor in {"router": router, **weights}.items()}
    if got != expected:
        raise ValueError(
            f"router and weights must fit x {list(x.shape)} and one hidden size: expected {expected}, got {got}; "
            "weights are [experts, inputs, outputs], transpose torch.nn.Linear's weights"
        )
    if not tokens:
        raise ValueError(f"x must have at least one token, got shape {tuple(x.shape)}: the loss is a mean over tokens")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1 to {experts}, the number of experts, got {top_k}")
    x = with_unit_column_stride(x)
    if w_gate.stride() != w_up.stride():
        w_gate, w_up = w_gate.contiguous(), w_up.contiguous()
    tensors = (x, router, w_gate, w_up, w_down)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _MoE.apply(*tensors, top_k)
    route, balance_loss = moe_routing.route_tokens(x, router, top_k, save=False)
    y, _, _ = _experts(x, w_gate, w_up, w_down, route, save=False)
    return y, balance_loss


def apply(inputs: dict[str, torch.Tensor], *, top_k: int) -> dict[str, torch.Tensor]:
    """Run the block `moe`: x, router, w_gate, w_up, w_down -> y, balance_loss."""
    y, balance_loss = moe(**inputs, top_k=top_k)
    return {"y": y, "balance_loss": balance_loss}
