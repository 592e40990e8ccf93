"""Which kernels of a long column are folded into "n more"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ....graph import formats
from ....graph.analyse.totals import declared_bytes, tally
from ....graph.model import FusionGraph, Kernel
from ....graph.render import text_view
from .tracks import Piece

SHOWN = 16  # kernels of a column, the costliest; one with no more shows each


def little(graph: FusionGraph) -> set[int]:
    """Launch indices of what is not among the costliest."""
    return set(range(len(graph.kernels or ()))) - set(text_view.costliest(graph, SHOWN))


def folds(graph: FusionGraph, placed: Mapping[int, Sequence[Piece]]) -> list[dict[str, Any]]:
    """Groups of kernels of little cost that lie in one place: a band of a lane, or a part that has no bands.

    Each has `members` (launch indices) and `text`: what they come to.
    """
    kernels = graph.kernels or ()
    groups: dict[object, list[int]] = defaultdict(list)
    for index in sorted(little(graph)):
        groups[tuple(placed[index]) or kernels[index].phase].append(index)
    return [
        {"members": members, "text": _text([kernels[index] for index in members])}
        for members in groups.values() if len(members) > 1
    ]


def _text(folded: Sequence[Kernel]) -> str:
    time = tally(kernel.device_time_us for kernel in folded)
    moved = tally(map(declared_bytes, folded))
    words = [] if time.exact is None else [formats.microseconds(time.exact)]
    return ", ".join([*words, *([] if moved.exact is None else [formats.size(moved.exact)])])
