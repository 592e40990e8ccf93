"""A layer of GPT-2, forward and backward, built from this folder's kernels and cuBLAS.

    x1 = x + dropout(attention(h1 Wqkv + bqkv) Wo + bo),  h1 = layernorm(x)
    y = x1 + dropout(gelu(h2 Wup + bup) Wdown + bdown),  h2 = layernorm(x1)

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); dropout_residual_norm.py draws the masks.
cuBLAS computes the products in brackets below, with at most a bias. Wup's product is ours or cuBLAS's, whichever is
faster (transformer_layer.py).

Forward:

1. h1; [qkv]; attention, which reads q, k and v as views of qkv
2. [Wo]; bias, dropout, x1 and h2 in one pass
3. Wup's product, bias and GELU
4. [Wdown]; bias, dropout and sum in one pass

Backward, where the norms add the residual's gradients to their own:

1. dropout's gradient and dbdown; [dWdown, dact]
2. GELU's gradient and dbup; [dWup, dh2]
3. the norm's gradient, dx1, dropout's gradient and dbo; [dWo, dmerged]
4. attention's gradients, written into the columns of dqkv; dbqkv, a sum that PyTorch computes
5. [dWqkv, dh1]; dx

One autograd function holds all of it, as in decoder_block.py. Shapes: x, y [tokens, width], a token a row, and so on.
dtypes: bfloat16, float16, float32, one for all. With gradients, the forward pass saves x, h1, qkv, attention's output,
x1, h2, and GELU's input and output. In fp32 it saves two numbers a token for each norm, and one a query.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.blocks.dropout_residual_norm import check_probability
from xlafuse.triton_side.calls.declare import computing
from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.kernels import dropout_residual_norm, layernorm, linear_gelu
from xlafuse.triton_side.kernels.shared.attention_configs import HEAD_DIMS
from xlafuse.triton_side.kernels.shared.launch import check_tensors
from xlafuse.triton_side.kernels.transformer_layer import (
    attention_backward,
    attention_forward,
    product_bias_gelu,
    refuse_autocast,
    split_qkv,
)

WEIGHTS = (
    "attention_norm_weight", "attention_norm_bias", "w_qkv", "b_qkv", "w_o", "b_o", "mlp_norm_weight", "mlp_norm_bias",
    "w_up", "b_up", "w_down", "b_down",
)


def _split_qkv(qkv: torch.Tensor, shape: torch.Size, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v, each [batch, heads, sequence, head_dim], of all rows; shape: [batch, sequence, ...]."""
    return split_qkv(qkv, shape[0], shape[1], heads, heads)


