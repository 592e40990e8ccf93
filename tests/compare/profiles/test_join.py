"""Profiles joined to the kernels of graphs, and what `xlafuse inspect` shows of them."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from planes import Space

from xlafuse.compare.cli.main import cli
from xlafuse.compare.profiles.join import join
from xlafuse.compare.profiles.model import DeviceEvent
from xlafuse.compare.profiles.steps import ProfiledStep, gaps
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.user.capture import NAME

DATA = Path(__file__).resolve().parents[2] / "data"
MLP = DATA / "xla" / "mlp_fwd.hlo.txt"
TRACE = DATA / "inductor" / "torch-2.13.0" / "trace"
GEMM = "nvjet_tst_128x128_64x4"


def inspect(*words: object) -> Any:
    return CliRunner().invoke(cli, ["inspect", *map(str, words)], env={"COLUMNS": "120"})


def graph_of(path: Path) -> Any:
    return open_source(path).results[0].load()


def step(events: list[DeviceEvent]) -> ProfiledStep:
    return ProfiledStep("step", tuple(events))


def events_of(names: list[str], **fields: Any) -> list[DeviceEvent]:
    return [DeviceEvent(name, at * 1e-5, at * 1e-5 + 5e-6, **fields) for at, name in enumerate(names)]


def ran(path: Path) -> list[str]:
    """Return the names with which a graph's kernels run on a GPU."""
    return [kernel.runtime_name or GEMM for kernel in graph_of(path).kernels]


def test_events_are_joined_by_module_and_instruction_in_any_order() -> None:
    graph = graph_of(MLP)
    named = [
        DeviceEvent(GEMM, at * 1e-5, at * 1e-5 + (at + 1) * 1e-6, module="jit_mlp", operation=kernel.name)
        for at, kernel in enumerate(graph.kernels)
    ][::-1]
    memset = DeviceEvent("[memset]", 1e-4, 1.01e-4, module="jit_mlp", operation="custom-call.0")
    joined = join([step([*named, memset])], {"jit_mlp": graph})
    assert joined.owners[0] == (*(("jit_mlp", at) for at in range(6, -1, -1)), ("jit_mlp", 3))
    times = [kernel.device_time_us for kernel in joined.graphs["jit_mlp"].kernels]
    assert times == pytest.approx([1, 2, 3, 5, 5, 6, 7])
    assert joined.calls == {"jit_mlp": 1}


def test_a_module_is_found_by_its_number_where_several_have_its_name() -> None:
    graph = graph_of(MLP)
    event = DeviceEvent("fusion_11", 0, 1, module="jit_mlp", operation="fusion.11", program=4)
    joined = join([step([event])], {"jit_mlp#3": graph, "jit_mlp#4": graph})
    assert joined.owners == ((("jit_mlp#4", 0),),)


def test_events_without_a_module_are_joined_by_their_order() -> None:
    graph = graph_of(MLP)
    names = ["adam_kernel", *ran(MLP), "adam_kernel"]
    joined = join([step(events_of(names)), step(events_of(names))], {"jit_mlp": graph})
    assert joined.owners[0] == (None, *(("jit_mlp", at) for at in range(7)), None)
    assert joined.owners[1] == joined.owners[0]


def test_kernels_of_a_command_buffer_are_joined_beside_those_that_xla_launches_alone() -> None:
    first, *others = graph_of(MLP).kernels
    alone = DeviceEvent(first.runtime_name, 0, 1e-6, module="jit_mlp", operation=first.name)
    buffered = events_of(ran(MLP)[1:], module="jit_mlp", operation="command_buffer_1")
    joined = join([step([alone, *buffered])], {"jit_mlp": graph_of(MLP)})
    assert joined.owners[0] == tuple(("jit_mlp", at) for at in range(1 + len(others)))


