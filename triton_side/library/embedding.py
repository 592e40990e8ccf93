"""Embedding by `torch.nn.functional.embedding`."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """table [rows, columns], ids [tokens] of integers -> y [tokens, columns]; the gradient is dense."""
    return {"y": F.embedding(inputs["ids"], inputs["table"])}
