"""Changes that users can make to a block: what to write, and the measured row that stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["switch", "library", "kernel", "checkpoint", "bound"]


@dataclass(frozen=True)
class Advice:
    """A change to a block.

    block: of the suite. compiler: whose program it changes ("xla", "inductor"). row: the implementation of the
    block that stands for it. change: what to write. kind: an argument or flag, a library's call, an own kernel, less
    checkpointing, or a bound without a known way.
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
