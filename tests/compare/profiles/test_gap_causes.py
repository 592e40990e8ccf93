"""Causes of the gaps of a step: waits of the host, slow launches, or neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import xlafuse
from kineto_events import kernel, span, trace

from xlafuse.compare.profiles.gap_causes import Cause, gap_causes
from xlafuse.compare.profiles.model import DeviceEvent, HostWait
from xlafuse.compare.profiles.steps import gaps


def step(*launched: float) -> list[DeviceEvent]:
    """Return kernels of 1 ms, each of which begins 4 ms after the one before; launched: by the host, in ms."""
    return [DeviceEvent(f"k{n}", 4e-3 * n, 4e-3 * n + 1e-3, launched=at * 1e-3) for n, at in enumerate(launched)]


def causes(events: list[DeviceEvent], *waits: HostWait) -> dict[Cause, float]:
    launches = {number: Cause("launches", name) for number, name in ((1, "AdamW.step"), (2, "clip"), (3, "AdamW.step"))}
    found = gap_causes(gaps(events), waits, launches)
    return {cause: round(seconds * 1e3, 3) for cause, seconds in found.items()}


def test_a_late_launch_is_of_the_part_that_it_launches() -> None:
    assert causes(step(0, 3.9, 7.9, 11.9)) == {Cause("launches", "AdamW.step"): 6, Cause("launches", "clip"): 3}


def test_a_gap_in_which_the_host_was_in_time_is_the_devices() -> None:
    assert causes(step(0, 1.2, 3, 11.9)) == {Cause("device", ""): 6, Cause("launches", "AdamW.step"): 3}
    unknown = [DeviceEvent("a", 0, 1e-3), DeviceEvent("b", 4e-3, 5e-3)]
    assert causes(unknown) == {Cause("device", ""): 3}


def test_a_wait_that_ends_as_the_gap_begins_or_in_it_is_its_cause() -> None:
    ends = HostWait("synchronisation", "aten::item", 0.2e-3, 0.99e-3)
    assert causes(step(0, 3.9), ends) == {Cause("synchronisation", "aten::item"): 3}
    before = HostWait("synchronisation", "aten::item", 0.1e-3, 0.8e-3)
    assert causes(step(0, 3.9), before) == {Cause("launches", "AdamW.step"): 3}
    after = HostWait("synchronisation", "aten::item", 3.95e-3, 3.99e-3)
    assert causes(step(0, 3.9), after) == {Cause("launches", "AdamW.step"): 3}


@pytest.mark.parametrize("kind", ["input", "compile", "copy"])
def test_input_copies_and_compiles_come_before_a_synchronisation(kind: str) -> None:
    other = HostWait(kind, "why", 2e-3, 3e-3, "main (train.py:60)")  # type: ignore[arg-type]
    waits = HostWait("synchronisation", "aten::item", 0.5e-3, 1.1e-3), other
    assert causes(step(0, 3.9), *waits) == {Cause(kind, "why", "main (train.py:60)"): 3}


def test_the_captured_steps_causes_add_up_to_its_gaps_and_name_the_line_that_waits(gpt: Path) -> None:
    shown = json.loads(xlafuse("inspect", gpt, "--json").stdout)
    mean = sum(step["idle_us"] for step in shown["steps"]) / len(shown["steps"])
    assert sum(cause["us"] for cause in shown["gap_causes"]) == pytest.approx(mean)
    by_name = {cause["name"]: cause["us"] for cause in shown["gap_causes"]}
    assert by_name["aten::item"] == pytest.approx(907, abs=1)  # 1000 and 814 us before the step's first kernel
    output = " ".join(xlafuse("inspect", gpt).output.split())
    assert "aten::item, which waits for the device (train_gpt.py:30)" in output  # `loss.item()`
    assert "AdamW.step (train_gpt.py:30)" in output  # the only call of a method `step`


def captured(folder: Path, events: list[dict[str, Any]], *log: object) -> Any:
    """Return the causes that `inspect` shows of a capture with a trace and a log of TORCH_TRACE."""
    (folder / "profile").mkdir()
    (folder / "torch_trace").mkdir()
    (folder / "capture.json").write_text(json.dumps({"schema": "xlafuse.capture/1", "device": "NVIDIA H200"}))
    (folder / "profile" / "torch.json").write_text(json.dumps(trace(*events)))
    lines = (f"V1130 03:55:18.000000 7 torch/_x.py:1] {json.dumps(event)}\n" for event in log)
    (folder / "torch_trace" / "dedicated_log_torch_trace_x.log").write_text("".join(lines))
    return json.loads(xlafuse("inspect", folder, "--json").stdout)["gap_causes"]


def launched(*starts: float) -> list[dict[str, Any]]:
    """Return a step with launches at these times in us, each of a kernel that begins 10 us later and takes 10 us."""
    found = [span("user_annotation", "ProfilerStep#3", 0, 1e5)]
    for number, start in enumerate(starts):
        found += [
            span("cuda_runtime", "cudaLaunchKernel", start, 5, correlation=number),
            kernel(f"k{number}", start + 10, 10, number),
        ]
    return found


FILES = {"str": ["/opt/packages/compare/user/capture.py", 0]}, {"str": ["/home/me/train.py", 1]}, {
    "str": ["/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", 2]}
RECOMPILED = [
    *launched(0, 1000), span("cpu_op", "dynamo", 30, 950),
    span("user_annotation", "dynamo_data: compile_id=0/1", 31, 1),
    span("cpu_op", "_compile.compile_inner (dynamo_timed)", 35, 940),
]


def test_a_recompilation_has_the_line_whose_call_compiles(tmp_path: Path) -> None:
    stacks = [[(0, 323), (1, 29), (2, 1779), (1, 8)], [(0, 323), (1, 31), (2, 1779), (1, 8)]]
    starts = [
        {"dynamo_start": {"stack": [{"filename": file, "line": line} for file, line in stack]}, "frame_id": 0,
         "frame_compile_id": number}
        for number, stack in enumerate(stacks)
    ]
    (cause,) = captured(tmp_path, RECOMPILED, *FILES, *starts)
    assert (cause["kind"], cause["name"], cause["lines"]) == ("compile", "torch.compile 0/1", ["train.py:31"])
    assert cause["us"] == pytest.approx(990)


def test_without_a_log_or_frames_a_recompilation_has_no_line(tmp_path: Path) -> None:
    (cause,) = captured(tmp_path, RECOMPILED)
    assert (cause["name"], cause["lines"]) == ("torch.compile 0/1", [])


@pytest.mark.parametrize(("kind", "events"), [
    ("input", [span("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 40, 900)]),
    ("copy", [
        span("cpu_op", "aten::to", 40, 900), span("cuda_runtime", "cudaMemcpyAsync", 41, 500, correlation=9),
        span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 45, 2, device=0, stream=7, correlation=9),
        span("cuda_runtime", "cudaStreamSynchronize", 542, 300, correlation=10),
    ]),
    ("synchronisation", [
        span("cpu_op", "aten::item", 40, 900), span("cuda_runtime", "cudaMemcpyAsync", 41, 500, correlation=9),
        span("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 45, 2, device=0, stream=7, correlation=9),
        span("cuda_runtime", "cudaStreamSynchronize", 542, 300, correlation=10),
    ]),
    ("launches", []),
])
def test_frames_of_a_profile_name_the_function_that_delays_the_device(
    tmp_path: Path, kind: str, events: list[dict[str, Any]]
) -> None:
    frames = [
        span("python_function", "train.py(12): main", 0, 5000),
        span("python_function", "contextlib.py(141): __exit__", 39, 4000),
        span("python_function", "torch/utils/data/dataloader.py(733): __next__", 39.5, 3000),
    ]
    causes = captured(tmp_path, [*launched(0, 1000), *events, *frames])
    longest = max(causes, key=lambda cause: cause["us"])
    assert (longest["kind"], longest["lines"]) == (kind, ["in main (train.py:12)"])
