"""Graphviz text: every kernel a box, every buffer an edge of its width, and no name can end a string."""

from __future__ import annotations

import re

import pytest
from examples import EAGER, INDUCTOR, STRANGE, XLA

from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel
from xlafuse.compare.graph.render.dot import dot

STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


@pytest.mark.parametrize("graph", [XLA, INDUCTOR, EAGER, STRANGE], ids=["xla", "inductor", "eager", "strange"])
def test_what_is_not_in_strings_is_graphviz_alone(graph: FusionGraph) -> None:
    bare = STRING.sub("S", dot(graph))
    for line in bare.splitlines():
        assert re.fullmatch(
            r"digraph xlafuse \{|\}|  \}|  subgraph cluster_(forward|backward) \{ label=\w+;"
            r"|\s*(label|labelloc|fontname)=\w+;( fontname=Helvetica;)?"
            r"|\s*(node|edge|[kbo]\d+( -> [kb]\d+)?) \[\w+=[\w.]+(, \w+=[\w.]+)*\];",
            line,
        ), line


def test_edges_run_from_the_last_writer_and_are_as_wide_as_their_bytes() -> None:
    text = dot(XLA)
    assert re.search(r'k1 -> k2 \[penwidth=3.02, label="h\\nbf16\[2048,4096\] 16.8 MB"\]', text)
    assert re.search(r"k4 -> k6 \[penwidth=5.66, style=dashed, ", text)
    assert re.search(r"b2 -> k2 \[penwidth=8.00\]", text)
    assert 'not fused: reduction"' in text
    assert len(re.findall(r"^ +k\d+ \[", text, re.MULTILINE)) == len(XLA.kernels or ())


def test_a_buffer_written_twice_reaches_each_reader_from_the_nearer_writer() -> None:
    x = (Access("x", 4),)
    kernels = (Kernel("a", "custom", inputs=x, outputs=x), Kernel("b", "custom", inputs=x, outputs=x))
    text = dot(FusionGraph("inplace", "triton", kernels, (Buffer("x", (1,), "f32", 4, "output"),)))
    edges = re.findall(r"(\w+ -> \w+)", text)
    assert edges == ["b0 -> k0", "k0 -> k1", "k1 -> b0"]


def test_entities_and_escapes_are_shown_as_written() -> None:
    assert r"k\"] \\ evil <b>&amp;amp;" in dot(STRANGE)
