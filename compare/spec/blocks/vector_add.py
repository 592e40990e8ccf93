"""out = x + y: the roofline exercise. One FLOP for three elements moved: 1/6 FLOP per byte in 16-bit types."""

from ..block import Block
from ..case import Shape
from ..common_rows import compilers, cuda, library, triton
from ..tensor import Tensor


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    return {"out": inputs["x"] + inputs["y"]}


BLOCK = Block(
    name="vector_add",
    summary="out = x + y",
    inputs=(Tensor("x", ("elements",)), Tensor("y", ("elements",))),
    outputs=(Tensor("out", ("elements",)),),
    reference=reference,
    directions=("fwd",),
    flops=lambda s: s["elements"],
    shapes=(
        Shape("64Mi", {"elements": 2**26}, quick=True),
        Shape("prime", {"elements": 1_000_003}, ("float32",), edge=True),
        Shape("256Mi", {"elements": 2**28}, ("float16",)),
        Shape("odd", {"elements": 4099}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny", {"elements": 1}, ("float32", "float16", "bfloat16"), edge=True),
    ),
    implementations=(*compilers("vector_add", train=False), library("vector_add", "torch.add"), triton("vector_add"),
                     cuda("vector_add")),
)
