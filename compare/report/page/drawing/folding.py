"""The choice of kernels in a long column that are folded into "n more"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ....graph import formats
from ....graph.analyse.totals import declared_bytes, tally
from ....graph.model import FusionGraph, Kernel
from ....graph.render import text_view
from .tracks import Piece

SHOWN = 16  # the costliest kernels of a column; a column with fewer folds nothing


def low_cost(graph: FusionGraph) -> set[int]:
    """Return the launch indices of all but the costliest kernels."""
    return set(range(len(graph.kernels or ()))) - set(text_view.costliest(graph, SHOWN))


def folds(graph: FusionGraph, placed: Mapping[int, Sequence[Piece]]) -> list[dict[str, Any]]:
    """Return groups of low-cost kernels in one place: a band of a track, or a phase without bands.

    Each group has `members` (launch indices) and `text` (their total time and bytes).
    """
    kernels = graph.kernels or ()
    groups: dict[object, list[int]] = defaultdict(list)
    for index in sorted(low_cost(graph)):
        groups[tuple(placed[index]) or kernels[index].phase].append(index)
    return [
        {"members": members, "text": _text([kernels[index] for index in members])}
        for members in groups.values() if len(members) > 1
    ]


def _text(folded: Sequence[Kernel]) -> str:
    time = tally(kernel.device_time_us for kernel in folded)
    declared = tally(map(declared_bytes, folded))
    words = [] if time.exact is None else [formats.microseconds(time.exact)]
    return ", ".join([*words, *([] if declared.exact is None else [formats.size(declared.exact)])])
