"""Causal attention within a layer: between rows of tokens, as the products around it have them, and heads.

`joined` has a token's heads side by side in its row, [tokens, heads head_dim]. q, k and v are views of such rows, and
are read in place.
"""

import torch

from triton_side.kernels import attention
from triton_side.kernels._attention_configs import chosen, dk_dv_config, dq_config, forward_config
from triton_side.kernels.attention_backward import launch_delta, launch_dk_dv, launch_dq
from triton_side.stages import stage


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """joined and, with `save`, logsumexp2, from q [batch, heads, sequence, head_dim] and k, v of as many heads or
    fewer."""
    batch, heads, sequence, head_dim = q.shape
    with stage("attention"):
        out, logsumexp2 = attention.launch_forward(q, k, v, chosen(forward_config, q, k, v), save)
    with stage("out"):  # whose product it serves
        return out.transpose(1, 2).reshape(batch * sequence, heads * head_dim), logsumexp2


def attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, joined: torch.Tensor, logsumexp2: torch.Tensor,
    djoined: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv, contiguous, from what `attend` was given and returned and the gradient of joined."""
    batch, heads, sequence, head_dim = q.shape
    out, dout = (x.view(batch, sequence, heads, head_dim).transpose(1, 2) for x in (joined, djoined))
    shared = heads != k.shape[1]
    if sequence == 1:
        # As in `attention`: exact zeros. Nor does Triton 3.7.1 compile the kernel for dk and dv of one row, where
        # heads share keys: its pipeliner stops at a descriptor that is made within a loop of one step.
        with stage("attention"):
            dv = dout.unflatten(1, (k.shape[1], -1)).sum(dim=2).contiguous()
            return torch.zeros(q.shape, dtype=q.dtype, device=q.device), torch.zeros_like(dv), dv
    with stage("attention"):
        given = (q, k, v, dout, logsumexp2, launch_delta(out, dout))
        dk, dv = launch_dk_dv(*given, chosen(dk_dv_config, q, dout, shared=shared))
        return launch_dq(*given, chosen(dq_config, k, v, shared=shared)), dk, dv
