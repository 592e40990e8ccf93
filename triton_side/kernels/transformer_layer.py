"""Steps that decoder_block and gpt2_block share: attention on tensors with one row per token, and fused MLPs.

Attention reads q, k and v as views of the projection's output, and writes its output and gradients to such views, so it
copies none of them. `merged` is its output [tokens, heads head_dim]: one row holds all heads of a token.

A product followed by another operation runs as one Triton kernel with an epilogue, or as cuBLAS and a second kernel.
The choice follows the tables below: device times in us of a full run on an H200, for rows x inner x columns, in
bfloat16 unless another dtype is named. Both columns include the operation that follows the product.

    | silu(gate) * up, both products in one kernel            ours; gate and up kept    cuBLAS twice + a pass
    | 8192 x 4096 x 14336, decoder_block/llama-8b             2632; 2763                2379 + 158
    | 8192 x 2048 x 8192, decoder_block/llama-1b, float16     829; 923                  741 + 90
    | 2048 x 4096 x 14336, swiglu_mlp/llama-8b                674; 711                  595 + 40
    | 4096 x 1024 x 2816, lm_step/2-layers                    -; 108                    73 + 17
    | 8192 x 768 x 2048, swiglu_mlp/gpt2, float16             102; 118                  79 + 25
    | 1 x 4096 x 14336, swiglu_mlp/one-token                  84; 85                    62 + 1
    | 251 x 509 x 1021, decoder_block/prime, float32          41; 43                    27 + 2

cuBLAS wins for gate and up, so gate_up_activation always calls it. It writes gate and up to memory, in inference too.

    | + : a product and a sum; others: bias and GELU          ours                      cuBLAS + a pass
    | + 8192 x 14336 x 4096, decoder_block/llama-8b           1198 to 1205              1164 + 60
    | + 8192 x 8192 x 2048, decoder_block/llama-1b, float16   360                       341 + 30
    | + 2048 x 14336 x 4096, swiglu_mlp/llama-8b              294                       287 + 9
    | + 4096 x 2816 x 1024, lm_step/2-layers                  37                        32 + 5
    | 8192 x 768 x 3072, gpt2_block/gpt2-small                76; 86 with pre kept      56 + 37
    | 8192 x 1600 x 6400, gpt2_block/gpt2-xl, float16         267; 292                  228 + 68
    | + 8192 x 2048 x 768, swiglu_mlp/gpt2, float16           54                        37 + 7
    | + 1 x 14336 x 4096, swiglu_mlp/one-token                67                        31 + 1
    | + 257 x 1021 x 509, swiglu_mlp/prime, float16           33                        12 + 1
    | + 8192 x 2048 x 768, swiglu_mlp/gpt2-fp32               691; TF32 443             544 + 13; 90 + 13
    | + 251 x 1021 x 509, decoder_block/prime, float32        78                        14 + 1
    | 251 x 509 x 1021, gpt2_block/prime, float32             45; 47                    14 + 2

Our kernel wins if three conditions hold, and cuBLAS computes all other products:

- TMA reads 16-bit operands;
- the output has more than a few rows;
- the tiles keep the multiprocessors busy in every wave. The output 8192 x 768 does not: it has 192 tiles of 128 x 256,
  one and a half waves of 132.
"""

import torch

from xlafuse.triton_side.calls.declare import Computed, computing
from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.kernels import attention, gelu, linear_gelu, swiglu_mlp
from xlafuse.triton_side.kernels.matmul import choose_config, launch_bias_gelu, launch_matmul, matmul_config
from xlafuse.triton_side.kernels.shared import gated_unit
from xlafuse.triton_side.kernels.shared.launch import cdiv, multiprocessors
from xlafuse.triton_side.kernels.shared.matmul_tiles import operands_fit_descriptors
from xlafuse.triton_side.kernels.swiglu import swiglu_forward_kernel

# The tiles must fill this share of their waves. Measured: our kernel loses at 0.73 and wins at 0.93.
MIN_BUSY_SHARE = 0.9


