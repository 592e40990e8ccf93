"""One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) with bias correction."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def adamw(
    param: Tensor, gradient: Tensor, mu: Tensor, nu: Tensor, step: Tensor,
    *, rate: float, beta1: float, beta2: float, eps: float, decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (param, mu, nu) after step number `step`, an integer that starts at 1.

    The computation is in float32; param has its own dtype, mu and nu are float32.
    """
    with stage("mu"):
        g = gradient.float()
        mu = beta1 * mu + (1 - beta1) * g
    with stage("nu"):
        nu = beta2 * nu + (1 - beta2) * g * g
    with stage("update"):
        p, t = param.float(), step.float()
        change = mu / (1 - beta1**t) / (torch.sqrt(nu / (1 - beta2**t)) + eps)
        return (p - rate * (change + decay * p)).to(param.dtype), mu, nu


def apply(inputs: Mapping[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """param, gradient [elements], mu, nu [elements] float32, step [] int32 -> new_param, new_mu, new_nu."""
    names = ("param", "gradient", "mu", "nu", "step")
    param, mu, nu = adamw(*(inputs[name] for name in names), **attributes)
    return {"new_param": param, "new_mu": mu, "new_nu": nu}