def test_a_kernel_of_another_module_with_an_equal_name_stays_without_a_graph() -> None:
    own = events_of(ran(MLP), module="jit_mlp", operation="command_buffer_1")
    other = events_of(ran(MLP), module="jit_other", operation="command_buffer_1")
    joined = join([step([*other, *own])], {"jit_mlp": graph_of(MLP)})
    assert joined.owners[0] == (*[None] * len(other), *(("jit_mlp", at) for at in range(len(own))))
    assert joined.calls == {"jit_mlp": 1}


def test_a_graph_that_a_step_runs_several_times_has_the_time_of_one_call() -> None:
    joined = join([step(events_of(ran(MLP) * 3))], {"jit_mlp": graph_of(MLP)})
    assert [owner and owner[1] for owner in joined.owners[0]] == [*range(7)] * 3
    assert joined.calls == {"jit_mlp": 3}
    times = [kernel.device_time_us for kernel in joined.graphs["jit_mlp"].kernels]
    assert times == pytest.approx([5] * 7)


def test_kernels_of_inductor_that_do_not_run_do_not_change_the_number_of_calls() -> None:
    """A trace has the code of all compiles, also of those that a step does not run."""
    graph = graph_of(TRACE)
    forward = [kernel.runtime_name or GEMM for kernel in graph.kernels if kernel.phase == "forward"]
    joined = join([step(events_of(forward * 4))], {"trace": graph})
    owners = [owner and owner[1] for owner in joined.owners[0]]
    ours = [at for at, name in enumerate(forward) if name != GEMM]
    assert [owners[call * len(forward) + at] for call in range(4) for at in ours] == ours * 4
    assert joined.calls == {"trace": 4}


def test_layers_of_xla_that_share_a_kernel_are_one_call() -> None:
    """XLA launches the kernel of the first layer for all layers with equal code."""
    graph = graph_of(MLP)
    first = next(kernel for kernel in graph.kernels if kernel.runtime_name)
    layer = [replace(first, name=f"fusion.{at}", runtime_name=f"fusion_{at}") for at in range(6)]
    joined = join([step(events_of(["fusion_0"] * 6))], {"jit": replace(graph, kernels=tuple(layer))})
    assert [owner and owner[1] for owner in joined.owners[0]] == [*range(6)]


def test_both_phases_of_a_training_step_are_joined_in_their_order() -> None:
    names = [*ran(TRACE), "multi_tensor_apply_kernel"]
    joined = join([step(events_of(names))], {"trace": graph_of(TRACE)})
    assert [owner and owner[1] for owner in joined.owners[0]] == [*range(14), None]


def test_other_kernels_stay_without_a_graph() -> None:
    joined = join([step(events_of(["other_kernel", GEMM]))], {"jit_mlp": graph_of(MLP)})
    assert joined.owners == ((None, None),)
    assert not joined.graphs


def test_work_of_pytorch_outside_of_compiled_code_stays_without_a_graph() -> None:
    """A library call in the graph may run any number of kernels, and would take those of the optimizer."""
    graph = graph_of(TRACE)
    library = replace(graph.kernels[-1], name="aten.sum", kind="library", runtime_name=None, launches=None)
    graph = replace(graph, kernels=(*graph.kernels, library))
    compiled = ("## Call CompiledFxGraph f2x ##", "aten::sum")
    inside = events_of([*ran(TRACE), "void at::native::reduce_kernel"], host_path=compiled)
    foreach = "void at::native::multi_tensor_apply_kernel"
    outside = [replace(event, start=1, end=2, host_path=("Optimizer.step#AdamW.step", "aten::_foreach_mul_"))
               for event in events_of([foreach] * 3)]
    count = len(graph.kernels)
    joined = join([step([*inside, *outside])], {"mlp": graph})
    assert joined.owners[0] == (*(("mlp", at) for at in range(count)), None, None, None)
    untold = [replace(event, host_path=()) for event in (*inside, *outside)]
    assert join([step(untold)], {"mlp": graph}).owners[0][count:] == (("mlp", count - 1),) * 3


