"""The measuring protocol inside a worker, on a pretended device: warm-up, input sets, modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins

from xlafuse.compare.measure import warm_up
from xlafuse.compare.measure.clock import DeviceRecord, Sample
from xlafuse.compare.measure.measurement import MeasuredProgram, WrongResult
from xlafuse.compare.measure.worker_backend import Arrays, Extent, Program
from xlafuse.compare.spec.case import Case

CASE = Case("softmax", "odd", {"rows": 2, "columns": 3}, "float32", "fwd")
TRAIN = Case("softmax", "odd", {"rows": 2, "columns": 3}, "float32", "train")
SCALES = {name: {"rms": 1.0, "largest": 1.0, "independent_error": 0.0} for name in ("y", "d_x")}


class Backend:
    """y = x + 1, d_x = 3 dy; the input set in folder n has x = n and dy = 10 n. `log` lists poisons and flushes."""

    device = name = "pretended"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.reserved = 0  # bytes of L2 that a flush gives back
        self.variants: dict[str, Program | Exception] = {}

    def inputs(self, folder: Path, case: Case) -> Arrays:
        return {"x": np.full(2, float(folder.name))}

    def cotangents(self, folder: Path, case: Case) -> Arrays:
        return {"y": np.full(2, 10 * float(folder.name))}

    def changed_inputs(self, inputs: Arrays, folder: Path, case: Case) -> list[str]:
        return []

    def reference(self, folder: Path, role: str, name: str) -> Any:
        return np.full(2, float(folder.name) + 1 if role == "output" else 30 * float(folder.name))

    def largest_difference(self, values: Any, reference: Any) -> float:
        return float(np.abs(values - reference).max())

    def poisoned_allocations(self, program: Program) -> AbstractContextManager[Any]:
        return nullcontext()

    def poison(self, program: Program, phase: str) -> list[Extent]:
        self.log.append(f"poison {phase}")
        return []

    def was_poisoned(self, poisoned: list[Extent], arrays: Arrays) -> bool:
        return True

    @contextmanager
    def in_mode(self, program: Program, mode: str, inputs: Arrays, cotangents: Arrays) -> Iterator[Program | None]:
        found = self.variants.get(mode)
        if isinstance(found, Exception):
            raise found
        yield found

    def flush_l2(self) -> int:
        self.log.append("flush")
        return self.reserved

    def synchronize(self, results: Any = None) -> None: ...

    def peak_memory(self, program: Program, phase: str, call: Callable[[], Any]) -> Any: ...

    def late_results(self, program: Program, phase: str, call: Callable[[], Arrays]) -> list[str]:
        return []


class Clock:
    """Each call takes the next of `times`; the last one repeats."""

    name = "pretended"

    def __init__(self, times: Sequence[float]) -> None:
        self._times, self.calls, self.started, self.stopped = times, 0, 0, 0

    def start(self) -> None:
        self.started += 1
        self._samples: list[Sample] = []

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
        time = self._times[min(self.calls, len(self._times) - 1)]
        self.calls += 1
        self._samples.append(Sample(time, time, (DeviceRecord("k", 0.0, time),)))
        return call()

    def collect(self, *, going_on: bool = False) -> list[Sample]:
        self.stopped += not going_on
        samples, self._samples = self._samples, []
        return samples


def one_more(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] + 1}


def program(forward: Callable[[Arrays], Arrays] = one_more, train: bool = False) -> Program:
    def backward(saved: Any, cotangents: Arrays) -> Arrays:
        return {"x": 3 * cotangents["y"]}

    return Program(lambda inputs: (forward(inputs), None), backward if train else None, 0.0, None)


def measured_program(made: Program, backend: Backend | None = None) -> MeasuredProgram:
    case = TRAIN if made.backward else CASE
    return MeasuredProgram(backend or Backend(), made, case, [Path("0"), Path("1")], [SCALES, SCALES])


@pytest.fixture(autouse=True)
def _single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_FIRST_BATCH_SECONDS", 0.0)  # a batch is then one call


@pytest.mark.parametrize(
    ("times", "warm_up_calls"),
    [([9.0, 4.0, 3.0, 2.0, 1.0], 6), ([1.0], 2)],  # the sixth call takes the fifth's time
)
def test_the_warm_up_ends_when_successive_medians_agree(times: list[float], warm_up_calls: int) -> None:
    clock = Clock(times)
    measured = measured_program(program()).measure(clock, 0.0)
    assert measured["warm_up"]["settled"] and measured["warm_up"]["seconds"] > 0
    assert measured["phases"]["forward"]["device_time"] == [1.0] * 4
    assert clock.calls == warm_up_calls + 4
    assert clock.started == clock.stopped == 1


def test_a_warm_up_that_does_not_settle_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "MOST_SECONDS", 0.0)
    measured = measured_program(program()).measure(Clock([4.0, 3.0, 2.0, 1.0]), 0.0)
    assert measured["warm_up"]["settled"] is False


def test_a_clock_without_kernels_knows_only_whole_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from xlafuse.compare.workers.pytorch import worker

    class Event:
        times = iter(range(1000))

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(self.times)

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(worker.torch.cuda, "Event", Event)
    measured = measured_program(program(train=True)).measure(worker.EventClock(), 0.0)
    assert measured["warm_up"]["settled"]
    unseen = {"busy_time": None, "launches": None, "records": None}
    assert measured["phases"] == dict.fromkeys(
        ("forward", "backward"), {"device_time": [1.0] * 4, "poisoned": True} | unseen
    )


def test_a_failure_while_timing_stops_the_clock() -> None:
    calls = 0

    def exhausted(inputs: Arrays) -> Arrays:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return one_more(inputs)

    clock = Clock([1.0])
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        measured_program(program(exhausted)).measure(clock, 0.0)
    assert clock.started == clock.stopped == 1


def test_a_timed_call_without_device_work_fails() -> None:
    clock = Clock([1.0])
    clock.collect = lambda *, going_on=False: [Sample(0.0, 0.0, ())]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the pretended clock saw no device work"):
        measured_program(program()).measure(clock, 0.0)


def test_gaps_between_launches_need_not_settle() -> None:
    """Gaps come from the host, and differ from call to call for ever."""
    clock = Clock([1.0])
    waits = iter(range(1, 100))
    collect = clock.collect

    def collect_late(*, going_on: bool = False) -> list[Sample]:
        samples = collect(going_on=going_on)
        return [replace(sample, device_time=sample.device_time + next(waits)) for sample in samples]

    clock.collect = collect_late  # type: ignore[method-assign]
    assert measured_program(program()).measure(clock, 0.0)["warm_up"]["settled"]
    assert clock.calls == 2 + 4


def test_warm_up_times_whole_calls() -> None:
    """A short forward and a long backward phase are a steady state."""
    clock = Clock([1.0, 5.0] * 50)
    measured = measured_program(program(train=True)).measure(clock, 0.0)
    assert measured["warm_up"]["settled"]
    assert measured["phases"]["forward"]["device_time"] == [1.0] * 4
    assert measured["phases"]["backward"]["device_time"] == [5.0] * 4


def test_the_other_input_set_catches_a_cached_result() -> None:
    kept: dict[str, Any] = {}

    def cached(inputs: Arrays) -> Arrays:
        return {"y": kept.setdefault("y", inputs["x"] + 1)}

    remembers = measured_program(program(cached))
    remembers.measure(Clock([1.0]), 0.0, input_set=0)
    with pytest.raises(WrongResult, match="timed call: y"):
        remembers.measure(Clock([1.0]), 0.0, input_set=1)
    measured_program(program(train=True)).measure(Clock([1.0]), 0.0, input_set=3)  # the sets alternate


def test_a_cold_call_is_poisoned_and_flushed_and_a_warm_one_is_neither() -> None:
    backend, cold_call = Backend(), ["poison forward", "flush", "poison backward", "flush"]
    measured_program(program(train=True), backend).call_as_timed()  # the call before timing
    assert backend.log == cold_call
    cold = measured_program(program(train=True), backend).measure(Clock([1.0]), 0.0)
    assert backend.log[4:9] == ["flush", *cold_call]
    assert cold["phases"]["backward"]["poisoned"]
    backend.log.clear()
    warm = measured_program(program(train=True), backend).measure_mode("warm", Clock([1.0]), 0.0)
    assert warm and backend.log == ["flush"] and not warm["phases"]["forward"]["poisoned"]  # after the last call
    with pytest.raises(WrongResult, match="timed call: y"):
        measured_program(program(lambda inputs: {"y": inputs["x"]})).measure_mode("warm", Clock([1.0]), 0.0)


def test_reserved_l2_is_given_back_and_belongs_to_the_program_that_reserved_it() -> None:
    class Reserving(Backend):
        def flush_l2(self) -> int:
            reserved, self.reserved = super().flush_l2(), 0
            return reserved

    backend = Reserving()

    def keeps(inputs: Arrays) -> Arrays:
        backend.reserved = 4096
        return one_more(inputs)

    keeping, sound = measured_program(program(keeps), backend), measured_program(program(), backend)
    assert keeping.measure_round(Clock([1.0]), 0.0, False, 0)["persisting_l2"] == 4096
    assert backend.reserved == 0
    keeping.call_as_timed()
    assert sound.measure_round(Clock([1.0]), 0.0, False, 0)["persisting_l2"] == 0
    keeping.measure_mode("warm", Clock([1.0]), 0.0)
    assert backend.reserved == 0


def test_a_wrong_result_is_not_hidden_by_a_larger_tolerated_error() -> None:
    """Error and tolerance are relative to each set's own reference."""
    errs = program(lambda inputs: {"y": inputs["x"] + 1 + np.where(inputs["x"] == 0, 1.0e-3, 1.05e-3)})
    scales = [{"y": {"rms": 1.0, "largest": 1.0, "independent_error": twice / 2}} for twice in (0.95e-3, 1.2e-3)]
    for order in ([0, 1], [1, 0]):
        folders = [Path(str(number)) for number in order]
        (check,) = MeasuredProgram(Backend(), errs, CASE, folders, [scales[number] for number in order]).check()
        assert not check.passes and check.error == pytest.approx(1.0e-3)


