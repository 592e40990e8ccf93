"""Check shapes at an edge that blocks of [rows, columns] have in common."""

from ..case import TRANSPOSED, Shape

LONE_COLUMN = Shape(
    "tiny-column", {"rows": 3, "columns": 1}, ("float32", "bfloat16"), directions=("train",), edge=True
)
TRANSPOSED_ROWS = Shape(
    "transposed", {"rows": 5, "columns": 67}, ("float32", "bfloat16"), directions=("train",),
    layout=TRANSPOSED, edge=True,
)


def large(half: int, others: int) -> tuple[Shape, Shape]:
    """Values near the largest numbers, so many times those of other shapes: in float16, and in types of float32's
    range. Forward alone: what a gate's or GELU's gradient is made of overflows there."""
    sizes = {"rows": 3, "columns": 61}
    return (
        Shape("large-fp16", {**sizes, "magnitude": half}, ("float16",), directions=("fwd",), edge=True),
        Shape("large", {**sizes, "magnitude": others}, ("float32", "bfloat16"), directions=("fwd",), edge=True),
    )