def test_a_gap_says_whether_the_host_was_late() -> None:
    found = gaps([
        DeviceEvent("a", 0, 10), DeviceEvent("overlaps", 2, 5), DeviceEvent("late", 14, 20, launched=13),
        DeviceEvent("in time", 21, 22, launched=3), DeviceEvent("unknown", 25, 26),
    ])
    assert [(gap.before, gap.after, gap.seconds, gap.host_late) for gap in found] == [
        ("a", "late", 4, 3), ("late", "in time", 1, 0), ("in time", "unknown", 3, None),
    ]


# The command


def torch_trace(folder: Path, rank: int = 0, optimizer: str = "multi_tensor_apply_kernel") -> Path:
    """Write a trace of two steps: the kernels of TRACE, 10 us each, and an optimizer's."""
    names = [*ran(TRACE), optimizer]
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, start: float, duration: float, **args: Any) -> None:
        events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args})

    for number in (3, 4):
        start = number * 1000.0
        add("user_annotation", f"ProfilerStep#{number}", start, 900)
        for at, name in enumerate(names):
            add("cuda_runtime", "cudaLaunchKernel", start + at, 1, correlation=number * 100 + at)
            if name == optimizer:
                add("cpu_op", "aten::_fused_adam_", start + at - 0.5, 2, **{"External id": 5})
            add("kernel", name, start + 20 + 11 * at, number + 7, device=0, correlation=number * 100 + at)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "torch.json.gz"
    top = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
           "distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(top).encode()))
    return path


