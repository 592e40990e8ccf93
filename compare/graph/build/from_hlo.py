"""Optimized HLO -> FusionGraph."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from xlafuse.hlo import gpu_program
from xlafuse.hlo.gc_pause import collector_paused

from ..model import Access, Buffer, FusionGraph, Kernel, Phase, SourceOp

_MAX_TEXT = 1000  # of an unparsed line: enough to find it by
_NOTHING: Mapping[str, str] = MappingProxyType({})


def from_hlo(
    module: gpu_program.Module,
    *,
    phase: Phase = "forward",
    target: str = "",
    versions: Mapping[str, str] = _NOTHING,
    provenance: Mapping[str, str] = _NOTHING,
) -> FusionGraph:
    """The graph of one module as XLA leaves it: after all passes, and scheduled if its kernels are to be in launch
    order (`module.is_scheduled`). Of one that XLA has not optimized yet, each instruction is a kernel.

    provenance: by kernel name (see xlafuse.hlo.provenance). Facts of each kernel: "opcode", and where it has them
    "opcodes" (of what a fusion holds), "fusion_kind", "custom_call_target", "tunable". Buffers come inputs first, in
    the order of the entry's parameters. An input that the module returns as it is keeps the role "input"; a residual
    is an output here, for one module does not show what it is saved for. What shares a buffer: xlafuse.hlo.buffers;
    what bytes and FLOPs count: hlo_traffic and hlo_flops; what equal sites mean: hlo_source.

    Raises ValueError if calls expand beyond what any module of XLA's does.
    """
    return from_program(
        gpu_program.program(module),
        unparsed=tuple(f"line {number}: {text[:_MAX_TEXT]}" for number, text in module.unparsed),
        phase=phase, target=target, versions=versions, provenance=provenance,
    )


def from_program(
    program: gpu_program.Program,
    *,
    unparsed: tuple[str, ...] = (),
    phase: Phase = "forward",
    target: str = "",
    versions: Mapping[str, str] = _NOTHING,
    provenance: Mapping[str, str] = _NOTHING,
) -> FusionGraph:
    """The same from what `hlo.program` made of a module, whose `inputs` and `outputs` tell which buffer is which
    argument and which result."""
    with collector_paused():
        kernels = tuple(_kernel(launch, phase, provenance.get(launch.kernel.name, "")) for launch in program.launches)
        buffers = tuple(Buffer(b.name, b.shape, b.dtype, b.bytes, b.role) for b in program.buffers)
    return FusionGraph(
        name=program.name,
        compiler="xla",
        kernels=kernels,
        buffers=buffers,
        unparsed=(*unparsed, *(text[:_MAX_TEXT] for text in program.unresolved)),
        versions=dict(versions),
        target=target,
    )


def _kernel(launch: gpu_program.Launch, phase: Phase, provenance: str) -> Kernel:
    kernel, instruction = launch.kernel, launch.instruction
    facts: dict[str, Any] = {
        "opcode": instruction.opcode,
        "opcodes": [] if kernel.opcodes == (instruction.opcode,) else list(kernel.opcodes),
        "fusion_kind": instruction.fusion_kind,
        "custom_call_target": instruction.custom_call_target,
        "tunable": kernel.tunable,
    }
    return Kernel(
        name=kernel.name,
        kind=kernel.kind,
        phase=phase,
        runtime_name=kernel.runtime_name,
        source_ops=tuple([
            SourceOp(op.op, op.stage, op.line, op.site, op.backward, op.rematerialized) for op in launch.source_ops
        ]),
        inputs=tuple([Access(access.buffer, access.bytes) for access in launch.reads]),
        outputs=tuple([Access(access.buffer, access.bytes) for access in launch.writes]),
        workspace_bytes=launch.workspace_bytes,
        flops=launch.flops,
        launches=kernel.launches,
        provenance=provenance,
        facts={name: value for name, value in facts.items() if value},
    )
