"""y = gelu(x W + bias), GELU in its tanh form (arXiv 1606.08415): a linear layer with an activation as its epilogue."""

from ..block import Block
from ..case import Shape, Sizes
from ..common_rows import compilers, cuda_graphs, library, pallas_product, triton
from ..tensor import Tensor
from . import gelu


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    return gelu.reference(xp, {"x": inputs["x"] @ inputs["weight"] + inputs["bias"]})


def product_flops(sizes: Sizes) -> float:
    """Count the product; the elementwise work is below 1% of it for inner axes of a thousand, and left out."""
    return 2 * sizes["m"] * sizes["k"] * sizes["n"]


BLOCK = Block(
    name="linear_gelu",
    summary="linear layer with bias, then GELU (tanh form): the epilogue fusion",
    inputs=(Tensor("x", ("m", "k")), Tensor("weight", ("k", "n"), fan_in="k"), Tensor("bias", ("n",))),
    outputs=(Tensor("y", ("m", "n")),),
    reference=reference,
    backward_needs=("x", "weight", "bias"),
    flops=product_flops,
    backward_flops=lambda s: 2 * product_flops(s),
    work="flops",
    shapes=(
        Shape("gpt2-mlp", {"m": 2048, "k": 4096, "n": 16384}, quick=True),
        Shape("prime", {"m": 1021, "k": 509, "n": 257}, ("float32",), edge=True),
        Shape("llama-8b-up", {"m": 8192, "k": 4096, "n": 14336}),
        Shape("skinny", {"m": 16, "k": 4096, "n": 16384}),
        Shape("odd", {"m": 17, "k": 37, "n": 67}, ("float32", "float16", "bfloat16"), edge=True),
        # Tiles of 128 x 256 with edges in both axes, and more steps of 64 along k than a ring of four holds.
        Shape("tiles", {"m": 72, "k": 320, "n": 576}, ("bfloat16", "float16"), edge=True),
        Shape("tiny-row", {"m": 1, "k": 32, "n": 48}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-column", {"m": 5, "k": 32, "n": 1}, ("float32", "bfloat16"), directions=("train",), edge=True),
    ),
    implementations=(
        *compilers("linear_gelu", rounded_sums=("bias",)),
        library("linear_gelu", 'F.gelu(F.linear(...), approximate="tanh")'),
        triton("linear_gelu"), pallas_product("linear_gelu"),
        *cuda_graphs("linear_gelu", static=("weight", "bias")),
    ),
)