@pytest.fixture
def captured(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "run"
    torch_trace(folder / "profile")
    (folder / "torch_trace").mkdir()
    for log in TRACE.iterdir():
        (folder / "torch_trace" / log.name).write_bytes(log.read_bytes())
    (folder / NAME).write_text(json.dumps({"device": "NVIDIA H200", "versions": {"torch": "2.13.0"}}))
    yield folder


def test_a_capture_is_shown_with_its_steps_and_the_graph(captured: Path) -> None:
    done = inspect(captured)
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert "torch.profiler on NVIDIA H200, torch 2.13.0" in words
    assert "2 steps (step 3, step 4)" in words
    assert "93% of the kernels' time is joined to kernels of run" in words
    assert "aten.sigmoid" in words
    assert "by aten::_fused_adam_" in words


def test_json_has_times_operations_and_rooflines(captured: Path) -> None:
    found = json.loads(inspect(captured, "--json").output)
    assert (found["schema"], found["tool"], found["device"]) == ("xlafuse.profile/1", "torch.profiler", "NVIDIA H200")
    assert found["joined_share"] == pytest.approx(14 / 15)
    assert found["device_us"] == pytest.approx({"total": 329, "median": 164.5, "min": 164, "max": 165})
    norm = next(each for each in found["kernels"] if each["kernels"] == [0])
    assert norm["step_us"] == pytest.approx({"total": 21, "median": 10.5, "min": 10, "max": 11})
    assert ["aten.rsqrt", "norm"] in [op[:2] for op in norm["operations"]]
    assert norm["lines"]
    assert norm["above_roofline_us"] == pytest.approx(norm["step_us"]["median"] - norm["roofline_us"])
    adam = next(each for each in found["kernels"] if each["graph"] is None)
    assert (adam["host_ops"], adam["roofline_us"]) == (["aten::_fused_adam_"], None)
    assert found["gaps"][0]["host_late"] is False
    assert sum(each["step_us"]["total"] for each in found["kernels"]) == pytest.approx(15 * 21)


def test_views_show_the_graph_with_the_times_of_a_median_step(captured: Path) -> None:
    assert "10.5" in inspect(captured, "--module", "run").output
    assert "10.5 µs" in inspect(captured, "--kernel", "1").output
    assert "no module 'other'" in inspect(captured, "--module", "other").output


def test_a_dump_is_given_apart(tmp_path: Path) -> None:
    path = torch_trace(tmp_path)
    assert "no kernel is joined to a graph; --dump PATH" in " ".join(inspect(path).output.split())
    assert "93% of the kernels' time is joined to kernels of trace" in " ".join(
        inspect(path, "--dump", TRACE).output.split()
    )
    wrong = inspect(path, "--dump", tmp_path / "none")
    assert (wrong.exit_code, "no such file" in wrong.output) == (2, True)
    assert "--dump goes with one profile" in inspect(MLP, "--dump", TRACE).output


def test_of_several_ranks_the_first_is_shown(tmp_path: Path) -> None:
    for rank, optimizer in ((2, "other"), (0, "adam"), (1, "adam")):
        folder = tmp_path / f"rank{rank}"
        torch_trace(folder / "profile", rank, optimizer)
        (folder / NAME).write_text("{}")
    words = " ".join(inspect(tmp_path).output.split())
    assert "rank 0 of 3; the same kernels: 1; other kernels: 2" in words
    assert "rank1" not in words


def test_another_rank_is_chosen_with_its_own_files(tmp_path: Path) -> None:
    for rank, optimizer in ((0, "adam"), (1, "other")):
        folder = tmp_path / f"rank{rank}"
        torch_trace(folder / "profile", rank, optimizer)
        (folder / "torch_trace").mkdir()
        (folder / NAME).write_text(json.dumps({"versions": {"torch": f"2.13.{rank}"}}))
        for log in TRACE.iterdir():
            (folder / "torch_trace" / log.name).write_bytes(log.read_bytes())
    words = " ".join(inspect(tmp_path, "--rank", 1).output.split())
    assert "torch 2.13.1" in words and "joined to kernels of rank1" in words
    assert "rank 1 of 2; other kernels: 0; --rank chooses another" in words
    refused = inspect(tmp_path, "--rank", 2)
    assert refused.exit_code == 2 and "no rank 2; it has 0, 1" in refused.output


def test_a_dump_of_several_ranks_gives_the_files_of_the_profiles_rank(tmp_path: Path) -> None:
    (log,) = TRACE.glob("*.log")
    for rank, name in enumerate(("triton_poi_fused_mul_sigmoid_1", "triton_poi_fused_other_1")):
        text = log.read_text().replace("triton_poi_fused_mul_sigmoid_1", name)
        (tmp_path / f"dedicated_log_torch_trace_rank_{rank}_x.log").write_text(text)
    path = torch_trace(tmp_path / "profiles", rank=1)
    found = json.loads(inspect(path, "--dump", tmp_path, "--json").output)
    kernel = next(each for each in found["kernels"] if each["name"] == "triton_poi_fused_mul_sigmoid_1")
    assert kernel["graph"] is None
    assert "other" in inspect(path, "--dump", tmp_path, "--module", "1").output


def two_gpus_of_torch(folder: Path) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps([
        {"ph": "X", "cat": "kernel", "name": f"kernel_{gpu}", "ts": 10 * at, "dur": gpu + 1, "args": {"device": gpu}}
        for gpu in (3, 1) for at in range(4)
    ]))
    return path


def two_gpus_of_jax(folder: Path) -> Path:
    space = Space()
    for gpu in (3, 1):
        for at in range(4):
            space.event(f"/device:GPU:{gpu}", "Stream #1(Compute)", f"kernel_{gpu}", 10 * at, gpu + 1)
    return space.write(folder / "a.xplane.pb")


def two_gpus_of_nsight(folder: Path) -> Path:
    path = folder / "report.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE StringIds (id, value)")
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "kernel_1"), (3, "kernel_3")])
        base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, shortName)")
        rows = [(10_000 * at, 10_000 * at + (gpu + 1) * 1000, gpu, gpu) for gpu in (3, 1) for at in range(4)]
        base.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?)", rows)
        base.commit()
    return path


