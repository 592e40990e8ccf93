"""y_ij = exp(x_ij - max_j x_ij) / sum_j exp(x_ij - max_j x_ij), in float32 inside."""

from compare.implementations import compilers, cuda, library, liger, quack, triton, xla_triton
from compare.spec import Block, Shape, Tensor


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    x = inputs["x"]
    exponentials = xp.exp(x - xp.amax(x, axis=-1, keepdims=True))
    return {"y": exponentials / xp.sum(exponentials, axis=-1, keepdims=True)}


BLOCK = Block(
    name="softmax",
    summary="softmax over the columns",
    inputs=(Tensor("x", ("rows", "columns"), std=2.0),),
    outputs=(Tensor("y", ("rows", "columns")),),
    reference=reference,
    backward_needs=("y",),
    flops=lambda s: 5 * s["rows"] * s["columns"],
    backward_flops=lambda s: 4 * s["rows"] * s["columns"],
    shapes=(
        # One batch of four GPT-2 sequences: 12 heads x 1024 queries each, scores over 1024 keys.
        Shape("gpt2-scores", {"rows": 4 * 12 * 1024, "columns": 1024}, ("bfloat16",), ("quick", "full")),
        Shape("prime", {"rows": 1021, "columns": 4093}, ("float32",), ("quick", "full"), tuned=False),
        Shape("4096-columns", {"rows": 8192, "columns": 4096}, ("float16",)),
        Shape("32768-columns", {"rows": 8192, "columns": 32768}, ("bfloat16",)),
        Shape("gpt2-vocabulary", {"rows": 4096, "columns": 50257}, ("bfloat16",)),
        Shape("one-row", {"rows": 1, "columns": 4096}, ("float32",)),
        Shape("odd", {"rows": 7, "columns": 257}, ("float32", "float16", "bfloat16"), ("check",)),
        Shape("tiny-column", {"rows": 3, "columns": 1}, ("float32", "float16", "bfloat16"), ("check",)),
    ),
    implementations=(
        *compilers("softmax"), library("softmax", "F.softmax"), triton("softmax"), cuda("softmax"),
        xla_triton("softmax"), liger("softmax"), quack("softmax", 16),
    ),
)
