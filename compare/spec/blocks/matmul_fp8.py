"""c = (a b^T) a_scale b_scale: the product of an fp8 linear layer, with bfloat16 c.

a and b are float8_e4m3fn with one float32 scale each. Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv
2209.05433. b is [n, k], as torch.nn.Linear stores its weight. Hopper's tensor cores read eight-bit operands only with
the inner axis last (PTX ISA, wgmma). There is no gradient: training quantizes gradients to e5m2, too, and
would be another block.

The reference takes the fp8 inputs as exact numbers. The independent evaluation multiplies them in bfloat16, where they
are exact, and sums and scales in float32. So the tolerance is one unit in the last place of the largest c, which
storing c may cost. Hopper's tensor cores sum fp8 products with some 14 bits (DeepSeek-V3, arXiv 2412.19437, section
3.3.2). Over 8192 terms without float32 accumulation (PyTorch's use_fast_accum=True, XLA's Triton fusions) they may miss
this tolerance, which is intended.
"""

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda_graphs, library, triton
from ..implementation import Implementation
from ..tensor import Tensor
from ._portable import at_least_float32


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    product = at_least_float32(xp, inputs["a"] @ inputs["b"].T)
    return {"c": product * (inputs["a_scale"] * inputs["b_scale"])}


def product_flops(sizes: Sizes) -> float:
    """Count a multiplication and an addition for each term; the scaling of each sum is left out."""
    return 2 * sizes["m"] * sizes["k"] * sizes["n"]


def draw_a_scale(generator, sizes):  # type: ignore[no-untyped-def]
    """Draw a scale that brings a from its standard deviation of 8 to about 1."""
    return generator.uniform(0.1, 0.2)


def draw_b_scale(generator, sizes):  # type: ignore[no-untyped-def]
    """Draw the same for b, divided by the square root of the inner axis."""
    return generator.uniform(0.1, 0.2) / sizes["k"] ** 0.5


def divisible_by_16(case: Case) -> str | None:
    """Refuse axes that torch._scaled_mm refuses for cuBLASLt on a GPU (aten/src/ATen/native/cuda/Blas.cpp)."""
    odd = [f"{axis} = {case.sizes[axis]}" for axis in ("k", "n") if case.sizes[axis] % 16]
    return f"torch._scaled_mm takes inner and output axes that 16 divides, not {' and '.join(odd)}" if odd else None


# With a standard deviation of 8 few numbers are subnormal (below 2^-6) and none is near the largest (448). Products of
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
        Implementation(
            "library-fast-accum", "xlafuse.triton_side.library.matmul_fp8:apply_fast", "eager",
            "torch._scaled_mm with fast accumulation, as torchao's linear layers call it", unsupported=divisible_by_16,
            needs_gpu="only a GPU accumulates fast",
        ),
        triton("matmul_fp8"),
        *cuda_graphs("matmul_fp8", static=("b", "b_scale")),
    ),
)
