"""The difference of two profiles as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...base.text import printable
from ...graph import formats
from ...graph.render import text_view
from ..profile_view import time_range
from .profiles import WORDS, Change, ProfileDiff

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_ROWS = 12  # of one word
MOST_OPERATIONS = 3


def tree(found: ProfileDiff, title: str, *, every: bool = False) -> RenderableType:
    """Return the changes, those of most time first. every: all of them."""
    lines = [_line("a step on the device", found.step), _line("kernels in a step", found.busy), *found.notes]
    root = text_view.titled(title, lines)
    for word in WORDS:
        changes = found.of(word)
        if not changes:
            continue
        branch = root.add(text_view.plain(f"{formats.count(len(changes), 'kernel')} {word}", "bold"))
        shown = changes if every else changes[:MOST_ROWS]
        for each in shown:
            branch.add(_kernel(each))
        if len(shown) < len(changes):
            rest = sum(each.lost_us for each in changes[len(shown):])
            branch.add(text_view.plain(f"… {len(changes) - len(shown)} more: {_signed(rest)}; --all shows them"))
    if same := len(found.of("same")):
        root.add(text_view.plain(f"{formats.count(same, 'kernel')} within the steps' spread or the tolerance", "dim"))
    return root


def _line(what: str, change: Change) -> str:
    verdict = "no change beyond the steps' spread and the tolerance" if change.word == "same" else change.word
    return f"{what}: {_times(change)}: {verdict}"


def _kernel(change: Change) -> Any:
    name = formats.runtime(change.name, 50) + (f" (was {formats.runtime(change.was, 40)})" if change.was else "")
    operations = ", ".join(dict.fromkeys(change.operations[:MOST_OPERATIONS]))
    launches = " → ".join(map(str, dict.fromkeys(change.launches)))
    facts = [f"{_signed(change.lost_us)} a step: {_times(change)}", f"launches: {launches}"]
    return text_view.plain(" · ".join([name, *facts, *([printable(operations, 80)] if operations else [])]))


def _signed(us: float) -> str:
    return ("+" if us >= 0 else "-") + formats.microseconds(abs(us))


def _times(change: Change) -> str:
    known = [time_range(times) for times in (change.before, change.after) if times is not None]
    return " → ".join(known)

