"""The totals of a graph, with known and unknown terms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.graph.analyse.roofline import Ceilings, roofline_time_us
from xlafuse.compare.graph.analyse.totals import Tally, compulsory_traffic, recomputed, totals
from xlafuse.compare.graph.model import FusionGraph, SourceOp
from xlafuse.compare.graph.render import text_view

CEILINGS = Ceilings.from_json(
    {"streams": {"1:0": 2e9, "1:1": 1e9, "3:1": 4e9}, "products": {"float32-ieee": 1e9, "float32-tf32": 8e9}}
)
# x -> h -> two products -> act -> product (with the residual x) -> y
MLP = (
    kernel("norm", "reduction", "norm:mul norm:mean norm:rsqrt", "x", "h"),
    kernel("gate", "gemm", "gate:dot", "h wg", "g", flops=2e6),
    kernel("up", "gemm", "up:dot", "h wu", "u", flops=2e6),
    kernel("act", "elementwise", "act:sigmoid act:mul", "g u", "a"),
    kernel("down", "gemm", "down:dot residual:add", "a wd x", "y", flops=2e6),
)
SIZES = "wg=5000 wu=5000 wd=5000 g=3000 u=3000 a=3000"


def test_declared_bytes_count_every_launch() -> None:
    looped = graph(
        kernel("k", "elementwise", "s:mul", "x", "y", launches=3), kernel("r", "reduction", "s:sum", "y", "z")
    )
    found = totals(looped)
    assert found.declared == Tally(3 * 8000 + 8000)


def test_unknown_bytes_are_counted_separately() -> None:
    unknown = replace(kernel("k", "custom", "s:f", "x", "y"), inputs=None)
    found = totals(graph(unknown, kernel("loop", "copy", "s:copy", "y", "z", launches=None)))
    assert found.declared == Tally(4000, 2) and found.declared.exact is None  # at least what is known of them
    assert found.fusion_efficiency is None


def test_totals_of_a_graph_with_unread_lines_are_at_least_the_known_part() -> None:
    made = graph(kernel("a", "elementwise", "s:mul", "x", "y"))
    unread = replace(made, unparsed=("mystery(buf0)",))
    assert totals(made).declared.exact == 8000 and totals(made).fusion_efficiency == 1
    assert totals(unread).declared == Tally(8000, 1) and totals(unread).fusion_efficiency is None
    assert "at least 8.00 kB (1 unknown)" in text_view.text(unread) and "100%" not in text_view.text(unread)


def test_a_graph_of_operations_has_no_kernels_to_count() -> None:
    eager = FusionGraph("f", "eager", None, operations=(SourceOp("aten.mul"), SourceOp("aten.add", line="f.py:1")))
    found = totals(eager, ceilings=CEILINGS)
    assert found.kernels is None and found.declared == Tally(0, 2) and found.fusion_efficiency is None


def test_compulsory_is_each_used_input_and_each_output_once() -> None:
    found = totals(graph(*MLP, sizes=SIZES))
    inputs, output = 4 * (1000 + 3 * 5000), 4 * 1000
    assert found.compulsory == {"forward": inputs + output}
    moved = 4 * (2000 + 2 * (1000 + 5000 + 3000) + 9000 + (3000 + 5000 + 1000 + 1000))
    assert found.declared == Tally(moved)
    assert found.fusion_efficiency == pytest.approx((inputs + output) / moved)


def test_a_gather_counts_its_rows_and_an_update_its_writes() -> None:
    gather = kernel("gather", "copy", "e:gather", "table", "rows")
    gather = replace(gather, inputs=(replace(gather.inputs[0], bytes=400),))  # type: ignore[index]
    found = graph(gather, sizes="table=100000 rows=100")
    assert compulsory_traffic(found) == {"forward": (400, 400)}


def test_an_unread_input_costs_nothing() -> None:
    unused = graph(*MLP, sizes=SIZES)
    with_more = replace(unused, buffers=(*unused.buffers, replace(unused.buffers[0], name="unused")))
    assert totals(with_more).compulsory == totals(unused).compulsory


def test_the_gemm_barrier_counts_products_that_feed_products() -> None:
    found = totals(graph(*MLP, sizes=SIZES))
    assert found.gemm_barrier == found.compulsory["forward"] + 2 * 4 * (3000 + 3000)


def test_a_product_that_only_leads_to_the_output_adds_no_barrier() -> None:
    found = totals(graph(kernel("dot", "gemm", "s:dot", "x w", "p"), kernel("gelu", "elementwise", "s:tanh", "p", "y")))
    assert found.gemm_barrier == found.compulsory["forward"] == 12000


def test_backward_reads_inputs_again_but_residuals_are_not_free() -> None:
    forward = kernel("f", "elementwise", "s:exp", "x w", "y r")
    backward = kernel("b", "elementwise", "s:mul!", "dy r w", "dx dw", phase="backward")
    found = totals(graph(forward, backward, saved="r", output="y dx dw", sizes="r=9000"))
    # r (9000) could be computed again from x (1000), which costs less: w is read anyway.
    assert found.compulsory == {"forward": 12000, "backward": 4 * (2000 + 1000 + 2000)}


def test_a_small_residual_is_cheaper_than_the_inputs_behind_it() -> None:
    forward = kernel("f", "reduction", "s:sum", "x", "y r")
    backward = kernel("b", "elementwise", "s:mul!", "dy r", "dx", phase="backward")
    found = compulsory_traffic(graph(forward, backward, saved="r", output="y dx", sizes="r=10"))
    assert found["backward"] == (4000 + 40, 4000)


def test_the_specs_bytes_replace_the_graphs() -> None:
    found = totals(graph(*MLP, sizes=SIZES), bytes_compulsory={"forward": 10, "backward": 5})
    assert found.compulsory == {"forward": 10, "backward": 5}
    assert found.fusion_efficiency == pytest.approx(15 / (found.declared.exact or 0))


def test_roofline_times_use_the_bandwidth_of_the_mix_and_the_rate_of_the_dtype() -> None:
    def time(found: FusionGraph, precision: str | None = None) -> float | None:
        (only,) = found.kernels or ()
        return roofline_time_us(found, only, CEILINGS.at(precision))

    assert time(graph(kernel("copy", "copy", "s:copy", "x", "y"))) == pytest.approx(8.0)
    assert time(graph(kernel("add", "elementwise", "s:add", "a b c", "y"))) == pytest.approx(4.0)
    dot = graph(kernel("dot", "gemm", "s:dot", "x w", "y", flops=1e9))
    assert time(dot, "ieee") == pytest.approx(3 * 1.25e5)  # three TF32 products are faster here
    slow = replace(CEILINGS, products={"float32-ieee": 1e9, "float32-tf32": 2e9}, precision="ieee")
    assert slow.rate("f32") == slow.measured_rate("f32") == 1e9
    assert CEILINGS.at("ieee").measured_rate("f32") == 1e9
    assert time(dot) == pytest.approx(1.25e5)  # the faster: a roofline time must not be too long
    assert time(graph(kernel("dot", "gemm", "s:dot", "x w", "y"))) is None


def test_the_kernels_roofline_times_are_added() -> None:
    pair = graph(kernel("a", "elementwise", "s:mul", "x", "m"), kernel("b", "elementwise", "s:add", "m", "y"))
    assert totals(pair, ceilings=CEILINGS).roofline_time_us == Tally(pytest.approx(16.0), 0)  # type: ignore[arg-type]
    assert totals(pair).roofline_time_us is None
    dot = graph(kernel("dot", "gemm", "s:dot", "x w", "y"))
    assert totals(dot, ceilings=CEILINGS).roofline_time_us == Tally(0, 1)
    lines = text_view.totals_lines(pair, CEILINGS)
    assert "the kernels' roofline times add up to 16.0 µs" in lines, lines


def test_the_blocks_roofline_time_is_the_larger_of_its_bytes_and_its_flops() -> None:
    pair = graph(kernel("a", "elementwise", "s:mul", "x", "m"), kernel("b", "elementwise", "s:add", "m", "y"))
    declared = {"forward": 1.0}
    assert totals(pair, flops_declared=declared, ceilings=CEILINGS).block_roofline_time_us == pytest.approx(8.0)
    dot = graph(kernel("dot", "gemm", "s:dot", "x w", "y", flops=16e9))
    found = totals(dot, flops_declared={"forward": 8e9}, ceilings=CEILINGS)
    assert found.block_roofline_time_us == pytest.approx(1e6)  # what the function needs, not what the kernel computes
    assert totals(dot, ceilings=CEILINGS).block_roofline_time_us is None
    assert totals(dot, flops_declared={"backward": 1.0}, ceilings=CEILINGS).block_roofline_time_us is None


def test_no_barrier_where_products_follow_each_other_on_chip() -> None:
    flash = kernel("flash", "custom", "s:dot s:exp v:dot", "q k v", "o")
    assert totals(graph(flash)).gemm_barrier is None
    assert totals(graph(kernel("sdpa", "attention", "a:attention", "q k v", "o"))).gemm_barrier is None


def test_recoverable_time_lies_above_the_roofline_times() -> None:
    slow = kernel("slow", "copy", "s:copy", "x", "m", device_time_us=30.0)
    cached = kernel("cached", "copy", "s:copy", "m", "n", device_time_us=1.0)
    unmeasured = kernel("unmeasured", "copy", "s:copy", "n", "y")
    found = totals(graph(slow, cached, unmeasured), ceilings=CEILINGS)
    assert found.recoverable_us == Tally(pytest.approx(22.0), 1)
    assert found.device_time_us == Tally(31.0, 1)
    assert totals(graph(unmeasured), ceilings=CEILINGS).recoverable_us is None
    assert found.below_roofline == (1,)
    near = replace(cached, device_time_us=7.9)  # of 8: no more than the measurements differ
    assert totals(graph(near), ceilings=CEILINGS).below_roofline == ()


def test_workspace_is_in_no_other_number() -> None:
    product = kernel("a", "gemm", "s:dot", "x w", "y", workspace_bytes=7)
    assert totals(graph(product, kernel("b", "copy", "", "y", "z"))).declared == Tally(12000 + 8000)


def test_one_site_in_two_kernels_is_recomputed() -> None:
    again = graph(
        kernel("a", "elementwise", "act:exp@1 act:mul@2", "x", "p"), kernel("b", "elementwise", "act:exp@1", "x q", "r")
    )
    (found,) = recomputed(again)
    assert (found.op.op, found.kernels) == ("exp", (0, 1))
    once = graph(kernel("a", "elementwise", "act:exp@1", "x", "p"), kernel("b", "elementwise", "act:mul@2", "x", "r"))
    assert recomputed(once) == ()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            kernel("partial", "reduction", "n:sum@1", "x", "p"),
            kernel("rest", "reduction", "n:sum@1 n:rsqrt@2", "p q", "y"),
        ),
        (
            kernel("partial", "reduction", "n:mul@1 n:mean@1", "x", "p"),
            kernel("rest", "reduction", "n:mul@1", "p", "y"),
        ),
        (kernel("operand", "copy", "n:mul@1", "w", "wide"), kernel("mul", "elementwise", "n:mul@1", "x wide", "y")),
        (kernel("mul", "elementwise", "n:mul@1", "x u", "p"), kernel("mul2", "elementwise", "n:mul@1", "p w", "y")),
    ],
    ids=["two-step sum", "two-step sum with its prologue's names", "broadcast apart", "a product of a product"],
)
def test_two_steps_of_one_operation_are_not_recomputed(first, second) -> None:  # type: ignore[no-untyped-def]
    assert recomputed(graph(first, second)) == ()


def test_an_operation_and_its_gradient_are_two() -> None:
    pair = kernel("f", "gemm", "g:dot@1", "x w", "y"), kernel("b", "gemm", "g:dot@1!", "dy w", "dx", phase="backward")
    assert recomputed(graph(*pair)) == ()
