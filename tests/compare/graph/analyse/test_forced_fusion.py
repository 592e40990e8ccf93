"""Two kernels that a user wants as one: their names, what refuses them, and what they save."""

from dataclasses import replace

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.graph.analyse.forced_fusion import NotForced, pair, saving
from xlafuse.compare.graph.analyse.roofline import Ceilings

STEP = graph(
    kernel("scale", "elementwise", "a:mul", "x w", "h"), kernel("bend", "elementwise", "b:tanh", "h", "y"),
    kernel("other", "elementwise", "c:exp", "z", "u"), kernel("last", "reduction", "d:sum", "x y", "s"),
)
CEILINGS = Ceilings({0.5: 1e9}, {}, launch_us=2.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [("scale+bend", (0, 1)), ("2+1", (0, 1)), (" 1 + bend", (0, 1)), ("1+last", (0, 3)), ("l…t+sc*", (0, 3))],
)
def test_kernels_have_names_and_numbers(text: str, found: tuple[int, int]) -> None:
    assert pair(STEP, text) == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bent+1", "no kernel 'bent'; did you mean bend?.*scale, bend, other, last"), ("1", "two kernels with a +"),
        ("1+2+3", "two kernels with a +"), ("1+scale", "both are the kernel 1 scale"),
        ("*a*+2", "2 kernels are called '.a.'"),
    ],
)
def test_other_names_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        pair(STEP, text)


def test_kernels_without_a_common_buffer_or_phase_are_refused() -> None:
    with pytest.raises(NotForced, match="scale and other share no buffer"):
        pair(STEP, "1+3")
    first, second, *others = STEP.kernels or ()
    with pytest.raises(NotForced, match="scale is of forward and bend of backward"):
        pair(replace(STEP, kernels=(first, replace(second, phase="backward"), *others)), "1+2")


def test_the_saving_stands_beside_the_price() -> None:
    merged = kernel("one", "elementwise", "a:mul b:tanh", "x w", "y")
    forced = graph(merged, *(kernel(k.name, k.kind, "c:exp", *names) for k, names in zip(
        (STEP.kernels or ())[2:], (("z", "u"), ("x y", "s")), strict=True
    )))
    found = saving(STEP, forced, (0, 1), CEILINGS)
    assert found.kernels == ("scale", "bend") and found.actual is not None
    assert (found.predicted.bytes, found.predicted.launches, found.predicted.us) == (8000, 1, 10.0)
    assert (found.actual.bytes, found.actual.launches, found.actual.us) == (8000, 1, 10.0)
    assert found.roofline_us == pytest.approx(8.0)
    assert str(found) == (
        "scale and bend as one kernel: the price of the missed fusion is 8.00 kB, 1 launch, 10.0 µs; the forced "
        "program saves 8.00 kB, 1 launch, 10.0 µs at a copy's bandwidth; roofline time 8.00 µs less"
    )
    assert saving(STEP, forced, (0, 1), None).predicted.us is None
    assert "device time 3.00 µs more" in str(replace(found, device_us=-3.0))
