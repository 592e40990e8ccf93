"""Causal attention within a layer: between rows of tokens, as the products around it have them, and heads.

`joined` has a token's heads side by side in its row, [tokens, heads head_dim]. q, k and v are views of such rows, and
are read in place; out and gradients are written in place as well.
"""

import torch

from triton_side.calls.stages import stage
from triton_side.kernels import attention
from triton_side.kernels._attention_configs import chosen, dk_dv_config, dq_config, forward_config
from triton_side.kernels.attention_backward import launch_delta, launch_dk_dv, launch_dq


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """joined and, with `save`, logsumexp2, from q [batch, heads, sequence, head_dim] and k, v of as many heads or
    fewer."""
    batch, heads, sequence, head_dim = q.shape
    joined = torch.empty((batch * sequence, heads * head_dim), dtype=q.dtype, device=q.device)
    with stage("attention"):
        config = chosen(forward_config, q, k, v)
        _, logsumexp2 = attention.launch_forward(q, k, v, config, save, out=_heads_of(joined, q))
    return joined, logsumexp2


def _heads_of(rows: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """View rows of tokens, [tokens, heads head_dim], as q is shaped."""
    batch, heads, sequence, head_dim = q.shape
    return rows.view(batch, sequence, heads, head_dim).transpose(1, 2)


def attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, joined: torch.Tensor, logsumexp2: torch.Tensor,
    djoined: torch.Tensor, gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write dq, dk and dv, views of rows of tokens as q, k and v are, from what `attend` was given and returned and the
    gradient of joined."""
    dq, dk, dv = gradients
    out, dout = _heads_of(joined, q), _heads_of(djoined, q)
    shared = q.shape[1] != k.shape[1]
    if q.shape[2] == 1:
        # As in `attention`: exact zeros. Nor does Triton 3.7.1 compile the kernel for dk and dv of one row, where
        # heads share keys: its pipeliner stops at a descriptor that is made within a loop of one step.
        with stage("attention"):
            dq.zero_()
            dk.zero_()
            torch.sum(dout.unflatten(1, (k.shape[1], -1)), dim=2, out=dv)
        return
    with stage("attention"):
        given = (q, k, v, dout, logsumexp2, launch_delta(out, dout))
        launch_dk_dv(*given, chosen(dk_dv_config, q, dout, shared=shared), out=(dk, dv))
        launch_dq(*given, chosen(dq_config, k, v, shared=shared), out=dq)