def split_qkv(
    qkv: torch.Tensor, batch: int, sequence: int, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views q, k and v, each [batch, its heads, sequence, head_dim], of qkv [batch sequence, columns]."""
    by_head = qkv.view(batch, sequence, heads + 2 * kv_heads, -1).transpose(1, 2)
    q, k, v = by_head.split_with_sizes((heads, kv_heads, kv_heads), 1)  # `split` calls it from Python
    return q, k, v


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return merged and, with `save`, logsumexp2 of causal attention.

    q is [batch, heads, sequence, head_dim]. k and v may have fewer heads, which query heads then share.
    """
    batch, heads, sequence, head_dim = q.shape
    merged = torch.empty((batch * sequence, heads * head_dim), dtype=q.dtype, device=q.device)
    with stage("attention"):
        hopper = attention.hopper_problem(q, k, v, None) is None
        _, logsumexp2 = attention.forward(q, k, v, save, hopper=hopper, out=_split_heads(merged, q))
    return merged, logsumexp2


def _split_heads(rows: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return a view of `rows` [tokens, heads head_dim] in q's shape."""
    batch, heads, sequence, head_dim = q.shape
    return rows.view(batch, sequence, heads, head_dim).transpose(1, 2)


def attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: torch.Tensor, logsumexp2: torch.Tensor,
    dmerged: torch.Tensor, gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Compute dq, dk and dv, and write them to `gradients`.

    q, k, v, merged, logsumexp2: the arguments and results of `attention_forward`. dmerged: the gradient of merged.
    gradients: dq, dk and dv; like q, k and v, they may be views of one tensor with a row per token.
    """
    out, dout = _split_heads(merged, q), _split_heads(dmerged, q)
    with stage("attention"):
        hopper = attention.hopper_problem(q, k, v, None) is None
        attention.backward(q, k, v, out, dout, logsumexp2, hopper=hopper, gradients=gradients)


def refuse_autocast(x: torch.Tensor) -> None:
    """Raise RuntimeError where `torch.autocast` would change the dtype of the layer's products."""
    if torch.is_autocast_enabled(x.device.type):
        raise RuntimeError(
            "the layer computes in the dtype of its inputs; call it under torch.autocast(..., enabled=False), with "
            "inputs of the dtype that you want"
        )


def fused_epilogue_wins(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether our kernel with an epilogue is faster for a @ b than cuBLAS and a second kernel."""
    if a.dtype == torch.float32 or not operands_fit_descriptors(a, b):
        return False
    # By the rule's tiles: a table may have smaller ones, and does not say what cuBLAS takes.
    config = choose_config(matmul_config.__wrapped__, a, b)
    if config.block_m < 128:  # tiles for few rows or short sums
        return False
    tiles = cdiv(a.shape[0], config.block_m) * cdiv(b.shape[1], config.block_n)
    tiles_per_wave = config.programs * multiprocessors(a.device)
    return tiles >= MIN_BUSY_SHARE * tiles_per_wave * cdiv(tiles, tiles_per_wave)


def gate_up_activation(
    h: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return act = silu(gate) * up and, with `save`, gate = h w_gate and up = h w_up."""
    with stage("gate"):
        gate = torch.mm(h, w_gate)
    with stage("up"):
        up = torch.mm(h, w_up)
    with computing(*swiglu_mlp.ACT, y_ptr="act"):
        act = gated_unit.forward(swiglu_forward_kernel, gate, up)
    return (act, gate, up) if save else (act, None, None)


def product_plus_residual(
    a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, operations: tuple[Computed, Computed], **names: str
) -> torch.Tensor:
    """Return a @ b + residual. residual must be contiguous, and is not changed.

    operations: the product and the sum, as declared to `computing`. names: names for tensors of the fused kernel, by
    parameter.
    """
    if fused_epilogue_wins(a, b):
        with computing(*operations, **names):
            return launch_matmul(a, b, choose_config(matmul_config, a, b), residual=residual)
    product, total = operations
    with stage(product.stage):
        c = torch.mm(a, b)
    with stage(total.stage):
        return c.add_(residual)


def product_bias_gelu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return act = gelu(pre) and, with `save`, pre = a @ b + bias; both contiguous."""
    if fused_epilogue_wins(a, b):
        with computing(*linear_gelu.FORWARD, c_ptr="pre", gelu_ptr="act"):
            return launch_bias_gelu(a, b, bias.contiguous(), choose_config(matmul_config, a, b), save)
    pre = torch.addmm(bias, a, b)
    with computing(y_ptr="act"):
        return gelu.forward(pre), pre if save else None
