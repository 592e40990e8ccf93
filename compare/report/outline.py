"""`Outline`: what a view shows, and its forms: terminal, Markdown, HTML, JSON and CSV. Each form is made when asked."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import data

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100  # columns of text in a file
_PAGE = "<!doctype html>\n<meta charset=utf-8>\n<title>{title}</title>\n<h1>{title}</h1>\n<pre>{text}</pre>\n"

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outline:
    """The content of a view.

    document: returns it for programs. trees: return renderables for a terminal, from top to bottom. text: instead of
    trees, returns plain text, or Markdown if its argument is true. rows: returns a flat table; None where it is none.
    """

    document: Callable[[], Any]
    trees: Callable[[], Iterable[RenderableType]] = tuple
    text: Callable[[bool], str] | None = None
    rows: Callable[[], Rows] | None = None

    def plain(self, width: int = WIDTH) -> str:
        """Return plain text of that width."""
        from ..graph.render import text_view

        if self.text is not None:
            return f"{self.text(False)}\n"
        return "\n".join(text_view.render(tree, width) for tree in self.trees())

    def markdown(self) -> str:
        """Return Markdown: tables as tables, trees as preformatted text."""
        return f"{self.text(True)}\n" if self.text is not None else f"```text\n{self.plain().rstrip()}\n```\n"

    def html(self, title: str) -> str:
        """Return a page with the plain text."""
        return _PAGE.format(title=html.escape(title), text=html.escape(self.plain(140)))

    def json(self) -> str:
        return json.dumps(self.document(), indent=1)

    def csv(self) -> str | None:
        """Return CSV; None where the view is no flat table."""
        return None if self.rows is None else data.as_csv(self.rows())


def of_rows(view: str, rows: Callable[[], Rows], text: Callable[[bool], str]) -> Outline:
    """Return the outline of a flat table, whose JSON is {"schema", "view", "rows"}."""
    return Outline(
        lambda: {"schema": data.SCHEMA, "view": view, "rows": data.finite(rows())}, text=text, rows=rows
    )
