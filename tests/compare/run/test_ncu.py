"""ncu's listing is read back by call and phase; missing launches are named."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_records import made_record

from xlafuse.compare import targets
from xlafuse.compare.base import host
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.graph.join.kernel_records import MEMCPY
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel
from xlafuse.compare.measure.clock import DeviceRecord
from xlafuse.compare.measure.profiler_marks import BEGIN, END
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.record import run_folder as record
from xlafuse.compare.record.record import Record
from xlafuse.compare.record.record_fields import Traffic, TrafficOfKernel, TrafficOfPhase, UncountedTraffic
from xlafuse.compare.run import count_traffic, run
from xlafuse.compare.run import ncu as traffic
from xlafuse.compare.run.ncu import KernelTraffic, NcuError, NotProfiled, Outcome, Profiled, parse, split
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.spec.implementation import Implementation

LISTING = f'''==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "{BEGIN}0_forward": 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_bytes.sum"
"","","","","byte","byte","byte"
"0","4242","{BEGIN}0_forward","(1, 1, 1)","0","0","0"
"1","4242","loop_add_fusion","(512, 1, 1)","268,435,456","134217728","402,653,184"
"2","4242","{END}","(1, 1, 1)","32","0","64"
'''.splitlines()
ADD = KernelTraffic("loop_add_fusion", 268435456, 134217728, 402653184)


def test_launches_are_read_with_their_bytes() -> None:
    assert parse(LISTING)[1] == ADD
    assert split(parse(LISTING)) == {"0_forward": [ADD]}
    for old, new in (("402,653,184", "n/a"), ("lts__t_bytes.sum", "other")):  # a GPU without counters of L2
        assert parse([line.replace(old, new) for line in LISTING])[1] == replace(ADD, l2=None)


def test_a_listing_without_what_was_asked_is_refused() -> None:
    complaint = "ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    with pytest.raises(NcuError, match="no kernel: ERR_NVGPUCTRPERM"):
        parse([f"==ERROR== {complaint}"])
    with pytest.raises(NcuError, match="no column dram__bytes_write.sum"):
        parse([line.replace("dram__bytes_write.sum", "other") for line in LISTING])
    with pytest.raises(NcuError, match="could not count loop_add_fusion"):
        parse([line.replace("268,435,456", "n/a") for line in LISTING])
    with pytest.raises(NcuError, match="cut off"):
        parse([*LISTING[:-1], '"2","4242"'])


def test_launches_are_told_apart_by_marks() -> None:
    one, two = KernelTraffic("one", 1, 1), KernelTraffic("two", 2, 2)
    begin, end = KernelTraffic(f"{BEGIN}0_forward", 0, 0), KernelTraffic(END, 0, 0)
    again = KernelTraffic(f"{BEGIN}1_forward", 0, 0)
    assert split([begin, end, again, one, two, end]) == {"0_forward": [], "1_forward": [one, two]}
    assert split([begin, one, again, two, end]) == {"1_forward": [two]}  # the first call failed under way
    assert split([begin, one]) == {}
    with pytest.raises(NcuError, match="two ran outside"):
        split([begin, end, two])


# Orchestration, with a script in ncu's place.


class FakeNcu:
    """An `ncu` and a worker's Python that tests/compare/run/fake_ncu.py plays."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        script = Path(__file__).with_name("fake_ncu.py")
        for name, arguments in (("ncu", " ncu"), ("python", "")):
            wrapper = folder / name
            wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"{arguments} "$@"\n')
            wrapper.chmod(0o755)
        monkeypatch.setenv("FAKE_NCU", str(folder))
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        for variable in ("XLAFUSE_XLA_PYTHON", "XLAFUSE_TORCH_PYTHON"):
            monkeypatch.setenv(variable, str(folder / "python"))

    def say(self, what: str, words: str) -> None:
        (self.folder / what).write_text(words)

    def forget(self, what: str) -> None:
        (self.folder / what).unlink()


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    return FakeNcu(tmp_path / "ncu", monkeypatch)


SOFTMAX = BLOCKS["softmax"]
CASE = next(case for case in SOFTMAX.cpu_check_cases() if case.direction == "train")
FORWARD = next(case for case in SOFTMAX.cpu_check_cases() if case.direction == "fwd")


def work(*names: str, case: Case = CASE) -> list[tuple[Case, Implementation]]:
    return [(case, SOFTMAX.implementation(name)) for name in names]


def measured(*arguments: Any, **options: Any) -> list[Outcome]:
    return [outcome for _, outcome in sorted(traffic.measure(*arguments, **options), key=lambda each: each[0])]


