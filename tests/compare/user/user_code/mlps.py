"""A gated MLP in PyTorch, whole and without one of its parts."""

import torch
import torch.nn.functional as F


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return x + (F.silu(x @ gate) * (x @ up)) @ down


def no_residual(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def geglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return x + (F.gelu(x @ gate, approximate="tanh") * (x @ up)) @ down
