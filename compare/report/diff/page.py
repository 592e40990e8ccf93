"""A comparison of two runs as one HTML file without scripts, links or requests; all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from ...base.text import number, printable
from ...graph.render.text_view import render as as_text
from ...plan.speedup import Speedup
from . import show
from .runs import RecordChange, RunDiff

if TYPE_CHECKING:
    from jinja2 import Template

_TEXT_WIDTH = 120  # characters


def html(diff: RunDiff) -> str:
    """Return the comparison as an HTML document."""
    return _template().render(
        title=_clean(f"{diff.before} → {diff.after}"), judged=diff.judged, regressed=bool(diff.regressed),
        verdict="Regressed" if diff.regressed else "No regression" if diff.judged else "Another card: no verdict",
        summary=[_clean(line) for line in show.summary(diff)],
        environment=[[_clean(text) for text in (each.name, each.before, each.after)] for each in diff.environment],
        shared_notes=list(map(_clean, diff.shared_notes)),
        timed=[
            {"title": _titled(title, found), "rows": [_timed(diff, change) for change in found]}
            for words, title in show.TIMED if (found := diff.timed(*words))
        ],
        listed=[
            {"title": _titled(title, found), "rows": [list(map(_clean, row)) for row in found]}
            for title, found in show.listed(diff) if found
        ],
        fused=[{"id": _clean(each.id), "text": as_text(show.fusion(each), _TEXT_WIDTH)} for each in diff.fused],
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    text = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(text)


def _clean(text: str) -> str:
    return printable(text, 600)


def _titled(title: str, found: Sequence[object]) -> str:
    return _clean(f"{title[:1].upper()}{title[1:]}: {len(found)}")  # capitalize() would lower a folder's name


def _timed(diff: RunDiff, change: RecordChange) -> dict[str, Any]:
    times = change.times
    assert times is not None and times.main is not None
    return {
        "id": _clean(change.id), "before": number(times.before_us), "after": number(times.after_us),
        "ratio": f"{times.main.ratio:.3f}", "interval": _interval(times.main),
        "kernels": "" if times.busy is None else f"{times.busy.ratio:.3f} ({_interval(times.busy)})",
        "notes": _clean("; ".join(diff.notes_of(times))),
    }


def _interval(speedup: Speedup) -> str:
    return f"{speedup.low:.3f} to {speedup.high:.3f}"
