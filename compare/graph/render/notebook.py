"""A terminal's views as HTML for a notebook: branches of trees fold, and tables are tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from . import text_view

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_KERNELS = 200  # of a graph; of a larger one, the costly kernels are shown
_STYLE = "white-space: pre-wrap; font-family: monospace"
_WIDTH = 100  # columns of a tree's lines, with their indentation
_INDENT = 2


def html(view: RenderableType, width: int = _WIDTH) -> str:
    """Return an HTML fragment without scripts or links. All text is escaped.

    Branches are open at first, but not those of a kernel's operations. A branch's lines are as much narrower as they
    are indented, so that columns end below their headings.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.tree import Tree

    if isinstance(view, Group):
        return "".join(html(each, width) for each in view.renderables)
    if isinstance(view, Table) and view.show_header:
        rows = zip(*(column.cells for column in view.columns), strict=True)
        head = _row([column.header for column in view.columns], "th")
        return f"<table><thead>{head}</thead><tbody>{''.join(_row(row, 'td') for row in rows)}</tbody></table>"
    label = view.label if isinstance(view, Tree) else view
    first, *details = label.renderables if isinstance(label, Group) else [label]
    shown = f'<span style="{_STYLE}">{escape(_text(first, width))}</span>'
    inside = [*details, *(view.children if isinstance(view, Tree) else ())]
    if not inside:
        return f"<div>{shown}</div>"
    lines = "".join(html(each, width - _INDENT) for each in inside)
    folded = f'<div style="padding-left: {_INDENT}ch">{lines}</div>'
    return f"<details{'' if details else ' open'}><summary>{shown}</summary>{folded}</details>"


def _row(cells: Any, tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(_text(cell))}</{tag}>" for cell in cells) + "</tr>"


def _text(view: RenderableType, width: int = _WIDTH) -> str:
    from rich.text import Text

    return view.plain if isinstance(view, Text) else text_view.render(view, width)
