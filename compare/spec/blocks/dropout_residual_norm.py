"""h = residual + dropout(x + bias), y = layer_norm(h) weight + shift, as between two products of a GPT-2 layer.

dropout(v) is v * scale where a uniform of 16 bits is at least a threshold, else 0 (Srivastava et al., JMLR 15, 2014).
Threefry (compare.spec.threefry) gives the uniforms at (row, column) for the key `seed`. So every implementation and the
reference have the same mask, and none needs to store it. h is the next layer's residual. Layer norm: Ba et al., arXiv
1607.06450.

There is no library row, because F.dropout draws another mask from its own generator.
"""

from .. import threefry
from ..block import Block
from ..case import Shape
from ..common_rows import compilers, cuda, cuda_graphs, triton
from ..tensor import Tensor


def dropped_sum(xp, x, bias, residual, seed, p):  # type: ignore[no-untyped-def]
    """Return residual + dropout(x + bias), all [rows, columns]."""
    threshold, scale = threefry.dropout_constants(p)
    kept = threefry.uniforms(xp, x, seed) >= threshold
    return residual + xp.where(kept, (x + bias) * scale, 0.0)


def reference(xp, inputs, *, p, eps):  # type: ignore[no-untyped-def]
    h = dropped_sum(xp, inputs["x"], inputs["bias"], inputs["residual"], inputs["seed"], p)
    centred = h - xp.mean(h, axis=-1, keepdims=True)
    normalized = centred / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return {"y": normalized * inputs["weight"] + inputs["shift"], "h": h}


def draw_seed(generator, sizes):  # type: ignore[no-untyped-def]
    return generator.integers(-(2**31), 2**31, sizes["words"])


def sizes(rows: int, columns: int) -> dict[str, int]:
    return {"rows": rows, "columns": columns, "words": 2}


MATRIX, VECTOR = ("rows", "columns"), ("columns",)

BLOCK = Block(
    name="dropout_residual_norm",
    summary="bias, dropout, residual sum and LayerNorm between two products, as in GPT-2",
    inputs=(
        Tensor("x", MATRIX, magnified=True),
        Tensor("bias", VECTOR, std=0.1),
        Tensor("residual", MATRIX),
        Tensor("weight", VECTOR, mean=1.0, std=0.1),
        Tensor("shift", VECTOR, std=0.1),
        Tensor("seed", ("words",), dtype="int32", draw=draw_seed),
    ),
    outputs=(Tensor("y", MATRIX), Tensor("h", MATRIX)),
    reference=reference,
    attributes={"p": 0.1, "eps": 1e-5},
    backward_needs=("h", "weight", "seed"),
    # Floating-point only; the generator has some 50 integer operations for four elements.
    flops=lambda s: 10 * s["rows"] * s["columns"],
    backward_flops=lambda s: 15 * s["rows"] * s["columns"],
    sizes=sizes,
    shapes=(
        Shape("4k-columns", sizes(8192, 4096), quick=True),
        Shape("prime", sizes(1021, 4093), ("float32",), edge=True),
        Shape("one-row", sizes(1, 4096), ("float32",), edge=True),
        Shape("odd", sizes(7, 257), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-row", sizes(1, 67), ("float32", "bfloat16"), directions=("train",), edge=True),
        # Forward only: with one column the gradient of weight is exactly zero, and a relative error has no scale.
        Shape("tiny-column", sizes(3, 1), ("float32", "bfloat16"), directions=("fwd",), edge=True),
        Shape(
            "large-fp16", {**sizes(3, 67), "magnitude": 10000}, ("float16",), directions=("train",), edge=True,
        ),
    ),
    implementations=(
        *compilers("dropout_residual_norm", rounded_sums=("bias",)),
        triton("dropout_residual_norm"), cuda("dropout_residual_norm"),
        *cuda_graphs("dropout_residual_norm", static=("bias", "weight", "shift")),
    ),
)
