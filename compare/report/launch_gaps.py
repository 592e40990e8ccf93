"""Findings on implementations that wait for launches: times, no graph, show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..graph import formats
from ..graph.findings.finding import Finding
from ..graph.findings.view import display_name
from ..spec.blocks import REPLAYS

if TYPE_CHECKING:
    from .run_results import Result

LEAST_SHARE = 0.1  # of the device time


def launch_gaps(results: Sequence[Result], comparable: Sequence[Result]) -> Iterator[Finding]:
    """Yield a finding for each result in whose time the GPU did nothing for LEAST_SHARE or more.

    comparable: results that may be a replay of the same kernels as a CUDA graph.
    """
    for result in results:
        gap, time = result.row["launch_gap"], result.time_us
        if not time or not gap or gap < LEAST_SHARE:
            continue
        text = (
            f"{display_name(result.name)} waits for launches in {formats.span(gap * time)} of "
            f"{formats.span(time)}"
        )
        replays = [
            each for each in comparable
            if REPLAYS.get(each.name) == result.name and each.group == result.group and each.time_us
        ]
        for each in replays:
            text += f"; {display_name(each.name)} takes {formats.span(each.time_us or 0.0)}"
        names = (result.name, *(each.name for each in replays))
        yield Finding("launch gaps", f"{text}.", names, 0, gap * time)
