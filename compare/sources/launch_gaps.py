"""Findings on implementations that wait for launches. They come from times; the other findings come from graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..graph import formats
from ..graph.findings.finding import Finding
from ..graph.findings.view import display_name
from ..spec.blocks import REPLAYS

if TYPE_CHECKING:
    from .result import Result

LEAST_SHARE = 0.1  # of the device time


def launch_gaps(results: Sequence[Result], replays: Sequence[Result]) -> Iterator[Finding]:
    """Yield a finding for each result in which nothing ran on the GPU for LEAST_SHARE of its device time or more.

    replays: among these is the replay of the same launches as a CUDA graph, if it was timed.
    """
    for result in results:
        gap, time = result.row.launch_gap, result.time_us
        if not time or not gap or gap < LEAST_SHARE:
            continue
        text = f"{display_name(result.name)} waits for launches in {formats.span(gap * time)} of {formats.span(time)}"
        names = [result.name]
        for replay in replays:
            if REPLAYS.get(replay.name) == result.name and replay.group == result.group and replay.time_us:
                text += f"; {display_name(replay.name)} takes {formats.span(replay.time_us)}"
                names.append(replay.name)
        yield Finding("launch gaps", f"{text}.", tuple(names), 0, gap * time)
