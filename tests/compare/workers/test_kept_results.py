"""A user's function that keeps results is caught, or has to compute in each timed call.

A CPU computes, and a pretended clock times.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.base.usage import UsageError  # noqa: E402
from xlafuse.compare.measure.clock import DeviceRecord, Sample  # noqa: E402
from xlafuse.compare.measure.measurement import MeasuredProgram, WrongResult  # noqa: E402
from xlafuse.compare.measure.worker_backend import Arrays, Program  # noqa: E402
from xlafuse.compare.numerics import reference  # noqa: E402
from xlafuse.compare.plan.own_function import own_function  # noqa: E402
from xlafuse.compare.spec.blocks import BLOCKS  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402
from xlafuse.compare.workers.pytorch.worker import TorchBackend  # noqa: E402

CASE = Case("softmax", "odd", {"rows": 7, "columns": 257}, "float32", "fwd")
FUNCTIONS = """
import torch

kept, computed = {}, []

def right(x):
    computed.append(x.detach().clone())
    return torch.softmax(x, -1)

def once_for(key, x):
    if key not in kept:
        kept[key] = right(x)
    return kept[key].clone()

def by_address(x):
    return once_for(x.data_ptr(), x)

def by_object(x):
    return once_for(id(x), x)

def at_the_first_call(x):
    return once_for("first", x)

def by_version(x):
    return once_for((x.data_ptr(), x._version), x)

def by_some_numbers(x):
    return once_for(tuple(x.flatten()[:8].tolist()), x)

def by_all_numbers(x):
    return once_for(x.detach().numpy().tobytes(), x)

def of_the_call_before(x):
    y, kept["before"] = kept.get("before"), right(x)
    return kept["before"] if y is None else y

class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args = [right(a.as_subclass(torch.Tensor)) if isinstance(a, Later) else a for a in args]
        return function(*args, **(kwargs or {}))

def when_read(x):
    return x.detach().as_subclass(Later)
"""


class Clock:
    """Every call takes a second."""

    name = "pretended"

    def start(self) -> None:
        self._samples: list[Sample] = []

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
        self._samples.append(Sample(1.0, 1.0, (DeviceRecord("k", 0.0, 1.0),)))
        return call()

    def collect(self, *, going_on: bool = False) -> list[Sample]:
        samples, self._samples = self._samples, []
        return samples


@pytest.fixture(autouse=True)
def _pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out what needs a GPU, and let each test import a module of its own."""
    monkeypatch.setattr(TorchBackend, "poison", lambda *_: [])
    monkeypatch.setattr(TorchBackend, "was_poisoned", lambda *_: True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    sys.modules.pop("mine", None)
    yield
    sys.modules.pop("mine", None)


def subject_of(function: str, folder: Path, case: Case = CASE) -> MeasuredProgram:
    folders = [folder / "0", folder / "1"]
    scales = [reference.produce(case, seed, path) for seed, path in enumerate(folders)]
    backend = TorchBackend()
    backend.flush_l2 = lambda: 0  # type: ignore[assignment]
    row = own_function(BLOCKS[case.block], f"mine.py:{function}", None, folder).row()
    return MeasuredProgram(backend, backend.build(case, row, folders[0], folder / "dumps"), case, folders, scales)


def computed() -> list[Any]:
    found: list[Any] = sys.modules["mine"].computed
    return found


@pytest.mark.parametrize("function", ["by_address", "by_object", "at_the_first_call", "of_the_call_before"])
def test_a_kept_result_is_wrong_in_the_check_and_in_timed_calls(tmp_path: Path, function: str) -> None:
    subject = subject_of(function, tmp_path)
    assert [check.name for check in subject.check() if not check.passes] == ["y"]
    with pytest.raises(WrongResult, match="timed call: y"):
        subject.measure(Clock(), 0.0)


@pytest.mark.parametrize("function", ["by_version", "by_some_numbers", "by_all_numbers"])
def test_a_function_that_recognises_its_inputs_computes_in_each_timed_call(tmp_path: Path, function: str) -> None:
    subject = subject_of(function, tmp_path)
    assert all(check.passes for check in subject.check())
    calls = 0

    class Counting(Clock):
        def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
            nonlocal calls
            calls += 1
            return super().time(call, synchronize)

    before = len(computed())
    subject.measure(Counting(), 0.0)
    assert len(computed()) - before >= calls > 0

    subject.program.renew_inputs = None  # as of rows that are not a user's
    before, calls = len(computed()), 0
    subject.measure(Counting(), 0.0)
    assert len(computed()) - before < calls


def test_a_graph_that_holds_a_result_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was captured when the function had a result for these inputs, and a replay calls no Python."""

    @contextmanager
    def captured(
        backend: TorchBackend, program: Program, mode: str, inputs: Arrays, cotangents: Arrays
    ) -> Iterator[Program]:
        outputs, saved = program.forward(inputs)
        yield replace(program, forward=lambda _: ({"y": outputs["y"].clone()}, saved))

    monkeypatch.setattr(TorchBackend, "in_mode", captured)
    with pytest.raises(WrongResult, match="timed call: y"):
        subject_of("by_all_numbers", tmp_path).measure_mode("graph", Clock(), 0.0)


@pytest.mark.parametrize("direction", ["fwd", "train", "joint"])
def test_a_sound_function_passes_with_new_inputs_in_each_call(tmp_path: Path, direction: str) -> None:
    subject = subject_of("right", tmp_path, replace(CASE, direction=direction))
    assert all(check.passes for check in subject.check())
    first = len(computed())
    subject.measure(Clock(), 0.0)
    *timed, checked = (x.flatten() for x in computed()[first:])
    assert len(timed) > 4 and all(torch.equal(x.sort().values, timed[0].sort().values) for x in timed)
    assert len({x.numpy().tobytes() for x in (*timed, checked)}) == len(timed) + 1


def test_integers_stay_and_gradients_of_outputs_change(tmp_path: Path) -> None:
    case = Case("cross_entropy", "odd", {"tokens": 5, "classes": 7, "ignored_percent": 20}, "float32", "train")
    folder = tmp_path / "0"
    reference.produce(case, 0, folder)
    backend = TorchBackend()
    inputs, cotangents = backend.inputs(folder, case), backend.cotangents(folder, case)
    before = {name: x.detach().clone() for name, x in (inputs | cotangents).items()}
    version = inputs["labels"]._version
    backend._renew_inputs(folder, case, itertools.count(1))
    assert torch.equal(inputs["labels"], before["labels"]) and inputs["labels"]._version > version
    assert not torch.equal(inputs["logits"], before["logits"])
    assert torch.equal(cotangents["loss"], before["loss"])  # of one number there is no other order


def test_only_a_users_function_gets_new_inputs(tmp_path: Path) -> None:
    subject = subject_of("right", tmp_path)
    assert subject.program.renew_inputs is not None
    ours = subject.backend.build(CASE, BLOCKS["softmax"].implementation("eager"), tmp_path / "0", tmp_path / "dumps")
    assert ours.renew_inputs is None


def test_a_result_that_computes_its_values_later_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="returns y as a Later"):
        subject_of("when_read", tmp_path).check()
