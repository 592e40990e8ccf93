"""A terminal's views as HTML for a notebook: branches of trees fold, and tables are tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from . import text_view

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_KERNELS = 200  # of a graph; of a larger one, the costly kernels are shown
_STYLE = "white-space: pre-wrap; font-family: monospace"
_WIDTH = 100  # columns of a tree's lines


def html(view: RenderableType) -> str:
    """Return an HTML fragment without scripts or links. All text is escaped.

    Branches are open at first, but not those of a kernel's operations.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.tree import Tree

    if isinstance(view, Group):
        return "".join(map(html, view.renderables))
    if isinstance(view, Table) and view.show_header:
        rows = zip(*(column.cells for column in view.columns), strict=True)
        head = _row([column.header for column in view.columns], "th")
        return f"<table><thead>{head}</thead><tbody>{''.join(_row(row, 'td') for row in rows)}</tbody></table>"
    label = view.label if isinstance(view, Tree) else view
    first, *details = label.renderables if isinstance(label, Group) else [label]
    shown = f'<span style="{_STYLE}">{escape(_text(first))}</span>'
    inside = [*details, *(view.children if isinstance(view, Tree) else ())]
    if not inside:
        return f"<div>{shown}</div>"
    folded = f'<div style="padding-left: 2ch">{"".join(map(html, inside))}</div>'
    return f"<details{'' if details else ' open'}><summary>{shown}</summary>{folded}</details>"


def _row(cells: Any, tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(_text(cell))}</{tag}>" for cell in cells) + "</tr>"


def _text(view: RenderableType) -> str:
    from rich.text import Text

    return view.plain if isinstance(view, Text) else text_view.render(view, _WIDTH)
