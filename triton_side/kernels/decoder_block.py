"""A decoder layer of Llama, forward and backward, built from this folder's kernels and cuBLAS.

    x1 = x + attention(rope(h1 Wqkv)) Wo,  h1 = rmsnorm(x)       y = x1 + (silu(h2 Wg) * (h2 Wu)) Wd,  h2 = rmsnorm(x1)

Touvron et al., arXiv:2302.13971; Ainslie et al., arXiv:2305.13245. cuBLAS computes the products in brackets below. For
a product followed by a sum, the faster of two is called: our kernel with the sum in its epilogue, or cuBLAS and a
second kernel (transformer_layer.py).

Forward:

1. h1; [qkv]
2. rope rotates q and k in place, in views of qkv; attention reads these views
3. [Wo]; x1 and h2 in one pass
4. [gate, up]; silu(gate) * up; Wd and the sum with x1

Backward. The kernel of each norm also adds the gradient that comes through the residual:

1. [dact]; dgate, dup and the recomputed act
2. [dWd, dWg, dWu, and the term dgate Wg^T of dh2]; the term dup Wu^T and the sum of both
3. dx1; [dWo, dmerged]
4. attention's gradients, written into their columns of dqkv; dq and dk rotated back in place
5. [dWqkv, dh1]; dx

One autograd function contains the whole layer. With separate functions, PyTorch would add the residual's gradients and
concatenate the parts of dqkv in separate passes.

Inside the layer, each tensor has one row per token: x, x1 and y are [tokens, width], and qkv is
[tokens, (heads + 2 kv_heads) head_dim]. All tensors have one dtype: bfloat16, float16 or float32.

With gradients, the forward pass saves x, h1, qkv, attention's output, x1, h2, gate and up. It also saves fp32 values:
one per token for each norm, and one per query row of each head for attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import computing, forward
from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.kernels import rmsnorm, rope, swiglu_mlp
from xlafuse.triton_side.kernels.shared.attention_configs import HEAD_DIMS
from xlafuse.triton_side.kernels.shared.launch import check_tensors
from xlafuse.triton_side.kernels.transformer_layer import (
    attention_backward,
    attention_forward,
    gate_up_activation,
    product_plus_residual,
    refuse_autocast,
    split_qkv,
)

WEIGHTS = ("attention_norm", "w_qkv", "w_o", "mlp_norm", "w_gate", "w_up", "w_down")
SUM_AND_NORM = (
    forward("add", "attention_residual"),
    *(replace(operation, stage=f"mlp_norm/{operation.stage}") for operation in rmsnorm.FORWARD),
)
DOWN = (forward("dot", "down"), forward("add", "mlp_residual"))


@dataclass(frozen=True)
class Settings:
    """The layer's arguments that are not tensors."""

    heads: int
    kv_heads: int
    eps: float
    theta: float

    def split(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v as views of qkv, each [batch, heads or kv_heads, sequence, head_dim]."""
        return split_qkv(qkv, positions.shape[0], positions.shape[1], self.heads, self.kv_heads)


def _forward(
    settings: Settings, x: torch.Tensor, positions: torch.Tensor, weights: Mapping[str, torch.Tensor], save: bool
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return y and the tensors that the backward pass needs besides x, positions and weights.

    Without `save`, gate, up and the statistics of norms and attention are None.
    """
    with stage("attention_norm"), computing(y_ptr="h1"):
        h1, rstd1 = rmsnorm.forward(x, weights["attention_norm"], settings.eps, save_rstd=save)
    with stage("qkv"):
        qkv = torch.mm(h1, weights["w_qkv"])
    q, k, v = settings.split(qkv, positions)
    with stage("rope"), computing(*rope.FORWARD):
        rope.launch_rope(q, k, positions, settings.theta, out=(q, k))
    merged, logsumexp2 = attention_forward(q, k, v, save)
    with stage("out"):
        projected = torch.mm(merged, weights["w_o"])
    with computing(*SUM_AND_NORM, x_ptr="projected", residual_ptr="x", y_ptr="h2", sum_ptr="x1"):
        h2, x1, rstd2 = rmsnorm.forward_with_residual(projected, x, weights["mlp_norm"], settings.eps, save_rstd=save)
    act, gate, up = gate_up_activation(h2, weights["w_gate"], weights["w_up"], save)
    y = product_plus_residual(act, weights["w_down"], x1, DOWN, c_ptr="y")
    return y, [h1, rstd1, qkv, merged, logsumexp2, x1, h2, rstd2, gate, up]


def _attention_backward(
    settings: Settings, positions: torch.Tensor, qkv: torch.Tensor, merged: torch.Tensor, logsumexp2: torch.Tensor,
    dmerged: torch.Tensor,
) -> torch.Tensor:
    """Return dqkv from the gradient of attention's output; it has the shape of `merged`."""
    q, k, v = settings.split(qkv, positions)
    dqkv = torch.empty_like(qkv)
    dq, dk, dv = settings.split(dqkv, positions)
    attention_backward(q, k, v, merged, logsumexp2, dmerged, (dq, dk, dv))
    with stage("rope"), computing(*rope.BACKWARD, q_out_ptr="dq", k_out_ptr="dk"):
        rope.launch_rope(dq, dk, positions, settings.theta, backward=True, out=(dq, dk))
    return dqkv


class _DecoderBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: Settings, x: torch.Tensor, positions: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        y, saved = _forward(settings, x, positions, dict(zip(WEIGHTS, weights, strict=True)), save=True)
        ctx.save_for_backward(x, positions, *weights, *saved)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, positions, attention_norm, w_qkv, w_o, mlp_norm, w_gate, w_up, w_down, *saved = ctx.saved_tensors
        h1, rstd1, qkv, merged, logsumexp2, x1, h2, rstd2, gate, up = saved
        with stage("down"):
            dact = torch.mm(dy, w_down.T)
        dgate, dup, act = swiglu_mlp.launch_activation_gradients(dact, gate, up)
        with stage("down"):
            dw_down = torch.mm(act.T, dy)
        with stage("gate"):
            dw_gate, dh2 = torch.mm(h2.T, dgate), torch.mm(dgate, w_gate.T)
        with stage("up"):
            dw_up = torch.mm(h2.T, dup)
        dh2 = product_plus_residual(dup, w_up.T, dh2, swiglu_mlp.DH_OF_UP, residual_ptr="dh2_of_gate", c_ptr="dh2")
        with stage("mlp_norm"), computing(x_ptr="x1", dsum_ptr="dy", dy_ptr="dh2", dx_ptr="dx1"):
            dx1, dmlp_norm = rmsnorm.backward(x1, mlp_norm, rstd2, dh2, dsum=dy)
        with stage("out"):
            dw_o, dmerged = torch.mm(merged.T, dx1), torch.mm(dx1, w_o.T)
        dqkv = _attention_backward(ctx.settings, positions, qkv, merged, logsumexp2, dmerged)
        with stage("qkv"):
            dw_qkv, dh1 = torch.mm(h1.T, dqkv), torch.mm(dqkv, w_qkv.T)
        with stage("attention_norm"), computing(dsum_ptr="dx1", dy_ptr="dh1"):
            dx, dattention_norm = rmsnorm.backward(x, attention_norm, rstd1, dh1, dsum=dx1)
        return None, dx, None, dattention_norm, dw_qkv, dw_o, dmlp_norm, dw_gate, dw_up, dw_down


def decoder_block(
    x: torch.Tensor, params: Mapping[str, torch.Tensor], positions: torch.Tensor, *, heads: int, kv_heads: int,
    eps: float, theta: float,
) -> torch.Tensor:
    """Return the layer's output for x, differentiable once in x and the weights.

    Args:
        x: [batch, sequence, width], bfloat16, float16 or float32, on a GPU.
        params: the weights, of x's dtype and device: attention_norm and mlp_norm [width], w_o [heads head_dim, width],
            w_gate and w_up [width, hidden], w_down [hidden, width], w_qkv [width, (heads + 2 kv_heads) head_dim]. The
            columns of w_qkv are the heads of q, then of k, then of v. Other entries are ignored.
        positions: [batch, sequence], int32 or int64, on x's device. They only set the rotation of q and k; the causal
            mask follows the order in the sequence.
        heads, kv_heads: the number of query heads, and of key and value heads. heads / kv_heads query heads share one
            key and value head.
        eps: added to the mean squares.
        theta: the base of the rotation's frequencies.

    Returns:
        y, contiguous, of x's shape and dtype.

    Raises:
        ValueError: shapes do not fit, attention does not support head_dim, devices differ, a device is not a GPU
            (outside Triton's interpreter), or PyTorch's float32 matmul precision is "medium".
        TypeError: a dtype is not supported, or dtypes differ.
        RuntimeError: `torch.autocast` is on.
    """
    weights = {name: params[name] for name in WEIGHTS}
    check_tensors(x=x, **weights)
    refuse_autocast(x)
    _check_shapes(x, positions, weights, heads, kv_heads)
    settings = Settings(heads, kv_heads, eps, theta)
    tokens = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights.values())):
        y: torch.Tensor = _DecoderBlock.apply(settings, tokens, positions, *weights.values())
    else:
        y, _ = _forward(settings, tokens, positions, weights, save=False)
    return y.view(x.shape)


