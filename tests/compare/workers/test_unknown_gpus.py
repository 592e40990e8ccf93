"""On a GPU that no table and no target knows, our kernels get as far as their launch, which the GPU has the memory for.

The GPU is pretended by its properties, as CUDA's driver gives them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from full_marks import first_of_each
from pretended_gpus import GPUS

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import store
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.client import Worker

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="pretending to have a GPU")]
CASES = [
    ("rmsnorm", "triton", {"rows": 512, "columns": 4096}), ("matmul", "triton", {"m": 512, "n": 1024, "k": 1024}),
    ("softmax", "cuda", {"rows": 512, "columns": 4096}),
]


def environment(name: str) -> dict[str, str]:
    return {
        "XLAFUSE_TARGET": GPUS[name].name, "XLAFUSE_TARGET_PROPERTIES": json.dumps(GPUS[name].properties),
        "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0",
    }


@pytest.mark.parametrize("name", first_of_each(["sm_121", *(name for name in GPUS if name != "sm_121")]))
def test_kernels_fit_and_take_the_nearest_gpus_configurations(name: str, tmp_path: Path) -> None:
    worker = Worker("target", tmp_path / "log", environment(name))
    try:
        worker.wait_ready()
        found = worker.ask("environment")
        assert found["pretends"] == GPUS[name].name and found["launch_table"].startswith("h")
        for block, implementation, sizes in CASES:
            direction = "train" if "train" in BLOCKS[block].directions else "fwd"
            case = Case(block, "odd", sizes, "bfloat16", direction)
            compiled = worker.ask(
                "compile", case=case.to_json(), implementation=implementation, dumps=str(tmp_path / "dumps")
            )
            graph = store.from_json(compiled["graph"])
            assert graph.target == GPUS[name].name
            taken = [kernel.launch and kernel.launch.shared_bytes for kernel in graph.kernels or ()]
            limit = GPUS[name].properties["shared_memory_per_block_optin"]
            assert taken and all(bytes is not None and bytes <= limit for bytes in taken)
    finally:
        worker.stop()
    assert GPUS[name].name in (warned := (tmp_path / "log").read_text()) and "xlafuse tune" in warned


PLANNED = """
import json, sys
import pytest
from pretended_gpus import GPUS, pretend
from xlafuse.compare.workers.xla import triton_calls

pretend(pytest.MonkeyPatch(), GPUS[sys.argv[1]], GPUS["l4"])
planner = triton_calls._planner()
plan = planner.ask(
    "launch_plan", function="xlafuse.triton_side.kernels.softmax:apply", inputs={"x": [[64, 128], "bfloat16"]},
    attributes={}, train=False, precision="ieee",
)
print(json.dumps([planner.ask("environment")["pretends"], [each["name"] for each in plan["parts"]["forward"]]]))
"""


def test_xla_plans_launches_of_triton_for_the_gpu_that_the_driver_names_first() -> None:
    pytest.importorskip("jax")
    variables: dict[str, Any] = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join((str(PROJECT), str(PROJECT / "tests" / "helpers")))
    done = subprocess.run(
        [sys.executable, "-c", PLANNED, "sm_87"], cwd=PROJECT, capture_output=True, text=True, timeout=280,
        env=variables | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    device, launches = json.loads(done.stdout.splitlines()[-1])
    assert device == GPUS["sm_87"].name and launches
