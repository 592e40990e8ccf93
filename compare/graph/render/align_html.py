"""An alignment as HTML for a notebook: one row for each stage, one column for each graph."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .. import formats
from ..analyse.align import Alignment
from .align_view import kernels_in


def html(names: Sequence[str], alignment: Alignment) -> str:
    """Return an HTML fragment without scripts or links. All text of the graphs is escaped."""
    first = "operation (inferred)" if any(row.inferred for row in alignment.rows) else "stage"
    head = [first, *(formats.name(name, 40) for name in names)]
    rows = [[formats.name(row.label, 60), *map(kernels_in, row.cells)] for row in alignment.rows]
    body = "".join(_row(row, "td") for row in rows)
    return f'<div class="xlafuse"><table><thead>{_row(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def _row(words: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(word)}</{tag}>" for word in words) + "</tr>"
