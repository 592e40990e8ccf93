"""The views of what a path holds, by name."""

from __future__ import annotations

from ..base.usage import one_of
from ..sources.source import Source
from . import graph_views, table_views
from .graph_views import Shown
from .outline import Outline

GRAPH_VIEWS = {
    "kernels": graph_views.kernels, "why": graph_views.why, "stages": graph_views.stages,
    "passes": graph_views.passes, "steps": graph_views.steps,
}
TABLE_VIEWS = {
    "times": table_views.times, "matrix": table_views.matrix, "roofline": table_views.roofline,
    "kernel-roofline": table_views.kernel_roofline, "traffic": table_views.traffic, "findings": table_views.findings,
    "ranks": table_views.ranks, "peers": table_views.peers, "authorship": table_views.authorship,
}
VIEWS = {**GRAPH_VIEWS, **TABLE_VIEWS}
WITHOUT_GRAPHS = ("times", "matrix", "traffic", "ranks", "peers", "authorship")  # their text reads no graph


def default(source: Source, selected: bool) -> str:
    """Return the view that a path is shown by, if the user names none. selected: the user chose a module."""
    if source.put_together is not None:
        return "stages"
    return "steps" if source.profile is not None and not selected else "kernels"


def outline(view: str, source: Source, shown: Shown) -> Outline:
    """Return what a view shows of a source.

    Raises UsageError for an unknown view, and with the reason where the view has nothing to show there.
    """
    one_of("view", view, VIEWS)
    if view in GRAPH_VIEWS:
        return GRAPH_VIEWS[view](source, shown)
    return TABLE_VIEWS[view](source, shown.every)


def meanings() -> list[str]:
    """Return a line a view: its name and its meaning."""
    return [f"{name}: {view.__doc__}" for name, view in VIEWS.items()]
