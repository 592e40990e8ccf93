"""What other modules put into the slots of a case's page: fusion graphs side by side, and sources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare.graph.model import FusionGraph
from compare.html import drawing, sources
from compare.html.reading import Member, Run
from compare.opening import Found


def styles() -> list[str]:
    return ["drawing.css", "sources.css"]


def scripts() -> list[str]:
    return ["drawing.js", "sources.js"]


def data(run: Run, beside: Path) -> dict[str, Any]:
    """By the id of its element, a case each: "drawing-3", "sources-3"; what several share is "sources-programs"."""
    made: dict[str, Any] = {}
    kept = sources.of_run([_found(member) for member in run.members], beside)
    for case in run.cases:
        drawn = drawing.of_case([_found(m) for m in case.members if m.found.read is not None])
        if drawn is not None:
            made[f"drawing-{case.number}"] = drawn
        made[f"sources-{case.number}"] = kept.cases[case.case.id]
    return {**made, "sources-programs": kept.programs}


def _found(member: Member) -> Found:
    """With the graph that was read already."""
    if member.graph is None:
        return member.found
    return replace(member.found, read=_Known(member.graph))


@dataclass(frozen=True)
class _Known:
    graph: FusionGraph

    def __call__(self) -> FusionGraph:
        return self.graph