def _forward(
    x: torch.Tensor, shape: torch.Size, seed: torch.Tensor, weights: Mapping[str, torch.Tensor], heads: int, p: float,
    eps: float, save: bool,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return y of the tokens x and the tensors that the backward pass needs besides x, seed and weights.

    Some are None without `save`.
    """
    w = weights
    with stage("attention_norm"), computing(y_ptr="h1"):
        h1, mean1, rstd1 = layernorm.forward(x, w["attention_norm_weight"], w["attention_norm_bias"], eps, save=save)
    with stage("qkv"):
        qkv = torch.addmm(w["b_qkv"], h1, w["w_qkv"])
    merged, logsumexp2 = attention_forward(*_split_qkv(qkv, shape, heads), save)
    with stage("out"):
        projected = torch.mm(merged, w["w_o"])
    with stage("attention_residual"), computing(x_ptr="projected", residual_ptr="x", y_ptr="h2", h_ptr="x1"):
        h2, x1, mean2, rstd2 = dropout_residual_norm.forward(
            projected, w["b_o"], x, w["mlp_norm_weight"], w["mlp_norm_bias"], seed[0], p, eps, save_statistics=save
        )
    with stage("up"):
        act, pre = product_bias_gelu(h2, w["w_up"], w["b_up"], save)
    with stage("down"):
        down = torch.mm(act, w["w_down"])
    with stage("mlp_residual"):
        y = dropout_residual_norm.forward_without_norm(down, w["b_down"], x1, seed[1], p)
    return y, [h1, mean1, rstd1, qkv, merged, logsumexp2, x1, h2, mean2, rstd2, pre, act]


class _Gpt2Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: torch.Size, heads: int, p: float, eps: float, x: torch.Tensor, seed: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        named = dict(zip(WEIGHTS, weights, strict=True))
        y, saved = _forward(x, shape, seed, named, heads, p, eps, save=True)
        ctx.save_for_backward(x, seed, *weights, *saved)
        ctx.shape, ctx.heads, ctx.p = shape, heads, p
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, seed, *rest = ctx.saved_tensors
        w = dict(zip(WEIGHTS, rest, strict=False))
        h1, mean1, rstd1, qkv, merged, logsumexp2, x1, h2, mean2, rstd2, pre, act = rest[len(WEIGHTS) :]
        d: dict[str, torch.Tensor] = {}
        with stage("mlp_residual"):
            ddown, d["b_down"] = dropout_residual_norm.backward_without_norm(dy, seed[1], ctx.p)
        with stage("down"):
            d["w_down"], dact = torch.mm(act.T, ddown), torch.mm(ddown, w["w_down"].T)
        with stage("up"):
            dpre, d["b_up"] = linear_gelu.launch_dpre(dact, pre)
            with stage("product"):
                d["w_up"], dh2 = torch.mm(h2.T, dpre), torch.mm(dpre, w["w_up"].T)
        with stage("attention_residual"), computing(h_ptr="x1", dy_ptr="dh2", dh_ptr="dy", dresidual_ptr="dx1"):
            dprojected, d["b_o"], dx1, d["mlp_norm_weight"], d["mlp_norm_bias"] = dropout_residual_norm.backward(
                x1, w["mlp_norm_weight"], seed[0], mean2, rstd2, dh2, dy, ctx.p
            )
        with stage("out"):
            d["w_o"], dmerged = torch.mm(merged.T, dprojected), torch.mm(dprojected, w["w_o"].T)
        dqkv = torch.empty_like(qkv)
        views, gradients = (_split_qkv(rows, ctx.shape, ctx.heads) for rows in (qkv, dqkv))
        attention_backward(*views, merged, logsumexp2, dmerged, gradients)
        with stage("qkv"):
            d["b_qkv"], d["w_qkv"], dh1 = dqkv.sum(0), torch.mm(h1.T, dqkv), torch.mm(dqkv, w["w_qkv"].T)
        with stage("attention_norm"), computing(dsum_ptr="dx1", dy_ptr="dh1"):
            dx, d["attention_norm_weight"], d["attention_norm_bias"] = layernorm.backward(
                x, w["attention_norm_weight"], mean1, rstd1, dh1, dsum=dx1
            )
        return None, None, None, None, dx, None, *(d[name] for name in WEIGHTS)


def gpt2_block(
    x: torch.Tensor, params: Mapping[str, torch.Tensor], seed: torch.Tensor, *, heads: int, p: float, eps: float
) -> torch.Tensor:
    """Return the layer's output for x, differentiable once in x and the weights.

    Args:
        x: [batch, sequence, width], bfloat16, float16 or float32, on a GPU, width up to 16,384.
        params: attention_norm_weight, attention_norm_bias, mlp_norm_weight, mlp_norm_bias, b_o, b_down [width]; w_qkv
            [width, 3 heads head_dim], the queries' heads, then the keys', then the values'; b_qkv; w_o
            [heads head_dim, width]; w_up [width, hidden]; b_up; w_down [hidden, width]; of x's dtype and device.
            Other entries are ignored.
        seed: [2, 2] in int32 on x's device: a key for the dropout after attention, and one for the dropout after the
            MLP.
        heads: of queries, keys and values alike.
        p: probability of an element to be dropped, 0 <= p < 1, rounded up to a multiple of 2^-16.
        eps: added to the variances.

    Returns:
        y, contiguous, of x's shape and dtype.

    Raises:
        ValueError: p is out of range, shapes do not fit, attention does not support head_dim, devices differ, a device
            is not a GPU (outside Triton's interpreter), or PyTorch's float32 matmul precision is "medium".
        TypeError: a dtype is not supported, or they differ, or the seed is not int32.
        RuntimeError: `torch.autocast` is on.
    """
    weights = {name: params[name] for name in WEIGHTS}
    check_tensors(x=x, **weights)
    refuse_autocast(x)
    _check_shapes(x, weights, heads)
    if seed.dtype != torch.int32:
        raise TypeError(f"seed must be int32, got {seed.dtype}; cast it with .to(torch.int32)")
    if seed.shape != (2, 2) or seed.device != x.device:
        raise ValueError(f"seed must be [2, 2] on {x.device}, got shape {list(seed.shape)} on {seed.device}")
    check_probability(p)
    tokens = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights.values())):
        y: torch.Tensor = _Gpt2Block.apply(x.shape, heads, p, eps, tokens, seed, *weights.values())
    else:
        y, _ = _forward(tokens, x.shape, seed, weights, heads, p, eps, save=False)
    return y.view(x.shape)


def _check_shapes(x: torch.Tensor, weights: Mapping[str, torch.Tensor], heads: int) -> None:
    if x.ndim != 3 or x.numel() == 0 or x.shape[-1] > dropout_residual_norm.MAX_COLUMNS:
        raise ValueError(
            "x must be [batch, sequence, width], not empty and of a width up to "
            f"{dropout_residual_norm.MAX_COLUMNS}, got {list(x.shape)}"
        )
    width, hidden = x.shape[-1], weights["w_up"].shape[-1]
    head_dim, rest = divmod(weights["w_qkv"].shape[-1], 3 * heads)
    if head_dim not in HEAD_DIMS or rest:
        raise ValueError(
            f"w_qkv must have 3 * {heads} heads of {HEAD_DIMS} columns, got {weights['w_qkv'].shape[-1]}"
        )
    attended = heads * head_dim
    matrices = {
        "w_qkv": [width, 3 * attended], "b_qkv": [3 * attended], "w_o": [attended, width], "w_up": [width, hidden],
        "b_up": [hidden], "w_down": [hidden, width],
    }
    expected = {name: matrices.get(name, [width]) for name in WEIGHTS}
    got = {name: list(tensor.shape) for name, tensor in weights.items()}
    if got != expected:
        raise ValueError(f"the weights must fit x {list(x.shape)}: expected {expected}, got {got}")


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `gpt2_block`: x, seed, the weights and biases; heads, p, eps -> y."""
    return {"y": gpt2_block(inputs["x"], inputs, inputs["seed"], **attributes)}
