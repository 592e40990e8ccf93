"""FLOP counts that several readers share."""

from __future__ import annotations

Shape = tuple[int, ...]


def grouped_product_flops(left: Shape, right: Shape) -> float:
    """Return the FLOPs of torch's grouped_mm: 2 M N K over all groups.

    If an operand has no axis of groups, the sizes of the groups add up to one of M, N and K. Where the last group ends
    depends on data. Rows after it count, although they are not computed.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2.0 * groups * left[-2] * left[-1] * right[-1]
