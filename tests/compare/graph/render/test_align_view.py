"""Graphs side by side as text: hidden regions, equal names, explained words."""

from __future__ import annotations

import io
from typing import get_args

from graph_builder import graph, kernel
from rich.console import Console

from xlafuse.compare.graph.analyse.ablation import ablation
from xlafuse.compare.graph.analyse.align import Relation, align
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.graph.render import align_view, text_view


def bought(fused: FusionGraph, unfused: FusionGraph) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(align_view.ablation("xla", "xla-unfused", ablation(fused, unfused)))
    return stream.getvalue()


FORWARD = kernel("f", "elementwise", "act:exp@1 act:mul@2", "x", "y")
BACKWARD = kernel("b", "elementwise", "act:exp@1! act:mul@2!", "dy", "dx", phase="backward")
APART = (
    kernel("f1", "elementwise", "act:exp@1", "x", "e"), kernel("f2", "elementwise", "act:mul@2", "e", "y"),
    kernel("b1", "elementwise", "act:exp@1!", "dy", "de", phase="backward"),
    kernel("b2", "elementwise", "act:mul@2!", "de", "dx", phase="backward"),
)


def test_equal_names_show_their_phase() -> None:
    text = bought(graph(FORWARD, BACKWARD), graph(*APART))
    assert "forward: act" in text and "backward: act" in text
    assert "forward: act" not in bought(graph(FORWARD), graph(*APART[:2]))


def test_unchanged_regions_are_counted() -> None:
    dot, same = (kernel("d", "gemm", "down:dot@3", f"y w{more}", "z") for more in ("", " tiny"))
    text = bought(graph(FORWARD, dot), graph(*APART[:2], same, sizes="tiny=1"))
    assert "down" not in text and "1 more region" in text
    large = bought(graph(FORWARD, dot), graph(*APART[:2], same, sizes="tiny=500"))
    assert "down" in large and "more region" not in large
    assert "1 → 1 kernel " in large and "3 → 2 kernels" in large


def test_the_used_words_are_explained() -> None:
    graphs = [graph(FORWARD), graph(*APART[:2])]
    text = text_view.render(align_view.table(["a", "b"], graphs, align(graphs)))
    assert "split: in more kernels" in text and "merged" not in text and "absent" not in text
    same = text_view.render(align_view.table(["a", "b"], graphs[:1] * 2, align(graphs[:1] * 2)))
    assert not any(f"{word}:" in same for word in align_view._WORDS)


def test_every_word_is_explained() -> None:
    assert set(align_view._WORDS) == set(get_args(Relation)) - {"same region"}
