"""The best peer of a case: the fastest implementation that this project did not write by hand.

Peers are all but the project's own kernels. Stock peers come with JAX or PyTorch. A peer is the best by one of two
times, and may differ between them: device time (first start to last end), and busy time (kernels alone). All times of a
comparison are of one segment and one clock.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ..spec.blocks import BLOCKS
from ..spec.implementation import Implementation
from .paired_rounds import Rounds, compare_rounds, comparison_key

PEERS = {"peer": "of all peers", "stock_peer": "of the peers that come with JAX or PyTorch"}
TIMES = {"": "device_time_us", "_by_kernels": "busy_time_us"}  # suffix of columns -> time


def add_best_peers(rows: list[dict[str, Any]], rounds: list[Rounds], uncalibrated: Container[str] = ()) -> None:
    """Fill the best peers of each row of the project's own kernels.

    A ratio is the peer's time over the row's own, above 1 where the row is faster: of medians. The interval is that of
    paired rounds of device time. rounds, uncalibrated: as for `paired_rounds.add_comparisons`.
    """
    rounds_of = {id(row): its for row, its in zip(rows, rounds, strict=True)}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(comparison_key(row, uncalibrated), []).append(row)
    for group in groups.values():
        peers = {kind: [row for row in group if is_a(kind, row)] for kind in PEERS}
        for own in filter(is_own, group):
            for kind, members in peers.items():
                for suffix, time in TIMES.items():
                    _fill(own, kind, suffix, time, members, rounds_of)


def is_own(row: Mapping[str, Any]) -> bool:
    """Return whether the project wrote the row's kernels, for the framework in which the row runs them."""
    found = _implementation(row)
    return found is not None and not found.is_peer and found.backend.hand_written


def is_a(kind: str, row: Mapping[str, Any]) -> bool:
    """Return whether the row is a peer of a kind of PEERS."""
    found = _implementation(row)
    return found is not None and (found.is_peer if kind == "peer" else found.is_stock)


def _implementation(row: Mapping[str, Any]) -> Implementation | None:
    try:
        return BLOCKS[row["block"]].implementation(row["implementation"])
    except KeyError:
        return None  # a run of another release


def _fill(
    own: dict[str, Any], kind: str, suffix: str, time: str, peers: list[dict[str, Any]], rounds: Mapping[int, Rounds]
) -> None:
    timed = [peer for peer in peers if peer[time]]
    if not own[time] or not timed:
        return
    best = min(timed, key=lambda peer: peer[time])
    own[f"best_{kind}{suffix}"] = best["implementation"]
    own[f"ratio_to_best_{kind}{suffix}"] = best[time] / own[time]
    if not suffix and (found := compare_rounds(rounds[id(best)], rounds[id(own)])):
        own[f"ratio_to_best_{kind}_low"], own[f"ratio_to_best_{kind}_high"] = found.main.low, found.main.high
