"""y = residual + x W: a projection without bias and its residual connection.

Llama's output projection of attention and its down projection have this form (Touvron et al., arXiv 2302.13971).
"""

from ..block import Block
from ..case import Shape, Sizes
from ..common_rows import compilers, cuda_graphs, library, triton
from ..tensor import Tensor


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    return {"y": inputs["residual"] + inputs["x"] @ inputs["weight"]}


def product_flops(sizes: Sizes) -> float:
    """Count the product; the addition is below 1% of it for inner axes of a thousand, and left out."""
    return 2 * sizes["m"] * sizes["k"] * sizes["n"]


BLOCK = Block(
    name="linear_residual",
    summary="linear layer added to the residual stream: output and down projections",
    inputs=(Tensor("x", ("m", "k")), Tensor("weight", ("k", "n"), fan_in="k"), Tensor("residual", ("m", "n"))),
    outputs=(Tensor("y", ("m", "n")),),
    reference=reference,
    backward_needs=("x", "weight"),
    passes_on=("residual",),
    flops=product_flops,
    backward_flops=lambda s: 2 * product_flops(s),
    work="flops",
    shapes=(
        Shape("llama-8b-out", {"m": 8192, "k": 4096, "n": 4096}, quick=True),
        Shape("prime", {"m": 1021, "k": 509, "n": 257}, ("float32",), edge=True),
        Shape("llama-8b-down", {"m": 8192, "k": 14336, "n": 4096}),
        Shape("skinny", {"m": 16, "k": 14336, "n": 4096}),
        Shape("odd", {"m": 17, "k": 37, "n": 67}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-row", {"m": 1, "k": 32, "n": 48}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-column", {"m": 5, "k": 32, "n": 1}, ("float32", "bfloat16"), directions=("train",), edge=True),
    ),
    implementations=(
        *compilers("linear_residual"), library("linear_residual", "torch.addmm, one library call with the residual"),
        triton("linear_residual"),
        *cuda_graphs("linear_residual", static=("weight",)),
    ),
)
