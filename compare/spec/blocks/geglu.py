"""y = gelu(gate) * up with GELU in its tanh form: the gate of a GEGLU layer (Shazeer, arXiv 2002.05202)."""

from ..block import Block
from ..case import Shape
from ..common_rows import compilers, inference_only, library, liger, triton
from ..tensor import Tensor
from . import gelu
from ._edges import LONE_COLUMN, large


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    return {"y": gelu.reference(xp, {"x": inputs["gate"]})["y"] * inputs["up"]}


BLOCK = Block(
    name="geglu",
    summary="GELU, tanh form, of the gate times the other half of a gated linear unit",
    inputs=(Tensor("gate", ("rows", "columns"), std=2.0, magnified=True), Tensor("up", ("rows", "columns"))),
    outputs=(Tensor("y", ("rows", "columns")),),
    reference=reference,
    backward_needs=("gate", "up"),
    flops=lambda s: 10 * s["rows"] * s["columns"],
    backward_flops=lambda s: 21 * s["rows"] * s["columns"],
    shapes=(
        Shape("llama-8b", {"rows": 8192, "columns": 14336}, quick=True),
        Shape("prime", {"rows": 1021, "columns": 4093}, ("float32",), edge=True),
        Shape("one-row", {"rows": 1, "columns": 14336}, ("float32",), edge=True),
        Shape("odd", {"rows": 7, "columns": 257}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-row", {"rows": 1, "columns": 67}, ("float32", "bfloat16"), directions=("train",), edge=True),
        LONE_COLUMN,
        # Gates near the largest numbers; where their cubes overflow, the plain formula's gradient is NaN.
        *large(2048, 5 * 10**36),
    ),
    implementations=(
        *compilers("geglu"), library("geglu", 'F.gelu(approximate="tanh"), then a product'), triton("geglu"),
        liger("geglu", inference_only("Liger's GEGLU")),
    ),
)
