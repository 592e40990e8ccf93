"""The alignment of graphs on one list of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.graph.analyse.align import Alignment, align
from xlafuse.compare.graph.model import FusionGraph, Kernel, SourceOp

NORM = kernel("n", "reduction", "norm:mean@1", "x", "h")
GATE = kernel("g", "gemm", "gate:dot@2", "h wg", "g")
UP = kernel("u", "gemm", "up:dot@3", "h wu", "u")
ACT = kernel("a", "elementwise", "act:exp@4 act:mul@4", "g u", "y")


def cells(found: Alignment, label: str) -> list[tuple[tuple[int, ...] | None, tuple[str, ...]]]:
    return [(cell.kernels, cell.relations) for cell in found.row(label).cells]


def labels(found: Alignment) -> list[str]:
    return [row.label for row in found.rows]


def test_equal_graphs_have_the_same_regions() -> None:
    plain = graph(NORM, GATE, UP, ACT)
    found = align([plain, plain])
    assert labels(found) == ["norm", "gate", "up", "act"]
    assert cells(found, "act") == [((3,), ()), ((3,), ("same region",))]
    assert not any(row.inferred for row in found.rows)


def test_launch_order_may_differ() -> None:
    found = align([graph(NORM, GATE, UP, ACT), graph(NORM, UP, GATE, ACT)])
    assert labels(found) == ["norm", "gate", "up", "act"]
    assert cells(found, "up") == [((2,), ()), ((1,), ("same region",))]


EXP, MUL = kernel("a1", "elementwise", "act:exp@4", "g", "e"), kernel("a2", "elementwise", "act:mul@4", "e u", "y")
BOTH = kernel("gu", "gemm", "gate:dot@2 up:dot@3", "h wg wu", "g u")
NEIGHBOURS = (
    graph(kernel("1", "elementwise", "a:mul b:mul", "x", "p"), kernel("2", "elementwise", "c:mul", "p", "y")),
    graph(kernel("1", "elementwise", "a:mul", "x", "p"), kernel("2", "elementwise", "b:mul c:mul", "p", "y")),
)
# The number of kernels decides before their neighbours.
SEVERAL = graph(
    kernel("1", "reduction", "norm:sum other:add", "x", "m"), kernel("2", "elementwise", "norm:mul", "m", "h"),
    kernel("3", "elementwise", "other:sub", "h", "y"),
)
ONCE = graph(kernel("1", "reduction", "norm:sum norm:mul", "x", "h"), kernel("2", "elementwise", "other:add", "h", "y"))


@pytest.mark.parametrize(
    ("first", "second", "stage", "kernels", "relation"),
    [
        (graph(NORM, GATE, UP, ACT), graph(NORM, GATE, UP, EXP, MUL), "act", (3, 4), "split"),
        (graph(NORM, GATE, UP, EXP, MUL), graph(NORM, GATE, UP, ACT), "act", (3,), "merged"),
        (ONCE, SEVERAL, "norm", (0, 1), "split"),
        (SEVERAL, ONCE, "norm", (0,), "merged"),
        (graph(NORM, GATE, UP, ACT), graph(NORM, BOTH, ACT), "gate", (1,), "joined"),
        (graph(NORM, BOTH, ACT), graph(NORM, GATE, UP, ACT), "up", (2,), "parted"),
        (graph(NORM, BOTH, ACT), graph(NORM, GATE, UP, ACT), "act", (3,), "same region"),
        (*NEIGHBOURS, "b", (1,), "regrouped"),
    ],
)
def test_a_stage_is_compared_with_the_first_graph(
    first: FusionGraph, second: FusionGraph, stage: str, kernels: tuple[int, ...], relation: str
) -> None:
    assert cells(align([first, second]), stage)[1] == (kernels, (relation,))


def test_equal_sites_in_two_kernels_are_recomputed() -> None:
    again = kernel("a2", "elementwise", "act:exp@4 act:add@5", "g", "z")
    found = align([graph(NORM, GATE, UP, ACT), graph(NORM, GATE, UP, ACT, again)])
    assert cells(found, "act")[1] == ((3, 4), ("recomputed", "split"))


def test_a_repeated_move_or_conversion_is_not_recomputed() -> None:
    again = kernel("a2", "elementwise", "act:convert_element_type@4 other:add@5", "g", "z")
    first = kernel("a1", "elementwise", "act:exp@4 act:convert_element_type@4", "g", "e")
    assert cells(align([graph(NORM, GATE, first, again)]), "act") == [((2, 3), ())]


def test_checkpointing_recomputes() -> None:
    again = kernel("a2", "elementwise", "act:exp@9", "g", "z", phase="backward")
    remade = replace(again, source_ops=(replace(again.source_ops[0], rematerialized=True),))
    found = align([graph(NORM, GATE, ACT, again), graph(NORM, GATE, ACT, remade)])
    assert cells(found, "backward: act") == [((3,), ()), ((3,), ("recomputed",))]


def test_helpers_of_one_library_call_recompute_nothing() -> None:
    product = kernel("aten.mm", "library", "gate:aten.mm@2", "h wg", "g")
    helper = replace(product, runtime_name="splitk_reduce", inputs=None)
    assert cells(align([graph(product, helper, compiler="eager")]), "gate") == [((0, 1), ())]
    assert cells(align([graph(product, helper)]), "gate") == [((0, 1), ("recomputed",))]


@pytest.mark.parametrize(
    ("kernels", "relation"),
    [
        ([GATE, kernel("f", "gemm", ":dot", "h wu", "u")], "not named"),
        ([kernel("g", "gemm", "gate:dot@2 :add", "h wg", "g")], "not named"),
        ([kernel("c", "copy", ":concatenate", "wg wu", "w"), GATE], "not named"),
        ([kernel("g", "gemm", "gate:dot@2 :pad", "h wg", "g"), kernel("c", "copy", "", "x", "xt")], "absent"),
    ],
)
def test_kernels_without_a_stage_may_hold_an_unnamed_one(kernels: list[Kernel], relation: str) -> None:
    assert cells(align([graph(NORM, GATE, UP), graph(NORM, *kernels)]), "up")[1] == ((), (relation,))


def test_one_graph_without_stages_leaves_the_others_aligned() -> None:
    found = align([graph(NORM, GATE, ACT), unnamed(graph(NORM, GATE, ACT)), graph(NORM, GATE, ACT)])
    assert not any(row.inferred for row in found.rows)
    assert [relations for _, relations in cells(found, "gate")] == [(), ("names no stages",), ("same region",)]
    assert found.unattributed == ((), (0, 1, 2), ())


def test_a_stage_that_one_graph_lacks_is_absent_there() -> None:
    residual = kernel("r", "elementwise", "residual:add@9", "y x", "z")
    found = align([graph(NORM, GATE, UP, ACT), graph(NORM, GATE, UP, ACT, residual)])
    assert labels(found)[-1] == "residual"
    assert cells(found, "residual") == [((), ("absent",)), ((4,), ())]
    # A stage of only one graph does not make the others' regions differ.
    joined = kernel("a", "elementwise", "act:exp@4 act:mul@4 residual:add@9", "g u x", "y")
    assert cells(align([graph(NORM, GATE, UP, ACT), graph(NORM, GATE, UP, joined)]), "act")[1][1] == ("same region",)


def test_backward_has_its_own_rows_after_forward() -> None:
    gradient = kernel("dg", "gemm", "gate:dot@2!", "dy wg", "dh", phase="backward")
    found = align([graph(NORM, GATE, gradient), graph(NORM, GATE, gradient, UP)])
    assert labels(found) == ["norm", "gate", "up", "backward: gate"]
    assert cells(found, "backward: gate") == [((2,), ()), ((2,), ("same region",))]


def test_a_joint_value_and_gradient_is_split_by_its_operations() -> None:
    joint = kernel("dg", "gemm", "gate:dot@2!", "dy wg", "dh")
    assert labels(align([graph(NORM, GATE, joint)])) == ["norm", "gate", "backward: gate"]


def test_nested_stages_are_cut_to_the_common_depth() -> None:
    deep = graph(
        kernel("a", "reduction", "norm/mean:sum", "x", "m"), kernel("b", "elementwise", "norm/scale:mul", "m", "h")
    )
    found = align([deep, graph(NORM)])
    assert labels(found) == ["norm"] and cells(found, "norm") == [((0, 1), ()), ((0,), ("merged",))]
    assert labels(align([deep, deep])) == ["norm/mean", "norm/scale"]
    # A graph without that outermost stage has no say.
    assert labels(align([deep, graph(GATE)])) == ["norm/mean", "norm/scale", "gate"]


def test_kernels_without_stages_are_listed_separately() -> None:
    copy = kernel("c", "copy", "", "x", "xt")
    assert align([graph(NORM, copy, GATE), graph(NORM, GATE)]).unattributed == ((1,), ())


def test_eager_operations_are_aligned_without_kernels() -> None:
    eager = FusionGraph("f", "eager", None, operations=(SourceOp("aten.mean", "norm"), SourceOp("aten.mm", "gate")))
    found = align([graph(NORM, GATE), eager])
    assert cells(found, "gate") == [((1,), ()), (None, ())]


def test_three_graphs_are_compared_with_the_first() -> None:
    both = kernel("gu", "gemm", "gate:dot@2 up:dot@3", "h wg wu", "g u")
    found = align([graph(NORM, GATE, UP), graph(NORM, both), graph(NORM, GATE, UP)])
    assert [relations for _, relations in cells(found, "gate")] == [(), ("joined",), ("same region",)]


# Without stages.


def unnamed(found: FusionGraph) -> FusionGraph:
    def plain(k: Kernel) -> Kernel:
        return replace(k, source_ops=tuple(replace(op, stage="") for op in k.source_ops))

    return replace(found, kernels=tuple(map(plain, found.kernels or ())))


DOWN = kernel("d", "gemm", "down:dot@5 residual:add@6", "y wd x", "z")
XLA = unnamed(graph(NORM, UP, GATE, ACT, DOWN))
ATEN = unnamed(
    graph(
        kernel("n", "reduction", "n:aten.pow@11 n:aten.mean@11", "x", "h"),
        kernel("g", "library", "g:aten.mm@12", "h wg", "g"),
        kernel("u", "library", "u:aten.mm@13", "h wu", "u"),
        kernel("a", "elementwise", "a:aten.exp@14", "g", "e"),
        kernel("a", "elementwise", "a:aten.mul.Tensor@14", "e u", "y"),
        kernel("d", "library", "d:aten.addmm@15", "y wd x", "z"),
    )
)


def test_without_stages_operations_align_by_kind_and_dataflow() -> None:
    found = align([XLA, ATEN])
    assert all(row.inferred for row in found.rows)
    assert cells(found, "mean 1") == [((0,), ()), ((0,), ("same region",))]
    # The first graph launches the second product first; lines tell which is which.
    assert cells(found, "dot 1") == [((1,), ()), ((2,), ("same region",))]
    assert cells(found, "dot 2") == [((2,), ()), ((1,), ("same region",))]
    assert cells(found, "exp 1") == [((3,), ()), ((3,), ("parted",))]
    assert cells(found, "dot 3")[1][0] == (5,)


def test_an_operation_without_counterpart_is_unaligned() -> None:
    found = align([XLA, ATEN])
    assert [[op.op for op in ops] for ops in found.unaligned] == [["add"], ["aten.pow"]]


def test_products_in_ambiguous_order_are_not_guessed() -> None:
    def lineless(found: FusionGraph) -> FusionGraph:
        kernels = [
            replace(k, source_ops=tuple(replace(op, line="") for op in k.source_ops)) for k in found.kernels or ()
        ]
        return replace(found, kernels=tuple(kernels))

    found = align([lineless(XLA), ATEN])
    assert "dot 2" not in labels(found) and cells(found, "dot 1") == [((4,), ()), ((5,), ("same region",))]
    assert [op.op for op in found.unaligned[1]].count("aten.mm") == 2
    assert "exp 1" in labels(found)


def test_graphs_with_different_numbers_of_products_are_not_aligned() -> None:
    found = align([unnamed(graph(NORM, GATE)), unnamed(graph(NORM, GATE, UP))])
    assert found.rows == () and len(found.unaligned[1]) == 3
    assert found.unattributed == ((0, 1), (0, 1, 2))


def test_eager_without_stages_aligns_by_program_order() -> None:
    names = ["aten.mean", "aten.mm", "aten.mm", "aten.exp", "aten.mul", "aten.mm", "aten.add"]
    eager = FusionGraph("f", "eager", None, operations=tuple(SourceOp(name) for name in names))
    found = align([XLA, eager])
    assert labels(found) == ["mean 1", "dot 1", "dot 2", "exp 1", "mul 1", "dot 3", "add 1"]
    assert found.unaligned == ((), ())


def test_no_graphs_align_to_nothing() -> None:
    assert align([]).rows == ()


def test_an_unknown_label_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="gate"):
        align([graph(GATE)]).row("nope")
