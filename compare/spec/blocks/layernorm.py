"""y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the columns, computed in float32.

Source: Ba, Kiros and Hinton, arXiv 1607.06450.
"""

from ..block import Block
from ..case import Shape
from ..common_rows import compilers, cuda, cuda_graphs, library, liger, quack, triton
from ..implementation import Implementation
from ..tensor import Tensor
from ._edges import TRANSPOSED_ROWS


def reference(xp, inputs, *, eps):  # type: ignore[no-untyped-def]
    centred = inputs["x"] - xp.mean(inputs["x"], axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    return {"y": centred / xp.sqrt(variance + eps) * inputs["weight"] + inputs["bias"]}


BLOCK = Block(
    name="layernorm",
    summary="LayerNorm with a learnt scale and shift, as in GPT-2",
    inputs=(
        Tensor("x", ("rows", "columns"), magnified=True),
        Tensor("weight", ("columns",), mean=1.0, std=0.1),
        Tensor("bias", ("columns",), std=0.1),
    ),
    outputs=(Tensor("y", ("rows", "columns")),),
    reference=reference,
    attributes={"eps": 1e-5},
    # A row's mean and rstd follow from x; implementations that save them read 8 more bytes a row.
    backward_needs=("x", "weight"),
    flops=lambda s: 7 * s["rows"] * s["columns"],
    backward_flops=lambda s: 13 * s["rows"] * s["columns"],
    shapes=(
        Shape("4k-columns", {"rows": 8192, "columns": 4096}, quick=True),
        Shape("prime", {"rows": 1021, "columns": 4093}, ("float32",), edge=True),
        Shape("8k-columns", {"rows": 8192, "columns": 8192}),
        Shape("16k-columns", {"rows": 4096, "columns": 16384}),
        Shape("one-row", {"rows": 1, "columns": 4096}, ("float32",), edge=True),
        Shape("odd", {"rows": 7, "columns": 257}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-row", {"rows": 1, "columns": 67}, ("float32", "float16", "bfloat16"), edge=True),
        # Forward only: with one column the gradients of x and weight are exactly zero, and errors have no scale.
        Shape("tiny-column", {"rows": 3, "columns": 1}, ("float32", "bfloat16"), directions=("fwd",), edge=True),
        Shape(
            "large-fp16", {"rows": 3, "columns": 64, "magnitude": 12000}, ("float16",),
            directions=("train",), edge=True,
        ),
        TRANSPOSED_ROWS,
    ),
    implementations=(
        *compilers("layernorm"),
        Implementation(
            "xla-flax", "xlafuse.blocks.layernorm:apply_flax", "xla-remat",
            "jax.jit of jax.checkpoint of flax.nnx.LayerNorm, whose variance takes one pass", directions=("train",),
        ),
        library("layernorm", "F.layer_norm"), triton("layernorm"), cuda("layernorm"),
        liger("layernorm"), quack("layernorm", 4),
        *cuda_graphs("layernorm", static=("weight", "bias")),
    ),
)
