"""Roofline points from a kernel's bytes and FLOPs and the device's ceilings."""

from __future__ import annotations

import pytest

from xlafuse.compare.graph.analyse.roofline import Ceilings, roofline_point, roofline_time_us
from xlafuse.compare.graph.analyse.summary import RooflineOfPhase, rooflines
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp

# A stream moves 1 TB/s, a product makes 100 TFLOP/s, an empty kernel takes a microsecond.
CEILINGS = Ceilings({0.5: 1e12}, {"bfloat16": 1e14}, launch_us=1.0)
MEGA = 1_000_000


def kernel(moved: int | None, flops: float | None, kind: str = "elementwise", **fields: object) -> Kernel:
    half = None if moved is None else moved // 2
    return Kernel("k", kind, inputs=(Access("x", half),), outputs=(Access("y", half),), flops=flops, **fields)  # type: ignore[arg-type]


def graph(*kernels: Kernel) -> FusionGraph:
    size = 500 * MEGA
    buffers = (Buffer("x", (size // 2,), "bf16", size, "input"), Buffer("y", (size // 2,), "bf16", size, "output"))
    return FusionGraph("g", "triton", kernels, buffers=buffers)


def placed(subject: Kernel, ceilings: Ceilings = CEILINGS):  # type: ignore[no-untyped-def]
    return roofline_point(graph(subject), subject, ceilings)


def test_the_larger_of_bytes_and_flops_bounds() -> None:
    memory = placed(kernel(10 * MEGA, 1e8))
    assert (memory.memory_us, memory.compute_us, memory.bound) == (pytest.approx(10), pytest.approx(1), "memory")
    assert memory.roofline_time_us == pytest.approx(10)
    compute = placed(kernel(10 * MEGA, 2e9, "gemm"))
    assert (compute.roofline_time_us, compute.bound) == (pytest.approx(20), "compute")


def test_a_kernel_shorter_than_an_empty_one_is_launch_bound() -> None:
    assert placed(kernel(MEGA // 2, 1e6)).bound == "launch"
    assert placed(kernel(MEGA * 2, 1e6)).bound == "memory"
    # A hundred short launches are short each, however long they take together.
    many = placed(kernel(MEGA // 2, 1e6, launches=100))
    assert many.bound == "launch" and many.roofline_time_us == pytest.approx(50)
    unmeasured = Ceilings(CEILINGS.streams, CEILINGS.products)
    assert placed(kernel(MEGA // 2, 1e6), unmeasured).bound == "memory"


def test_bandwidth_is_interpolated_between_measured_mixes() -> None:
    ceilings = Ceilings({0.25: 1e12, 0.5: 2e12, 0.75: 4e12}, {})
    assert ceilings.bandwidth(1, 1) == 2e12
    assert ceilings.bandwidth(3, 5) == pytest.approx(1.5e12)
    assert ceilings.bandwidth(5, 3) == pytest.approx(3e12)
    assert ceilings.bandwidth(1, 0) == 4e12 and ceilings.bandwidth(0, 1) == 1e12
    assert ceilings.bandwidth(0, 0) == 2e12


@pytest.mark.parametrize(
    "subject",
    [
        kernel(None, 1e6), kernel(MEGA, None, "gemm"), kernel(MEGA, None, "attention"),
        kernel(MEGA, 1.0, launches=None), kernel(MEGA, None, "custom", source_ops=(SourceOp("dot"), SourceOp("exp"))),
        kernel(MEGA, None, "custom"), kernel(MEGA, None, "library", source_ops=(SourceOp("aten._linalg_solve_ex"),)),
        kernel(MEGA, None, "library"),
    ],
    ids=["bytes", "product", "attention", "launches", "hand-written product", "hand-written, unknown",
         "library's solver", "library, unknown"],
)
def test_unknown_bytes_or_flops_have_no_roofline_point(subject: Kernel) -> None:
    assert placed(subject) is None and roofline_time_us(graph(subject), subject, CEILINGS) is None


def test_an_elementwise_kernel_without_flops_is_bound_by_its_bytes() -> None:
    found = placed(kernel(4 * MEGA, None))
    assert (found.roofline_time_us, found.bound) == (pytest.approx(4), "memory")


def test_a_library_call_that_multiplies_nothing_is_bound_by_its_bytes() -> None:
    found = placed(kernel(4 * MEGA, None, "library", source_ops=(SourceOp("aten.sort"),)))
    assert (found.roofline_time_us, found.bound) == (pytest.approx(4), "memory")


def test_a_float32_sum_beside_16_bit_operands_does_not_set_the_rate() -> None:
    """As in attention backward, which adds to a float32 dq: at the float32 rate its roofline was 12 times its time."""
    ceilings = Ceilings({0.5: 1e12}, {"bfloat16": 1e14, "float32-ieee": 1e13})
    inputs = (Access("x", MEGA), Access("dq", 4 * MEGA))
    subject = Kernel("k", "custom", inputs=inputs, outputs=(Access("dq", 4 * MEGA),), flops=1e10)
    buffers = (Buffer("x", (1,), "bf16", MEGA, "input"), Buffer("dq", (1,), "f32", 4 * MEGA, "intermediate"))
    found = roofline_point(FusionGraph("g", "triton", (subject,), buffers=buffers), subject, ceilings)
    assert found is not None and found.compute_us == pytest.approx(100)


def test_ceilings_have_the_time_of_a_launch() -> None:
    found = Ceilings.from_json({"streams": {"1:1": 1e12}, "products": {}, "launch": {"host_s": 5e-6, "device_s": 1e-6}})
    assert found.launch_us == pytest.approx(1.0)
    assert Ceilings.from_json({"streams": {"1:1": 1e12}}).launch_us is None


def test_sums_over_the_kernels_of_a_phase() -> None:
    (found,) = rooflines(
        graph(
            kernel(10 * MEGA, 1e8, device_time_us=12.0), kernel(10 * MEGA, 2e9, "gemm", device_time_us=19.0),
            kernel(MEGA // 2, 0.0, device_time_us=2.0),
        ),
        ["forward"], CEILINGS,
    ) or ()
    assert found.roofline_time_us == pytest.approx(30.5)
    assert found.recoverable_us == pytest.approx(2 + 0 + 1.5)  # below its roofline time: nothing, not less
    assert found.bound_us == {"memory": 12.0, "compute": 19.0, "launch": 2.0}


def test_an_incomplete_sum_is_none_and_its_bound_unknown() -> None:
    found = rooflines(
        graph(kernel(10 * MEGA, 1e8, device_time_us=12.0), kernel(MEGA, None, "gemm", device_time_us=30.0)),
        ["forward"], CEILINGS,
    )
    assert found == [RooflineOfPhase(None, None, {"memory": 12.0, "unknown": 30.0})]


def test_without_a_gpu_the_least_times_weigh() -> None:
    (found,) = rooflines(graph(kernel(10 * MEGA, 1e8)), ["forward"], CEILINGS) or ()
    assert found.recoverable_us is None and found.bound_us == {"memory": pytest.approx(10)}
