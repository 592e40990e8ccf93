"""y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""

import math

from ..block import Block
from ..case import Shape
from ..common_rows import compilers, cuda, library, triton
from ..tensor import Tensor
from ._edges import LONE_COLUMN, TRANSPOSED_ROWS, large


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    x = inputs["x"]
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return {"y": 0.5 * x * (1 + xp.tanh(inner))}


BLOCK = Block(
    name="gelu",
    summary="GELU in its tanh form",
    inputs=(Tensor("x", ("rows", "columns"), std=2.0, magnified=True),),
    outputs=(Tensor("y", ("rows", "columns")),),
    reference=reference,
    backward_needs=("x",),
    flops=lambda s: 9 * s["rows"] * s["columns"],
    backward_flops=lambda s: 17 * s["rows"] * s["columns"],
    autotuned_in_quick=("fwd",),
    shapes=(
        Shape("llama-8b", {"rows": 4096, "columns": 14336}, quick=True),
        Shape("prime", {"rows": 1021, "columns": 4093}, ("float32",), edge=True),
        Shape("gpt2", {"rows": 32768, "columns": 3072}, ("float16", "float32"), quick=True),
        Shape("one-row", {"rows": 1, "columns": 14336}, ("float32",), edge=True),
        Shape("odd", {"rows": 7, "columns": 257}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-row", {"rows": 1, "columns": 67}, ("float32", "float16", "bfloat16"), edge=True),
        LONE_COLUMN,
        # Near the largest numbers; where x^3 overflows, the plain formula's gradient is NaN.
        *large(6000, 3 * 10**37),
        TRANSPOSED_ROWS,
    ),
    implementations=(*compilers("gelu"), library("gelu", 'F.gelu(approximate="tanh")'), triton("gelu"), cuda("gelu")),
)
