"""Embedding: y[t] = table[ids[t]], with every id between 0 and rows - 1."""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """table [rows, columns], ids [tokens] of integers -> y [tokens, columns] in the table's dtype.

    The table is cast to float32 before the lookup. The cast changes no value of y, and the gradient is summed in
    float32. Without it, Inductor (torch 2.13) sums the gradient of a bfloat16 table with bfloat16 atomics, which round
    after each token. Ids must be in range: PyTorch counts negative ids from the end, and rejects others.
    """
    table = inputs["table"]
    with stage("gather"):
        return {"y": table.float()[inputs["ids"]].to(table.dtype)}