@pytest.mark.parametrize("made", [two_gpus_of_torch, two_gpus_of_jax, two_gpus_of_nsight])
def test_each_gpu_of_a_process_can_be_chosen(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    path = made(tmp_path)
    words = " ".join(inspect(path).output.split())
    assert "GPU 1 of 2; other kernels: 3; --rank chooses another" in words and "kernel_1" in words
    found = json.loads(inspect(path, "--rank", 3, "--json").output)
    assert (found["gpu"], found["other_kernels"]) == (3, ["1"])
    (kernel,) = found["kernels"]
    assert (kernel["name"], kernel["launches"]) == ("kernel_3", 4)
    assert kernel["step_us"]["median"] == pytest.approx(16)
    refused = inspect(path, "--rank", 0)
    assert refused.exit_code == 2 and "no GPU 0; it has 1, 3" in refused.output
    assert "GPU 1 of 2; other kernels: 3" in CliRunner().invoke(cli, ["diff", str(path), str(path)]).output


def test_a_gpu_without_work_in_the_steps_is_not_the_first_choice(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 100, "dur": 50},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 1, "dur": 1, "args": {"device": 0}},
        {"ph": "X", "cat": "kernel", "name": "kernel", "ts": 110, "dur": 1, "args": {"device": 1}},
    ]))
    assert "GPU 1 of 2; other kernels: 0" in " ".join(inspect(path).output.split())
    assert "did nothing in its 1 step" in inspect(path, "--rank", 0).output


def test_idle_time_before_launches_is_a_least_where_some_launches_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 35, "dur": 1, "args": {"correlation": 2}},
        *({"ph": "X", "cat": "kernel", "name": "kernel", "ts": 20 * at, "dur": 10, "args": {"correlation": at}}
          for at in range(3)),
    ]))
    assert "gaps between kernels take 20.0 µs, at least 5.00 µs of it before" in " ".join(inspect(path).output.split())


def test_a_file_that_cannot_be_read_costs_itself(tmp_path: Path) -> None:
    torch_trace(tmp_path)
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    text = "".join(inspect(tmp_path).output.replace("│", "").split())  # a long path moves the breaks of lines
    assert "2steps" in text and "other.json:nokernelsofaGPUinthistrace" in text


def test_a_profile_of_jax_is_joined_to_the_dump(tmp_path: Path) -> None:
    space = Space()
    for number in (3, 4):
        space.event("/host:CPU", "python", "train", number * 1000, 900, step_num=number)
        for at, kernel in enumerate(graph_of(MLP).kernels):
            space.event(
                "/device:GPU:0", "Stream #13(Compute)", kernel.runtime_name or GEMM, number * 1000 + at * 10, 8,
                hlo_op=kernel.name, hlo_module="jit_mlp",
            )
    path = space.write(tmp_path / "a.xplane.pb")
    done = inspect(path, "--dump", MLP, "--price-as", "h200", "--json")
    found = json.loads(done.output)
    assert found["joined_share"] == 1
    assert all(each["roofline_us"] > 0 for each in found["kernels"])
    assert found["host_late_us"] is None


def test_a_capture_whose_profile_cannot_be_read_shows_what_was_compiled(captured: Path) -> None:
    (captured / "profile" / "torch.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    done = inspect(captured)
    assert done.exit_code == 0
    assert "no kernels of a GPU in this trace" in done.output
    assert "triton_poi_fused_mul_sigmoid_1" in done.output


def test_kernels_that_take_no_time_have_no_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 1, "dur": 0, "args": {"device": 0}}
    path.write_text(json.dumps({"traceEvents": [event]}))
    done = inspect(path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["operator_shares"] == {"": 0}
    assert inspect(path).exit_code == 0


def test_a_broken_profile_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(b"broken")
    done = inspect(path)
    assert done.exit_code == 2
    assert done.output.startswith("Error: ") and done.output.count("\n") == 1
