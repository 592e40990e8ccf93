"""Which kernels of a long column are folded into "n more"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from compare.graph import formats
from compare.graph.model import Kernel
from compare.graph.totals import bytes_moved, known_bytes, tally
from compare.html.lanes import Piece

SHORT = 12  # kernels; a column with no more shows each
KEPT = 2  # of the costliest in a band, whatever they cost
TELLING = 0.01  # of the column's cost: what costs more is shown while there is room
MOST = 4  # shown in a band


def folds(kernels: Sequence[Kernel], placed: Mapping[int, Sequence[Piece]]) -> list[dict[str, Any]]:
    """Groups of kernels of little cost in one band and lane (of a part without bands, all of them are one group).

    Each has `members` (launch indices) and `text`: what they come to.
    """
    if len(kernels) <= SHORT:
        return []
    timed = any(kernel.device_time_us is not None for kernel in kernels)
    cost = [(kernel.device_time_us if timed else known_bytes(kernel)) or 0 for kernel in kernels]
    groups: dict[object, list[int]] = defaultdict(list)
    for index, boxes in placed.items():
        if not boxes:
            groups[kernels[index].part].append(index)
        elif len(boxes) == 1 and boxes[0].first == boxes[0].last:
            groups[boxes[0]].append(index)
    found = []
    for group, members in groups.items():
        most, kept = (SHORT, SHORT) if isinstance(group, str) else (MOST, KEPT)
        ranked = sorted(members, key=lambda index: -cost[index])
        shown = ranked[:kept] + [index for index in ranked[kept:most] if cost[index] >= TELLING * sum(cost)]
        folded = sorted(set(members) - set(shown))
        if len(folded) > 1:
            found.append({"members": folded, "text": _text([kernels[index] for index in folded], timed)})
    return found


def _text(folded: Sequence[Kernel], timed: bool) -> str:
    time = tally(kernel.device_time_us for kernel in folded)
    moved = tally(map(bytes_moved, folded))
    words = [formats.microseconds(time.exact)] if timed and time.exact is not None else []
    return ", ".join([*words, *([] if moved.exact is None else [formats.size(moved.exact)])])
