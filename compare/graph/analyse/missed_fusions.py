"""The missed fusions of a graph, ranked by what each could save."""

from __future__ import annotations

from ..model import FusionGraph, Reason


def ranked(graph: FusionGraph, bandwidth: float) -> list[tuple[Reason, float]]:
    """Return missed fusions with the microseconds that each would save at `bandwidth` (bytes per second).

    The largest saving comes first. Each is an upper bound: the saved bytes over the bandwidth. It assumes that the
    fused kernel is no slower otherwise and that no byte comes from cache. Savings of two edges of one buffer do not
    add up. Reasons that save no bytes, or an unknown number, are left out.

    Raises ValueError for a bandwidth that is not positive.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth}; a target's is in its measured ceilings")
    priced = [(reason, reason.bytes_saved / bandwidth * 1e6) for reason in graph.reasons if reason.bytes_saved]
    return sorted(priced, key=lambda pair: -pair[1])
