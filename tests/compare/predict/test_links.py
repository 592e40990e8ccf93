"""Times of exchanges between GPUs: bytes that are sent, links of the target, the fit on two GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.links import Measured, fit, predicted_by_others
from xlafuse.compare import targets
from xlafuse.compare.graph.analyse.exchange import COPY, Exchange, between, exchange_of
from xlafuse.compare.graph.analyse.roofline import roofline_point
from xlafuse.compare.graph.model import Access, FusionGraph, Kernel
from xlafuse.compare.predict.links import class_of, errors_of, predicted, record
from xlafuse.compare.predict.times import why_predicted, with_predictions
from xlafuse.compare.sources.target_ceilings import target_ceilings

SIZE = 64 << 20
PERMUTE = Exchange("collective-permute", 2, float(SIZE))


def collective(opcode: str = "all-gather", gpus: int = 2, **facts: object) -> Kernel:
    return Kernel(
        opcode, "collective", inputs=(Access("x", SIZE),), outputs=(Access("y", SIZE * gpus),),
        facts={"opcode": opcode, "gpus": gpus, **facts},
    )


def of_pytorch(name: str, read: int = SIZE, written: int = SIZE, **facts: object) -> Kernel:
    return Kernel(
        name, "collective", inputs=(Access("x", read),), outputs=(Access("y", written),), facts={"gpus": 4, **facts}
    )


@pytest.mark.parametrize(
    ("name", "opcode", "shares"),
    [
        ("_c10d_functional.all_gather_into_tensor.default", "all-gather", 3),
        ("torch.ops._c10d_functional.reduce_scatter_tensor.default#2", "reduce-scatter", 3 / 4),
        ("_c10d_functional.all_reduce.default", "all-reduce", 2 * 3 / 4),
        ("torch.ops._c10d_functional.all_reduce_.default", "all-reduce", 2 * 3 / 4),
        ("_c10d_functional.all_to_all_single.default", "all-to-all", 3 / 4),
    ],
)
def test_a_collective_of_pytorch_takes_the_time_of_xlas(name: str, opcode: str, shares: float) -> None:
    assert exchange_of(of_pytorch(name)) == Exchange(opcode, 4, shares * SIZE)
    of_xla = replace(collective(opcode, gpus=4), outputs=(Access("y", SIZE),))
    assert us(of_pytorch(name)) == us(of_xla)


def test_an_all_to_all_takes_the_longer_of_both_directions() -> None:
    name = "_c10d_functional.all_to_all_single.default"
    found = [us(of_pytorch(name, *sizes)) for sizes in ((SIZE, 2 * SIZE), (2 * SIZE, SIZE), (2 * SIZE, 2 * SIZE))]
    assert found[0] == found[1] == found[2]


def test_a_copy_crosses_the_links_once_and_faster_than_a_collective() -> None:
    copy = of_pytorch("xlafuse.exchange.default")
    assert exchange_of(copy) == Exchange(COPY, 2, float(SIZE))
    assert us(copy) < 0.7 * us(collective())


def test_a_collective_of_pytorch_needs_the_number_of_gpus() -> None:
    name = "_c10d_functional.all_gather_into_tensor.default"
    unknown = Kernel(name, "collective", inputs=(Access("x", SIZE),), outputs=(Access("y", 2 * SIZE),))
    assert predicted(unknown, "h200").us is None
    (kernel,) = between(FusionGraph("g", "eager", (unknown,)), 2).kernels or ()
    assert us(kernel) == us(collective())
    assert between(FusionGraph("g", "eager", None), 2).kernels is None
    assert exchange_of(of_pytorch("_c10d_functional.all_gather_into_tensor_coalesced.default")) is None


def us(kernel: Kernel, target: str = "h200") -> float:
    found = predicted(kernel, target)
    assert found.us is not None and found.low_us is not None and found.high_us is not None, found.reason
    assert found.low_us < found.us < found.high_us
    return found.us


def test_a_time_grows_with_the_bytes_that_a_gpu_sends() -> None:
    assert us(collective(gpus=8)) / us(collective()) == pytest.approx(7, rel=0.1)
    assert us(collective("all-reduce")) == pytest.approx(2 * us(collective("reduce-scatter")), rel=0.01)
    assert us(replace(collective(), launches=3)) == pytest.approx(3 * us(collective()))
    assert us(collective("all-gather-start", overlaps=True)) > us(collective())


def test_links_of_twice_the_rate_take_half_the_time() -> None:
    assert us(collective()) == us(collective(), "h100")
    assert us(collective()) / us(collective(), "b200") == pytest.approx(2, rel=0.05)
    assert us(collective(), "a100-80gb") / us(collective()) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(("target", "gpus"), [("h200", 8), ("b200", 2)])
def test_the_interval_of_what_was_not_measured_begins_at_the_rate_of_the_links(target: str, gpus: int) -> None:
    kernel, ceilings = collective(gpus=gpus), target_ceilings(target)
    point = roofline_point(FusionGraph("g", "xla", (kernel,), target=target), kernel, ceilings)
    assert point is not None and point.bound == "link"
    assert predicted(kernel, target).low_us == pytest.approx(point.roofline_time_us, abs=10)
    assert us(kernel, target) > 1.5 * point.roofline_time_us


@pytest.mark.parametrize(
    ("kernel", "target", "reason"),
    [
        (collective(), "l4", "PCIe 4.0"), (collective(), "gh200", "not known"), (collective(), "tpu-v5e", "not known"),
        (collective("ragged-all-to-all"), "h200", "bytes"), (collective(gpus=0), "h200", "bytes"),
        (replace(collective(), launches=None), "h200", "launches"),
    ],
)
def test_an_exchange_without_a_time_has_a_reason(kernel: Kernel, target: str, reason: str) -> None:
    found = predicted(kernel, target)
    assert found.us is None and reason in found.reason


def test_exchanges_of_a_gpu_without_predictions_have_times() -> None:
    graph = FusionGraph("g", "xla", (collective(),), target="a100-80gb")
    timed = with_predictions(graph, target_ceilings("a100-80gb"))
    (kernel,) = timed.kernels or ()
    assert kernel.predicted_us == us(collective(), "a100-80gb")
    assert "NVLink 3" in why_predicted(timed, 0, target_ceilings("a100-80gb"))[0]


def measured(block: str, exchange: Exchange, took: float) -> Measured:
    return Measured(block, "fwd", "xla", exchange, took)


def test_a_fit_finds_latency_and_share_and_a_prediction_does_not_see_its_own_program() -> None:
    rate = 100e9
    small = Exchange("all-to-all", 2, 8.0)
    runs = [measured(block, small, 5.0) for block in "ab"]
    runs += [measured(block, PERMUTE, 5.0 + SIZE / (rate * 0.5) * 1e6) for block in "abc"]
    found = fit(runs, rate)
    assert found.latencies_us == {"collective": pytest.approx(5)}
    assert found.shares[class_of(PERMUTE)] == pytest.approx(0.5)
    slow = [*runs[:-1], replace(runs[-1], us=3 * runs[-1].us)]
    assert predicted_by_others(slow, rate)[-1] == pytest.approx(runs[-1].us)


def test_the_committed_fit_holds_its_exchanges() -> None:
    known = record()
    assert known["rate"] == targets.load("h200").link.rate  # type: ignore[union-attr]
    assert {"xla", "eager", "inductor", "triton"} <= {one["implementation"] for one in known["exchanges"]}
    within: dict[str, list[bool]] = {}
    for one in known["exchanges"]:
        of = errors_of(Exchange(one["opcode"], one["gpus"], one["sent_bytes"], one["overlaps"]))
        low, high = known["intervals"][of]
        within.setdefault(of, []).append(low <= one["measured_us"] / one["predicted_us"] <= high)
    assert set(within) == set(known["intervals"]) > set(known["shares"])
    assert all(len(found) >= 8 and sum(found) >= 0.75 * len(found) for found in within.values())
