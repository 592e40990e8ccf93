"""Vector addition by `torch.add`."""

from collections.abc import Mapping

import torch
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """out = x + y; x [elements], y [elements] -> out [elements]."""
    return {"out": torch.add(inputs["x"], inputs["y"])}
