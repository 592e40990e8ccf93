"""The measuring protocol of several ranks, here two threads with a simulated framework and clock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlafuse.compare.measure import rank_measurement
from xlafuse.compare.measure.clock import DeviceRecord, Sample, sample_of
from xlafuse.compare.measure.host_barrier import HostBarrier, Rank
from xlafuse.compare.measure.measurement import WrongResult
from xlafuse.compare.measure.rank_measurement import CALLS, WARM_UP_CALLS, RankProgram
from xlafuse.compare.measure.worker_backend import Program
from xlafuse.compare.numerics import input_arrays
from xlafuse.compare.plan.timing_modes import ALONE
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case

CASE = Case("mlp_parallel", "x", {"tokens": 4, "width": 3, "hidden": 2, "ranks": 2}, "float32", "fwd")


class Clock:
    """Each call took a microsecond of exchange and two of compute, which begin together."""

    name = "simulated"

    def __init__(self, log: list[str]) -> None:
        self.log, self.samples = log, list[Sample]()

    def start(self) -> None:
        self.samples = []

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
        synchronize()
        result = call()
        synchronize(result)
        self.samples.append(sample_of([DeviceRecord("nccl", 0, 1e-6), DeviceRecord("gemm", 0, 2e-6)]))
        self.log.append("timed")
        return result

    def collect(self, *, going_on: bool = False) -> list[Sample]:
        return self.samples


class Backend:
    device, name = "cpu", "simulated"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def inputs(self, folder: Path, case: Case) -> dict[str, Any]:
        x = np.load(input_arrays.path_of(folder, "input", "x"))
        return {"x": BLOCKS[case.block].tensor("x").of_rank(x, self.rank, 2)}

    def cotangents(self, folder: Path, case: Case) -> dict[str, Any]:
        return {}

    def changed_inputs(self, inputs: dict[str, Any], folder: Path, case: Case) -> list[str]:
        return []

    def poisoned_allocations(self, program: Program) -> Any:
        return nullcontext()

    def local(self, array: Any) -> Any:
        return array

    def flush_l2(self) -> None: ...

    def synchronize(self, results: Any = None) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.save(input_arrays.path_of(tmp_path, "input", "x"), x)
    np.save(input_arrays.path_of(tmp_path, "output", "y"), 2 * x.astype(np.float64))
    return tmp_path


def on_both(task: Callable[[Rank], Any], tmp_path: Path) -> list[Any]:
    ranks = [Rank(number, 2, HostBarrier(tmp_path / "barrier", number, 2, seconds=10)) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(task, ranks))


def on_rank(rank: Rank, made: Program, folder: Path, scales: list[Any] | None = None) -> RankProgram:
    return RankProgram(Backend(rank.number), made, CASE, [folder], scales or [], rank=rank)


def program(factor: float = 2.0, log: list[str] | None = None) -> Program:
    def forward(inputs: dict[str, Any]) -> tuple[dict[str, Any], None]:
        if log is not None:
            log.append("call")
        return {"y": factor * inputs["x"]}, None

    return Program(forward, None, 0.0, None)


def test_each_rank_compares_its_slice(folder: Path) -> None:
    scales = [{"y": {"rms": 10.0, "largest": 22.0, "independent_error": 1e-3}}]

    def check(rank: Rank, factor: float = 2.0) -> Any:
        return on_rank(rank, program(factor), folder, scales).check()

    assert [one.passes for found in on_both(check, folder) for one in found] == [True, True]
    # The second rank's rows are larger, so the same factor errs more there.
    wrong = [found[0] for found in on_both(lambda rank: check(rank, 2.1), folder)]
    assert not wrong[0].passes and wrong[1].error > wrong[0].error
    with pytest.raises(WrongResult, match="shape"):
        on_rank(Rank(0, 1, HostBarrier(folder / "b", 0, 1)), program(), folder, scales).check()


def test_ranks_make_the_same_calls_and_return_their_times(folder: Path) -> None:
    logs: list[list[str]] = [[], []]

    def measure(rank: Rank) -> list[dict[str, Any]]:
        log = logs[rank.number]
        made = program(log=log)
        made.variants[ALONE] = lambda: program(log=log)
        held, clock = on_rank(rank, made, folder), Clock(log)
        rounds = []
        for number in range(2):
            rounds.append(held.measure_round(clock, 1.0, number == 0, number))
            rounds.append(held.measure_mode(ALONE, clock, 1.0, number))
        return [one["phases"]["forward"] for one in rounds]

    found = on_both(measure, folder)
    assert logs[0] == logs[1] == (["call"] * WARM_UP_CALLS + ["call", "timed"] * CALLS) * 4
    for rounds in found:
        for times in rounds:
            expected = {"device_time": 2e-6, "busy_time": 2e-6, "communication": 1e-6, "compute": 2e-6, "both": 1e-6}
            assert {name: times[name] for name in expected} == {
                name: pytest.approx([seconds] * CALLS) for name, seconds in expected.items()
            }
            assert [one["name"] for one in times["records"]] == ["nccl", "gemm"]


def test_a_missing_rank_ends_the_wait(tmp_path: Path) -> None:
    barrier = HostBarrier(tmp_path / "barrier", 1, 2, seconds=0.05)
    with pytest.raises(TimeoutError, match=r"ranks \[0\]"):
        barrier.wait()


def test_the_routing_decides_what_must_be_sent() -> None:
    block = BLOCKS["moe_parallel"]
    assert block.least_sent is not None
    sizes = {"tokens": 4, "width": 2, "hidden": 2, "experts": 4, "top_k": 1, "ranks": 2}
    router = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.float32)  # experts 2 and 3 are the second rank's
    here, there = np.array([[1, 0], [0, 1]], np.float32), np.array([[-1, 0], [0, 1]], np.float32)
    case = Case("moe_parallel", "x", sizes, "bfloat16", "fwd")
    row = 2 * 2
    assert block.least_sent(case, 0, {"x": here, "router": router}) == 0
    assert block.least_sent(case, 0, {"x": there, "router": router}) == 2 * row
    assert block.least_sent(case, 1, {"x": there, "router": router}) == 2 * row


def test_bfloat16_bits_become_floats() -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16).view(np.int16)
    assert rank_measurement.as_float32(bits, "bfloat16").tolist() == [1.0, -2.0]
    assert rank_measurement.max_or_nan([1.0, 2.0]) == 2.0
    assert np.isnan(rank_measurement.max_or_nan([1.0, float("nan")]))
