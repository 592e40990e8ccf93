"""Embedding: y[t] = table[ids[t]], every id in 0 .. rows - 1."""

from collections.abc import Mapping

from torch import Tensor

from triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """table [rows, columns], ids [tokens] of integers -> y [tokens, columns] in the table's dtype.

    Looked up in float32, which changes no value, so that the gradient adds up in float32: of a bfloat16 table Inductor
    (torch 2.13) adds it up with atomic operations in bfloat16, and rounds after each token. Ids out of range are not
    part of the contract: negative ones count from the end, others are an error.
    """
    table = inputs["table"]
    with stage("gather"):
        return {"y": table.float()[inputs["ids"]].to(table.dtype)}
