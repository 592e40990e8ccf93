"""HTML for notebooks: well formed, complete, and nothing in a name becomes markup."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from examples import EAGER, INDUCTOR, STRANGE, XLA

from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.graph.render import notebook

KNOWN = {"div", "p", "strong", "br", "table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary", "ul",
         "li"}


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN
        assert attrs in ([], [("class", "xlafuse")])
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(graph: FusionGraph) -> str:
    reader = Reader()
    reader.feed(notebook.html(graph))
    reader.close()
    assert reader.open == []
    return " ".join(" ".join(reader.words).split())


@pytest.mark.parametrize("graph", [XLA, INDUCTOR, EAGER, STRANGE], ids=["xla", "inductor", "eager", "strange"])
def test_well_formed_and_without_foreign_markup(graph: FusionGraph) -> None:
    assert read(graph)


def test_kernels_with_costs_and_operations() -> None:
    text = read(XLA)
    for part in (
        "forward: 6 kernels", "backward: 2 kernels", "1 input_convert_reduce_fusion", "16.8 MB 33.6 MB 4% 11.4 1%",
        "norm/mean_square: mul, reduce_sum (xlafuse/blocks/rmsnorm.py:11)", "saved for backward: 2 buffers",
        "fusion efficiency",
    ):
        assert part in text, part


def test_notes_of_the_graph_are_shown() -> None:
    assert "half of it ran" in read(replace(XLA, notes=("half of it ran",)))


def test_times_have_columns_only_where_there_are_times() -> None:
    assert "µs" in notebook.html(XLA)
    assert "µs" not in notebook.html(STRANGE)


def test_names_are_text() -> None:
    assert "<script>alert(1)</script>" in read(STRANGE)
    assert "<script" not in notebook.html(STRANGE)
