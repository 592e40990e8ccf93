"""PyTorch's side for a GPU that is not there: Inductor, Triton and CUDA emit its real code; nothing is run.

The process pretends to have the GPU and is good for nothing else, which is why it is a role of its own.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare import machine, targets
from compare.protocol import Skip
from compare.spec import Case
from triton_side import deviceless

_PACK = targets.load(os.environ["XLAFUSE_TARGET"])
try:
    deviceless.activate(_PACK.device_properties())
except deviceless.Unsupported as problem:
    raise Skip(str(problem)) from problem

import torch  # noqa: E402  (the pretended GPU must be there before torch is imported)

from compare.blocks import BLOCKS  # noqa: E402
from compare.kernels import of_launch, to_json  # noqa: E402


def methods() -> dict[str, Callable[..., Any]]:
    return {"compile": compile_for_target, "environment": environment}


def environment() -> dict[str, Any]:
    """Versions of what emits the code, and the GPU that this process pretends to have."""
    packages = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
    found = {"python": platform.python_version(), "pretends": str(_PACK.device_properties()["name"])}
    return found | machine.versions(packages)


def compile_for_target(case: dict[str, Any], implementation: str, dumps: str) -> dict[str, Any]:
    """Kernels, artifacts and compile time of one implementation for this process's pretended GPU."""
    spec = Case.from_json(case)
    block = BLOCKS[spec.block]
    row = block.implementation(implementation)
    torch.set_float32_matmul_precision("high" if spec.precision == "tf32" else "highest")
    inputs = {t.name: (t.shape(spec.sizes), getattr(torch, spec.dtype)) for t in block.inputs}
    train = spec.direction == "train"
    started = time.perf_counter()
    if row.compiler.startswith("inductor"):
        captured = deviceless.compile_inductor(
            row.load(), inputs, block.attributes, train=train, max_autotune=row.compiler == "inductor-max"
        )
        compile_s = time.perf_counter() - started
        captured.write(dumps)
        kernels = {part: [to_json(k) for k in captured.kernels if k.part == part] for part in spec.parts}
    else:
        launches = deviceless.compile_handwritten(row.load(), inputs, block.attributes, train=train)
        compile_s = time.perf_counter() - started
        kernels = {part: [of_launch(launch) for launch in recorded] for part, recorded in launches.items()}
        for part, recorded in launches.items():
            for index, launch in enumerate(recorded):
                launch.write(Path(dumps) / part, index)
    return {"compile_s": compile_s, "kernels": kernels}
