"""Changes that users can make to a block: what to write, and the measured row that stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["switch", "library", "kernel", "checkpoint", "bound"]


@dataclass(frozen=True)
class Advice:
    """A change to a block.

    block: of the suite; "" for a change to no single block. compiler: whose program it changes ("xla", "inductor", or
        "eager" for PyTorch without a compiler). row: the implementation of the block that stands for it.
    change: what to write. kind: an argument or flag, a library's call, an own kernel, less checkpointing, or a bound
        without a known way.
    limits: what it needs besides the dtype of the measured row.
    switch: for `xlafuse capture --try`; "" where the change needs an edit.
    """

    block: str
    compiler: str
    row: str
    change: str
    kind: Kind
    limits: str = ""
    switch: str = ""


_PALLAS = "Hopper, jax 0.11"
_CUDNN = 'jax.nn.dot_product_attention(..., implementation="cudnn")'
_CUDNN_BIAS = 'jax.nn.dot_product_attention(..., bias=..., implementation="cudnn")'
_SDPA = "F.scaled_dot_product_attention(..., is_causal=True)"
_SDPA_BIAS = "F.scaled_dot_product_attention(..., attn_mask=bias)"
_SDPA_CUDNN = f"{_SDPA} under sdpa_kernel(SDPBackend.CUDNN_ATTENTION)"
_OWN = "from xlafuse.kernels.{} import {}"

ADVICE = (
    Advice("attention", "xla", "xla-cudnn", _CUDNN, "switch", switch="attention:cudnn"),
    Advice("attention", "xla", "pallas", _OWN.format("pallas", "attention"), "kernel", _PALLAS),
    Advice("attention", "inductor", "sdpa-flash", _SDPA, "library"),
    Advice("attention", "inductor", "sdpa-cudnn", _SDPA_CUDNN, "library"),
    Advice("attention", "inductor", "triton", _OWN.format("triton", "attention"), "kernel"),
    Advice("attention_bias", "xla", "xla-cudnn", _CUDNN_BIAS, "switch", switch="attention:cudnn"),
    Advice("attention_bias", "inductor", "sdpa-efficient", _SDPA_BIAS, "library"),
    Advice("cross_entropy", "inductor", "triton", _OWN.format("triton", "cross_entropy"), "kernel"),
    Advice("linear_cross_entropy", "xla", "xla-chunked", "the loss in chunks of tokens, by jax.lax.map", "library"),
    Advice("linear_cross_entropy", "inductor", "triton", _OWN.format("triton", "linear_cross_entropy"), "kernel"),
    Advice("rmsnorm", "xla", "pallas", _OWN.format("pallas", "rmsnorm"), "kernel", _PALLAS),
    Advice("rmsnorm", "inductor", "triton", _OWN.format("triton", "rmsnorm"), "kernel"),
    Advice("layernorm", "inductor", "triton", _OWN.format("triton", "layernorm"), "kernel"),
    Advice("adamw", "inductor", "inductor", "torch.compile(optimizer.step), one kernel", "library"),
    Advice("moe", "xla", "xla", "jax.lax.ragged_dot over tokens sorted by expert", "library"),
    Advice("moe", "inductor", "library", "F.grouped_mm over tokens sorted by expert", "library"),
)

SWITCHED_CALLS = {"attention:cudnn": "dot_product_attention"}  # what a switch changes the default argument of

# TF32 for products in IEEE float32, by the compiler. The rows' blocks are those of `evidence.tf32_pair`.
_ROUNDS = "which rounds inputs of products by up to 0.05%"
_TORCH_TF32 = f'torch.set_float32_matmul_precision("high"), {_ROUNDS}'
_JAX_TF32 = f'jax_default_matmul_precision="tensorfloat32", {_ROUNDS}'
TF32 = {
    "xla": Advice("", "xla", "xla", _JAX_TF32, "switch", "unless a product sets its own precision", "matmul:tf32"),
    "inductor": Advice("", "inductor", "inductor", _TORCH_TF32, "switch", switch="matmul:tf32"),
    "eager": Advice("", "eager", "library", _TORCH_TF32, "switch", switch="matmul:tf32"),
}