class Calling(Backend):
    def late_results(self, program: Program, phase: str, call: Callable[[], Any]) -> list[str]:
        call()
        return []


def test_a_gradient_that_a_program_sums_in_its_dtype_has_its_own_tolerance() -> None:
    case = replace(TRAIN, dtype="bfloat16")
    scales = SCALES | {"d_x": SCALES["d_x"] | {"rounded_error": 0.25}}
    folders = [Path("0"), Path("1")]
    off = program(train=True)
    off.backward = lambda saved, cotangents: {"x": 3 * cotangents["y"] + 0.5}
    of_everybody = MeasuredProgram(Calling(), off, case, folders, [scales, scales]).check()
    own = MeasuredProgram(Calling(), off, case, folders, [scales, scales], ("x",)).check()
    assert [(c.name, c.passes, c.sums) for c in of_everybody] == [("y", True, None), ("d_x", False, None)]
    assert [(c.name, c.passes, c.sums) for c in own] == [("y", True, None), ("d_x", True, "bfloat16")]
    assert to_builtins(own[1]) == {"name": "d_x", "error": 0.5, "tolerance": 0.5, "sums": "bfloat16"}
    assert "sums" not in to_builtins(own[0])


def test_each_row_of_a_scattered_gradient_has_its_own_tolerance(tmp_path: Path) -> None:
    class ByRow(Calling):
        def reference(self, folder: Path, role: str, name: str) -> Any:
            return np.ones(2) if role == "output" else np.array([[100.0, 100.0], [1.0, 1.0]])

        def largest_differences_by_row(self, values: Any, reference: Any) -> list[float]:
            return [float(row) for row in np.abs(values - reference).max(-1)]

    case = replace(TRAIN, dtype="bfloat16")
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "tolerance.x.npy", np.array([8.0, 0.5]))
    for error, passes in ((np.array([[7.0, 0.0], [0.25, 0.0]]), True), (np.array([[0.0, 0.0], [0.0, 1.0]]), False)):
        made = program(lambda inputs: {"y": np.ones(2)}, train=True)
        made.backward = lambda saved, cotangents, error=error: {
            "x": np.array([[100.0, 100.0], [1.0, 1.0]]) + error
        }
        folders = [tmp_path / "0", tmp_path / "1"]
        check = MeasuredProgram(ByRow(), made, case, folders, [SCALES, SCALES], ("x",)).check()[1]
        assert (check.passes, check.sums) == (passes, "bfloat16")


