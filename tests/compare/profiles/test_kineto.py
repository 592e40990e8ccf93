"""Traces of torch.profiler: the events of a training step on a GPU, written here in Kineto's format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from compare.graph.join.kernel_records import MEMCPY, MEMSET
from compare.profiles import files, kineto
from compare.profiles.model import ProfileError
from compare.profiles.steps import profiled_steps


def span(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": duration, "args": args}


def kernel(name: str, start: float, duration: float, correlation: int, device: int = 0, **args: Any) -> dict[str, Any]:
    return span(
        "kernel", name, start, duration,
        **{"device": device, "stream": 7, "correlation": correlation, "grid": [4, 1, 1], "block": [128, 1, 1], **args},
    )


def trace(*events: Any, **top: Any) -> dict[str, Any]:
    return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], **top,
            "traceEvents": list(events)}


def written(folder: Path, data: Any, name: str = "trace.json") -> Path:
    path = folder / name
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


STEP = trace(
    span("user_annotation", "ProfilerStep#3", 1000, 100),
    span("cpu_op", "aten::mm", 1005, 20, **{"External id": 12}),
    span("cuda_runtime", "cudaLaunchKernel", 1010, 5, correlation=1),
    span("cuda_driver", "cuLaunchKernelEx", 1040, 5, correlation=2),
    kernel("nvjet_tst_64x8", 1050.5, 30, 1, **{"External id": 12}),
    kernel("triton_poi_fused_add_0", 1090, 10, 2),
    span("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1101, 2, device=0, stream=7, correlation=3),
    span("gpu_memset", "Memset (Device)", 1104, 1, device=0, stream=7, correlation=4),
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "ts": 1010, "pid": 1, "tid": 1},
    distributedInfo={"backend": "nccl", "rank": 2, "world_size": 4},
)


def test_a_trace_with_stacks_names_the_function_that_launched_a_kernel(tmp_path: Path) -> None:
    data = trace(
        span("python_function", "train.py(40): main", 1000, 500),
        span("python_function", "train.py(12): step", 1010, 90),
        span("python_function", "torch/optim/adam.py(230): step", 1020, 40),
        span("python_function", "<built-in method _fused_adam_ of type object at 0x7f>", 1025, 10),
        span("python_function", "/usr/lib/python3.12/site-packages/einops/einops.py(9): rearrange", 1200, 50),
        {**span("python_function", "other.py(1): run", 1000, 900), "tid": 8},
        *(span("cuda_runtime", "cudaLaunchKernel", at, 5, correlation=at) for at in (990, 1030, 1150, 1210, 1600)),
        *(kernel("adam", at + 20, 3, at) for at in (990, 1030, 1150, 1210, 1600)),
    )
    (profile,) = files.read(written(tmp_path, data))
    assert [event.host_function for event in profile.events] == [
        "", "step (train.py:12)", "main (train.py:40)", "main (train.py:40)", "",
    ]


@pytest.mark.parametrize("name", ["trace.json", "worker.pt.trace.json.gz"])
def test_kernels_have_times_launches_and_operations(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, STEP, name)
    assert files.profile_files(path) == files.profile_files(tmp_path) == [path]
    (profile,) = files.read(path)
    assert (profile.tool, profile.device, profile.rank, profile.skipped) == ("torch.profiler", "NVIDIA H200", 2, 0)
    gemm, add, copy, fill = profile.events
    assert [event.name for event in profile.events] == ["nvjet_tst_64x8", "triton_poi_fused_add_0", MEMCPY, MEMSET]
    assert gemm.seconds == pytest.approx(30e-6)
    assert (gemm.host_op, gemm.grid) == ("aten::mm", (4, 1, 1))
    assert gemm.launched == pytest.approx(1010e-6)
    assert (add.host_op, copy.launched, fill.grid) == ("", None, None)
    assert [step.name for step in profile.steps] == ["step 3"]


def test_an_event_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    data = trace(
        span("user_annotation", "ProfilerStep#3", 1000, 100), span("user_annotation", "ProfilerStep#4", 1100, 100),
        span("cuda_runtime", "cudaLaunchKernel", 990, 1, correlation=1),
        span("cuda_runtime", "cudaLaunchKernel", 1090, 1, correlation=2),
        span("cuda_runtime", "cudaLaunchKernel", 1110, 1, correlation=3),
        kernel("before", 1001, 5, 1), kernel("first", 1150, 5, 2), kernel("second", 1160, 5, 3),
    )
    (profile,) = kineto.read(written(tmp_path, data))
    steps = profiled_steps(profile)
    assert [(step.name, [event.name for event in step.events]) for step in steps] == [
        ("step 3", ["first"]), ("step 4", ["second"]),
    ]


def test_each_device_is_a_profile(tmp_path: Path) -> None:
    data = trace(kernel("a", 1, 2, 1), kernel("b", 1, 2, 2, device=1))
    one, other = kineto.read(written(tmp_path, data))
    assert (one.device, one.events[0].name, other.device, other.events[0].name) == ("NVIDIA H200", "a", "GPU 1", "b")


@pytest.mark.parametrize("event", [
    kernel("k", "now", 2, 1), kernel("k", 1, -2, 1), kernel("", 1, 2, 1), kernel("k", float("nan"), 1, 1),
    kernel("k", 10**400, 1, 1), kernel("k", True, 1, 1),
])
def test_events_that_cannot_be_read_are_counted(tmp_path: Path, event: dict[str, Any]) -> None:
    (profile,) = kineto.read(written(tmp_path, trace(event, kernel("good", 1, 2, 1), 7, None, {"ph": "X"})))
    assert [found.name for found in profile.events] == ["good"]
    assert profile.skipped == 1


@pytest.mark.parametrize("args", [None, [], "x", {"device": [], "correlation": "1", "grid": "4", "External id": {}}])
def test_wrong_arguments_of_an_event_are_unknown(tmp_path: Path, args: Any) -> None:
    (profile,) = kineto.read(written(tmp_path, trace({**kernel("k", 1, 2, 1), "args": args})))
    (event,) = profile.events
    assert (event.grid, event.host_op, event.launched) == (None, "", None)


@pytest.mark.parametrize("text, message", [
    (b"", "no trace of torch.profiler can be read"),
    (b"{", "no trace of torch.profiler can be read"),
    (b"[" * 100_000, "no trace of torch.profiler can be read"),
    (b'{"traceEvents": 3}', "no list of `traceEvents`"),
    (b'{"traceEvents": []}', "no kernels of a GPU in this trace"),
    (b"\x1f\x8b\x08\x00garbage", "damaged gzip file"),
    (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-6], "damaged gzip file"),
])
def test_other_files_are_refused_with_the_reason(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text)
    with pytest.raises(ProfileError, match=message):
        kineto.read(path)


def test_a_large_file_and_many_events_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, STEP, "trace.json.gz")
    monkeypatch.setattr(kineto, "MOST_EVENTS", 3)
    with pytest.raises(ProfileError, match="more than 3 events of one GPU"):
        kineto.read(path)
    monkeypatch.setattr(kineto, "MOST_BYTES", 100)
    with pytest.raises(ProfileError, match="more than 0 MiB"):
        kineto.read(path)
