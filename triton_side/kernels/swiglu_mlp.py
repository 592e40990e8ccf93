"""The feed-forward half of a Llama layer: y = x + (silu(h Wg) * (h Wu)) Wd with h = rmsnorm(x).

Shazeer, "GLU variants improve Transformer", arXiv:2002.05202. The forward pass has three kernels: RMSNorm; one product
for gate and up, which share the tiles of h and meet in the epilogue; and the down projection, whose epilogue adds x.
With act = silu(gate) * up, the backward pass is

    dact = dy Wd^T
    dgate = dact up silu'(gate)    dup = dact silu(gate)    (one kernel, which also recomputes act)

    dWd = act^T dy    dWg = h^T dgate    dWu = h^T dup    (one kernel for the last two)
    dh = dgate Wg^T + dup Wu^T    dx = dy + RMSNorm's backward pass of dh

The first two lines, and dh, take two kernels each, because one was slower on an H200 (Triton 3.6). One kernel for the
first two reached 551 TFLOP/s, two reach 620: its three outputs and the accumulator share the registers. One for dh
reached 620, two reach 800: it has four operand tiles a step.

Shapes: x, y, h [tokens, width]; norm_weight [width]; gate_weight, up_weight [width, hidden]; down_weight
[hidden, width]; gate, up, act [tokens, hidden]. dtypes: bfloat16, float16, float32, one for all. Products accumulate in
float32, and activations are float32. With gradients, the forward pass saves h, gate and up.
"""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_side.calls.declare import Shapes, again, computing, declare, forward, gradient
from triton_side.calls.stages import stage
from triton_side.kernels import rmsnorm
from triton_side.kernels.matmul import choose_config, launch_matmul, matmul_config, pointer_config
from triton_side.kernels.shared.gated_unit import backward_block
from triton_side.kernels.shared.launch import FlatConfig, check_matrix, check_tensors, device_of, launch_elementwise
from triton_side.kernels.shared.matmul_tiles import (
    MatmulConfig,
    load_operand,
    open_operand,
    programs_for_output,
    store_tile,
    stored_transposed,
    tile_at,
)
from triton_side.kernels.shared.tiles import add_product, product_precision, provide_descriptor_memory
from triton_side.kernels.swiglu import silu_value_and_slope

ACTIVATION = (("logistic", "sigmoid"), ("mul", "silu"), ("mul", "activated"))
ACT = tuple(forward(op, "act", result) for op, result in ACTIVATION)
GATE_UP = (forward("dot", "gate"), forward("dot", "up"), *ACT)
DOWN = (forward("dot", "down"), forward("add", "residual"))
DACT = (gradient("dot", "down", "dact"),)
ACTIVATION_GRADIENTS = (
    *(again(op, "act", result) for op, result in ACTIVATION),
    gradient("mul", "act", "dsilu"), gradient("mul", "act", "dup"), gradient("logistic", "act", "dgate"),
)
DDOWN_WEIGHT = (gradient("dot", "down", "ddown_weight"),)
DGATE_UP_WEIGHT = (gradient("dot", "gate", "dgate_weight"), gradient("dot", "up", "dup_weight"))
DH_OF_GATE = (gradient("dot", "gate", "dh"),)
DH_OF_UP = (gradient("dot", "up", "dh"), gradient("add", "up", "dh"))


def two_products_flops(shapes: Shapes) -> float:
    (m, k), n = shapes["a_ptr"], shapes["b_ptr"][1]
    return 2 * 2 * m * n * k + (6 * m * n if "activated_ptr" in shapes else 0)


