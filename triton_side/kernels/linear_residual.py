"""A linear layer without bias whose result is added to the residual stream: y = residual + x @ weight.

    dx = dy weight^T    dweight = x^T dy    dresidual = dy

It ends attention and the feed-forward half of a Llama layer, whose linear layers have no bias (Touvron et al.,
arXiv:2302.13971). `matmul.py` computes it: one kernel forward, two backward; dresidual is dy itself. Shapes: x [m, k],
weight [k, n], residual, y [m, n]; dtypes and errors are those of `matmul`.
"""

import torch

from xlafuse.triton_side.kernels.matmul import matmul


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `linear_residual`: x [m, k], weight [k, n], residual [m, n] -> y [m, n]."""
    return {"y": matmul(inputs["x"], inputs["weight"], inputs["residual"])}
