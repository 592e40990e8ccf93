"""Where a buffer comes from, by one rule."""

from __future__ import annotations

from graph_builder import graph, kernel

from xlafuse.compare.graph.analyse.causes import Cause, cause, cause_text


def test_the_last_operation_that_computes_something() -> None:
    moved = graph(kernel("k", "elementwise", "norm:mul@1 act:exp@2 view:reshape@3", "x", "y"))
    assert cause(moved, "y") == Cause("model.py:2", ("act",))
    assert cause_text(moved, "y") == "model.py:2"
    assert cause_text(graph(kernel("k", "copy", "view:transpose@3", "x", "y")), "y") == "model.py:3"


def test_of_several_results_only_the_kernels_stages_are_known() -> None:
    both = graph(kernel("k", "elementwise", "norm:mul@1 act:exp@2", "x", "y z"))
    assert cause(both, "y") == Cause("", ("norm", "act")) and cause_text(both, "y") == "by norm, act"
    assert cause_text(graph(kernel("k", "elementwise", "norm:mul@1 norm:exp@1", "x", "y z")), "y") == "model.py:1"


def test_inputs_and_operations_without_a_place_have_none() -> None:
    bare = graph(kernel("k", "elementwise", ":mul", "x", "y"))
    assert cause_text(bare, "x") == cause_text(bare, "y") == ""
