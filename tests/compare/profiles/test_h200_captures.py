"""Captures of an H200: two training steps of 8 layers, by jax 0.11.2 and by torch 2.11 with torch.compile and Adam.

The folders are those of `xlafuse capture`, without the files that no test needs. Each expected number is computed here
from the raw file.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xlafuse.compare.cli.main import cli
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.profiled import ProfiledSteps
from xlafuse.hlo.proto_reader import message_type

DATA = Path(__file__).resolve().parents[2] / "data" / "profiles"
STEP = "module_14624.jit_train_step"


@dataclass(frozen=True)
class Ran:
    """One kernel, copy or memset of the raw file; times are in us. launched: when the host's call began."""

    name: str
    start: float
    end: float
    launched: float
    operation: str = ""
    grid: tuple[int, ...] = ()

    @property
    def us(self) -> float:
        return self.end - self.start


def torch_steps() -> list[list[Ran]]:
    """Return the work that each `ProfilerStep` launched."""
    events = json.loads(gzip.decompress((DATA / "torch/profile/torch.json.gz").read_bytes()))["traceEvents"]
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        of[event.get("cat", "")].append(event)
    launched = {each["args"]["correlation"]: each["ts"] for each in (*of["cuda_runtime"], *of["cuda_driver"])}
    operations = {each["args"]["External id"]: each["name"] for each in of["cpu_op"]}
    steps = [each for each in of["user_annotation"] if each["name"].startswith("ProfilerStep#")]
    found: list[list[Ran]] = [[] for _ in steps]
    for each in (*of["kernel"], *of["gpu_memcpy"], *of["gpu_memset"]):
        at = launched[each["args"]["correlation"]]
        (number,) = (n for n, step in enumerate(steps) if step["ts"] <= at <= step["ts"] + step["dur"])
        name = {"gpu_memcpy": "[memcpy]", "gpu_memset": "[memset]"}.get(each["cat"], each["name"])
        operation = operations[each["args"]["External id"]]
        grid = tuple(each["args"].get("grid", ()))
        found[number].append(Ran(name, each["ts"], each["ts"] + each["dur"], at, operation, grid))
    return [sorted(step, key=lambda ran: ran.start) for step in found]


def jax_steps() -> list[list[Ran]]:
    """Return the work that each StepTraceAnnotation launched."""
    (file,) = DATA.glob("jax/profile/plugins/profile/*/vm.xplane.pb.gz")
    space = message_type("tensorflow.profiler.XSpace").FromString(gzip.decompress(file.read_bytes()))

    def events(plane_name: str) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
        (plane,) = (plane for plane in space.planes if plane.name == plane_name)
        for line in plane.lines:
            for event in line.events:
                start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                stats = {
                    plane.stat_metadata[stat.metadata_id].name: plane.stat_metadata[stat.ref_value].name
                    if stat.WhichOneof("value") == "ref_value" else stat.int64_value or stat.uint64_value
                    for stat in event.stats
                }
                yield plane.event_metadata[event.metadata_id].name, start, start + event.duration_ps / 1e6, stats

    host = list(events("/host:CPU"))
    launched = {stats["correlation_id"]: start for _, start, _, stats in host if "correlation_id" in stats}
    steps = sorted((start, end) for _, start, end, stats in host if "step_num" in stats)
    found: list[list[Ran]] = [[] for _ in steps]
    for name, start, end, stats in events("/device:GPU:0"):
        at = launched[stats["correlation_id"]]
        (number,) = (n for n, step in enumerate(steps) if step[0] <= at <= step[1])
        shown = {"MemcpyD2H": "[memcpy]", "Memset 0": "[memset]"}.get(name, name)
        grid = re.search(r"grid:(\d+),(\d+),(\d+)", stats.get("kernel_details", ""))
        found[number].append(Ran(shown, start, end, at, grid=tuple(map(int, grid.groups())) if grid else ()))
    return [sorted(step, key=lambda ran: ran.start) for step in found]


RAW = {"jax": jax_steps, "torch": torch_steps}


@pytest.fixture(scope="module", params=sorted(RAW))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def raw(name: str) -> list[list[Ran]]:
    return RAW[name]()


