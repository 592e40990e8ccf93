"""`Outline`: what a view shows, and its forms: terminal, Markdown, HTML, JSON and CSV. Each form is made when asked."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xlafuse.rows/3"  # of a flat table (docs/report-data.md)
WIDTH = 100  # columns of text in a file
_PAGE = "<!doctype html>\n<meta charset=utf-8>\n<title>{title}</title>\n<h1>{title}</h1>\n<pre>{text}</pre>\n"
_FORMULA = re.compile(r"[=+\-@\t\n＝＋－＠]")  # the last four are the full-width forms of the first four

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outline:
    """The content of a view.

    document: returns it for programs. trees: return renderables for a terminal, from top to bottom. text: instead of
    trees, returns plain text, or Markdown if its argument is true. rows: returns a flat table; None where it is none.
    summary: returns Markdown that stands above the trees.
    """

    document: Callable[[], Any]
    trees: Callable[[], Iterable[RenderableType]] = tuple
    text: Callable[[bool], str] | None = None
    rows: Callable[[], Rows] | None = None
    summary: Callable[[], str] | None = None

    def plain(self, width: int = WIDTH) -> str:
        """Return plain text of that width."""
        from ..graph.render import text_view

        if self.text is not None:
            return f"{self.text(False)}\n"
        return "\n".join(text_view.render(tree, width) for tree in self.trees())

    def markdown(self) -> str:
        """Return Markdown: tables as tables, trees as preformatted text."""
        if self.text is not None:
            return f"{self.text(True)}\n"
        above = "" if self.summary is None else f"{self.summary()}\n\n"
        return f"{above}```text\n{self.plain().rstrip()}\n```\n"

    def html(self, title: str) -> str:
        """Return a page with the plain text."""
        return _PAGE.format(title=html.escape(title), text=html.escape(self.plain(140)))

    def json(self) -> str:
        return json.dumps(self.document(), indent=1)

    def csv(self) -> str | None:
        """Return a line of names, then a line a row; None where the view is no flat table.

        Values that are not known or not finite are empty. Text is kept, quoted where CSV needs it, except for the
        characters that no CSV can hold: NUL and carriage return. Text that a spreadsheet would run as a formula begins
        with an apostrophe.
        """
        if self.rows is None:
            return None
        rows = self.rows()
        stream = io.StringIO()
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(_finite(value)) for name, value in row.items()} for row in rows)
        return stream.getvalue()


def of_rows(view: str, rows: Callable[[], Rows], text: Callable[[bool], str]) -> Outline:
    """Return the outline of a flat table, whose JSON is {"schema", "view", "rows"}.

    In JSON, a number that is not finite becomes null; the row's detail has it.
    """

    def document() -> dict[str, Any]:
        finite = [{name: _finite(value) for name, value in row.items()} for row in rows()]
        return {"schema": SCHEMA, "view": view, "rows": finite}

    return Outline(document, text=text, rows=rows)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.replace("\0", "").replace("\r", "")
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
