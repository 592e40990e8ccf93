"""The data, scripts and styles of a case's two interactive views: fusion graphs side by side, and sources."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from ..run_results import Run
from . import embed
from .drawing import drawing
from .listings import sources


def styles() -> list[str]:
    """Return the names of the style sheets."""
    return ["drawing.css", "sources.css"]


def scripts() -> list[str]:
    """Return the names of the scripts, in the order in which they are loaded."""
    modules = ("data", "layout", "tip", "box", "edges", "legend")
    drawing = [*(f"drawing-{module}.js" for module in modules), "drawing.js"]
    return ["make.js", *drawing, "kernels.js", "sources-highlight.js", "sources.js"]


def elements(run: Run, files: Path | None) -> list[Markup]:
    """Return the embedded data of each case, and in "programs" the texts that cases share.

    files: the folder for texts that are too large for the page.
    """
    kept = sources.of_cases({case.id: [result.source for result in case.results] for case in run.cases}, files)
    drawn = [
        drawing.of_case(drawing.ordered(result.source for result in case.results if result.source.read is not None))
        for case in run.cases
    ]
    return [
        *embed.elements("drawing", drawn),
        *embed.elements("sources", [kept.cases[case.id] for case in run.cases]),
        embed.element("programs", kept.programs),
    ]
