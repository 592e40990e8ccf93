"""Edge shapes that blocks of [rows, columns] share."""

from ..case import TRANSPOSED, Shape

LONE_COLUMN = Shape(
    "tiny-column", {"rows": 3, "columns": 1}, ("float32", "bfloat16"), directions=("train",), edge=True
)
TRANSPOSED_ROWS = Shape(
    "transposed", {"rows": 5, "columns": 67}, ("float32", "bfloat16"), directions=("train",),
    layout=TRANSPOSED, edge=True,
)


def large(half: int, others: int) -> tuple[Shape, Shape]:
    """Return shapes with values near the dtype's largest. half, others: their magnitude in float16 and in other types.

    They have no gradients, because terms of a gate's or GELU's gradient overflow there.
    """
    sizes = {"rows": 3, "columns": 61}
    return (
        Shape("large-fp16", {**sizes, "magnitude": half}, ("float16",), directions=("fwd",), edge=True),
        Shape("large", {**sizes, "magnitude": others}, ("float32", "bfloat16"), directions=("fwd",), edge=True),
    )
