"""y[t] = table[ids[t]]: a lookup of token ids in a table. Backward adds each dy[t] to row ids[t], in float32.

Every id is in 0 .. rows - 1; the contract does not cover others.
"""

from ..block import Block
from ..case import Shape
from ..common_rows import compilers, cuda_graphs, library, triton
from ..tensor import Tensor
from ._portable import at_least_float32


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    # A lookup in float32 makes the gradient a float32 sum that is rounded once. A bfloat16 sum over hundreds of tokens
    # errs by several units, and a tolerance from it would hide missing rows.
    return {"y": at_least_float32(xp, inputs["table"])[inputs["ids"]]}


def draw_ids(generator, sizes):  # type: ignore[no-untyped-def]
    """Draw ids of `distinct` random rows, each at least once; the other tokens follow Zipf's law.

    The k-th row is drawn 1/k as often as the first, like the k-th most frequent word of a text.
    """
    distinct = generator.permutation(sizes["rows"])[: sizes["distinct"]]
    weights = [1 / rank for rank in range(1, sizes["distinct"] + 1)]
    total = sum(weights)
    again = generator.choice(
        distinct, sizes["tokens"] - sizes["distinct"], p=[weight / total for weight in weights]
    )
    return generator.permutation([*distinct, *again])


def distinct_elements(sizes):  # type: ignore[no-untyped-def]
    return sizes["distinct"] * sizes["columns"]


BLOCK = Block(
    name="embedding",
    summary="lookup of token ids in an embedding table; its gradient is a scatter-add",
    inputs=(
        Tensor("table", ("rows", "columns"), read=distinct_elements),
        Tensor("ids", ("tokens",), dtype="int32", draw=draw_ids),
    ),
    outputs=(Tensor("y", ("tokens", "columns")),),
    reference=reference,
    backward_needs=("ids",),
    flops=lambda s: 0.0,
    backward_flops=lambda s: s["tokens"] * s["columns"],
    shapes=(
        Shape(
            "llama-3.2-1b", {"rows": 128256, "columns": 2048, "tokens": 8192, "distinct": 3000}, quick=True,
        ),
        Shape("llama-3-8b", {"rows": 128256, "columns": 4096, "tokens": 8192, "distinct": 3000}),
        Shape(
            "prime", {"rows": 4093, "columns": 1021, "tokens": 509, "distinct": 251}, ("float32",), edge=True,
        ),
        Shape("one-row-only", {"rows": 128256, "columns": 4096, "tokens": 8192, "distinct": 1}, edge=True),
        # A row has at most three tokens: on a CPU F.embedding sums in the table's dtype and rounds twice, by half a
        # unit in the last place each time, and the tolerance is at least one unit.
        Shape(
            "odd", {"rows": 37, "columns": 67, "tokens": 19, "distinct": 17}, ("float32", "float16", "bfloat16"),
            edge=True,
        ),
        Shape("tiny-one-row-only", {"rows": 5, "columns": 33, "tokens": 130, "distinct": 1}, ("float32",), edge=True),
        Shape(
            "tiny", {"rows": 1, "columns": 1, "tokens": 1, "distinct": 1}, ("float32", "bfloat16"),
            directions=("train",), edge=True,
        ),
    ),
    implementations=(
        *compilers("embedding", rounded_sums=("table",)), library("embedding", "F.embedding"), triton("embedding"),
        *cuda_graphs("embedding", static=("table",)),
    ),
)
