"""Launches of a measured call, through real workers: from CUPTI for every kernel, and as the compilers state them."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import convert
from worker_programs import WorkerProgram

from xlafuse.compare.graph import store
from xlafuse.compare.graph.join.kernel_records import MEMCPY, MEMSET, join
from xlafuse.compare.measure.clock import DeviceRecord, cupti_missing
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.workers.pool import WorkerPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cupti_missing() is not None, reason=str(cupti_missing()))]


@pytest.mark.parametrize(
    ("block", "implementation"),
    [
        *(("rmsnorm", name) for name in ("xla", "inductor", "triton", "cuda", "library")),
        *(("linear", name) for name in ("xla", "inductor", "library")),
    ],
)
def test_every_kernel_has_its_launch(pool: WorkerPool, tmp_path: Path, block: str, implementation: str) -> None:
    case = next(c for c in BLOCKS[block].cpu_check_cases() if (c.dtype, c.direction) == ("float16", "train"))
    with WorkerProgram(pool, tmp_path, case, implementation) as program:
        measured = program.measure()
    stated = graph = store.from_json(program.prepared["graph"])
    for phase, found in measured["phases"].items():
        graph, _ = join(graph, {phase: [convert(record, DeviceRecord) for record in found["records"]]})
    for kernel, before in zip(graph.kernels or (), stated.kernels or (), strict=True):
        ran_as = set(kernel.facts.get("ran_as", [kernel.runtime_name]))
        if ran_as <= {MEMCPY, MEMSET}:
            assert kernel.launch.grid is None
            continue
        assert kernel.device_time_us is not None, kernel.name
        launch = kernel.launch
        assert launch.differing is None and launch.grid and launch.block and min(*launch.grid, *launch.block) > 0
        assert launch.registers is not None and 0 < launch.registers <= 255
        assert launch.shared_bytes is not None and launch.local_bytes is not None
        for name in ("grid", "block", "registers", "shared_bytes"):
            assert getattr(before.launch, name) in (None, getattr(launch, name)), (kernel.name, name)
        assert launch.config == before.launch.config
        if implementation == "triton" or kernel.name.startswith("triton_"):
            assert (launch.config or {})["num_warps"] * 32 == launch.block[0]
        if implementation == "xla" and kernel.runtime_name == kernel.name.replace(".", "_"):
            assert before.launch.grid and before.launch.block and before.launch.shared_bytes is not None
        if kernel.name.startswith(("extern_kernels", "aten.")):
            assert kernel.runtime_name, kernel.name
        assert all(access.strides is not None for access in kernel.outputs or ())
    again = store.from_json(store.to_json(graph))
    assert [k.launch for k in again.kernels or ()] == [k.launch for k in graph.kernels or ()]
