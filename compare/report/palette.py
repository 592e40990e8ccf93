"""Colours of implementations for pages and pictures, legible on white and on dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterable

PALETTE = (
    "#4c78a8", "#e0862f", "#54a24b", "#8c8c8c", "#c44e52", "#b279a2", "#3f9c95", "#9d755d", "#b79a20", "#6f4fa0",
    "#d67195", "#2f7ed8", "#5b8c2a", "#a05d3b", "#7a8fb8", "#c2477f",
)


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, in order of first appearance.

    Give it all names of a run, not the selected ones: then an implementation has the same colour everywhere.
    """
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(dict.fromkeys(names))}
