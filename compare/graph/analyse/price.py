"""What the missed fusions of a graph would be worth, at most."""

from __future__ import annotations

from ..model import FusionGraph, Reason


def ranked(graph: FusionGraph, bandwidth: float) -> list[tuple[Reason, float]]:
    """Missed fusions and the microseconds that each would save at `bandwidth` (bytes per second), largest first: the
    first five are the fusions worth having.

    An upper bound: the bytes that would no longer move, at the speed of a stream, as if the fused kernel were no slower
    otherwise and nothing came from cache. Savings of two edges of one buffer do not add up. Left out are reasons whose
    bytes are not known, or none. Raises ValueError for a bandwidth that is not positive.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth}; a target's is in its measured ceilings")
    priced = [(reason, reason.bytes_saved / bandwidth * 1e6) for reason in graph.reasons if reason.bytes_saved]
    return sorted(priced, key=lambda pair: -pair[1])
