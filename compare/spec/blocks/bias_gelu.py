"""y = gelu(x + bias), GELU in its tanh form, as between the two products of GPT-2's MLP.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from ..block import Block
from ..case import Shape
from ..common_rows import compilers, cuda, library, triton
from ..tensor import Tensor
from . import gelu
from ._edges import LONE_COLUMN, large


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    return gelu.reference(xp, {"x": inputs["x"] + inputs["bias"]})


BLOCK = Block(
    name="bias_gelu",
    summary="GELU, tanh form, of rows to which a bias is added; the bias's gradient is a sum over rows",
    inputs=(Tensor("x", ("rows", "columns"), std=2.0, magnified=True), Tensor("bias", ("columns",))),
    outputs=(Tensor("y", ("rows", "columns")),),
    reference=reference,
    backward_needs=("x", "bias"),
    flops=lambda s: 10 * s["rows"] * s["columns"],
    backward_flops=lambda s: 19 * s["rows"] * s["columns"],
    shapes=(
        Shape("gpt2-mlp", {"rows": 8192, "columns": 16384}, quick=True),
        Shape("prime", {"rows": 1021, "columns": 4093}, ("float32",), edge=True),
        Shape("one-row", {"rows": 1, "columns": 16384}, ("float32",), edge=True),
        Shape("odd", {"rows": 7, "columns": 257}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-row", {"rows": 1, "columns": 67}, ("float32", "float16", "bfloat16"), edge=True),
        LONE_COLUMN,
        # Near the largest numbers; where x^3 overflows, the plain formula's gradient is NaN.
        *large(6000, 3 * 10**37),
    ),
    implementations=(
        *compilers("bias_gelu", rounded_sums=("bias",)),
        library("bias_gelu", 'F.gelu(x + bias, approximate="tanh")'),
        triton("bias_gelu"),
        cuda("bias_gelu"),
    ),
)
