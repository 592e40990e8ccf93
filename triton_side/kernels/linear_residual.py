"""A linear layer without bias whose result is added to the residual stream: y = residual + x @ weight.

The last product of attention and of the feed-forward half of a Llama layer (Touvron et al., arXiv:2302.13971), whose
linear layers have no bias.

    dx = dy weight^T    dweight = x^T dy    dresidual = dy

It is `matmul` with its residual: one kernel forward, two backward; dresidual is dy itself. Shapes: x [m, k], weight
[k, n], residual, y [m, n]; dtypes, and what is raised, as in `matmul`.
"""

import torch

from triton_side.kernels.matmul import matmul


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The block `linear_residual`: x [m, k], weight [k, n], residual [m, n] -> y [m, n]."""
    return {"y": matmul(inputs["x"], inputs["weight"], inputs["residual"])}
