"""The best peer of a case: the fastest implementation that this project did not write by hand.

Peers are all but the project's own kernels. Stock peers come with JAX or PyTorch. A peer is the best by one of two
times, and may differ between them: device time (first start to last end), and busy time (kernels alone). All times of a
comparison are of one segment and one clock. A ratio is the peer's time over the own one, above 1 where the own one is
faster: of medians. Its interval is that of paired rounds of device time.
"""

from __future__ import annotations

from ..spec.blocks import BLOCKS
from ..spec.implementation import Implementation

PEERS = {"peer": "of all peers", "stock_peer": "of the peers that come with JAX or PyTorch"}
TIMES = {"": "device_time_us", "_by_kernels": "busy_time_us"}  # suffix of columns -> time


def is_own(block: str, implementation: str) -> bool:
    """Return whether the project wrote its kernels, for the framework in which it runs them."""
    known = _implementation(block, implementation)
    return known is not None and not known.is_peer and known.backend.hand_written


def is_a(kind: str, block: str, implementation: str) -> bool:
    """Return whether it is a peer of a kind of PEERS."""
    known = _implementation(block, implementation)
    return known is not None and (known.is_peer if kind == "peer" else known.is_stock)


def _implementation(block: str, implementation: str) -> Implementation | None:
    try:
        return BLOCKS[block].implementation(implementation)
    except KeyError:
        return None  # a run of another release
