"""A graph's fingerprint: equal where kernels do the same work with the same configuration, in the same order.

It leaves out names, registers and source lines, which differ between versions of a compiler.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ..model import FusionGraph, Kernel

# Facts that describe a kernel's configuration, or the library routine that it calls.
_CONFIGURATION = ("config", "opcode", "opcodes", "fusion_kind", "custom_call_target")


def fingerprint(graph: FusionGraph) -> str | None:
    """Return 16 hexadecimal digits; None where a GPU could run other kernels than the graph's.

    A GPU could where it would choose a kernel's configuration by measuring: XLA's kernels that are "not autotuned". The
    configuration of Inductor's kernels is among their facts, so it is compared instead.
    """
    kernels = graph.kernels
    if not kernels or any(k.provenance == "not autotuned" and "config" not in k.facts for k in kernels):
        return None
    text = json.dumps([_work(kernel) for kernel in kernels], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _work(kernel: Kernel) -> list[Any]:
    operations = sorted((op.op, op.stage, op.backward) for op in kernel.source_ops)
    language, launch = kernel.facts.get("language"), kernel.launch
    # A GPU records the launch of every kernel, a compiler states those of hand-written ones.
    stated = [launch.grid, launch.block, (launch.config or {}).get("num_warps")] if language else [None] * 3
    configuration = [language, *stated, *(kernel.facts.get(name) for name in _CONFIGURATION)]
    return [
        kernel.phase, kernel.kind, operations, kernel.bytes_read, kernel.bytes_written, kernel.launches, configuration
    ]
