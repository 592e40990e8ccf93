"""The view of a graph that asserts read. Unknown names are errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import example_graphs as examples
import pytest

from xlafuse.compare.graph.model import Kernel
from xlafuse.compare.pytest_plugin.autotune_choices import AutotuneChoices
from xlafuse.compare.pytest_plugin.fusion import Fusion
from xlafuse.compare.pytest_plugin.per_choice import Undetermined
from xlafuse.compare.pytest_plugin.view import NotKnown, UnknownName, View, within

APART, TOGETHER = View(examples.apart()), View(examples.together())


def fusion(choices: AutotuneChoices) -> Fusion:
    return Fusion(choices, lambda *_: True)


@pytest.mark.parametrize(
    ("name", "found"),
    [("up", True), ("layer/up", True), ("layer", True), ("act", False), ("scores", True), ("x", False), ("y", False)],
)
def test_materialized_by_stage_scope_and_buffer(name: str, found: bool):
    assert (name in APART.materialized) is found
    if name not in ("scores", "x", "y"):
        assert name not in TOGETHER.materialized


@pytest.mark.parametrize("name", ["ups", "u", "layer/", "", "up/layer", "layer up", "<script>", "a\nb", "s" * 10_000])
def test_an_unknown_name_is_an_error(name: str):
    for ask in (lambda: name in APART.materialized, lambda: APART.stage(name), lambda: APART.fused("act", name)):
        with pytest.raises(UnknownName, match="stages: layer/up, layer/act") as raised:
            ask()
        assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


def test_an_unknown_name_has_a_suggestion_or_the_way_to_name_a_stage():
    with pytest.raises(UnknownName, match="did you mean 'act'"):
        APART.stage("actt")
    bare = View(examples.graph([examples.kernel("k", [examples.op("mul")], ["x"], ["y"])]))
    with pytest.raises(UnknownName, match="jax.named_scope"):
        bare.stage("norm")


def test_sizes_of_materialized_buffers():
    assert APART.materialized.bytes == APART.materialized.largest == examples.SIZE and len(APART.materialized) == 1
    assert not TOGETHER.materialized and TOGETHER.materialized.largest == 0
    assert APART.materialized.only("up", "act") and not APART.materialized.only("act") and TOGETHER.materialized.only()
    with pytest.raises(UnknownName):
        APART.materialized.only("up", "ups")
    assert repr(APART.materialized) == "{layer/up bf16[2048,4096]}"
    (line,) = APART.materialized.described("up")
    assert "the result of layer/up, mlp.py:7; kernel 1 writes it, 2 reads it" in line
    assert line.endswith("not fused: gemm: the producer is not fusible")


def test_stages_kernels_and_bytes():
    assert APART.stage("up").kernels != APART.stage("act").kernels and not APART.fused("up", "act")
    assert TOGETHER.stage("up").kernels == TOGETHER.stage("act").kernels and TOGETHER.fused("up", "act")
    assert APART.stage("layer").kernels == APART.kernels and APART.stage("layer").kernel_count == 2
    assert APART.bytes_moved == 4 * examples.SIZE and APART.stage("act").bytes_moved == 2 * examples.SIZE
    assert APART.bytes_compulsory == TOGETHER.bytes_moved == 2 * examples.SIZE
    first = APART.kernels[0]
    assert (first.kind, first.name, repr(first)) == ("gemm", "gemm", "<1. gemm: layer/up>")
    assert len({first, *APART.kernels}) == 2
    assert "up" in APART.stage("layer").materialized and not APART.stage("act").materialized


def test_equal_kernels_are_two():
    twice = examples.kernel("k", [examples.op("mul", "a")], ["x"], ["y"])
    view = View(examples.graph([twice, replace(twice, source_ops=(examples.op("mul", "b"),))]))
    assert view.stage("a").kernels != view.stage("b").kernels


def test_unknown_bytes_and_a_buffer_of_unknown_origin_are_errors():
    view = View(examples.graph([Kernel("lib", "library", inputs=None, outputs=None)]))
    with pytest.raises(NotKnown, match="lib"):
        _ = view.bytes_moved
    activation = examples.kernel("act", [examples.op("tanh", "act")], ["t"], ["y"])
    lost = [examples.kernel("lost", [], ["x"], ["t"]), activation]
    with pytest.raises(NotKnown, match="does not say which operations wrote t"):
        assert "act" not in View(examples.graph(lost)).materialized
    copied = [replace(lost[0], kind="copy"), lost[1]]
    assert "act" not in View(examples.graph(copied)).materialized


def test_scopes_match_as_whole_names():
    assert within("layer/norm/scale", "norm/scale") and not within("layer/norm", "nor") and not within("a/b", "b/a")


def test_parts():
    graph = examples.apart()
    assert graph.kernels is not None
    parts = replace(graph, kernels=(graph.kernels[0], replace(graph.kernels[1], phase="backward")))
    g = fusion(examples.single_choice(parts))
    assert (g.forward.kernel_count, g.backward.kernel_count, g.kernel_count) == (1, 1, 2)
    assert g.backward.stage("act").kernels == g.backward.kernels
    with pytest.raises(UnknownName):
        g.backward.stage("up")


# Two choices


def test_two_choices_answer_together():
    g = fusion(examples.two_choices())
    assert g.kernel_count <= 2 and g.bytes_moved >= g.bytes_compulsory and g.bytes_compulsory == 2 * examples.SIZE
    assert "act" not in g.materialized and g.stage("act").kernels[0].kind
    assert set(g.choices) == {"Triton GEMM", "cuBLAS"} and all(view.fused("act") for view in g.choices.values())
    questions: list[Any] = [
        lambda: "up" in g.materialized, lambda: "up" not in g.materialized, lambda: not g.materialized,
        lambda: bool(g.fused("up", "act")), lambda: g.stage("up").kernels == g.stage("act").kernels,
        lambda: g.bytes_moved <= 1.1 * g.bytes_compulsory, lambda: len(g.kernels), lambda: g.kernel_count == 1,
        lambda: [kernel.kind for kernel in g.kernels], lambda: "scores" in g.materialized,
    ]
    for question in questions:
        with pytest.raises(Undetermined, match="Triton GEMM[\\s\\S]*cuBLAS"):
            question()
    with pytest.raises(UnknownName):
        g.stage("nothing")
    with pytest.raises(AttributeError, match="kernals"):
        _ = g.kernals
    assert "kernels" in dir(g)


def test_the_report_shows_different_graphs_and_reasons():
    titles = [title for title, _ in fusion(examples.two_choices()).report()]
    assert titles == ["fusion graph of mlp, products by Triton GEMM", "fusion graph of mlp, products by cuBLAS"]
    same = AutotuneChoices("mlp", {"a": examples.apart(), "b": examples.apart()}, ("a note",))
    ((title, text),) = fusion(same).report()
    assert title.endswith("products by a or b") and "the producer is not fusible" in text and "note: a note" in text
