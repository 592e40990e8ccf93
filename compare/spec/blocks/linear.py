"""y = x W + bias: a linear layer, as in GPT-2 and in Qwen2's projections of queries, keys and values."""

from ..block import Block
from ..case import Shape, Sizes
from ..common_rows import compilers, cuda_graphs, library, pallas_product, triton
from ..tensor import Tensor


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    return {"y": inputs["x"] @ inputs["weight"] + inputs["bias"]}


def product_flops(sizes: Sizes) -> float:
    """Count the product; the addition is below 1% of it for inner axes of a thousand, and left out."""
    return 2 * sizes["m"] * sizes["k"] * sizes["n"]


BLOCK = Block(
    name="linear",
    summary="linear layer with bias; the bias's gradient is a sum over rows",
    inputs=(Tensor("x", ("m", "k")), Tensor("weight", ("k", "n"), fan_in="k"), Tensor("bias", ("n",))),
    outputs=(Tensor("y", ("m", "n")),),
    reference=reference,
    backward_needs=("x", "weight"),
    flops=product_flops,
    backward_flops=lambda s: 2 * product_flops(s),
    work="flops",
    shapes=(
        Shape("llama-8b-out", {"m": 8192, "k": 4096, "n": 4096}, quick=True),
        Shape("prime", {"m": 1021, "k": 509, "n": 257}, ("float32",), edge=True),
        Shape("llama-8b-qkv", {"m": 8192, "k": 4096, "n": 6144}),
        Shape("skinny", {"m": 16, "k": 4096, "n": 4096}),
        Shape("odd", {"m": 17, "k": 37, "n": 67}, ("float32", "float16", "bfloat16"), edge=True),
        # Tiles of 128 x 256 with edges in both axes, and more steps of 64 along k than a ring of four holds.
        Shape("tiles", {"m": 72, "k": 320, "n": 576}, ("bfloat16", "float16"), edge=True),
        Shape("tiny-row", {"m": 1, "k": 32, "n": 48}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-column", {"m": 5, "k": 32, "n": 1}, ("float32", "bfloat16"), directions=("train",), edge=True),
    ),
    implementations=(
        *compilers("linear", rounded_sums=("bias",)),
        library("linear", "F.linear, one library call with the bias"), triton("linear"),
        pallas_product("linear"),
        *cuda_graphs("linear", static=("weight", "bias")),
    ),
)