def test_one_process_profiles_all_of_a_framework(ncu: FakeNcu) -> None:
    said: list[int] = []
    found = measured(work("eager", "triton"), "all", say=said.append)
    kernel = KernelTraffic("k", 2000, 1000, 3200)
    assert found == [Profiled(None, {"forward": [kernel], "backward": [kernel]})] * 2
    assert said == [0, 1]


def test_a_worker_that_dies_costs_its_own(ncu: FakeNcu, tmp_path: Path) -> None:
    ncu.say("fault", "library")
    before, dead, after = measured(work("eager", "library", "triton"), "none", logs=tmp_path)
    assert isinstance(before, Profiled) and isinstance(after, Profiled)
    assert isinstance(dead, NotProfiled) and "died" in dead.reason and "ncu-torch-none.log" in dead.reason


def test_an_ncu_that_lists_nothing_costs_the_traffic_alone(ncu: FakeNcu) -> None:
    ncu.say("trouble", "ERR_NVGPUCTRPERM - no permission")
    assert measured(work("eager", "triton"), "all") == [
        NotProfiled("ncu listed no kernel: ERR_NVGPUCTRPERM - no permission")
    ] * 2


def test_what_was_timed_elsewhere_is_not_profiled_here(ncu: FakeNcu) -> None:
    expected = [{"timer": "cupti", "device": "another GPU"}, {"timer": "cupti", "device": "GPU"}]
    elsewhere, here = measured(work("eager", "triton"), "all", expected=expected)
    assert isinstance(here, Profiled)
    assert elsewhere == NotProfiled("it was timed in another environment: device another GPU, not GPU")


def test_each_batch_is_there_before_the_next_begins(ncu: FakeNcu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "BATCH", 2)
    said: list[int] = []
    found = traffic.measure(work("eager", "triton", "library"), "all", say=said.append)
    assert [next(found)[0], next(found)[0]] == said == [0, 1]  # a SIGKILL from here on costs the third alone
    assert [number for number, _ in found] == [2]


def test_an_interrupt_keeps_what_was_profiled(ncu: FakeNcu) -> None:
    ncu.say("interrupt", f"triton {os.getpid()} 1 0")
    kept = []
    with pytest.raises(KeyboardInterrupt):
        for number, outcome in traffic.measure(work("eager", "triton", "library"), "all"):
            kept.append((number, outcome))
    kernel = KernelTraffic("k", 2000, 1000, 3200)
    assert kept == [(0, Profiled(None, {"forward": [kernel], "backward": [kernel]}))]


def test_a_worker_that_stays_busy_after_an_interrupt_is_killed_and_ncu_is_not(
    ncu: FakeNcu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "_STOP_SECONDS", 2)
    ncu.say("interrupt", f"triton {os.getpid()} 1 60")
    kept = []
    with pytest.raises(KeyboardInterrupt):
        for number, outcome in traffic.measure(work("eager", "triton"), "all"):
            kept.append((number, isinstance(outcome, Profiled)))
    assert kept == [(0, True)]


def test_a_second_interrupt_waits_for_nothing(ncu: FakeNcu) -> None:
    ncu.say("interrupt", f"triton {os.getpid()} 2 60")
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        measured(work("eager", "triton"), "all")
    assert time.monotonic() - begun < 12  # the worker would be busy for a minute, and has a quarter of one


def test_a_probe_tells_whether_ncu_can_count(ncu: FakeNcu, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic.probe("torch")
    ncu.say("trouble", "ERR_NVGPUCTRPERM - no permission")
    with pytest.raises(NcuError, match="ERR_NVGPUCTRPERM"):
        traffic.probe("torch")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NcuError, match="not on PATH: install NVIDIA Nsight Compute"):
        traffic.probe("torch")


# Records.


def graph(*names: str) -> FusionGraph:
    kernels = tuple(
        Kernel(name, "elementwise", runtime_name="k", inputs=(Access("x", 8),), outputs=(Access("y", 4),))
        for name in names
    )
    buffers = (Buffer("x", (2,), "f32", 8, "input"), Buffer("y", (1,), "f32", 4, "output"))
    return FusionGraph("softmax", "triton", kernels, buffers=buffers)


