"""A mixture of SwiGLU experts by `torch.nn.functional.grouped_mm`: tokens sorted by expert, one product per group."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from xlafuse.triton_side.blocks.moe import route


def apply(inputs: Mapping[str, Tensor], *, top_k: int) -> dict[str, Tensor]:
    """x [tokens, width], router [experts, width], w_gate, w_up [experts, width, hidden], w_down [experts, hidden,
    width] -> y [tokens, width], balance_loss [] in float32.

    The host does not wait for the GPU: grouped_mm reads the ends of the groups from GPU memory. A row must have a
    multiple of 16 bytes. On a GPU only bfloat16 has a kernel; other dtypes are computed group by group, with a wait for
    each.
    """
    x = inputs["x"]
    chosen, weights, balance_loss = route(x, inputs["router"], top_k)
    experts, order = chosen.flatten().sort(stable=True)  # by expert, then by token
    every = torch.arange(len(inputs["router"]), device=x.device)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    rows = x[order // top_k]
    gate = F.grouped_mm(rows, inputs["w_gate"], offs=ends)
    up = F.grouped_mm(rows, inputs["w_up"], offs=ends)
    out = F.grouped_mm(F.silu(gate) * up, inputs["w_down"], offs=ends)
    own = torch.empty_like(out).index_copy(0, order, out).view(*chosen.shape, -1)
    y = (weights[:, :, None] * own.float()).sum(dim=1).to(x.dtype)
    return {"y": y, "balance_loss": balance_loss}
