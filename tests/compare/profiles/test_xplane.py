"""`*.xplane.pb` of jax.profiler, for a GPU as built by planes.py, and for the CPU as jax writes it."""

from __future__ import annotations

import gzip
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from planes import Space

from xlafuse.compare.graph.join.kernel_records import MEMCPY
from xlafuse.compare.profiles import files, xplane
from xlafuse.compare.profiles.model import ProfileError
from xlafuse.compare.profiles.steps import profiled_steps

GPU = "/device:GPU:0"
PROGRAM = """
import sys, jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.tanh(x @ x))
x, small = step(jnp.ones((64, 64))), jnp.ones((32, 32))
jax.profiler.start_trace(sys.argv[1])
for number in range(3):
    with jax.profiler.StepTraceAnnotation("train", step_num=number):
        x = step(x).block_until_ready()
step(small)
jax.profiler.stop_trace()
"""


def gpu() -> Space:
    space = Space()
    for number, at in ((3, 0.0), (4, 1000.0)):
        space.event("/host:CPU", "python", "train", at, 900, step_num=number)
        space.event("/host:CPU", "python", "PjitFunction(step)", at + 8, 9)
        space.event("/host:CUPTI", "1", "cuLaunchKernel", at + 10, 2, correlation_id=number * 10)
        space.event(
            GPU, "Stream #13(Compute)", "fusion_1", at + 20, 5, correlation_id=number * 10, hlo_op="fusion.1",
            hlo_module="jit_step", program_id=7, kernel_details="regs:32 grid:128,2,1 block:256,1,1 occ_pct:100",
        )
        space.event(GPU, "Stream #14(MemcpyD2H)", "MemcpyD2H", at + 30, 1, memcpy_details="kind_src:device size:4")
    space.module("jit_step", 7, b"proto")
    space.stat(space.plane("/host:metadata"), space.plane("/host:metadata").stats, "jax_version", "0.11.2")
    return space


def test_kernels_of_a_gpu_have_times_launches_and_instructions(tmp_path: Path) -> None:
    path = gpu().write(tmp_path / "plugins" / "profile" / "2026_01_01" / "host.xplane.pb")
    assert files.profile_files(tmp_path) == files.profile_files(path) == [path]
    (profile,) = files.read(path)
    assert (profile.tool, profile.device, profile.versions) == ("jax.profiler", "GPU 0", {"jax": "0.11.2"})
    fusion, copy, *_ = profile.events
    assert (fusion.name, fusion.module, fusion.operation, fusion.program) == ("fusion_1", "jit_step", "fusion.1", 7)
    assert (fusion.grid, copy.name) == ((128, 2, 1), MEMCPY)
    assert fusion.seconds == pytest.approx(5e-6)
    assert fusion.launched == pytest.approx(11e-6)
    assert profile.modules["jit_step", 7]() == b"proto"
    steps = profiled_steps(profile)
    assert [(step.name, len(step.events)) for step in steps] == [("train 3", 2), ("train 4", 2)]
    assert [(step.program, step.called) for step in steps] == [
        ("step", pytest.approx(9e-6)), ("step", pytest.approx(1009e-6)),
    ]


def test_a_compile_is_a_wait_with_the_function_that_is_called(tmp_path: Path) -> None:
    space = gpu()
    space.event("/host:CPU", "python", "PjitFunction(loss)", 1100, 90)
    space.event("/host:CPU", "python", "lower_sharding_computation", 1101, 10)
    space.event("/host:CPU", "python", "backend_compile_and_load", 1120, 60)
    space.event("/host:CPU", "other thread", "backend_compile_and_load", 1130, 60)
    (profile,) = files.read(space.write(tmp_path / "a.xplane.pb"))
    assert [(wait.kind, wait.name) for wait in profile.waits] == [
        ("compile", "loss"), ("compile", "loss"), ("compile", ""),
    ]
    assert profile.waits[1].end - profile.waits[1].start == pytest.approx(60e-6)


def test_each_gpu_is_a_profile_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    space = Space()
    for number in (10, 2, 0):
        space.event(f"/device:GPU:{number}", "Stream #13(Compute)", f"fusion_{number}", 1, 2)
    found = xplane.read(space.write(tmp_path / "a.xplane.pb"))
    assert [(profile.gpu, profile.events[0].name) for profile in found] == [
        (0, "fusion_0"), (2, "fusion_2"), (10, "fusion_10"),
    ]


@pytest.mark.parametrize("name", ["renamed.pb", "space.zip"])
def test_the_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    path = gpu().write(tmp_path / name)
    if name.endswith(".zip"):
        data = path.read_bytes()
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/host.xplane.pb", data)
    assert files.profile_files(path) == [path]
    assert files.read(path)[0].tool == "jax.profiler"


def test_launches_may_be_among_the_events_of_the_host(tmp_path: Path) -> None:
    space = gpu()
    space.plane("/host:CUPTI").Clear()
    space.event("/host:CPU", "python", "cuGraphLaunch", 12, 2, correlation_id=30)
    (profile,) = xplane.read(space.write(tmp_path / "a.xplane.pb"))
    assert [event.launched for event in profile.events[:3]] == [pytest.approx(13e-6), None, None]


def test_the_latest_session_counts(tmp_path: Path) -> None:
    sessions = [gpu().write(tmp_path / "plugins" / "profile" / name / "host.xplane.pb") for name in ("2025", "2026")]
    assert files.profile_files(tmp_path) == sessions[1:]
    assert files.profile_files(sessions[0].parent) == sessions[:1]


def test_damaged_files_are_refused_or_read_in_part(tmp_path: Path) -> None:
    whole = gpu().proto.SerializeToString()
    path = tmp_path / "cut.xplane.pb"
    for data in (b"", b"no proto", whole[: len(whole) // 2], gzip.compress(whole[: len(whole) // 2])):
        path.write_bytes(data)
        with pytest.raises(ProfileError, match="XSpace"):
            xplane.read(path)
    space = gpu()
    space.event(GPU, "Stream #13(Compute)", "", 1, 1)
    space.event(GPU, "Stream #13(Compute)", "negative", 1, -1)
    (profile,) = xplane.read(space.write(path))
    assert profile.skipped == 2


def test_a_profile_without_device_events_names_its_planes(tmp_path: Path) -> None:
    space = Space()
    space.event("/host:CPU", "python", "train", 0, 1, step_num=1)
    with pytest.raises(ProfileError, match="neither a GPU's kernels nor XLA's operations on a CPU.*host:CPU"):
        xplane.read(space.write(tmp_path / "a.xplane.pb"))


def test_large_files_and_many_events_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gpu().write(tmp_path / "a.xplane.pb")
    monkeypatch.setattr(xplane, "MOST_EVENTS", 3)
    with pytest.raises(ProfileError, match="more than 3 events of one device"):
        xplane.read(path)
    monkeypatch.setattr(xplane, "MOST_BYTES", 10)
    with pytest.raises(ProfileError, match="more than 0 MiB"):
        xplane.read(path)


@pytest.mark.slow
def test_a_profile_of_jax_on_a_cpu(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, capture_output=True, timeout=120)
    (path,) = files.profile_files(tmp_path)
    (profile,) = files.read(path)
    assert profile.device == "cpu"
    assert {event.module for event in profile.events} == {"jit__lambda"}
    assert [step.name for step in profile.steps] == ["train 0", "train 1", "train 2"]
    assert "jit__lambda" in {name for name, _ in profile.modules}
    assert all(event.seconds > 0 and event.operation for event in profile.events)
    assert {(wait.kind, wait.name) for wait in profile.waits} == {("compile", "<lambda>")}  # of the smaller array
