"""A layer of GPT-2: attention and a GELU MLP, each after a LayerNorm, with dropout before the residual is added.

    x1 = x + dropout(attention(norm(x) Wqkv + bqkv) Wo + bo)
    y = x1 + dropout(gelu(norm(x1) Wup + bup) Wdown + bdown)

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Dropout's masks come from explicit
seeds, as in dropout_residual_norm.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from xlafuse.triton_side.blocks import attention, dropout_residual_norm, layernorm, linear_gelu
from xlafuse.triton_side.blocks.decoder_block import split_heads
from xlafuse.triton_side.calls.stages import stage

Attend = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def stages(
    x: Tensor, params: Mapping[str, Tensor], seed: Tensor, *, heads: int, p: float, eps: float,
    attend: Attend = attention.apply,
) -> Tensor:
    """Return the layer's output for x [batch, sequence, width]. `params` has the names of `apply`'s inputs.

    seed: [2, 2] in int32, a key for each dropout.
    attend: maps q, k and v [batch, heads, sequence, head_dim] to `out` of their shape.
    """
    tokens = x.reshape(-1, x.shape[-1])
    attention_seed, mlp_seed = seed.unbind()
    norm = {"weight": params["attention_norm_weight"], "bias": params["attention_norm_bias"]}
    with stage("attention_norm"):
        h = layernorm.apply({"x": tokens, **norm}, eps=eps)["y"]
    with stage("qkv"):
        qkv = h @ params["w_qkv"] + params["b_qkv"]
    q, k, v = split_heads(qkv.view(*x.shape[:2], -1), heads, heads)
    with stage("attention"):
        attended = attend({"q": q, "k": k, "v": v})["out"]
    with stage("out"):
        projected = attended.transpose(1, 2).reshape(len(tokens), -1) @ params["w_o"]
    between = {"bias": params["b_o"], "weight": params["mlp_norm_weight"], "shift": params["mlp_norm_bias"]}
    with stage("attention_residual"):
        summed = dropout_residual_norm.apply(
            {"x": projected, "residual": tokens, "seed": attention_seed, **between}, p=p, eps=eps
        )
    with stage("up"):
        activated = linear_gelu.apply({"x": summed["y"], "weight": params["w_up"], "bias": params["b_up"]})["y"]
    with stage("down"):
        down = activated @ params["w_down"]
    with stage("mlp_residual"):
        y = dropout_residual_norm.dropped_sum(down, params["b_down"], summed["h"], mlp_seed, p)
    return y.view(x.shape)


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """x [batch, sequence, width], attention_norm_weight, attention_norm_bias, mlp_norm_weight, mlp_norm_bias, b_o,
    b_down [width], w_qkv [width, 3 heads head_dim], b_qkv, w_o [heads head_dim, width], w_up [width, hidden], b_up,
    w_down [hidden, width], seed [2, 2] -> y, of x's shape. The attributes are `stages`': heads, p, eps.

    Columns of w_qkv are the queries' heads, then the keys', then the values'. Every result has x's dtype. Norms and
    softmax are in float32. float32 products follow `torch.get_float32_matmul_precision()`.
    """
    return {"y": stages(inputs["x"], inputs, inputs["seed"], **attributes)}