def _check_shapes(
    x: torch.Tensor, positions: torch.Tensor, weights: Mapping[str, torch.Tensor], heads: int, kv_heads: int
) -> None:
    if x.ndim != 3 or x.numel() == 0:
        raise ValueError(f"x must be [batch, sequence, width] and not empty, got {list(x.shape)}")
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be int32 or int64, got {positions.dtype}; cast them with .to(torch.int32)")
    if positions.shape != x.shape[:2] or positions.device != x.device:
        raise ValueError(
            f"positions must be [batch, sequence] = {list(x.shape[:2])} on {x.device}, got {list(positions.shape)} on "
            f"{positions.device}"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    width, hidden = x.shape[-1], weights["w_gate"].shape[-1]
    head_dim, rest = divmod(weights["w_qkv"].shape[-1], heads + 2 * kv_heads)
    if head_dim not in HEAD_DIMS or rest:
        raise ValueError(
            f"w_qkv must have {heads} + 2 * {kv_heads} heads of {HEAD_DIMS} columns, got {weights['w_qkv'].shape[-1]}"
        )
    expected = {
        "attention_norm": [width], "w_qkv": [width, (heads + 2 * kv_heads) * head_dim],
        "w_o": [heads * head_dim, width], "mlp_norm": [width], "w_gate": [width, hidden], "w_up": [width, hidden],
        "w_down": [hidden, width],
    }
    got = {name: list(tensor.shape) for name, tensor in weights.items()}
    if got != expected:
        raise ValueError(f"the weights must fit x {list(x.shape)}: expected {expected}, got {got}")


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `decoder_block`: x, positions, the weights; heads, kv_heads, eps, theta -> y."""
    return {"y": decoder_block(inputs["x"], inputs, inputs["positions"], **attributes)}
