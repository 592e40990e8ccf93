"""c = (a b^T) a_scale b_scale for float8_e4m3fn a and b with one float32 scale each, and bfloat16 c: the product of an
fp8 linear layer (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433).

b is [n, k], as torch.nn.Linear stores its weight: tensor cores of Hopper read eight-bit operands with the inner axis
last alone (PTX ISA, wgmma). No gradient: training quantizes gradients as well, in e5m2, which is another block.

The reference takes the inputs as the fp8 numbers that they are. They are exact in bfloat16, in which the independent
evaluation multiplies them, summed in float32; it scales in float32. The tolerance is one unit in the last place of the
largest c, which storing c may cost. Hopper's tensor cores sum fp8 products with some 14 bits (DeepSeek-V3, arXiv
2412.19437, section 3.3.2): left to themselves over 8192 terms (PyTorch's use_fast_accum=True, XLA's Triton fusions)
they may miss it, and should.
"""

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, library, triton
from ..tensor import Tensor
from ._portable import at_least_float32


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    product = at_least_float32(xp, inputs["a"] @ inputs["b"].T)
    return {"c": product * (inputs["a_scale"] * inputs["b_scale"])}


def product_flops(sizes: Sizes) -> float:
    """A multiplication and an addition for each term; one more for each sum, the scale, is left out."""
    return 2 * sizes["m"] * sizes["k"] * sizes["n"]


def draw_a_scale(generator, sizes):  # type: ignore[no-untyped-def]
    """What brings a, drawn with a standard deviation of 8, to one of about 1."""
    return generator.uniform(0.1, 0.2)


def draw_b_scale(generator, sizes):  # type: ignore[no-untyped-def]
    """The same of b, over the square root of the inner axis."""
    return generator.uniform(0.1, 0.2) / sizes["k"] ** 0.5


def divisible_by_16(case: Case) -> str | None:
    """What torch._scaled_mm asks of its operands, for cuBLASLt, on a GPU (aten/src/ATen/native/cuda/Blas.cpp)."""
    odd = [f"{axis} = {case.sizes[axis]}" for axis in ("k", "n") if case.sizes[axis] % 16]
    return f"torch._scaled_mm takes inner and output axes that 16 divides, not {' and '.join(odd)}" if odd else None


# With a standard deviation of 8 few numbers are subnormal (under 2^-6), none is near the largest (448), and products of
# the small check cases do not overflow float16, in which the interpreter's checks evaluate them independently.
BLOCK = Block(
    name="matmul_fp8",
    summary="fp8 (e4m3) matrix product with a scale for each operand, bfloat16 out",
    inputs=(
        Tensor("a", ("m", "k"), std=8.0, dtype="float8_e4m3fn"),
        Tensor("b", ("n", "k"), std=8.0, dtype="float8_e4m3fn"),
        Tensor("a_scale", (), dtype="float32", draw=draw_a_scale),
        Tensor("b_scale", (), dtype="float32", draw=draw_b_scale),
    ),
    outputs=(Tensor("c", ("m", "n"), dtype="bfloat16"),),
    reference=reference,
    directions=("fwd",),
    flops=product_flops,
    work="flops",
    shapes=(
        Shape("square-8k", {"m": 8192, "k": 8192, "n": 8192}, quick=True),
        Shape("llama-8b-up", {"m": 8192, "k": 4096, "n": 14336}),
        Shape("skinny", {"m": 16, "k": 4096, "n": 14336}),
        Shape("ragged", {"m": 1021, "k": 509, "n": 257}, ("bfloat16",), edge=True),
        Shape("odd", {"m": 17, "k": 37, "n": 67}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-row", {"m": 1, "k": 32, "n": 48}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-column", {"m": 5, "k": 32, "n": 1}, ("float32", "bfloat16"), edge=True),
    ),
    implementations=(
        *compilers("matmul_fp8", train=False),
        library("matmul_fp8", "torch._scaled_mm without fast accumulation", unsupported=divisible_by_16),
        triton("matmul_fp8"),
    ),
)
