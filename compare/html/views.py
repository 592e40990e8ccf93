"""What other modules put into the slots of a case's page: fusion graphs side by side, and sources."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from compare.html.reading import Run


def styles() -> list[str]:
    return []


def scripts() -> list[str]:
    return []


def elements(run: Run, beside: Path) -> list[Markup]:
    """Their data, an element a case: "drawing-3", "sources-3"."""
    return []
