"""y = silu(gate) * up with silu(x) = x / (1 + exp(-x)): the gate of a SwiGLU layer (Shazeer, arXiv 2002.05202)."""

from ..block import Block
from ..case import Shape
from ..common_rows import compilers, inference_only, library, liger, pallas_rows, triton, xla_triton
from ..tensor import Tensor
from ._edges import LONE_COLUMN, TRANSPOSED_ROWS, large


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    gate = inputs["gate"]
    return {"y": gate / (1 + xp.exp(-gate)) * inputs["up"]}


BLOCK = Block(
    name="swiglu",
    summary="SiLU of the gate times the other half of a gated linear unit",
    inputs=(Tensor("gate", ("rows", "columns"), std=2.0, magnified=True), Tensor("up", ("rows", "columns"))),
    outputs=(Tensor("y", ("rows", "columns")),),
    reference=reference,
    backward_needs=("gate", "up"),
    flops=lambda s: 5 * s["rows"] * s["columns"],
    backward_flops=lambda s: 10 * s["rows"] * s["columns"],
    shapes=(
        Shape("llama-8b", {"rows": 8192, "columns": 14336}, quick=True),
        Shape("prime", {"rows": 1021, "columns": 4093}, ("float32",), edge=True),
        Shape("one-row", {"rows": 1, "columns": 14336}, ("float32",), edge=True),
        Shape("odd", {"rows": 7, "columns": 257}, ("float32", "float16", "bfloat16"), edge=True),
        # Several tiles of 2048 elements for some programs.
        Shape("tiles", {"rows": 40, "columns": 1024}, ("bfloat16", "float16"), edge=True),
        Shape("tiny-row", {"rows": 1, "columns": 67}, ("float32", "float16", "bfloat16"), edge=True),
        LONE_COLUMN,
        # Gates near the largest numbers; where exp(-gate) overflows, the reference's gradient is NaN.
        *large(2048, 5 * 10**36),
        TRANSPOSED_ROWS,
    ),
    implementations=(
        *compilers("swiglu"), library("swiglu", "F.silu, then a product"), triton("swiglu"),
        pallas_rows("swiglu", longest=None), xla_triton("swiglu"), liger("swiglu", inference_only("Liger's SwiGLU")),
    ),
)
