"""The graph of a training step from its two phases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.graph.build.phases import join_phases
from xlafuse.compare.graph.model import Reason

FORWARD = replace(
    graph(
        kernel("fusion.1", "elementwise", "act:exp@1", "x w", "e t"),
        kernel("fusion.2", "reduction", "s:sum@2", "e", "y"),
        output="y e t",
    ),
    reasons=(Reason("fusion.1", "fusion.2", "reduction", "", "xla"),),
)
BACKWARD = replace(
    graph(
        kernel("fusion.1", "elementwise", "act:mul@1!", "dy res0 res1 res2", "t"),
        kernel("fusion.9", "copy", "act:copy@1!", "t", "dx"),
    ),
    reasons=(Reason("fusion.1", "fusion.9", "layout", "", "xla"),),
)
PASSED = {"res0": "e", "res1": "w", "res2": "y"}


def test_residuals_become_one_buffer_that_forward_writes_and_backward_reads() -> None:
    joined = join_phases(FORWARD, BACKWARD, PASSED, outputs=["y"])
    assert [kernel.phase for kernel in joined.kernels or ()] == ["forward", "forward", "backward", "backward"]
    assert joined.producers["e"] == (0,) and joined.consumers["e"] == (1, 2)
    assert [buffer.name for buffer in joined.saved] == ["e"]
    roles = {buffer.name: buffer.role for buffer in joined.buffers}
    assert roles["w"] == "input" and roles["y"] == "output" and roles["t"] == "output"
    assert "res0" not in roles and roles["dy"] == "input" and roles["dx"] == "output"


def test_without_visible_outputs_every_passed_buffer_is_saved() -> None:
    joined = join_phases(FORWARD, BACKWARD, PASSED)
    assert {buffer.name for buffer in joined.saved} == {"e", "y"}


def test_names_that_collide_get_backwards_prefix() -> None:
    joined = join_phases(FORWARD, BACKWARD, PASSED, outputs=["y"])
    assert joined.buffer["t"].role == "output" and joined.buffer["backward/t"].role == "intermediate"
    assert [kernel.name for kernel in joined.kernels or ()] == ["fusion.1", "fusion.2", "backward/fusion.1", "fusion.9"]
    assert [(r.producer, r.consumer) for r in joined.reasons] == [
        ("fusion.1", "fusion.2"), ("backward/fusion.1", "fusion.9"),
    ]


def test_phases_without_kernels_join_their_operations() -> None:
    eager = replace(FORWARD, kernels=None, operations=(FORWARD.kernels or ())[0].source_ops, reasons=())
    joined = join_phases(eager, replace(eager, buffers=()), {})
    assert joined.kernels is None and len(joined.operations) == 2


@pytest.mark.parametrize(
    ("forward", "backward", "passed", "message"),
    [
        (FORWARD, BACKWARD, {"res9": "e"}, "res9: no such buffer in backward"),
        (FORWARD, BACKWARD, {"res0": "zz"}, "zz: no such buffer in forward"),
        (FORWARD, replace(BACKWARD, compiler="inductor"), {}, "one compiler and target"),
        (FORWARD, replace(BACKWARD, kernels=None), {}, "only one phase has kernels"),
    ],
)
def test_phases_that_do_not_match_are_refused(forward, backward, passed, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        join_phases(forward, backward, passed)
