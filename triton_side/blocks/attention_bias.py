"""Attention with a bias and with the scores in memory: out = softmax(q k^T / sqrt(head_dim) + bias) v.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (T5),
https://arxiv.org/abs/1910.10683.
"""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.blocks.attention import scores_of, weighted
from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q, k, v [batch, heads, sequence, head_dim], bias [heads, sequence, sequence] -> out of q's shape.

    Both products are in q's dtype; scaling, bias and softmax are in float32. A query whose biases are all -inf gives
    zeros. Memory grows with sequence^2, as in `attention`.
    """
    scores = scores_of(inputs["q"], inputs["k"])
    with stage("bias"):
        scores = scores + inputs["bias"].float()
    return {"out": weighted(scores, inputs["v"], empty_rows=True)}
