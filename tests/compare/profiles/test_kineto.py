"""Traces of torch.profiler: the events of a training step on a GPU, written here in Kineto's format."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from kineto_events import kernel, span, trace

from xlafuse.compare.graph.join.kernel_records import MEMCPY, MEMSET
from xlafuse.compare.profiles import chrome_trace, files, kineto
from xlafuse.compare.profiles.model import ProfileError
from xlafuse.compare.profiles.steps import profiled_steps


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


EVENTS = STEP["traceEvents"]
REST = {key: value for key, value in STEP.items() if key != "traceEvents"}
METADATA = {f"key {number}": "{" * 50 for number in range(3000)}


@pytest.mark.parametrize("data", [
    {"metadata": METADATA, "displayTimeUnit": "ms", **REST, "traceEvents": EVENTS},
    {"traceEvents": EVENTS, "displayTimeUnit": "ms", **REST},
    {"cuda_driver_version": 13000, **dict(reversed(REST.items())), "with_stack": 1, "traceEvents": EVENTS},
    EVENTS,
], ids=["long metadata first", "events first", "another order", "a list"])
def test_a_trace_is_known_by_its_content(tmp_path: Path, data: Any) -> None:
    path = written(tmp_path, data)
    assert files.profile_files(path) == [path]
    (profile,) = files.read(path)
    assert profile.events == files.read(written(tmp_path, STEP, "plain.json"))[0].events
    assert profile.device == ("GPU 0" if data is EVENTS else "NVIDIA H200")


def zipped(**members: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return packed.getvalue()


@pytest.mark.parametrize("name, packed", [
    ("trace.txt", bytes), ("trace.json", lambda data: b"\xef\xbb\xbf" + data),
    ("trace.json", lambda data: data.decode().encode("utf-16")), ("trace", gzip.compress),
    ("trace.zip", lambda data: zipped(**{"a/trace.json": data})),
    ("trace.zip", lambda data: zipped(**{"trace.json.gz": gzip.compress(data), "notes.txt": b"x"})),
], ids=["another name", "byte order mark", "UTF-16", "gzip", "zip", "gzip in a zip"])
def test_a_trace_may_be_packed_and_have_any_name(tmp_path: Path, name: str, packed: Any) -> None:
    path = tmp_path / name
    path.write_bytes(packed(json.dumps(STEP).encode()))
    assert files.profile_files(path) == [path]
    assert len(files.read(path)[0].events) == 4


def test_a_zip_of_several_profiles_and_other_json_are_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (zipped(**{"0.json": b"{}", "1.json": b"{}"}), b"PK\x03\x04", b"[]", b'[{"a": 1}]', b"[" * 9999, b"{}"):
        path.write_bytes(data)
        assert files.profile_files(path) == []


def test_the_operation_around_the_launch_launched_a_kernel(tmp_path: Path) -> None:
    """One external id has several operations, and a thread says nothing about another one."""
    same = {"External id": 5}
    data = trace(
        span("cpu_op", "aten::to", 1000, 100, **same), span("cpu_op", "aten::copy_", 1000, 40, **same),
        span("cpu_op", "aten::detach", 1050, 10, **same), span("cpu_op", "aten::mul", 1200, 20, **same),
        {**span("cpu_op", "other::op", 900, 900, **same), "tid": 8},
        *(span("cuda_runtime", "cudaMemcpyAsync", at, 5, correlation=at, **same) for at in (1001, 1080, 1205, 1300)),
        *(span("gpu_memcpy", "Memcpy HtoD", at + 300, 5, device=0, correlation=at, **same)
          for at in (1001, 1080, 1205, 1300)),
    )
    (profile,) = kineto.read(written(tmp_path, data))
    assert [event.host_op for event in profile.events] == ["aten::copy_", "aten::to", "aten::mul", ""]


def test_a_launch_has_the_ranges_and_operations_around_it(tmp_path: Path) -> None:
    launches = (1012, 1030, 1210)
    data = trace(
        span("user_annotation", "ProfilerStep#3", 1000, 500),
        span("user_annotation", "Optimizer.step#AdamW.step", 1005, 50),
        span("cpu_op", "aten::_foreach_norm", 1010, 10), span("cpu_op", "aten::zeros", 1011, 5),
        {**span("user_annotation", "elsewhere", 1000, 500), "tid": 8},
        *(span("cuda_runtime", "cudaLaunchKernel", at, 1, correlation=at) for at in launches),
        *(kernel("k", at + 20, 3, at) for at in launches),
    )
    (profile,) = kineto.read(written(tmp_path, data))
    step = "Optimizer.step#AdamW.step"
    assert [event.host_path for event in profile.events] == [(step, "aten::_foreach_norm", "aten::zeros"), (step,), ()]
    assert [event.host_op for event in profile.events] == ["aten::zeros", "", ""]


def test_an_external_id_tells_the_operation_only_of_an_unknown_launch(tmp_path: Path) -> None:
    operations = (("aten::mm", 1), ("aten::add", 2), ("aten::sub", 2), ("aten::neg", 7))
    data = trace(
        *(span("cpu_op", name, 10 * at, 5, **{"External id": number}) for at, (name, number) in enumerate(operations)),
        *(kernel(f"k{at}", 100 + at, 1, at, **{"External id": number}) for at, number in ((5, 1), (6, 2), (7, 7))),
    )
    (profile,) = kineto.read(written(tmp_path, data))
    assert [event.host_op for event in profile.events] == ["aten::mm", "", ""]  # the last one has its own correlation


def test_numbers_may_be_strings(tmp_path: Path) -> None:
    def as_text(event: dict[str, Any]) -> dict[str, Any]:
        args = {key: str(value) if isinstance(value, int) else value for key, value in event.get("args", {}).items()}
        return {**event, "args": args, **{key: str(event[key]) for key in ("ts", "dur", "pid", "tid") if key in event}}

    (plain,) = kineto.read(written(tmp_path, STEP))
    (text,) = kineto.read(written(tmp_path, {**STEP, "traceEvents": list(map(as_text, EVENTS))}))
    assert (text.events, text.steps) == (plain.events, plain.steps)


def test_the_first_versions_of_the_format_are_read(tmp_path: Path) -> None:
    names = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "cuda_driver": "Runtime", "kernel": "Kernel",
             "gpu_memcpy": "Memcpy", "gpu_memset": "Memset", "user_annotation": "Operator"}
    old = [{**event, "cat": names.get(event.get("cat", ""), "")} for event in EVENTS]
    (plain,) = kineto.read(written(tmp_path, STEP))
    (found,) = kineto.read(written(tmp_path, {**STEP, "traceEvents": old}))
    assert (found.events, found.steps) == (plain.events, plain.steps)


def test_a_time_since_1970_leaves_durations_exact(tmp_path: Path) -> None:
    (profile,) = kineto.read(written(tmp_path, trace(kernel("k", 1790857026000000.6, 1.203, 1))))
    assert profile.events[0].seconds * 1e6 == pytest.approx(1.203, abs=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_off_gives_the_events_before_that(tmp_path: Path, packed: bool) -> None:
    data = json.dumps(trace(*(kernel(f"k{at:032x}", at, 1, at) for at in range(2000)))).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(data)[:-1000] if packed else data[: len(data) // 2])
    (profile,) = files.read(path)
    assert 100 < len(profile.events) < 2000
    assert [event.name for event in profile.events] == [f"k{at:032x}" for at in range(len(profile.events))]
    assert profile.notes[0].endswith("steps may lack kernels")


def test_an_event_that_is_no_json_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps(trace(kernel("one", 1, 2, 1), kernel("two", 4, 2, 1), kernel("three", 7, 2, 1)))
    path.write_text(text.replace('"ts": 4', '"ts": nan').replace('"three"', r'"C:\Users\x"'))
    (profile,) = kineto.read(path)
    assert ([event.name for event in profile.events], profile.skipped) == (["one", r"C:\Users\x"], 1)


def test_work_of_a_gpu_that_no_argument_names(tmp_path: Path) -> None:
    bare = {**kernel("k", 1, 2, 1), "args": {}}
    peer = span("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 5, 1, inDevice=1, fromDevice=0, toDevice=1)
    (only,) = kineto.read(written(tmp_path, trace(bare)))
    assert (only.device, only.gpu) == ("NVIDIA H200", 0)  # the process sees no other one
    found = kineto.read(written(tmp_path, [bare, peer, kernel("k", 1, 2, 1)]))
    assert [(profile.device, profile.gpu) for profile in found] == [("GPU 0", 0), ("GPU 1", 1), ("GPU ?", None)]


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
    kernel("k", 10**400, 1, 1), kernel("k", True, 1, 1), kernel("k", "1e999", 1, 1),
    {key: value for key, value in kernel("k", 1, 1, 1).items() if key != "dur"},
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
    (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12], "damaged gzip file"),
    (b'{"traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "/device:GPU:0"}}]}', "xplane.pb beside"),
    (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}]}', "its events: 1 cpu_op"),
    (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]}', "1 could not be read"),
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
    monkeypatch.undo()
    monkeypatch.setattr(chrome_trace, "MOST_CHARACTERS", 1 << 17)
    path.write_bytes(b'{"a": "' + bytes(3 << 20) + b'", "traceEvents": []}')
    with pytest.raises(ProfileError, match="a value of more than"):
        kineto.read(path)


def test_the_hosts_waits_have_their_operation(tmp_path: Path) -> None:
    profile, = kineto.read(written(tmp_path, trace(
        kernel("a", 0, 10, 1),
        span("cpu_op", "aten::item", 5, 20), span("cpu_op", "aten::_local_scalar_dense", 6, 18),
        span("cuda_runtime", "cudaStreamSynchronize", 7, 15, correlation=2),
        span("cuda_runtime", "cudaDeviceSynchronize", 40, 5, correlation=3),
        span("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 60, 5),
        span("cpu_op", "backend_compile (dynamo_timed)", 80, 5),
    )))
    assert [(wait.kind, wait.name.partition("#")[0]) for wait in profile.waits] == [
        ("synchronisation", "aten::item"), ("synchronisation", "cudaDeviceSynchronize"),
        ("input", "enumerate(DataLoader)"), ("compile", "backend_compile (dynamo_timed)"),
    ]
    assert [round((wait.end - wait.start) * 1e6) for wait in profile.waits] == [15, 5, 5, 5]
