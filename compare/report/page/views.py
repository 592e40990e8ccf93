"""What other modules put into the slots of a case's page: fusion graphs side by side, and sources."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from . import embed
from .content.reading import Run
from .drawing import drawing
from .listings import sources


def styles() -> list[str]:
    return ["drawing.css", "sources.css"]


def scripts() -> list[str]:
    parts = ("data", "layout", "tip", "box", "edges", "words")
    drawing = [*(f"drawing-{part}.js" for part in parts), "drawing.js"]
    return ["make.js", *drawing, "kernels.js", "sources-paint.js", "sources.js"]


def elements(run: Run, beside: Path | None) -> list[Markup]:
    """What those scripts show of each case; "programs" are what several share."""
    kept = sources.of_run([member.found for member in run.members], beside)
    drawn = [
        drawing.of_case(drawing.ordered(member.found for member in case.members if member.found.read is not None))
        for case in run.cases
    ]
    return [
        *embed.elements("drawing", drawn),
        *embed.elements("sources", [kept.cases[case.case.id] for case in run.cases]),
        embed.element("programs", kept.programs),
    ]
