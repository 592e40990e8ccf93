"""HTML for notebooks: well formed, complete, and nothing in a name becomes markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from examples import EAGER, INDUCTOR, STRANGE, XLA

from xlafuse.compare.graph.analyse.align import align
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.graph.render import align_view, notebook, text_view

KNOWN = {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}


def page(graph: FusionGraph) -> str:
    return notebook.html(text_view.overview(graph, every=True, notes=text_view.totals_lines(graph)))


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN
        assert {name for name, _ in attrs} <= {"style", "open"}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(html: str) -> str:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return " ".join(" ".join(reader.words).split())


@pytest.mark.parametrize("graph", [XLA, INDUCTOR, EAGER, STRANGE], ids=["xla", "inductor", "eager", "strange"])
def test_well_formed_and_without_foreign_markup(graph: FusionGraph) -> None:
    assert graph.compiler in read(page(graph))


def test_the_same_html_inside_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, rich's console would display each text as an output of its own."""
    outside = page(XLA)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert page(XLA) == outside


def test_kernels_with_costs_and_operations() -> None:
    text = read(page(XLA))
    for part in (
        "forward: 6 kernels", "backward: 2 kernels", "1. input_convert_reduce_fusion 50.3 MB 4% 11.4 1%",
        "reads 16.8 MB, writes 33.6 MB", "mul, reduce_sum xlafuse/blocks/rmsnorm.py:11",
        "saved for backward: 2 buffers", "fusion efficiency",
    ):
        assert part in text, part


def test_operations_of_a_kernel_are_folded_and_its_line_is_not() -> None:
    before, inside = page(XLA).split("1. input_convert_reduce_fusion")
    assert before.rpartition("<details")[2].startswith("><summary>")
    assert "reduce_sum" in inside.partition("</details>")[0]


def test_headings_end_where_their_columns_end() -> None:
    def end(word: str) -> int:
        """Return the column after the word, counted from the fragment's left edge."""
        before, line = html.partition(f"{word} ")[0], html.partition(f"{word} ")[0].rpartition(">")[2]
        opened = re.findall(r"<(/?)div( style=\"padding-left: (\d+)ch\")?>", before)
        indents: list[int] = []
        for closing, _, indent in opened:
            indents.pop() if closing else indents.append(int(indent or 0))
        return sum(indents) + len(unescape(line)) + len(word)

    html = page(XLA)
    assert end("bytes share      µs") == end("50.3 MB    4%    11.4")


def test_a_table_of_stages_is_a_table() -> None:
    html = notebook.html(align_view.table(["a", "<b>"], [XLA, INDUCTOR], align([XLA, INDUCTOR])))
    assert html.startswith("<table>") and "<td>norm/mean_square</td><td>1</td><td>1: joined</td>" in html
    assert "stage a <b>" in read(html)


def test_notes_of_the_graph_are_shown() -> None:
    assert "half of it ran" in read(page(replace(XLA, notes=("half of it ran",))))


def test_times_have_columns_only_where_there_are_times() -> None:
    assert "µs" in page(XLA)
    assert "µs" not in page(STRANGE)


def test_names_are_text() -> None:
    named = replace(STRANGE, name="<script>alert(1)</script>")
    assert "<script>alert(1)</script>" in read(page(named))
    assert "<script" not in page(named)
