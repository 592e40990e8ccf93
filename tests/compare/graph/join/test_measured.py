"""Launches of kernels from a GPU's records, and from a compiler where no record tells; the bytes that ncu counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_records import append_malformed, made_record
from msgspec import convert
from recording import record

from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.graph.join.kernel_records import join
from xlafuse.compare.graph.join.measured import with_measured_bytes
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Launch
from xlafuse.compare.graph.render import text_view
from xlafuse.compare.measure.clock import DeviceRecord
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record_fields import Traffic
from xlafuse.compare.spec.case import Case

STATED = Launch((4, 1, 1), (128, 1, 1), 30, 1024, 0, config={"num_warps": 4})


def ran(name: str = "k", at: float = 0.0, **more: Any) -> DeviceRecord:
    known = {"grid": (4, 1, 1), "block": (128, 1, 1), "registers": 40, "shared_bytes": 2048, "local_bytes": 16}
    return DeviceRecord(name, at, at + 1e-6, **known | more)


def copied(at: float = 0.0) -> DeviceRecord:
    return DeviceRecord("[memcpy]", at, at + 1e-6, bytes=8)


def graph(*kernels: Kernel, compiler: str = "inductor") -> FusionGraph:
    return FusionGraph("g", compiler, kernels, (Buffer("b", (), "u8", 8, "intermediate"),))


def kernel(name: str = "k", **more: Any) -> Kernel:
    uses = (Access("b", 8),)
    return Kernel(name, **{"kind": "elementwise", "runtime_name": name, "inputs": uses, "outputs": uses} | more)


def joined(kernel: Kernel, *records: Any, **more: Any) -> Kernel:
    found, left = join(graph(kernel, **more), {"forward": records})
    assert left == () and found.kernels is not None
    return found.kernels[0]


def test_records_tell_the_launch_and_the_compiler_its_configuration() -> None:
    assert joined(kernel(launch=STATED), ran()).launch == Launch(
        (4, 1, 1), (128, 1, 1), 40, 2048, 16, config={"num_warps": 4}
    )
    assert joined(kernel(), ran()).launch == Launch((4, 1, 1), (128, 1, 1), 40, 2048, 16)


def test_a_library_call_has_the_launch_of_its_main_kernel() -> None:
    product = kernel("mm", kind="gemm", runtime_name=None)
    helper = ran("splitKreduce_kernel", 2e-6, grid=(9, 9, 9), registers=99)
    found = joined(product, ran("nvjet_sm90_tst"), helper)
    assert found.runtime_name == "nvjet_sm90_tst" and found.launch.grid == (4, 1, 1) and found.launch.registers == 40
    assert found.launch.differing is None


def test_launches_that_differ_have_no_common_value() -> None:
    records = [ran(), ran(at=1e-6, grid=(8, 1, 1)), ran(at=2e-6)]
    found = joined(kernel(launches=3), *records).launch
    assert found.grid is None and found.registers == 40
    assert found.differing == {"grid": [(4, 1, 1), (8, 1, 1)]}
    written = store.to_json(graph(kernel(launch=found)))["kernels"][0]["launch"]
    assert "grid" not in written and json.loads(json.dumps(written))["differing"] == {"grid": [[4, 1, 1], [8, 1, 1]]}


def test_nothing_known_stays_as_the_compiler_states_it() -> None:
    """Older records and some profiles have neither grid nor registers."""
    assert joined(kernel(launch=STATED), record("k")).launch == STATED
    partly = joined(kernel(launch=STATED), record("k", grid=(4, 1, 1))).launch
    assert partly == STATED
    assert joined(kernel(), record("k")).launch == Launch()


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        # Another configuration ran, as on a GPU that measured.
        ([record("k", grid=(8, 1, 1))], Launch((8, 1, 1))),
        ([record("k", grid=(4, 1, 1), block=(256, 1, 1))], Launch((4, 1, 1), (256, 1, 1))),
        # The driver copied.
        ([copied()], Launch()),
    ],
)
def test_a_statement_about_other_code_is_dropped(records: list[Any], expected: Launch) -> None:
    assert joined(kernel(kind="copy", launch=STATED), *records).launch == expected


def test_a_launch_by_the_driver_and_one_of_a_kernel_differ() -> None:
    found = joined(kernel(kind="copy", launches=2), ran(), copied(1e-6)).launch
    assert found.grid is None and found.differing is not None and found.differing["grid"] == [(4, 1, 1), None]


def test_graphs_keep_launches_and_layouts() -> None:
    seen = (Access("b", 8, shape=(4, 2), strides=(1, 4)),)
    before = graph(kernel(launch=STATED, inputs=seen), kernel("l", launch=Launch(registers=0)))
    written = json.loads(json.dumps(store.to_json(before)))
    first, second = written["kernels"]
    assert first["launch"]["grid"] == [4, 1, 1] and first["launch"]["config"] == {"num_warps": 4}
    assert second["launch"] == {"registers": 0}  # what is not known is absent
    assert first["inputs"] == [{"buffer": "b", "bytes": 8, "shape": [4, 2], "strides": [1, 4]}]
    assert second["inputs"] == [{"buffer": "b", "bytes": 8}]
    after = store.from_json(written)
    assert after == before and after.kernels is not None and after.kernels[0].inputs is not None
    assert (after.kernels[0].inputs[0].shape, after.kernels[0].inputs[0].strides) == ((4, 2), (1, 4))


@pytest.mark.parametrize(
    "launch", [{"grid": 4}, {"grid": [1, 2]}, {"block": ["x", 1, 1]}, {"registers": "40"}, {"config": []}, [1]]
)
def test_a_damaged_launch_is_an_error(launch: Any) -> None:
    data = store.to_json(graph(kernel()))
    data["kernels"][0]["launch"] = launch
    with pytest.raises(store.GraphError):
        store.from_json(data)


def test_one_line_tells_a_launch() -> None:
    launch = Launch((4096, 2, 1), (128, 1, 1), 40, 2048, 16, {"BLOCK": 64}, {"registers": [40, 42]})
    shown = text_view.render(text_view.kernel(graph(kernel(launch=launch)), 0, width=200), width=200)
    line = next(line for line in shown.splitlines() if "launched with" in line)
    for words in ("4,096×2×1 blocks", "128×1×1 threads", "40 registers", "2.05 kB shared", "16 B local", "BLOCK 64"):
        assert words in line, line
    assert "differ in registers: 40, 42" in line
    assert "launched with" not in text_view.render(text_view.kernel(graph(kernel()), 0))


ADDITIONS = FusionGraph(
    "add", "triton",
    tuple(
        Kernel(name, "elementwise", inputs=(Access("x", 8_000_000),), outputs=(Access("y", 4_000_000),))
        for name in ("one", "two")
    ),
    buffers=(
        Buffer("x", (2_000_000,), "f32", 8_000_000, "input"), Buffer("y", (1_000_000,), "f32", 4_000_000, "output"),
    ),
)
COUNTS = {"dram_read": 8_100_000, "dram_written": 4_000_000, "l2": None}


def traffic(way: str = "alone") -> dict[str, Any]:
    kernels = [{"kernel": 1, "launches": 1, **COUNTS}]
    return {way: {"cache_control": "all", "phases": {"forward": {"launches": 1, **COUNTS, "kernels": kernels}}}}


def read(counts: dict[str, Any]) -> dict[str, Traffic]:
    return convert(counts, dict[str, Traffic])


def test_counts_go_to_the_kernel_that_was_launched() -> None:
    found = with_measured_bytes(ADDITIONS, read({**traffic(), "call": {"unavailable": "the worker died"}}))
    assert found.kernels and not any(fact.startswith("measured") for fact in text_view.facts(found.kernels[0]))
    assert text_view.facts(found.kernels[1])[-1] == "measured alone: reads 8.10 MB, writes 4.00 MB, ? through L2"
    in_the_call = with_measured_bytes(ADDITIONS, read(traffic("call")))
    assert in_the_call.kernels and text_view.facts(in_the_call.kernels[1])[-1].startswith("measured in the call: ")
    assert with_measured_bytes(ADDITIONS, read({"alone": {"unavailable": "no"}})) is ADDITIONS


@pytest.mark.parametrize("arguments", [[], ["--kernel", "two"]], ids=["overview", "kernel"])
def test_inspect_shows_them(tmp_path: Path, arguments: list[str]) -> None:
    run_folder.create(tmp_path, {"segments": []})
    case = Case("vector_add", "large", {"elements": 2_000_000}, "float32", "fwd")
    store.save(ADDITIONS, tmp_path / "graphs" / "g.json.gz")
    run_folder.append(tmp_path, made_record(case, "triton", graph="graphs/g.json.gz", traffic=traffic()))
    result = CliRunner().invoke(main.cli, ["inspect", str(tmp_path), *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.output.count("measured alone: reads 8.10 MB, writes 4.00 MB") == 1


def test_a_record_with_other_traffic_costs_itself(tmp_path: Path) -> None:
    run_folder.create(tmp_path, {"segments": []})
    case = Case("vector_add", "large", {"elements": 2_000_000}, "float32", "fwd")
    store.save(ADDITIONS, tmp_path / "graphs" / "g.json.gz")
    broken = {"alone": {"phases": {"forward": {}}}}
    append_malformed(tmp_path, made_record(case, "triton", graph="graphs/g.json.gz"), traffic=broken)
    run_folder.append(tmp_path, made_record(case, "cuda", graph="graphs/g.json.gz"))
    result = CliRunner().invoke(main.cli, ["inspect", str(tmp_path), "--json"])
    assert result.exit_code == 0 and "$.traffic" in result.output
    assert json.loads(result.stdout)["records"][0]["graph"]["kernels"]
