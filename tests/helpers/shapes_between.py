"""Cases whose sizes lie between those of the suites, drawn with a fixed seed: tables of configurations lack them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.spec.own_size import own_shape

SEED = 1
MOST_ELEMENTS = 1 << 26  # of an input, which is drawn on the CPU


def cases() -> list[Case]:
    """Return one or two cases of products, of row kernels, of attention in float32, and of decode attention.

    float32 products have 512 rows or more: below, the rule changes within a class of rows.
    """
    draw = random.Random(SEED)

    def between(low: int, high: int, step: int = 8) -> int:
        """Return a multiple of `step`, evenly distributed in its logarithm."""
        return round(low * (high / low) ** draw.random() / step) * step

    def case(block: str, dtype: str, direction: str, precision: str = "ieee", **sizes: int) -> Case:
        shape = replace(own_shape(BLOCKS[block], sizes), dtypes=(dtype,), precisions=(precision,))
        (found,) = (case for case in BLOCKS[block].cases("full", [shape]) if case.direction == direction)
        return found

    def drawn() -> Iterator[Case]:
        for dtype, precision, least, most in (
            ("bfloat16", "ieee", 513, 8192), ("bfloat16", "ieee", 2, 64), ("float32", "ieee", 512, 4096),
            ("float32", "tf32", 512, 4096),
        ):
            m, n, k = between(least, most, 1), between(1024, 8192), between(1024, 8192)
            yield case("matmul", dtype, "fwd", precision, m=m, n=n, k=k)
        for block, dtype in (("softmax", "bfloat16"), ("rmsnorm", "bfloat16"), ("layernorm", "float32")):
            columns = between(512, 8192)
            rows = between(1000, MOST_ELEMENTS // columns, 1)
            yield case(block, dtype, "train", rows=rows, columns=columns)
        yield case("attention", "float32", "train", batch=4, heads=12, sequence=between(512, 3072), head_dim=64)
        for queries in (1, between(3, 12, 1)):
            capacity = between(1024, 8192, 1)
            yield case(
                "decode_attention", "bfloat16", "fwd", batch=between(2, 8, 1), capacity=capacity, shortest=capacity,
                queries=queries,
            )

    return list(drawn())
