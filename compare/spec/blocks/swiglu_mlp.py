"""y = x + (silu(h Wg) * (h Wu)) Wd with h = rmsnorm(x): the feed-forward half of a Llama layer (arXiv 2002.05202)."""

from dataclasses import replace

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda_graphs, library, tokamax, triton, xla_tf32x3
from ..tensor import Tensor


def reference(xp, inputs, *, eps):  # type: ignore[no-untyped-def]
    x = inputs["x"]
    h = x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * inputs["norm_weight"]
    gate = h @ inputs["gate_weight"]
    activated = gate / (1 + xp.exp(-gate)) * (h @ inputs["up_weight"])
    return {"y": x + activated @ inputs["down_weight"]}


def product_flops(sizes: Sizes) -> float:
    """Count three products of tokens x width x hidden; the elementwise work is below 1% of it and left out."""
    return 3 * 2 * sizes["tokens"] * sizes["width"] * sizes["hidden"]


def tokamax_unsupported(case: Case) -> str | None:
    """Refuse sizes for which tokamax calls XLA on an H200 (tokamax 0.0.17). With gradients it always does."""
    tokens, width, hidden = (case.sizes[axis] for axis in ("tokens", "width", "hidden"))
    if tokens % 128 == hidden % 128 == width % 64 == 0:
        return None
    return (
        "tokamax's gated linear unit has tiles of 128 tokens, 128 hidden columns and a width of 64, which tokens "
        f"{tokens}, hidden {hidden}, width {width} do not divide into; it calls XLA there"
    )


BLOCK = Block(
    name="swiglu_mlp",
    summary="RMSNorm, two up-projections, SiLU gate, down-projection, residual",
    inputs=(
        Tensor("x", ("tokens", "width")),
        Tensor("norm_weight", ("width",), mean=1.0, std=0.1),
        Tensor("gate_weight", ("width", "hidden"), fan_in="width"),
        Tensor("up_weight", ("width", "hidden"), fan_in="width"),
        Tensor("down_weight", ("hidden", "width"), fan_in="hidden"),
    ),
    outputs=(Tensor("y", ("tokens", "width")),),
    reference=reference,
    attributes={"eps": 1e-5},
    backward_needs=("x", "norm_weight", "gate_weight", "up_weight", "down_weight"),
    flops=product_flops,
    backward_flops=lambda s: 2 * product_flops(s),
    work="flops",
    autotuned_in_quick=("fwd",),
    shapes=(
        Shape("llama-8b", {"tokens": 2048, "width": 4096, "hidden": 14336}, quick=True),
        Shape("prime", {"tokens": 257, "width": 509, "hidden": 1021}, ("float16",), edge=True),
        Shape("gpt2", {"tokens": 8192, "width": 768, "hidden": 2048}, ("float16",), quick=True),
        Shape(
            "gpt2-fp32", {"tokens": 8192, "width": 768, "hidden": 2048}, ("float32",), ("ieee", "tf32"), quick=True,
        ),
        Shape("one-token", {"tokens": 1, "width": 4096, "hidden": 14336}),
        Shape("odd", {"tokens": 17, "width": 37, "hidden": 67}, ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-token", {"tokens": 1, "width": 32, "hidden": 48}, ("float32", "float16", "bfloat16"), edge=True),
        Shape(
            "tiny-column", {"tokens": 3, "width": 1, "hidden": 1}, ("float32", "bfloat16"),
            directions=("train",), edge=True,
        ),
    ),
    implementations=(
        *compilers("swiglu_mlp", rounded_sums=("norm_weight",)), xla_tf32x3("swiglu_mlp", ("norm_weight",)),
        library("swiglu_mlp", "F.rms_norm, F.silu and addmm"), triton("swiglu_mlp"),
        replace(tokamax("swiglu_mlp", "gated_linear_unit", tokamax_unsupported), directions=("fwd",)),
        *cuda_graphs("swiglu_mlp", static=("norm_weight", "gate_weight", "up_weight", "down_weight")),
    ),
)
