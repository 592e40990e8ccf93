"""The missed fusions of a graph in a terminal, the largest savings first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...base.text import printable
from .. import formats
from ..analyse.missed_fusions import missed, ranked
from ..model import REASONS, FusionGraph, Reason
from .text_view import plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

MOST_SHOWN = 20


def tree(graph: FusionGraph, bandwidth: float | None, whose: str, *, every: bool = False) -> RenderableType:
    """Return each missed fusion with its largest possible saving and the compiler's own words.

    bandwidth: bytes per second; None shows no times. whose: the device with that bandwidth.
    """
    from rich.tree import Tree

    priced = ranked(graph, bandwidth)
    known = {id(reason) for reason, _ in priced}
    rest = [reason for reason in missed(graph) if id(reason) not in known]
    root = Tree(plain(formats.name(graph.name, 76), "bold"), guide_style="dim")
    root.add(plain(formats.origin(graph)))
    if not graph.reasons:
        root.add(plain("no reasons are recorded: the compiler's log was not requested or not kept"))
        return root
    rate = f", at {bandwidth / 1e12:.2f} TB/s of {whose}" if bandwidth else "; its GPU's bandwidth is not known"
    root.add(plain(f"the most that each missed fusion would save{rate}"))
    shown = priced if every else priced[:MOST_SHOWN]
    places = {
        kernel.name: ", ".join(kernel.stages or map(formats.place, kernel.lines)) for kernel in graph.kernels or ()
    }
    for number, (reason, us) in enumerate(shown, 1):
        _add(root, number, reason, us, places)
    if len(shown) < len(priced):
        root.add(plain(f"… and {len(priced) - len(shown):,} with smaller savings; --all shows them"))
    if rest:
        branch = root.add(plain(f"{formats.count(len(rest), 'more reason')} with no saving, or an unknown one", "bold"))
        for reason in rest if every else rest[:MOST_SHOWN]:
            branch.add(plain(f"{_pair(reason)}: {reason.code}: {printable(reason.text, 120)}"))
        if not every and len(rest) > MOST_SHOWN:
            branch.add(plain(f"… and {len(rest) - MOST_SHOWN} more; --all shows them"))
    codes = dict.fromkeys(reason.code for reason in (*(reason for reason, _ in shown), *rest) if reason.code != "other")
    branch = root.add(plain("reason codes", "bold")) if codes else root
    for code in codes:
        branch.add(plain(f"{code}: {REASONS[code]}"))
    return root


def _add(root: Tree, number: int, reason: Reason, us: float | None, places: Mapping[str, str]) -> None:
    time = "" if us is None else f", {formats.microseconds(us)}"
    branch = root.add(plain(f"{number}. {formats.size(reason.bytes_saved)}{time}", "bold"))
    branch.add(plain(_pair(reason)))
    ends = [places.get(name, "") for name in (reason.producer, reason.consumer)]
    if any(ends):  # stages or lines, which often say more than the kernels' names
        branch.add(plain(" → ".join(formats.name(end, 34) if end else "?" for end in ends)))
    branch.add(plain(f"{reason.code} · {printable(reason.origin, 60)}: {printable(reason.text)}"))
    if reason.fused_us is not None and reason.unfused_us is not None:
        estimate = f"{reason.fused_us:.4g} µs fused, {reason.unfused_us:.4g} µs unfused"
        branch.add(plain(f"the compiler's estimate: {estimate}"))
    if reason.line:
        branch.add(plain(formats.place(reason.line, 70)))


def _pair(reason: Reason) -> str:
    if not (reason.producer or reason.consumer):
        return formats.place(reason.line, 70) if reason.line else "kernels that the log does not identify"
    return " → ".join(formats.name(name, 32) if name else "?" for name in (reason.producer, reason.consumer))


def to_json(graph: FusionGraph, bandwidth: float | None, whose: str) -> dict[str, Any]:
    """Return `missed`: ranked, each with `saves_us_at_most`; `others`: reasons without a known saving."""
    priced = ranked(graph, bandwidth)
    known = {id(reason) for reason, _ in priced}
    return {
        "graph": graph.name, "bandwidth": bandwidth, "bandwidth_of": whose,
        "missed": [{**asdict(reason), "saves_us_at_most": us} for reason, us in priced],
        "others": [asdict(reason) for reason in missed(graph) if id(reason) not in known],
    }
