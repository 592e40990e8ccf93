"""Remarks on this machine's GPUs: slices, several kinds, other programs, compute mode, memory, WSL."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import targets
from ..base import host
from ..base.usage import UsageError
from . import gpu_conditions

if TYPE_CHECKING:
    from xlafuse.compile.gpus import Gpu

OLDEST = (8, 0)
LITTLE_MEMORY = 16 << 30  # the main cases of the tour fit in it, by the estimate of run/batches.py


def problem() -> str | None:
    """Return why the several processes of a run cannot share the first GPU, or None."""
    found = host.gpus()
    mode = found[0].compute_mode if found else "default"
    # Under NVIDIA's MPS, one server process holds an exclusive GPU for all.
    mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control"
    if mode == "default" or (mode == "exclusive process" and mps.exists()):
        return None
    return (
        f"the {found[0].name} is in compute mode \"{mode}\", and a run has several processes on it; an administrator "
        f"changes the mode: nvidia-smi -i {found[0].uuid} -c DEFAULT"
    )


def require_gpu(needed: str) -> None:
    """Raise UsageError without a GPU that several processes can share. needed: the message where there is none."""
    if not host.gpu_present():
        raise UsageError(needed)
    if reason := problem():
        raise UsageError(reason)


def remarks(listed: Sequence[str] = ()) -> list[str]:
    """Return what a user should know before a run, a sentence or two each.

    listed: the GPUs that nvidia-smi lists.
    """
    found = host.gpus()
    if not found:
        return [
            "nvidia-smi lists a GPU but CUDA sees none: check the driver and CUDA_VISIBLE_DEVICES; a GPU in MIG mode "
            "needs a slice (nvidia-smi -L lists them)"
        ] if listed else []
    first = found[0]
    said = [problem(), *different(found), gpu_conditions.in_use()]
    if first.is_slice:
        said.append(
            f"{first.name} is a slice: its ceilings are measured, clocks and temperature are those of the whole GPU, "
            "and work in other slices may change times. CUDA gives a process one slice; CUDA_VISIBLE_DEVICES takes the "
            "UUID of another"
        )
    if targets.of_device(first.name) is None:
        said.append(
            f"no target is a {first.name}: a run measures its ceilings, and kernels take launch configurations of the "
            "nearest GPU until `xlafuse tune` finds its own (docs/gpus.md, \"A GPU that nobody recorded\")"
        )
    if (capability := (first.properties["major"], first.properties["minor"])) < OLDEST:
        said.append(
            f"its compute capability {capability[0]}.{capability[1]} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest "
            "for which our kernels were compiled: expect failed records"
        )
    if first.memory_bytes < LITTLE_MEMORY:
        said.append(f"cases that need more than its {first.memory_bytes / 1e9:.0f} GB are skipped, with both numbers")
    if "microsoft" in platform.release().lower():
        said.append(
            "this is WSL, where no run was tried. NVIDIA's CUPTI, the clock here, needs WSL 2 with Windows 11 and "
            "driver 525 or newer. Graphics of Windows use the GPU, too"
        )
    return [sentence for sentence in said if sentence]


def different(found: Sequence[Gpu]) -> list[str]:
    """Return a sentence where the GPUs are of several kinds."""
    if len({gpu.name for gpu in found}) < 2:
        return []
    others = ", ".join(f"{gpu.name} ({gpu.uuid})" for gpu in found[1:])
    return [
        f"the GPUs differ: runs use the {found[0].name}, which CUDA names first. CUDA_VISIBLE_DEVICES=UUID makes it "
        f"another one: {others}"
    ]
