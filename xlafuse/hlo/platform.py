"""The platform that a module was compiled for, by the traces that each of XLA's backends leaves in it."""

from __future__ import annotations

import re
from typing import Literal

from xlafuse.hlo.text_reader import Instruction, Module

Platform = Literal["cpu", "gpu", "tpu"]

# Fields of backend_config that one backend alone writes.
_CONFIGS: dict[Platform, re.Pattern[str]] = {
    "gpu": re.compile(
        r'"(?:operation_queue_id|fusion_backend_config|gemm_backend_config|native_emitter_backend_config|'
        r"selected_algorithm|cudnn_\w{1,40})"
    ),
    "tpu": re.compile(r'"(?:scoped_memory_configs|flag_configs)\\?":'),
    "cpu": re.compile(r'"outer_dimension_partitions\\?":|"(?:__ynn|__xnn|__onednn)\w{0,40}\\?"'),
}
_TARGETS: dict[Platform, tuple[str, ...]] = {
    "gpu": ("__cub", "__cudnn", "__gpu$", "cusolver", "cusparse", "cufft", "__triton"),
    "cpu": ("lapack_", "__onednn$", "__xla_cpu"),
    "tpu": ("tpu_custom_call", "ConcatBitcast", "AllocateBuffer"),
}


def platform_of(module: Module) -> Platform | None:
    """Return the platform of a module after all passes; None where nothing in it tells."""
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if found := _platform(instruction):
                return found
    return None


def _platform(instruction: Instruction) -> Platform | None:
    for platform, targets in _TARGETS.items():
        if instruction.custom_call_target.startswith(targets):
            return platform
    if not instruction.backend_config:
        return None
    return next((name for name, config in _CONFIGS.items() if config.search(instruction.backend_config)), None)


_HOST = 5
_VMEM = 1


def memory_space(number: int, platform: Platform | None) -> str:
    """Return the name of a memory space other than the device's main memory, else "".

    XLA's spaces for GPUs, except the host's, are regions of device memory (collectives, temporary buffers).
    """
    if number == _HOST:
        return "host"
    if number == 0 or platform == "gpu":
        return ""
    return "VMEM" if (number, platform) == (_VMEM, "tpu") else f"S({number})"
