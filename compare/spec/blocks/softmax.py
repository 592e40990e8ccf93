"""y_ij = exp(x_ij - max_j x_ij) / sum_j exp(x_ij - max_j x_ij), computed in float32.

An x of -inf is hidden: its y and its gradient are 0. A row of only -inf has a y of zeros. Implementations learn from
`masked` which shapes have such rows, so that the others keep the usual plain formula.
"""

import math
from collections.abc import Callable
from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda, library, liger, pallas_rows, quack, triton, xla_triton
from ..tensor import Tensor


def reference(xp, inputs, masked=0):  # type: ignore[no-untyped-def]
    x = inputs["x"]
    largest = xp.amax(x, axis=-1, keepdims=True)
    exponentials = xp.exp(x - xp.where(largest == -math.inf, 0.0, largest))
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    return {"y": exponentials / xp.where(total == 0, 1.0, total)}


def draw_x(generator: Any, sizes: Sizes) -> Any:
    """Draw scores under a causal mask in a shape with `masked`; None, for normal values, in others.

    Row i is normal up to column i modulo the columns, and -inf after it. The last `masked` rows, the padding queries,
    are only -inf.
    """
    if "masked" not in sizes:
        return None
    rows, columns = sizes["rows"], sizes["columns"]
    x = STD * generator.standard_normal((rows, columns), dtype="float32")
    for row, values in enumerate(x):
        values[row % columns + 1 if row < rows - sizes["masked"] else 0 :] = -math.inf
    return x


def nan_where_masked(what: str) -> Callable[[Case], str | None]:
    """Refuse masked shapes, for libraries that do not return zeros for a row of only -inf."""

    def unsupported(case: Case) -> str | None:
        return f"{what} gives NaN, not zeros, for a row of only -inf" if "masked" in case.sizes else None

    return unsupported


STD = 2.0
BLOCK = Block(
    name="softmax",
    summary="softmax over the columns",
    inputs=(Tensor("x", ("rows", "columns"), std=STD, draw=draw_x),),
    outputs=(Tensor("y", ("rows", "columns")),),
    reference=reference,
    parameters=("masked",),
    backward_needs=("y",),
    flops=lambda s: 5 * s["rows"] * s["columns"],
    backward_flops=lambda s: 4 * s["rows"] * s["columns"],
    autotuned_in_quick=("fwd",),
    shapes=(
        # One batch of four GPT-2 sequences: 12 heads x 1024 queries each, scores over 1024 keys.
        Shape("gpt2-scores", {"rows": 4 * 12 * 1024, "columns": 1024}, quick=True),
        Shape("prime", {"rows": 1021, "columns": 4093}, ("float32",), edge=True),
        Shape("4096-columns", {"rows": 8192, "columns": 4096}, ("float16", "float32"), quick=True),
        Shape("32768-columns", {"rows": 8192, "columns": 32768}),
        Shape("gpt2-vocabulary", {"rows": 4096, "columns": 50257}),
        # One GPT-2 sequence, padded from 768 to 1024 positions, under its mask.
        Shape("gpt2-padded", {"rows": 12 * 1024, "columns": 1024, "masked": 12 * 256}),
        Shape("one-row", {"rows": 1, "columns": 4096}, ("float32",), edge=True),
        Shape("odd", {"rows": 7, "columns": 257}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("odd-masked", {"rows": 9, "columns": 257, "masked": 2}, ("float32", "float16", "bfloat16"), edge=True),
        # Rows that no compiler pads.
        Shape("even-masked", {"rows": 5, "columns": 64, "masked": 2}, ("float32", "bfloat16"), edge=True),
        # Several tiles of four rows for some programs.
        Shape("tiles-masked", {"rows": 100, "columns": 1024, "masked": 10}, ("bfloat16", "float16"), edge=True),
        Shape("tiny-column", {"rows": 3, "columns": 1}, ("float32", "float16", "bfloat16"), edge=True),
    ),
    implementations=(
        *compilers("softmax"), library("softmax", "F.softmax", nan_where_masked("F.softmax")), triton("softmax"),
        pallas_rows("softmax"), cuda("softmax"), xla_triton("softmax"),
        liger("softmax", nan_where_masked("Liger's softmax")),
        quack("softmax", 16, nan_where_masked("quack's softmax")),
    ),
)
