"""c = a b, the matrix product."""

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda, cuda_graphs, pallas_examples, pallas_product, triton
from ..tensor import Tensor


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    return {"c": inputs["a"] @ inputs["b"]}


def product_flops(sizes: Sizes) -> float:
    """Count a multiplication and an addition for each term."""
    return 2 * sizes["m"] * sizes["k"] * sizes["n"]


def examples_unsupported(case: Case) -> str | None:
    m, k, n = (case.sizes[axis] for axis in "mkn")
    if m % 128 == k % 64 == n % 256 == 0:
        return None
    return f"jax's Pallas example takes whole tiles of 128 x 256 and steps of 64, not m {m}, k {k}, n {n}"


BLOCK = Block(
    name="matmul",
    summary="the matrix product",
    inputs=(Tensor("a", ("m", "k")), Tensor("b", ("k", "n"), fan_in="k")),
    outputs=(Tensor("c", ("m", "n")),),
    reference=reference,
    backward_needs=("a", "b"),
    flops=product_flops,
    backward_flops=lambda s: 2 * product_flops(s),
    work="flops",
    autotuned_in_quick=("fwd",),
    shapes=(
        Shape("llama-8b-up", {"m": 2048, "k": 4096, "n": 14336}, quick=True),
        Shape("prime", {"m": 1021, "k": 509, "n": 257}, ("float32",), edge=True),
        Shape("square-8k", {"m": 8192, "k": 8192, "n": 8192}),
        Shape("skinny", {"m": 16, "k": 4096, "n": 14336}),
        Shape("odd", {"m": 17, "k": 37, "n": 67}, ("float32", "float16", "bfloat16"), edge=True),
        # Tiles of 128 x 256 with edges in both axes, and more steps of 64 along k than a ring of four holds.
        Shape("tiles", {"m": 72, "k": 320, "n": 576}, ("bfloat16", "float16"), edge=True),
        Shape("tiny-row", {"m": 1, "k": 32, "n": 48}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-column", {"m": 5, "k": 32, "n": 1}, ("float32", "bfloat16"), directions=("train",), edge=True),
        Shape(
            "transposed", {"m": 17, "k": 37, "n": 19}, ("float32", "bfloat16"),
            directions=("train",), layout="transposed", edge=True,
        ),
    ),
    # No library row: eager already calls `torch.matmul`.
    implementations=(
        *compilers("matmul"), triton("matmul"), pallas_product("matmul"), cuda("matmul"),
        pallas_examples("matmul", "hopper_matmul_mgpu", examples_unsupported),
        *cuda_graphs("matmul", static=("b",)),
    ),
)
