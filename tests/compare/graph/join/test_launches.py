"""Launches of kernels from a GPU's records, and from a compiler where no record tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recording import record

from xlafuse.compare.graph import store
from xlafuse.compare.graph.join.kernel_records import join
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Launch
from xlafuse.compare.graph.render import text_view
from xlafuse.compare.measure.clock import DeviceRecord

STATED = Launch((4, 1, 1), (128, 1, 1), 30, 1024, 0, config={"num_warps": 4})
RUNS = Path(__file__).parents[3] / "data" / "runs"


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