@pytest.fixture(scope="module")
def shown(name: str) -> Any:
    done = CliRunner().invoke(cli, ["inspect", str(DATA / name), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.fixture(scope="module")
def opened(name: str) -> ProfiledSteps:
    return profiled(DATA / name)


def profiled(path: Path) -> ProfiledSteps:
    profile = open_source(path).profile
    assert profile is not None
    return profile


def idle(step: Sequence[Ran]) -> list[tuple[float, float, Ran]]:
    """Return the idle times of a step: the time, the part of it before the host's launch, and the kernel after it."""
    found, busy_until = [], step[0].end
    for ran in step[1:]:
        if ran.start > busy_until:
            late = min(max(ran.launched - busy_until, 0.0), ran.start - busy_until)
            found.append((ran.start - busy_until, late, ran))
        busy_until = max(busy_until, ran.end)
    return found


def test_steps_have_the_kernels_and_times_of_the_raw_file(name: str, raw: list[list[Ran]], shown: Any) -> None:
    assert [step["name"] for step in shown["steps"]] == {
        "jax": ["train 3", "train 4"], "torch": ["step 3", "step 4"],
    }[name]
    assert [step["kernels"] for step in shown["steps"]] == list(map(len, raw))
    whole = [max(ran.end for ran in step) - step[0].start for step in raw]
    assert [step["device_us"] for step in shown["steps"]] == pytest.approx(whole, rel=1e-4)
    gaps = [sum(time for time, _, _ in idle(step)) for step in raw]
    assert [step["idle_us"] for step in shown["steps"]] == pytest.approx(gaps, rel=1e-3)
    late = statistics.median(sum(time for _, time, _ in idle(step)) for step in raw)
    assert shown["host_late_us"] == pytest.approx(late, rel=1e-3)


def test_lines_add_up_to_the_kernels_time_of_each_step(raw: list[list[Ran]], shown: Any) -> None:
    total = sum(ran.us for step in raw for ran in step)
    assert sum(each["step_us"]["total"] for each in shown["kernels"]) == pytest.approx(total, rel=1e-4)
    launches = sum(each["launches"] + sum(more["launches"] for more in each["helpers"]) for each in shown["kernels"])
    assert [launches] * 2 == list(map(len, raw))


def test_a_line_has_the_launches_of_one_kernel(raw: list[list[Ran]], shown: Any) -> None:
    """Memsets of 0.7 us before a matrix product of 321 us are no launches of it."""
    for each in shown["kernels"]:
        own = [ran.us for step in raw for ran in step if ran.name == each["name"]]
        assert min(own) - 1e-3 <= each["launch_us"]["min"] <= each["launch_us"]["max"] <= max(own) + 1e-3
        assert each["launch_us"]["max"] < 2 * each["launch_us"]["min"], each["name"]
    helpers = Counter[str]()
    for each in shown["kernels"]:
        helpers += Counter({more["name"]: more["launches"] for more in each["helpers"]})
    assert helpers["[memset]"] == sum(ran.name == "[memset]" for ran in raw[0])


@pytest.mark.parametrize(("name", "costliest", "launches"), [
    ("jax", "fusion_591", 8),
    ("torch", "FusedAdamMathFunctor", 6),  # a seventh launch, of the last tensors, has a smaller grid
], scope="module", indirect=["name"])
def test_the_costliest_line_is_that_of_the_raw_file(
    raw: list[list[Ran]], shown: Any, costliest: str, launches: int
) -> None:
    first = shown["kernels"][0]
    mine = [[ran.us for ran in step if costliest in ran.name and list(ran.grid) == first["grid"]] for step in raw]
    assert [first["launches"]] * 2 == list(map(len, mine)) == [launches] * 2
    assert first["step_us"]["median"] == pytest.approx(statistics.median(map(sum, mine)), rel=1e-4)
    assert first["launch_us"]["max"] == pytest.approx(max(map(max, mine)), rel=1e-3)


def test_the_largest_gap_is_before_the_kernel_that_the_raw_file_has(raw: list[list[Ran]], shown: Any) -> None:
    by_kernel = [{ran.name: time for time, _, ran in sorted(idle(step), key=lambda item: item[0])} for step in raw]
    largest = shown["gaps"][0]
    assert largest["host_late"] is True
    assert largest["us"] == pytest.approx(statistics.median(max(step.values()) for step in by_kernel), rel=1e-3)


def test_all_but_copies_is_joined_to_graphs_or_operators(name: str, raw: list[list[Ran]], shown: Any) -> None:
    total = sum(ran.us for step in raw for ran in step)
    eager = ("aten::_fused_adam_", "aten::_local_scalar_dense", "aten::fill_", "aten::_foreach_add_")
    if name == "torch":
        expected = {op: sum(r.us for step in raw for r in step if r.operation == op) / total for op in eager}
    else:
        expected = {"": sum(ran.us for step in raw for ran in step if ran.name == "[memcpy]") / total}
    assert shown["operator_shares"] == pytest.approx(expected, rel=1e-3)
    assert shown["joined_share"] == pytest.approx(1 - sum(expected.values()), rel=1e-6)


def thunks() -> tuple[dict[int, str], list[tuple[int, str, str]]]:
    """Return XLA's own list of launches: the instruction by the thunk's number; numbers, kinds and kernels in order."""
    folder = DATA / "jax" / "xla"
    metadata = gzip.decompress((folder / f"{STEP}.thunk_metadata.txt.gz").read_bytes()).decode()
    instructions = {
        int(number[1]): name[1] for each in metadata.split("thunk_metadata {")
        if (name := re.search(r'profile_annotation: "([^"]*)"', each))
        and (number := re.search(r"thunk_id: (\d+)", each))
    }
    text = gzip.decompress((folder / f"{STEP}.thunk_sequence_after_thunk_passes.txt.gz").read_bytes()).decode()
    order = re.findall(r"^ +(\d+): (kCustomKernel|kCublasLtMatmul) +\[[^\]]*\] (\S+)", text, flags=re.MULTILINE)
    return instructions, [(int(number), kind, kernel) for number, kind, kernel in order]


@pytest.mark.parametrize("name", ["jax"], scope="module", indirect=True)
def test_kernels_of_a_command_buffer_are_joined_to_the_instructions_that_xla_launches(opened: ProfiledSteps) -> None:
    """XLA's profiler names only the command buffer of them, and layers share a kernel's name."""
    instructions, order = thunks()
    kernels = opened.joined.graphs["jit_train_step"].kernels or ()
    assert opened.joined.calls == {"jit_train_step": 1}
    for step, owners in zip(opened.steps, opened.joined.owners, strict=True):
        ran = [
            (event.name, None if owner is None else kernels[owner[1]].name)
            for event, owner in zip(step.events, owners, strict=True) if not event.name.startswith("[")
        ]
        assert [joined for _, joined in ran] == [instructions[number] for number, _, _ in order]
        assert all(
            name == kernel for (name, _), (_, kind, kernel) in zip(ran, order, strict=True) if kind == "kCustomKernel"
        )
    assert all(kernel.device_time_us for kernel in kernels)


@pytest.mark.parametrize("name", ["torch"], scope="module", indirect=True)
def test_kernels_of_inductor_are_joined_in_the_order_of_its_code(opened: ProfiledSteps) -> None:
    kernels = opened.joined.graphs["torch"].kernels or ()
    for step, owners in zip(opened.steps, opened.joined.owners, strict=True):
        joined = [owner[1] for owner in owners if owner is not None]
        assert joined == sorted(joined)
        assert set(joined) == set(range(len(kernels)))
        for event, owner in zip(step.events, owners, strict=True):
            if owner is not None and (expected := kernels[owner[1]].runtime_name) and expected in event.host_op:
                assert event.name == expected


def test_the_profile_alone_has_the_hlo_and_the_gpu() -> None:
    opened = profiled(DATA / "jax" / "profile")
    assert opened.profile.device == "NVIDIA H200"
    assert list(opened.joined.graphs) == ["jit_train_step"]
    assert all(kernel.device_time_us for kernel in opened.joined.graphs["jit_train_step"].kernels or ())
