"""The time in which kernels move some of their bytes: a share of their predicted times, else bytes over bandwidth."""

from __future__ import annotations

from collections.abc import Mapping

from ..model import FusionGraph
from ..operations import may_multiply
from .roofline import Ceilings


def traffic_us(graph: FusionGraph, traffic: Mapping[int, int], ceilings: Ceilings) -> tuple[float, bool]:
    """Return the time of the bytes that kernels move, by launch index, and whether it is predicted.

    These bytes take their share of the kernel's predicted time. In a product, which arithmetic may bound, and in a
    collective, which the links bound, they take a copy's bandwidth. So they do in all kernels where one has no
    prediction, or something was measured.
    """
    at_bandwidth = share = 0.0
    known = not graph.measured
    for index, size in traffic.items():
        kernel = (graph.kernels or ())[index]
        moved = ((kernel.bytes_read or 0) + (kernel.bytes_written or 0)) * kernel.certain_launches
        if may_multiply(kernel) or kernel.kind == "collective":
            at_bandwidth += size
        elif kernel.predicted_us is not None and moved:
            share += kernel.predicted_us * min(1.0, size / moved)
        elif size:
            known = False
    rate = ceilings.bandwidth(1, 1) / 1e6
    return (at_bandwidth / rate + share, True) if known and share else (sum(traffic.values()) / rate, False)
