"""The bytes that pass along an edge into, out of and inside a loop."""

from dataclasses import replace

import pytest

from xlafuse.compare.graph.analyse.missed_fusions import ranked, together
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.build.xla_reasons import reasons
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.hlo import gpu_program

ARRAY = 4000  # bytes of f32[1000]
STATE = "(f32[1000], f32[1000])"
TRIPS = ', backend_config={"known_trip_count":{"n":"%d"}}'


def loop(body: str, trips: int | None = 100, more: str = "") -> FusionGraph:
    """A loop that carries `c` and `k`, initially `start` and `fixed`, with a kernel `after` behind it."""
    module = gpu_program.parse(f"""HloModule m, is_scheduled=true
{more}
%body (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  %c = f32[1000] get-tuple-element(%s), index=0
  %k = f32[1000] get-tuple-element(%s), index=1
  {body}
}}

%going (s: {STATE}) -> pred[] {{
  %s = {STATE} parameter(0)
  ROOT %p = pred[] constant(true)
}}

ENTRY %main (x: f32[1000]) -> f32[1000] {{
  %x = f32[1000] parameter(0)
  %start = f32[1000] exponential(%x)
  %fixed = f32[1000] negate(%x)
  %init = {STATE} tuple(%start, %fixed)
  %w = {STATE} while(%init), condition=%going, body=%body{"" if trips is None else TRIPS % trips}
  %y = f32[1000] get-tuple-element(%w), index=0
  ROOT %after = f32[1000] tanh(%y)
}}
""")
    graph = from_hlo(module)
    assert not graph.unparsed
    return replace(graph, reasons=reasons(graph, ()))


def saved(graph: FusionGraph) -> dict[tuple[str, str], int | None]:
    return {(reason.producer, reason.consumer): reason.bytes_saved for reason in graph.reasons}


def prices(graph: FusionGraph) -> dict[tuple[str, str], int]:
    return {(one.reason.producer, one.reason.consumer): one.price.bytes for one in ranked(graph, None)}


STEP = f"""%step = f32[1000] multiply(%c, %k)
  ROOT %t = {STATE} tuple(%step, %k)"""


def test_a_loop_reads_an_initial_value_once_and_what_it_leaves_alone_in_each_iteration() -> None:
    graph = loop(STEP)
    assert saved(graph) == prices(graph) == {
        ("start", "step"): 2 * ARRAY, ("fixed", "step"): 101 * ARRAY, ("step", "after"): ARRAY
    }
    assert together(graph, None).bytes == (104 + 1) * ARRAY  # x is read twice
    apart = replace(graph, reasons=graph.reasons[:1])
    assert together(apart, None).bytes == 2 * ARRAY


def test_a_loop_of_unknown_length_reads_an_initial_value_at_most_once() -> None:
    """Without an iteration, the kernel behind the loop reads the initial value, so its write may stay."""
    graph = loop(STEP, trips=None)
    assert saved(graph) == {("start", "step"): ARRAY, ("fixed", "step"): None, ("step", "after"): ARRAY}


def test_two_kernels_of_the_body_read_the_carried_array() -> None:
    graph = loop(f"""%first = f32[1000] negate(%c)
  %step = f32[1000] multiply(%c, %first)
  ROOT %t = {STATE} tuple(%step, %k)""")
    expected = {("start", "first"): ARRAY, ("start", "step"): ARRAY, ("step", "after"): ARRAY}
    assert saved(graph) == {("first", "step"): 200 * ARRAY, **expected}
    # One kernel for both reads the carried array once in each iteration.
    assert prices(graph) == {("first", "step"): 300 * ARRAY, **expected}


def test_an_inner_loop_reads_its_initial_value_once_in_each_iteration_of_the_outer_one() -> None:
    inner = f"""
%inner (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  %c = f32[1000] get-tuple-element(%s), index=0
  %k = f32[1000] get-tuple-element(%s), index=1
  %deep = f32[1000] sine(%c)
  ROOT %t = {STATE} tuple(%deep, %k)
}}
"""
    graph = loop(f"""%first = f32[1000] negate(%c)
  %init = {STATE} tuple(%first, %k)
  %w = {STATE} while(%init), condition=%going, body=%inner{TRIPS % 20}
  %d = f32[1000] get-tuple-element(%w), index=0
  %last = f32[1000] cosine(%d)
  ROOT %t = {STATE} tuple(%last, %k)""", 30, inner)
    assert saved(graph) == {
        ("start", "first"): 2 * ARRAY, ("first", "deep"): 30 * 2 * ARRAY, ("deep", "last"): 30 * ARRAY,
        ("last", "after"): ARRAY,
    }


def test_a_branch_may_leave_the_carried_array_alone() -> None:
    branches = """
%changed (p: f32[1000]) -> f32[1000] {
  %p = f32[1000] parameter(0)
  ROOT %sine = f32[1000] sine(%p)
}

%same (p: f32[1000]) -> f32[1000] {
  ROOT %p = f32[1000] parameter(0)
}
"""
    graph = loop(f"""%look = pred[] custom-call(%c), custom_call_target="look"
  %new = f32[1000] conditional(%look, %c, %c), true_computation=%changed, false_computation=%same
  ROOT %t = {STATE} tuple(%new, %k)""", 100, branches)
    assert saved(graph)["start", "look"] == 100 * ARRAY


def test_a_loop_that_updates_rows_reads_the_rest_again() -> None:
    graph = loop(f"""%look = f32[1] custom-call(%c), custom_call_target="look"
  %i = s32[] constant(3)
  %new = f32[1000] dynamic-update-slice(%c, %look, %i)
  ROOT %t = {STATE} tuple(%new, %k)""")
    assert saved(graph)["start", "look"] == 100 * ARRAY
    assert saved(graph)["new", "after"] == 100 * 4


def test_all_rows_that_a_loop_writes_are_read_behind_it() -> None:
    graph = loop(f"""%row = f32[10] slice(%k), slice={{[0:10]}}
  %i = s32[] constant(3)
  %new = f32[1000] dynamic-update-slice(%c, %row, %i)
  ROOT %t = {STATE} tuple(%new, %k)""")
    assert saved(graph)["new", "after"] == 2 * ARRAY


@pytest.mark.parametrize("launches", [1, 100])
def test_a_graph_that_does_not_tell_its_loops_counts_each_launch(launches: int) -> None:
    """Graphs of earlier versions lack the loops around a kernel."""
    graph = loop(STEP, launches)
    kernels = tuple(replace(k, facts={}) for k in graph.kernels or ())
    found = replace(graph, kernels=kernels)
    assert prices(found)["start", "step"] == (2 if launches == 1 else launches + 1) * ARRAY
