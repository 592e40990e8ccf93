"""Timelines as Chrome trace events: valid, aligned, with the graph's names and an arrow from each launch."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from commands import xlafuse
from hypothesis import given
from hypothesis import strategies as st
from made_records import made_record
from msgspec import convert
from worker_programs import WorkerProgram

from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp
from xlafuse.compare.measure import timeline
from xlafuse.compare.measure.clock import LAUNCH, CallTrace, HostRecord, TracedRecord
from xlafuse.compare.record import run_folder
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.pool import WorkerPool

PRODUCT = Kernel(
    "extern_kernels.mm", "gemm", inputs=(Access("x", 400),), outputs=(Access("h", 100),), flops=2000.0,
    source_ops=(SourceOp("aten.mm", "mlp/up"),),
)
NORM = Kernel(
    "triton_red_fused_0", "reduction", runtime_name="triton_red_fused_0", inputs=(Access("h", 100),),
    outputs=(Access("y", 100),), source_ops=(SourceOp("aten.mean", "norm"), SourceOp("aten.mul", "norm/scale")),
)
GRAPH = FusionGraph(
    "inductor", "inductor", (PRODUCT, NORM),
    tuple(Buffer(name, (1,), "f32", size, "intermediate") for name, size in (("x", 400), ("h", 100), ("y", 100))),
)
FORWARD = CallTrace(
    returned=40e-6,
    host=(
        HostRecord("cudaMemsetAsync", 5e-6, 7e-6, 77, 1), HostRecord("cudaLaunchKernel", 8e-6, 12e-6, 77, 2),
        HostRecord("cuLaunchKernelEx", 20e-6, 23e-6, 77, 3),
    ),
    device=(
        TracedRecord("[memset]", 9e-6, 10e-6, None, 64, 7, 1),
        TracedRecord("nvjet_sm90_tst", 14e-6, 30e-6, (8, 1, 1), None, 7, 2),
        TracedRecord("triton_red_fused_0", 30e-6, 35e-6, (4, 1, 1), None, 7, 3),
    ),
)
BACKWARD = CallTrace(
    returned=10e-6,
    host=(HostRecord("cudaGraphLaunch", 2e-6, 6e-6, 99, 9),),
    device=tuple(TracedRecord(f"k{i}", (8 + i) * 1e-6, (11 + i) * 1e-6, (1, 1, 1), None, 7, 9) for i in range(3)),
)


def validate(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the document's events after checking the Trace Event Format."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    json.dumps(document, allow_nan=False)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    arrows: dict[int, dict[str, Any]] = {}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    last = -1.0
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["pid"] > 0 < event["tid"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert event["args"]
            continue
        assert event["pid"] in processes and (event["pid"], event["tid"]) in named
        assert event["ts"] >= last and event["ts"] >= 0  # sorted, from 0 on
        last = event["ts"]
        where = spans.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "X":
            end = round(event["ts"] + event["dur"], 3)
            assert event["dur"] >= 0 and isinstance(event["args"], dict) and event["cat"]
            # A viewer draws spans of one thread as nested, so they must be disjoint or contained.
            assert all(start <= event["ts"] and (until <= event["ts"] or end <= until) for start, until in where)
            where.append((event["ts"], end))
        else:
            assert event["ph"] in ("s", "f") and isinstance(event["id"], int)
            assert any(start <= event["ts"] <= until for start, until in where)  # it binds to a span
            if event["ph"] == "s":
                assert event["id"] not in arrows
                arrows[event["id"]] = event
            else:
                assert event["bp"] == "e" and arrows[event["id"]]["ts"] <= event["ts"]
                assert arrows.pop(event["id"])["pid"] == event["pid"]
    assert not arrows
    return events


def spans(events: list[dict[str, Any]], category: str) -> dict[str, dict[str, Any]]:
    return {e["name"]: e for e in events if e["ph"] == "X" and e["cat"] == category}


def test_events_have_the_graph_s_kernel_names() -> None:
    events = validate(timeline.of_call({"forward": FORWARD}, GRAPH, name="rmsnorm/inductor"))
    host = spans(events, "host")
    assert host["cudaMemsetAsync"]["ts"] == 0  # the first launch
    assert (host["cuLaunchKernelEx"]["ts"], host["cuLaunchKernelEx"]["dur"]) == (15, 3)
    kernels = spans(events, "kernel")
    product = kernels["extern_kernels.mm"]
    assert (product["ts"], product["dur"]) == (9, 16)
    assert product["args"] == {
        "runtime_name": "nvjet_sm90_tst", "stage": "mlp/up", "bytes_read": 400, "bytes_written": 100, "flops": 2000.0,
        "grid": (8, 1, 1), "stream": 7, "correlation": 2,
    }
    assert kernels["triton_red_fused_0"]["args"]["stage"] == "norm, norm/scale"
    (memset,) = spans(events, "gpu_memset").values()  # the library call's own: its bytes, not the product's
    assert memset["name"] == "extern_kernels.mm" and memset["args"]["bytes"] == 64
    assert "flops" not in memset["args"] and memset["args"]["runtime_name"] == "[memset]"
    phase = spans(events, "phase")["forward"]
    assert (phase["ts"], phase["dur"]) == (0, 35) and phase["args"]["host_before_first_launch_us"] == 5
    assert sum(e["ph"] == "s" for e in events) == 3
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"phases", "host thread 1", "stream 7"}


def test_helpers_of_an_eager_operation_have_none_of_its_bytes() -> None:
    operation = replace(PRODUCT, name="aten.mm", runtime_name="nvjet_sm90_tst", facts={"with": {"[memset]": 1}})
    norm = replace(NORM, name="aten.mean", runtime_name="triton_red_fused_0")
    graph = replace(GRAPH, compiler="eager", kernels=(operation, norm))
    events = validate(timeline.of_call({"forward": FORWARD}, graph, name="eager"))
    (memset,) = [event for event in events if event.get("cat") == "gpu_memset"]
    assert memset["name"] == "aten.mm" and "flops" not in memset["args"] and memset["args"]["bytes"] == 64
    assert spans(events, "kernel")["aten.mm"]["args"]["flops"] == 2000.0


def test_copies_within_a_gpu_and_between_two_are_no_kernels() -> None:
    copies = [
        TracedRecord(name, at * 1e-6, (at + 1) * 1e-6, None, 64, 7, 1)
        for at, name in enumerate(("[memcpy]", "[memcpy peer]"), 9)
    ]
    trace = replace(FORWARD, device=(*copies, *FORWARD.device[1:]))
    events = validate(timeline.of_call({"forward": trace}, None, name="x"))
    assert set(spans(events, "gpu_memcpy")) == {"[memcpy]", "[memcpy peer]"}
    assert set(spans(events, "kernel")) == {"nvjet_sm90_tst", "triton_red_fused_0"}


def test_backward_follows_forward_and_a_graph_launch_has_an_arrow_to_each_kernel() -> None:
    events = validate(timeline.of_call({"forward": FORWARD, "backward": BACKWARD}, None, name="x"))
    phases = spans(events, "phase")
    assert phases["backward"]["ts"] == phases["forward"]["ts"] + phases["forward"]["dur"] == 35
    launched = spans(events, "host")["cudaGraphLaunch"]
    assert launched["ts"] == 35
    assert sum(e["ph"] == "s" and e["tid"] == launched["tid"] for e in events) == 3
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["phases", "host thread 1", "host thread 2", "stream 7", "stream 7, row 2", "stream 7, row 3"]


def test_records_merge_as_processes_that_begin_together() -> None:
    one = timeline.of_call({"forward": FORWARD}, GRAPH, name="a")
    two = timeline.of_call({"forward": FORWARD, "backward": BACKWARD}, None, name="b")
    document = timeline.merge([one, two, one])
    events = validate(document)
    assert document["otherData"]["records"] == ["a", "b", "a"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "a", 2: "b", 3: "a"}
    assert {e["pid"] for e in events if e.get("cat") == "phase" and e["ts"] == 0} == {1, 2, 3}
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 3 + 6 + 3
    assert one["traceEvents"] == timeline.of_call({"forward": FORWARD}, GRAPH, name="a")["traceEvents"]  # untouched


times = st.tuples(st.integers(0, 400), st.integers(0, 60))


@given(
    st.lists(st.tuples(times, st.integers(1, 3), st.integers(0, 8)), max_size=15),
    st.lists(times, max_size=8),
    st.integers(0, 500),
)
def test_any_records_make_a_valid_trace(ran: list[Any], called: list[tuple[int, int]], returned: int) -> None:
    host, clear = [], 0
    for number, (gap, length) in enumerate(called):
        start, clear = clear + gap, clear + gap + length
        host.append(HostRecord("cuLaunchKernel", start * 1e-9, clear * 1e-9, 1, number))
    after = clear * 1e-9
    device = tuple(
        TracedRecord("k", after + start * 1e-9, after + (start + length) * 1e-9, (1, 1, 1), None, stream, correlation)
        for (start, length), stream, correlation in sorted(ran)
    )
    trace = CallTrace(returned * 1e-9, tuple(host), device)
    validate(timeline.of_call({"forward": trace, "backward": trace}, None, name="any"))
    assert convert(json.loads(json.dumps(asdict(trace))), CallTrace) == trace


def a_run(folder: Path) -> Path:
    case = BLOCKS["softmax"].cases("quick")[0]
    run_folder.create(folder, {"segments": []})
    for name, found in (("xla", {"file": "traces/xla.json.gz"}), ("inductor", {"file": "traces/inductor.json.gz"}),
                        ("triton", {"unavailable": "the torch worker died"}), ("eager", None)):
        run_folder.append(folder, made_record(case, name, name, "ok", trace=found))
        if found and "file" in found:
            document = timeline.of_call({"forward": FORWARD}, GRAPH, name=f"softmax/{name}")
            timeline.save(document, folder / found["file"])
    return folder


def export(*words: object) -> Any:
    return xlafuse("export", *words, "--to", "perfetto")


def test_a_runs_timelines_are_merged(tmp_path: Path) -> None:
    run, out = a_run(tmp_path / "run"), tmp_path / "made" / "both.json.gz"
    result = export(run, "-o", out)
    assert result.exit_code == 0 and "2 timelines; open it in https://ui.perfetto.dev" in result.output
    assert "triton: no timeline: the torch worker died" in result.output
    assert "eager: no timeline: the run was made without CUPTI" in result.output
    validate(timeline.load(out))
    assert timeline.load(out)["otherData"]["records"] == ["softmax/xla", "softmax/inductor"]
    assert export(run, "-i", "inductor", "-o", tmp_path / "one.json").exit_code == 0
    assert timeline.load(tmp_path / "one.json")["otherData"]["records"] == ["softmax/inductor"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-i", "triton"], "triton: no timeline: the torch worker died"),
        (["-i", "cuda"], "no implementation 'cuda'"),
        (["--block", "gelu"], "no block 'gelu'"),
    ],
)
def test_a_missing_timeline_is_refused_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    result = export(a_run(tmp_path / "run"), *words, "-o", tmp_path / "x.json")
    assert result.exit_code == 2 and said in result.output and result.output.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = export(a_run(tmp_path / "run"), "-i", "xla", "-o", tmp_path / "file" / "x.json")
    assert result.exit_code == 2 and "x.json: cannot be written: " in result.output and result.output.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"traceEvents": 3}', b'{"traceEvents": [{"ph": "X"}]}', b"\x1f\x8b"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    run = a_run(tmp_path / "run")
    (run / "traces" / "xla.json.gz").write_bytes(content)
    result = export(run, "-o", tmp_path / "x.json")
    assert result.exit_code == 2 and "xla.json.gz" in result.output


def test_no_file_outside_the_run_is_read(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    case = BLOCKS["softmax"].cases("quick")[0]
    run_folder.append(run, made_record(case, "xla", "xla", "ok", trace={"file": "../../etc/passwd"}))
    result = export(run, "-i", "xla", "-o", tmp_path / "x.json")
    assert result.exit_code == 2 and "is not in the run's folder" in result.output


def test_a_removed_timeline_is_left_out(tmp_path: Path) -> None:
    run, out = a_run(tmp_path / "run"), tmp_path / "x.json"
    (run / "traces" / "xla.json.gz").unlink()
    alone = export(run, "-i", "xla", "-o", out)
    assert alone.exit_code == 2 and "xla: this run was kept without such timelines" in alone.output and not out.exists()
    result = export(run, "-o", out)
    assert result.exit_code == 0 and "of the selected records it has those of inductor" in result.output
    assert timeline.load(out)["otherData"]["records"] == ["softmax/inductor"]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "eager", "inductor", "triton", "cuda"])
def test_a_traced_call_on_a_gpu(pool: WorkerPool, tmp_path: Path, implementation: str) -> None:
    if pool.ask("torch", "environment")["timer"] != "cupti":
        pytest.skip("needs CUPTI")
    case = Case("softmax", "any", {"rows": 4096, "columns": 1024}, "bfloat16", "train")
    with WorkerProgram(pool, tmp_path, case, implementation) as program:
        traces = {phase: convert(found, CallTrace) for phase, found in program.ask("trace").items()}
        measured = program.measure()["phases"]
    graph = store.from_json(program.prepared["graph"])
    assert list(traces) == ["forward", "backward"]
    for phase, trace in traces.items():
        assert len(trace.device) == measured[phase]["launches"]
        launched = {call.correlation: call for call in trace.host}
        assert all(LAUNCH.match(call.name) for call in trace.host)
        for ran in trace.device:  # each was launched by a call that is shown, and ran after that began
            assert launched[ran.correlation].start <= ran.start < ran.end
        assert len({call.correlation for call in trace.host}) == len(trace.host)
        assert 0 < trace.returned < 1
    events = validate(timeline.of_call(traces, graph, name=f"{case.id}/{implementation}"))
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert any(event["args"].get("bytes_written") for event in kernels)
    assert {event["name"] for event in kernels} & {kernel.name for kernel in graph.kernels or ()}
