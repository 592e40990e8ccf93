"""What other modules put into the slots of a case's page: fusion graphs side by side, and sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compare.html import drawing, sources
from compare.html.reading import Run


def styles() -> list[str]:
    return ["drawing.css", "sources.css"]


def scripts() -> list[str]:
    parts = ("data", "layout", "tip", "box", "edges", "words")
    return ["make.js", *(f"drawing-{part}.js" for part in parts), "drawing.js", "sources-paint.js", "sources.js"]


def data(run: Run, beside: Path | None) -> dict[str, Any]:
    """By the id of its element, a case each: "drawing-3", "sources-3"; what several share is "sources-programs"."""
    made: dict[str, Any] = {}
    kept = sources.of_run([member.found for member in run.members], beside)
    for case in run.cases:
        drawn = drawing.of_case(drawing.ordered(m.found for m in case.members if m.found.read is not None))
        if drawn is not None:
            made[f"drawing-{case.number}"] = drawn
        made[f"sources-{case.number}"] = kept.cases[case.case.id]
    return {**made, "sources-programs": kept.programs}
