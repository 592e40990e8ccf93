"""The differences between two graphs, and the absence of false ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from examples import INDUCTOR, XLA
from graph_builder import graph, kernel
from hypothesis import given
from hypothesis import strategies as st

from xlafuse.compare.graph.analyse.diff import diff
from xlafuse.compare.graph.model import Access, FusionGraph, Kernel, Reason, SourceOp
from xlafuse.compare.graph.render.diff_view import tree
from xlafuse.compare.graph.render.text_view import render

BASE = replace(
    graph(
        kernel("fusion.1", "reduction", "n:mul@1 n:sum@2", "x", "h"),
        kernel("dot.2", "gemm", "g:dot@3", "h w", "g"),
        kernel("dot.3", "gemm", "u:dot@4", "h v", "u"),
        kernel("fusion.4", "elementwise", "a:exp@5 a:mul@6", "g u", "y"),
        sizes="g=3000 u=3000",
    ),
    reasons=(
        Reason("fusion.1", "dot.2", "gemm", "fusion.1 is no", "xla", 100), Reason("", "fusion.4", "other", "?", "xla"),
    ),
)


def renamed(found: FusionGraph, rename: Callable[[str], str]) -> FusionGraph:
    def accesses(given: tuple[Access, ...] | None) -> tuple[Access, ...] | None:
        return None if given is None else tuple(replace(a, buffer=rename(a.buffer)) for a in given)

    kernels = tuple(
        replace(k, name=rename(k.name), runtime_name=None, inputs=accesses(k.inputs), outputs=accesses(k.outputs))
        for k in found.kernels or ()
    )
    reasons = tuple(
        replace(
            r, producer=r.producer and rename(r.producer), consumer=r.consumer and rename(r.consumer), text="new words"
        )
        for r in found.reasons
    )
    return replace(
        found, kernels=kernels, reasons=reasons, buffers=tuple(replace(b, name=rename(b.name)) for b in found.buffers)
    )


@given(st.sampled_from([BASE, XLA, INDUCTOR]), st.integers(0, 2**31))
def test_other_numbers_in_names_are_no_difference(found: FusionGraph, seed: int) -> None:
    names = sorted({k.name for k in found.kernels or ()} | {b.name for b in found.buffers})
    numbers = random.Random(seed).sample(range(1000), len(names))
    new = dict(zip(names, numbers, strict=True))
    other = renamed(found, lambda name: f"{name.split('.')[0]}.{new[name]}" if name in new else name)
    assert diff(found, other).empty and diff(other, found).empty


@given(st.permutations(range(4)))
def test_the_order_of_equal_kernels_is_no_difference(order: list[int]) -> None:
    layers = [kernel(f"k{i}", "elementwise", "a:exp@1", f"x{i}", f"y{i}") for i in range(4)]
    assert diff(graph(*layers), graph(*(layers[i] for i in order))).empty


def test_times_and_runtime_names_are_no_difference() -> None:
    timed = [replace(k, device_time_us=3.0, runtime_name="nvjet", provenance="device") for k in BASE.kernels or ()]
    assert diff(BASE, replace(BASE, kernels=tuple(timed))).empty


def moved(found: FusionGraph) -> FusionGraph:
    """The graph of the same operations, 40 lines further down in a file of another folder."""

    def further(op: SourceOp) -> SourceOp:
        file, _, line = op.line.rpartition(":")
        return replace(op, line=f"/head/{file}:{int(line) + 40}", site=f"new {op.site}")

    kernels = tuple(replace(k, source_ops=tuple(map(further, k.source_ops))) for k in found.kernels or ())
    return replace(found, kernels=kernels)


@pytest.mark.parametrize("found", [BASE, XLA])
def test_moved_lines_are_no_difference(found: FusionGraph) -> None:
    assert moved(found) != found and diff(found, moved(found)).empty


def changed(*kernels: Kernel, sizes: str = "g=3000 u=3000") -> FusionGraph:
    return replace(graph(*kernels, sizes=sizes), reasons=BASE.reasons)


NORM, GATE, UP, ACT = BASE.kernels or ()


def test_a_split_kernel_and_the_buffer_that_it_writes() -> None:
    exp, mul = kernel("e", "elementwise", "a:exp@5", "g", "e"), kernel("m", "elementwise", "a:mul@6", "e u", "y")
    exp, mul = (replace(k, name=n) for k, n in ((exp, "fusion.4"), (mul, "fusion.5")))
    split = changed(NORM, GATE, UP, exp, mul, sizes="g=3000 u=3000 e=3000")
    found = diff(BASE, split)
    assert [(c.kind, c.before, c.after, c.stages, c.bytes) for c in found.kernels] == [
        ("split", (3,), (3, 4), ("a",), 24000)
    ]
    assert [(c.materialized, c.buffer.name, c.bytes, c.lines) for c in found.buffers] == [
        (True, "e", 12000, ("model.py:5",))
    ]
    assert not found.reasons
    assert diff(BASE, moved(split)).kernels == found.kernels
    back = diff(split, BASE)
    assert [(c.kind, c.bytes) for c in back.kernels] == [("merged", -24000)]
    assert [(c.materialized, c.bytes) for c in back.buffers] == [(False, -12000)]


def test_regrouped_kernels() -> None:
    left = graph(
        kernel("1", "elementwise", "s:exp@1 s:mul@2", "x", "p"), kernel("2", "elementwise", "s:add@3", "p", "y")
    )
    right = graph(
        kernel("1", "elementwise", "s:exp@1", "x", "p"), kernel("2", "elementwise", "s:mul@2 s:add@3", "p", "y")
    )
    (change,) = diff(left, right).kernels
    assert (change.kind, change.before, change.after) == ("regrouped", (0, 1), (0, 1))


def test_a_kernel_that_appears_or_vanishes() -> None:
    copy = kernel("copy.7", "copy", "c:copy@9", "x", "xt")
    with_copy = changed(NORM, GATE, UP, ACT, copy)
    found = diff(BASE, with_copy)
    assert [(c.kind, c.after, c.bytes) for c in found.kernels] == [("appeared", (4,), 8000)]
    assert not found.buffers and not found.reasons
    assert [c.kind for c in diff(with_copy, BASE).kernels] == ["vanished"]


def test_changed_bytes_of_one_kernel_among_equals() -> None:
    layers = [kernel(f"k{i}", "elementwise", "a:exp@1", f"x{i}", f"y{i}") for i in range(3)]
    found = diff(graph(*layers), graph(*layers, sizes="y1=5000"))
    assert [(c.kind, c.before, c.after, c.bytes) for c in found.kernels] == [("bytes", (1,), (1,), 16000)]


def test_other_operations_or_another_kind_of_the_same_kernel() -> None:
    more = replace(ACT, source_ops=(*ACT.source_ops, SourceOp("add", "a", "model.py:6")))
    found = diff(BASE, changed(NORM, GATE, UP, more))
    assert [(c.kind, c.bytes) for c in found.kernels] == [("operations", 0)]
    other = diff(BASE, changed(NORM, replace(GATE, kind="library"), UP, ACT))
    assert [(c.kind, c.before) for c in other.kernels] == [("kind", (1,))]


def test_a_changed_reason_and_only_it() -> None:
    fused = replace(BASE, reasons=(replace(BASE.reasons[0], code="layout"), BASE.reasons[1]))
    found = diff(BASE, fused)
    assert not found.kernels and not found.buffers
    (change,) = found.reasons
    assert (change.producer, change.consumer, change.before, change.after) == (
        "fusion.1",
        "dot.2",
        ("gemm",),
        ("layout",),
    )
    gone = diff(BASE, replace(BASE, reasons=BASE.reasons[1:]))
    assert [(c.before, c.after) for c in gone.reasons] == [(("gemm",), ())]


def test_a_reason_without_its_kernel_counts() -> None:
    twice = replace(BASE, reasons=(*BASE.reasons, BASE.reasons[1]))
    assert [(c.before, c.after) for c in diff(BASE, twice).reasons] == [(("other",), ("other", "other"))]


def test_the_largest_change_comes_first_and_time_decides_where_it_is_known() -> None:
    small, large = kernel("s", "copy", "c:copy@8", "p", "q"), kernel("l", "copy", "c:copy@9", "x", "xt")
    before, after = graph(NORM, GATE, UP, ACT), graph(NORM, GATE, UP, ACT, small, large, sizes="xt=9000")
    assert [c.after for c in diff(before, after).kernels] == [(5,), (4,)]
    timed = replace(
        after,
        kernels=tuple(replace(k, device_time_us=9.0 if k.name == "s" else 1.0) for k in after.kernels or ()),
    )
    base = replace(before, kernels=tuple(replace(k, device_time_us=1.0) for k in before.kernels or ()))
    assert [c.after for c in diff(base, timed).kernels] == [(4,), (5,)]


def test_operations_alone_are_compared_with_operations() -> None:
    eager = FusionGraph("f", "eager", None, operations=(SourceOp("aten.mul", line="f.py:1"),))
    more = replace(eager, operations=(*eager.operations, SourceOp("aten.add", line="f.py:2")))
    assert diff(eager, eager).empty
    assert [(c.kind, c.after) for c in diff(eager, more).kernels] == [("appeared", (1,))]
    with pytest.raises(ValueError, match="no kernels"):
        diff(BASE, eager)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"fusion_kind": "kCustom"}, {"custom_call_target": "__cublas$gemm"}),
        ({"custom_call_target": "__cublas$gemm"}, {"custom_call_target": "__cublas$lt$matmul"}),
        ({"fusion_kind": "kLoop"}, {"fusion_kind": "kCustom"}),
        ({"extern": True}, {"template": True}),
    ],
)
def test_other_code_for_the_same_work_is_a_difference(before: dict[str, object], after: dict[str, object]) -> None:
    def made(facts: dict[str, object]) -> FusionGraph:
        kernels = tuple(replace(k, facts=facts) if k.name == "dot.2" else k for k in BASE.kernels or ())
        return replace(BASE, kernels=kernels)

    (change,) = diff(made(before), made(after)).kernels
    assert (change.kind, change.before, change.after, change.bytes) == ("code", (1,), (1,), 0)
    assert diff(made(before), made(before)).empty
    shown = render(tree("other", diff(made(before), made(after)), made(before), made(after)))
    assert "other code for the same work" in shown and "no difference" not in shown