@declare(flops=two_products_flops)  # the caller declares the operation
@triton.jit
def two_products_kernel(
    a_ptr, b_ptr, b2_ptr, c_ptr, c2_ptr, activated_ptr, m, n, k,
    stride_am, stride_ak, stride_bk, stride_bn, stride_b2k, stride_b2n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute c = a @ b, c2 = a @ b2 and silu(c) * c2 in one pass over a; a result with pointer None is not stored."""
    a = open_operand(a_ptr, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
    b = open_operand(b_ptr, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
    b2 = open_operand(b2_ptr, k, n, stride_b2k, stride_b2n, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    # Not flattened, unlike the single product. On an H200 that gives 735 against 591 TFLOP/s for gate and up, and 764
    # against 580 for dWg and dWu (Triton 3.6).
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        c2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            at = step * BLOCK_K
            x = load_operand(a, row, at, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
            y = load_operand(b, at, column, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
            y2 = load_operand(b2, at, column, k, n, stride_b2k, stride_b2n, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
            c = add_product(c, x, y, PRECISION)
            c2 = add_product(c2, x, y2, PRECISION)
        if c_ptr is not None:
            store_tile(c_ptr, c, row, column, m, n, BLOCK_M, BLOCK_N)
            store_tile(c2_ptr, c2, row, column, m, n, BLOCK_M, BLOCK_N)
        if activated_ptr is not None:
            store_tile(activated_ptr, c * tl.sigmoid(c) * c2, row, column, m, n, BLOCK_M, BLOCK_N)


@declare(*ACTIVATION_GRADIENTS, flops=lambda shapes: 13 * math.prod(shapes["dact_ptr"]))
@triton.jit
def activation_gradients_kernel(dact_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, act_ptr, elements, BLOCK: tl.constexpr):
    """Compute dgate, dup and act from a stored dact, element by element."""
    backward_block(gate_ptr, up_ptr, dact_ptr, dgate_ptr, dup_ptr, act_ptr, elements, silu_value_and_slope, BLOCK)


@lru_cache
def two_products_config(dtype: torch.dtype, precision: str, descriptors: bool, *output: int) -> MatmulConfig:
    """Tiles of the kernel with two accumulators: half as wide as a single product's, for any output shape."""
    if dtype == torch.float32:
        return pointer_config(64, 32, 16, 4, 2) if precision == "ieee" else pointer_config(128, 32, 32, 8, 2)
    if not descriptors:
        return pointer_config(64, 32, 32, 4, 3)
    return MatmulConfig(128, 128, 64, num_warps=8, num_stages=3)


def launch_gate_up(
    h: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, config: MatmulConfig, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return act = silu(h gate_weight) * (h up_weight) and, with `save`, the two products; all contiguous."""
    shape = (h.shape[0], gate_weight.shape[1])
    act = torch.empty(shape, dtype=h.dtype, device=h.device)
    gate, up = (torch.empty_like(act), torch.empty_like(act)) if save else (None, None)
    _launch_two_products(h, gate_weight, up_weight, gate, up, act, config)
    return act, gate, up


def launch_two_products(
    a: torch.Tensor, b: torch.Tensor, b2: torch.Tensor, config: MatmulConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a @ b and a @ b2, contiguous; b and b2 are both stored row by row or both column by column."""
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    c2 = torch.empty_like(c)
    _launch_two_products(a, b, b2, c, c2, None, config)
    return c, c2


def _launch_two_products(
    a: torch.Tensor, b: torch.Tensor, b2: torch.Tensor, c: torch.Tensor | None, c2: torch.Tensor | None,
    activated: torch.Tensor | None, config: MatmulConfig,
) -> None:
    (m, k), n = a.shape, b.shape[1]
    with device_of(a):
        if config.descriptors:
            provide_descriptor_memory(a.device)
        two_products_kernel[(programs_for_output(m, n, config, a.device),)](
            a, b, b2, c, c2, activated, m, n, k, *a.stride(), *b.stride(), *b2.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            A_TRANSPOSED=stored_transposed(a), B_TRANSPOSED=stored_transposed(b), DESCRIPTORS=config.descriptors,
            PRECISION=product_precision(a.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
        )


def launch_activation_gradients(
    dact: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dgate, dup and act from a stored dact; all are contiguous."""
    dgate, dup, act = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    config = FlatConfig(block=2048, num_warps=8)
    launch_elementwise(activation_gradients_kernel, config, dact, gate, up, dgate, dup, act)
    return dgate, dup, act


def _project(
    x: torch.Tensor, h: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return y and, with `save`, gate and up."""
    config = choose_config(two_products_config, h, gate_weight, up_weight)
    with computing(*GATE_UP, c_ptr="gate", c2_ptr="up", activated_ptr="act"):
        act, gate, up = launch_gate_up(h, gate_weight, up_weight, config, save)
    with computing(*DOWN, c_ptr="y"):
        y = launch_matmul(act, down_weight, choose_config(matmul_config, act, down_weight), residual=x.contiguous())
    return y, gate, up


class _SwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm_weight: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor,
        down_weight: torch.Tensor, eps: float,
    ) -> torch.Tensor:
        with stage("norm"), computing(y_ptr="h"):
            h, rstd = rmsnorm.forward(x, norm_weight, eps, save_rstd=True)
        y, gate, up = _project(x, h, gate_weight, up_weight, down_weight, save=True)
        ctx.save_for_backward(x, norm_weight, gate_weight, up_weight, down_weight, rstd, h, gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, norm_weight, gate_weight, up_weight, down_weight, rstd, h, gate, up = ctx.saved_tensors
        with computing(*DACT, c_ptr="dact"):
            dact = launch_matmul(dy, down_weight.T, choose_config(matmul_config, dy, down_weight.T))
        dgate, dup, act = launch_activation_gradients(dact, gate, up)
        with computing(*DDOWN_WEIGHT, c_ptr="ddown_weight"):
            ddown = launch_matmul(act.T, dy, choose_config(matmul_config, act.T, dy))
        config = choose_config(two_products_config, h.T, dgate, dup)
        with computing(*DGATE_UP_WEIGHT, c_ptr="dgate_weight", c2_ptr="dup_weight"):
            dgate_weight, dup_weight = launch_two_products(h.T, dgate, dup, config)
        with computing(*DH_OF_GATE, c_ptr="dh_of_gate"):
            dh = launch_matmul(dgate, gate_weight.T, choose_config(matmul_config, dgate, gate_weight.T))
        with computing(*DH_OF_UP, c_ptr="dh"):
            dh = launch_matmul(dup, up_weight.T, choose_config(matmul_config, dup, up_weight.T), residual=dh)
        with stage("norm"), computing(dx_ptr="dx_of_norm"):
            dx, dnorm_weight = rmsnorm.backward(x, norm_weight, rstd, dh)
        with stage("residual"):
            dx = dx + dy
        return dx, dnorm_weight, dgate_weight, dup_weight, ddown, None


def swiglu_mlp(
    x: torch.Tensor, norm_weight: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor,
    down_weight: torch.Tensor, eps: float,
) -> torch.Tensor:
    """Return x + (silu(h gate_weight) * (h up_weight)) down_weight with h = rmsnorm(x, norm_weight, eps).

    Differentiable once.

    Args:
        x: [tokens, width].
        norm_weight: [width].
        gate_weight, up_weight: [width, hidden].
        down_weight: [hidden, width].
        eps: added to the mean square of a row.

    Returns:
        y [tokens, width], contiguous, in the inputs' dtype.

    Raises:
        ValueError: shapes do not fit, devices differ or are not a GPU (outside the interpreter), or float32 products
            are set to "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    check_tensors(x=x, norm_weight=norm_weight, **weights)
    check_matrix("x", x)
    width, hidden = x.shape[1], gate_weight.shape[-1]
    expected = {"norm_weight": [width], "gate_weight": [width, hidden], "up_weight": [width, hidden],
                "down_weight": [hidden, width]}
    got = {name: list(tensor.shape) for name, tensor in {"norm_weight": norm_weight, **weights}.items()}
    if got != expected:
        raise ValueError(
            f"the weights must fit x {list(x.shape)} and one hidden size: expected {expected}, got {got}; "
            "weights are [inputs, outputs], transpose a torch.nn.Linear's weights"
        )
    tensors = (x, norm_weight, gate_weight, up_weight, down_weight)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _SwigluMlp.apply(*tensors, eps)
    with stage("norm"), computing(y_ptr="h"):
        h, _ = rmsnorm.forward(x, norm_weight, eps, save_rstd=False)
    y, _, _ = _project(x, h, gate_weight, up_weight, down_weight, save=False)
    return y


def apply(inputs: dict[str, torch.Tensor], *, eps: float) -> dict[str, torch.Tensor]:
    """Run the block `swiglu_mlp`: x, norm_weight, gate_weight, up_weight, down_weight -> y."""
    return {"y": swiglu_mlp(**inputs, eps=eps)}
