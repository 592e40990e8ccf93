"""Colours of implementations, in pages and pictures alike: legible on white and on dark grounds."""

from __future__ import annotations

from collections.abc import Iterable

PALETTE = (
    "#4c78a8", "#e0862f", "#54a24b", "#8c8c8c", "#c44e52", "#b279a2", "#3f9c95", "#9d755d", "#b79a20", "#6f4fa0",
    "#d67195", "#2f7ed8", "#5b8c2a", "#a05d3b", "#7a8fb8", "#c2477f",
)


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each, in the order in which they come first. Give it all names of a run, not the chosen ones, and an
    implementation has one colour wherever it is shown."""
    return {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(dict.fromkeys(names))}
