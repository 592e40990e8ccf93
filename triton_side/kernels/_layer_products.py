"""A layer's products of whose results more is made at once: cuBLAS's and a pass of its own, or ours, which ends in it.

By measurement: device time in us of a full run (H200; rows x inner x columns; bfloat16 unless said), ours and
cuBLAS's product with the pass that follows it, in rows of other implementations of the same case.

    gate and up in one, ending in silu(gate) * up           ours; gate and up kept    cuBLAS's two + a pass
    8192 x 4096 x 14336, decoder_block/llama-8b             2632; 2763                2379 + 158
    8192 x 2048 x 8192, decoder_block/llama-1b, float16     829; 923                  741 + 90
    2048 x 4096 x 14336, swiglu_mlp/llama-8b                674; 711                  595 + 40
    4096 x 1024 x 2816, lm_step/2-layers                    -; 108                    73 + 17
    8192 x 768 x 2048, swiglu_mlp/gpt2, float16             102; 118                  79 + 25
    1 x 4096 x 14336, swiglu_mlp/one-token                  84; 85                    62 + 1
    251 x 509 x 1021, decoder_block/prime, float32          41; 43                    27 + 2

So gate and up are cuBLAS's, and in memory until act is there, even where no backward pass wants them.

    a product that ends in a sum (+) or in bias and GELU    ours                      cuBLAS's + a pass
    + 8192 x 14336 x 4096, decoder_block/llama-8b           1198 to 1205              1164 + 60
    + 8192 x 8192 x 2048, decoder_block/llama-1b, float16   360                       341 + 30
    + 2048 x 14336 x 4096, swiglu_mlp/llama-8b              294                       287 + 9
    + 4096 x 2816 x 1024, lm_step/2-layers                  37                        32 + 5
    8192 x 768 x 3072, gpt2_block/gpt2-small                76; 86 with pre kept      56 + 37
    8192 x 1600 x 6400, gpt2_block/gpt2-xl, float16         267; 292                  228 + 68
    + 8192 x 2048 x 768, swiglu_mlp/gpt2, float16           54                        37 + 7
    + 1 x 14336 x 4096, swiglu_mlp/one-token                67                        31 + 1
    + 257 x 1021 x 509, swiglu_mlp/prime, float16           33                        12 + 1
    + 8192 x 2048 x 768, swiglu_mlp/gpt2-fp32               691; TF32 443             544 + 13; 90 + 13
    + 251 x 1021 x 509, decoder_block/prime, float32        78                        14 + 1
    251 x 509 x 1021, gpt2_block/prime, float32             45; 47                    14 + 2

So ours end in more where TMA reads 16-bit operands of more than a few rows and tiles keep the multiprocessors busy,
wave after wave: those of 8192 x 768 are 192 of 128 x 256, one and a half waves of 132. All else is cuBLAS's.
"""

import torch

from triton_side.calls.declare import Computed, computing
from triton_side.calls.stages import stage
from triton_side.kernels import _gated, gelu, linear_gelu, swiglu_mlp
from triton_side.kernels._launch import cdiv, multiprocessors
from triton_side.kernels.matmul import (
    choose_config,
    launch_bias_gelu,
    launch_matmul,
    matmul_config,
    operands_fit_descriptors,
)
from triton_side.kernels.swiglu import swiglu_forward_kernel

LEAST_BUSY = 0.9  # of the multiprocessors' time while tiles are made; measured: 0.73 loses, 0.93 wins


def ends_in_more(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a @ b is to be our kernel, which ends in what is computed of the product."""
    if a.dtype == torch.float32 or not operands_fit_descriptors(a, b):
        return False
    config = choose_config(matmul_config, a, b)
    if config.block_m < 128:  # those of few rows
        return False
    tiles = cdiv(a.shape[0], config.block_m) * cdiv(b.shape[1], config.block_n)
    at_once = config.programs * multiprocessors(a.device)
    return tiles >= LEAST_BUSY * at_once * cdiv(tiles, at_once)


def gate_up(
    h: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """act = silu(gate) * up and, with `save`, gate = h w_gate and up = h w_up; in the stages of these names."""
    with stage("gate"):
        gate = torch.mm(h, w_gate)
    with stage("up"):
        up = torch.mm(h, w_up)
    with computing(*swiglu_mlp.ACT, y_ptr="act"):
        act = _gated.forward(swiglu_forward_kernel, gate, up)
    return (act, gate, up) if save else (act, None, None)


def added(
    a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, operations: tuple[Computed, Computed], **names: str
) -> torch.Tensor:
    """a @ b + residual, the product and the sum being these `operations`; names: of the kernel's tensors. residual is
    contiguous, and not written."""
    if ends_in_more(a, b):
        with computing(*operations, **names):
            return launch_matmul(a, b, choose_config(matmul_config, a, b), residual=residual)
    product, total = operations
    with stage(product.stage):
        c = torch.mm(a, b)
    with stage(total.stage):
        return c.add_(residual)


def biased_gelu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """act = gelu(pre) and, with `save`, pre = a @ b + bias; both contiguous."""
    if ends_in_more(a, b):
        with computing(*linear_gelu.FORWARD, c_ptr="pre", gelu_ptr="act"):
            return launch_bias_gelu(a, b, bias.contiguous(), choose_config(matmul_config, a, b), save)
    pre = torch.addmm(bias, a, b)
    with computing(y_ptr="act"):
        return gelu.forward(pre), pre if save else None
