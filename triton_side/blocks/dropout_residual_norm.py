"""Bias, dropout, residual sum and layer norm, as between two matrix products of a GPT-2 layer.

    h = residual + dropout(x + bias)       y = layer_norm(h) * weight + shift

Dropout's mask comes from a counter-based generator and an explicit seed.

Sources: Srivastava et al., "Dropout", JMLR 15 (2014); Ba et al., "Layer Normalization",
https://arxiv.org/abs/1607.06450.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.blocks.threefry import uniforms
from xlafuse.triton_side.calls.stages import stage


def dropout_constants(p: float) -> tuple[int, float]:
    """Return (threshold, scale). An element is kept if its random 16 bits are at least the threshold, and is scaled.

    The scale keeps the mean.
    """
    threshold = math.ceil(p * 65536)
    return threshold, 65536 / (65536 - threshold)


def check_dropout(x: Tensor, seed: Tensor, p: float) -> None:
    """Check that a mask for x can be drawn from the seed.

    Raises:
        TypeError: the seed is not int32.
        ValueError: it is not two words on x's device, or p is out of range.
    """
    if seed.dtype != torch.int32:
        raise TypeError(f"seed must be int32, got {seed.dtype}; cast it with .to(torch.int32)")
    if seed.shape != (2,) or seed.device != x.device:
        raise ValueError(f"seed must be two words on {x.device}, got shape {tuple(seed.shape)} on {seed.device}")
    check_probability(p)


def check_probability(p: float) -> None:
    """Raise ValueError unless p, in steps of 2^-16, leaves some elements."""
    if not 0 <= p <= 65535 / 65536:
        raise ValueError(f"p must be at least 0 and, rounded up to a multiple of 2^-16, less than 1, got {p}")


def dropped_sum(x: Tensor, bias: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    """Return h = residual + dropout(x + bias)."""
    rows, columns = x.shape
    threshold, scale = dropout_constants(p)
    with stage("bias"):
        biased = x + bias
    with stage("random"):
        kept = uniforms(rows, columns, seed) >= threshold
    with stage("dropout"):
        dropped = torch.where(kept, biased * scale, 0.0)
    with stage("residual"):
        return residual + dropped


def apply(inputs: Mapping[str, Tensor], *, p: float, eps: float) -> dict[str, Tensor]:
    """x and residual [rows, columns], bias, weight and shift [columns], seed [2] in int32 -> y and h [rows, columns].

    Every operation of h is in x's dtype. The norm, weight and shift included, is in float32 and stored in x's dtype. An
    element is dropped with probability p, rounded up to a multiple of 2^-16.
    """
    x = inputs["x"]
    h = dropped_sum(x, inputs["bias"], inputs["residual"], inputs["seed"], p)
    with stage("mean"):
        wide = h.float()
        centred = wide - wide.mean(dim=-1, keepdim=True)
    with stage("variance"):
        variance = (centred * centred).mean(dim=-1, keepdim=True)
    with stage("normalize"):
        normalized = centred * torch.rsqrt(variance + eps)
    with stage("affine"):
        y = (normalized * inputs["weight"] + inputs["shift"]).to(x.dtype)
    return {"y": y, "h": h}
