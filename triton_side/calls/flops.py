"""FLOPs of operations that several readers count alike."""

from __future__ import annotations

Shape = tuple[int, ...]


def grouped_product_flops(left: Shape, right: Shape) -> float:
    """Of torch's grouped_mm: 2 M N K over all groups, whose sizes add up to one of the three where an operand has no
    axis of groups. Where the last group ends is data; what is behind it counts, and is not computed."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2.0 * groups * left[-2] * left[-1] * right[-1]
