"""Embedding: y[t] = table[ids[t]], every id in 0 .. rows - 1."""

from collections.abc import Mapping

from torch import Tensor

from triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """table [rows, columns], ids [tokens] of integers -> y [tokens, columns] in the table's dtype.

    The lookup is in float32, which changes no value, so that the gradient is summed in float32. For a bfloat16 table
    Inductor (torch 2.13) would sum it with atomics in bfloat16 and round after each token. Ids must be in range:
    negative ones count from the end, others are an error.
    """
    table = inputs["table"]
    with stage("gather"):
        return {"y": table.float()[inputs["ids"]].to(table.dtype)}
