"""A decoder layer of Llama: RMSNorm, attention with rotary positions and grouped queries, RMSNorm, gated MLP.

    x1 = x + out(attention(rope(qkv(norm(x)))))       y = x1 + down(silu(gate(h)) * up(h)),  h = norm(x1)

Sources: Touvron et al., "LLaMA", https://arxiv.org/abs/2302.13971; Ainslie et al., "GQA",
https://arxiv.org/abs/2305.13245.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from xlafuse.triton_side.blocks import attention, rmsnorm, rope
from xlafuse.triton_side.calls.stages import stage

Attend = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def split_heads(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views q, k and v, each [batch, its heads, sequence, head_dim], of qkv [batch, sequence, columns]."""
    by_head = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = by_head.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def stages(
    x: Tensor, params: Mapping[str, Tensor], positions: Tensor, *, heads: int, kv_heads: int, eps: float, theta: float,
    attend: Attend = attention.apply,
) -> Tensor:
    """Return the layer's output for x [batch, sequence, width]. `params` has the names of `apply`'s inputs.

    attend: maps q [batch, heads, sequence, head_dim], k and v [batch, kv_heads, ...] to `out` of q's shape.
    """
    with stage("attention_norm"):
        h = rmsnorm.apply({"x": x, "weight": params["attention_norm"]}, eps=eps)["y"]
    with stage("qkv"):
        qkv = h @ params["w_qkv"]
    q, k, v = split_heads(qkv, heads, kv_heads)
    with stage("rope"):
        turned = rope.apply({"q": q, "k": k, "positions": positions}, theta=theta)
    with stage("attention"):
        attended = attend({"q": turned["q_out"], "k": turned["k_out"], "v": v})["out"]
    with stage("out"):
        projected = attended.transpose(1, 2).flatten(2) @ params["w_o"]
    with stage("attention_residual"):
        x = x + projected
    with stage("mlp_norm"):
        h = rmsnorm.apply({"x": x, "weight": params["mlp_norm"]}, eps=eps)["y"]
    with stage("gate"):
        gate = h @ params["w_gate"]
    with stage("up"):
        up = h @ params["w_up"]
    with stage("act"):
        activated = gate * torch.sigmoid(gate) * up
    with stage("down"):
        down = activated @ params["w_down"]
    with stage("mlp_residual"):
        return x + down


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """x [batch, sequence, width], positions [batch, sequence], attention_norm, mlp_norm [width], w_qkv
    [width, (heads + 2 kv_heads) head_dim], w_o [heads head_dim, width], w_gate, w_up [width, hidden], w_down
    [hidden, width] -> y, of x's shape. The attributes are `stages`': heads, kv_heads, eps, theta.

    Columns of w_qkv are the queries' heads, then the keys', then the values'. Every result has x's dtype. Norms,
    rotation and softmax are in float32. float32 products follow `torch.get_float32_matmul_precision()`.
    """
    return {"y": stages(inputs["x"], inputs, inputs["positions"], **attributes)}
