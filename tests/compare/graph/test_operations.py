"""One name for each operation across frameworks, and the operation that a buffer comes from."""

from __future__ import annotations

from typing import Any

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.graph.model import Kernel, SourceOp
from xlafuse.compare.graph.operations import Cause, cause, cause_text, kind_by_operations, summarized, tokens

FUSION = {"opcode": "fusion", "opcodes": ["broadcast", "dot"]}
TRANSPOSING = {"opcode": "fusion", "opcodes": ["transpose", "dot"]}


@pytest.mark.parametrize(
    ("facts", "named", "expected"),
    [
        (FUSION, "mul transpose transpose", "mul dot dot"),  # two gradients, merged
        (FUSION, "dot_general transpose", "dot dot"),
        ({"opcode": "custom-call"}, "transpose add", "dot add"),
        (TRANSPOSING, "transpose dot_general", "transpose dot"),
        (TRANSPOSING, "transpose transpose", "transpose dot"),
        ({}, "transpose mul", "dot mul"),
        ({"template": True}, "aten.permute aten.mm", "transpose dot"),  # Inductor's
    ],
)
def test_a_product_named_by_the_transpose_of_its_result(facts: dict[str, Any], named: str, expected: str) -> None:
    ops = tuple(SourceOp(name) for name in named.split())
    assert tokens(Kernel("k", "gemm", source_ops=ops, facts=facts)) == expected.split()
    assert "dot" not in tokens(Kernel("k", "elementwise", source_ops=(SourceOp("transpose"),), facts=facts))


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("dot mul reduce_max exp reduce_sum dot div", "attention"),
        ("dot sort reduce_max exp reduce_sum div", "gemm"),  # a router
        ("dot dot logistic mul", "gemm"),
        ("mul reduce_sum rsqrt mul", "reduction"),
        ("logistic mul mul", "elementwise"),
        ("gather", "copy"),
        ("iota sort", "custom"),
        ("top_k", "custom"),
        ("scatter", "custom"),
        ("mpmd_map", "custom"),
        ("", "custom"),
    ],
)
def test_the_work_of_a_hand_written_kernel_is_that_of_its_operations(named: str, expected: str) -> None:
    ops = tuple(SourceOp(name) for name in named.split())
    assert kind_by_operations(Kernel("k", "custom", source_ops=ops)) == expected
    assert kind_by_operations(Kernel("k", "reduction", source_ops=ops)) == "reduction"
    assert kind_by_operations(Kernel("k", "library", source_ops=ops)) == "library"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("iota ge where amax sub exp sum div convert", "softmax"),
        ("mul le and where amax sub exp sum div mul", "mul softmax"),
        ("ge where exp sub mul", "where exp sub mul"),  # a part of a softmax is none
        ("ge convert", "ge"),
        ("add mul add", "add mul"),
    ],
)
def test_a_sentence_names_a_softmax_and_no_mask(names: str, expected: str) -> None:
    assert summarized(names.split()) == expected.split()


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