def timed(name: str, case: Case = FORWARD, status: str = "ok", **fields: Any) -> Record:
    records = [{"name": "k", "start": 0.0, "end": 1e-6}]
    parts = {
        phase: {"device_time": [[1e-6]], "busy_time": [[1e-6]], "launches": 1, "records": records, "poisoned": True}
        for phase in case.phases
    }
    measurement = {"timer": "cupti", "phases": parts, "wall_time": [1e-6]}
    compiler = SOFTMAX.implementation(name).backend_name
    return made_record(case, name, compiler, status, segment="s1", measurement=measurement, **fields)


def run_folder(folder: Path, *records: Record) -> Plan:
    workers = {role: {"timer": "cupti", "device": "GPU"} for role in ("torch", "xla")}
    record.create(folder, {"segments": [{"id": "s1", "environment": {"workers": workers}, "ceilings": None}]})
    for each in records:
        record.append(folder, each)
    implementations = tuple(SOFTMAX.implementation(each.implementation) for each in records)
    return Plan("check", ((records[0].case, implementations),))


def traffic_of(folder: Path) -> dict[str, Any]:
    return {each.implementation: each.traffic for each in record.read_records(folder)[0]}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_every_timed_record_gets_its_traffic(ncu: FakeNcu, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plan = run_folder(
        folder, timed("triton", graph="graphs/triton.json"), timed("xla"), timed("inductor-max"),
        timed("cuda", status="wrong"),
    )
    store.save(graph("softmax_kernel"), folder / "graphs" / "triton.json")
    store.save(graph("softmax_kernel"), ncu.folder / "triton.json")
    said: list[str] = []
    outcome = count_traffic.measure(plan, folder, said.append)
    assert outcome.startswith("traffic of 2 records was counted; 1 without")
    found = traffic_of(folder)
    counts = {"launches": 1, "dram_read": 2000, "dram_written": 1000, "l2": 3200}
    kernels, uncounted = [TrafficOfKernel(kernel=0, **counts)], UncountedTraffic(0, 0)
    forward = TrafficOfPhase(**counts, kernels=kernels, uncounted=uncounted)
    assert found["triton"]["alone"] == Traffic({"forward": forward}, cache_control="all")
    assert found["triton"]["call"].phases["forward"].dram_read == 1000
    assert found["xla"]["call"].phases["forward"].kernels == []  # no graph: sums alone
    assert "autotune" in found["inductor-max"]["alone"].unavailable
    assert found["cuda"] is None
    assert said == [
        f"traffic, {number} of 4, {way}: softmax/one-row/fp32/fwd/{name}"
        for number, way, name in (
            (1, "alone", "triton"), (2, "call", "triton"), (3, "alone", "xla"), (4, "call", "xla"),
        )
    ]
    assert count_traffic.missing(plan, folder) == []


def test_a_resumed_run_measures_what_is_missing(ncu: FakeNcu, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    eager = timed("eager")
    eager.times["forward"].records = None  # its timer saw no kernels
    plan = run_folder(folder, eager, timed("triton"), timed("inductor-max"))
    ncu.say("fault", "triton")
    count_traffic.measure(plan, folder, lambda what: None)
    assert "died" in traffic_of(folder)["triton"]["call"].unavailable
    assert [each.implementation for each in count_traffic.missing(plan, folder)] == ["triton"]
    assert traffic_of(folder)["eager"]["call"].phases["forward"].launches == 1
    ncu.forget("fault")
    count_traffic.measure(plan, folder, lambda what: None)
    assert traffic_of(folder)["triton"]["call"].phases
    assert [each["implementation"] for each in lines(folder)[3 + 5 :]] == ["triton", "triton"]  # only it, in both ways


def test_after_an_interrupt_only_the_missing_ways_are_measured(ncu: FakeNcu, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plan = run_folder(folder, timed("eager"), timed("triton"))
    ncu.say("interrupt", f"triton {os.getpid()} 1 0")
    with pytest.raises(KeyboardInterrupt):
        count_traffic.measure(plan, folder, lambda what: None)
    kept = traffic_of(folder)
    assert list(kept["eager"]) == ["alone"] and kept["triton"] is None
    ncu.forget("interrupt")
    said: list[str] = []
    count_traffic.measure(plan, folder, said.append)
    assert [what.split("/")[0] + what[what.rindex("/") :] for what in said] == [
        "traffic, 1 of 3, alone: softmax/triton", "traffic, 2 of 3, call: softmax/eager",
        "traffic, 3 of 3, call: softmax/triton",
    ]
    assert traffic_of(folder)["eager"]["alone"] == kept["eager"]["alone"]
    assert count_traffic.missing(plan, folder) == []


def test_an_interrupt_of_the_run_says_how_it_goes_on(
    ncu: FakeNcu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    plan = run_folder(folder, timed("eager"), timed("triton"))
    monkeypatch.setattr(host, "gpu_present", lambda: True)
    ncu.say("interrupt", f"triton {os.getpid()} 1 0")
    assert run.execute(plan, folder=folder, target=None, resume=True, traffic=True) == 130
    said = capsys.readouterr().err
    assert "traffic, 2 of 4, alone: softmax/one-row/fp32/fwd/triton\n" in said
    assert f"--out {folder} --resume --traffic goes on" in said
    assert list(traffic_of(folder)["eager"]) == ["alone"]


def test_resuming_a_finished_run_with_traffic_measures_nothing_else(
    ncu: FakeNcu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    plan = run_folder(folder, timed("eager"), timed("triton"))
    monkeypatch.setattr(host, "gpu_present", lambda: True)
    assert run.execute(plan, folder=folder, target=None, resume=True, traffic=True) == 0
    assert all(found["call"].phases for found in traffic_of(folder).values())
    assert len(record.read_run(folder)["segments"]) == 1  # a new one would stand for new times
    assert run.execute(plan, folder=folder, target=None, resume=True, traffic=True) == 0
    assert len(lines(folder)) == 2 + 4


def test_another_compile_s_kernels_are_not_the_record_s(ncu: FakeNcu, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plan = run_folder(folder, timed("triton", graph="graphs/triton.json"))
    store.save(graph("softmax_kernel"), folder / "graphs" / "triton.json")
    store.save(graph("other_kernel"), ncu.folder / "triton.json")
    count_traffic.measure(plan, folder, lambda what: None)
    assert "other kernels than the timed one: forward other_kernel" in str(traffic_of(folder)["triton"])


def test_copies_keep_their_place_among_the_launches_and_are_told_apart() -> None:
    kernels = (
        Kernel("one", "elementwise", runtime_name="a"), Kernel("copy", "copy", runtime_name="c"),
        Kernel("two", "elementwise", runtime_name="b"),
    )
    ran = [DeviceRecord("a", 0, 1), DeviceRecord(MEMCPY, 1, 2, bytes=64), DeviceRecord("b", 2, 3)]
    launches = [KernelTraffic("a", 10, 1, 20), KernelTraffic("b", 30, 3, None)]
    found = count_traffic.phase_traffic(FusionGraph("g", "triton", kernels), "forward", launches, ran)
    assert found.uncounted == UncountedTraffic(launches=1, bytes=128) and found.unjoined == []
    assert [(counted.kernel, counted.dram_read) for counted in found.kernels] == [(0, 10), (2, 30)]
    assert (found.dram_written, found.l2) == (4, None)


def test_xla_gets_the_choices_that_the_run_recorded(tmp_path: Path) -> None:
    worker = {"jax": "0.11.2", "device": "a GPU of which there is no pack"}
    environments = {("s1", "xla"): worker, ("s1", "torch"): {"torch": "2.11.0"}}
    assert "autotune" not in count_traffic._variables(tmp_path, "xla", environments)["XLA_FLAGS"]
    worker["device"] = "NVIDIA H200"  # whose pack stands in for a folder without results
    of_pack = targets.load("h200").xla_autotune_results("0.11.2")
    assert str(of_pack) in count_traffic._variables(tmp_path, "xla", environments)["XLA_FLAGS"]
    results = tmp_path / "target" / "xla" / "autotune-0.11.2.textproto"
    results.parent.mkdir(parents=True)
    results.write_text("")
    flags = count_traffic._variables(tmp_path, "xla", environments)["XLA_FLAGS"].split()
    assert f"--xla_gpu_load_autotune_results_from={results}" in flags
    assert "--xla_gpu_graph_min_graph_size=1000000" in flags  # no CUDA graphs: ncu meets each kernel by itself
    assert count_traffic._variables(tmp_path, "torch", environments) == {}


# The command line.


def test_without_a_gpu_or_ncu_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("check", ((FORWARD, (SOFTMAX.implementation("triton"),)),))
    with pytest.raises(UsageError, match="compiles for h200"):
        count_traffic.refuse(plan, "h200")
    monkeypatch.setattr(host, "gpu_present", lambda: True)
    monkeypatch.setenv("PATH", "/nonexistent")
    out = tmp_path / "run"
    result = CliRunner().invoke(main.cli, ["run", "softmax", "--traffic", "--out", str(out)])
    assert result.exit_code == 2 and "ncu is not on PATH: install" in result.output and not out.exists()