def test_a_mode_runs_its_own_program() -> None:
    backend = Backend()
    backend.variants["graph"] = replayed = program()
    replayed.command_buffers = {"forward": (3, 3)}
    poisoned: list[str] = []

    def poison(phase: str) -> list[Extent]:
        poisoned.append(phase)
        return []

    replayed.poison = poison
    fails = program(lambda inputs: pytest.fail("the main program ran"))
    measured = measured_program(fails, backend).measure_mode("graph", Clock([1.0]), 0.0)
    assert measured and measured["command_buffers"] == {"forward": (3, 3)}
    assert set(poisoned) == {"forward"} and set(backend.log) == {"flush"}
    assert measured_program(fails, backend).measure_mode("no-graph", Clock([1.0]), 0.0) is None  # the main mode already
    backend.variants["graph"] = program(lambda inputs: {"y": inputs["x"]})
    with pytest.raises(WrongResult, match="timed call: y"):
        measured_program(fails, backend).measure_mode("graph", Clock([1.0]), 0.0)


def test_backward_is_called_where_forward_s_peak_is_not_measured() -> None:
    class Refusing(Backend):
        def peak_memory(self, program: Program, phase: str, call: Callable[[], Any]) -> Any:
            if phase == "backward":
                call()
            return phase

    peaks = measured_program(program(train=True), Refusing()).peak_memory()
    assert peaks == {"forward": "forward", "backward": "backward"}
