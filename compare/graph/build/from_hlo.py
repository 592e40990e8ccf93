"""The fusion graph of an optimized HLO module, and the launches that XLA's runtime makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from xlafuse.hlo import gpu_program, tpu_estimate
from xlafuse.hlo.cost_estimates import estimates_us
from xlafuse.hlo.gc_pause import collector_paused

from ..join.measured import agreed
from ..model import Access, Buffer, FusionGraph, Kernel, Launch, Phase, SourceOp

if TYPE_CHECKING:
    from xlafuse.dumps.thunks import Thunk

_UNKNOWN = "unknown"
_MAX_TEXT = 1000  # characters of an unparsed line, enough to find it
_UNSCHEDULED = "the module has no schedule: XLA had not finished with it, and its kernels may still change"
_ON_TPU = (
    "nothing ran on the TPU: cycles are estimated by the compiler, and roofline times are at the rates of a data sheet"
)
_NOTHING: Mapping[str, str] = MappingProxyType({})


def from_hlo(
    module: gpu_program.Module,
    *,
    phase: Phase = "forward",
    target: str = "",
    versions: Mapping[str, str] = _NOTHING,
    provenance: Mapping[str, str] = _NOTHING,
) -> FusionGraph:
    """Return the graph of one module after all of XLA's passes.

    Kernels are in launch order if the module is scheduled (`module.is_scheduled`); the notes of another one say that
    it has none. In a module that XLA has not optimized, each instruction is a kernel.

    provenance: by kernel name (`xlafuse.hlo.provenance`).

    A kernel's facts: "opcode", and where they exist "opcodes" (of the instructions in a fusion), "fusion_kind",
    "custom_call_target", "tunable", and
    - "other_memory": the bytes that a launch reads and writes in each other memory ("host"), in no other number;
    - "around": the loops and branches that hold it, outermost first: each a name that no other one has, and the
      iterations of one entry (None if data decides);
    - "split_k": of a product, the partial sums of each element of its result, which all its readers add up;
    - "gpus": of a collective, how many exchange with each other; "overlaps": XLA runs other kernels meanwhile;
    - "estimated_cycles": the cycles of a launch on a TPU, as XLA's cost model estimates them;
    - "sort_launches": "unknown" for a sort on a GPU (see `with_thunks`). It is one kernel here, with the bytes of one
      pass, and becomes several launches. So `launches` is None.
    - "branches": of the conditionals around it, outermost first: each conditional's name, the branch's index, and the
      number of branches; "launches_if_taken": the fewest launches if these branches are taken.

    Buffers start with the inputs, in the order of the entry's parameters. An input that the module returns unchanged
    keeps the role "input". A residual is an output, because one module does not show its purpose. `xlafuse.hlo` defines
    the rest: `buffers` which values share a buffer, `fusion_bytes` and `flops` what counts, `source_lines` what equal
    sites mean.

    Raises ValueError if the module's calls expand more than those of any real module.
    """
    graph = from_program(
        gpu_program.program(module),
        unparsed=tuple(f"line {number}: {text[:_MAX_TEXT]}" for number, text in module.unparsed),
        phase=phase, target=target, versions=versions, provenance=provenance,
    )
    return graph if module.is_scheduled else replace(graph, notes=(*graph.notes, _UNSCHEDULED))


def from_program(
    program: gpu_program.Program,
    *,
    unparsed: tuple[str, ...] = (),
    phase: Phase = "forward",
    target: str = "",
    versions: Mapping[str, str] = _NOTHING,
    provenance: Mapping[str, str] = _NOTHING,
) -> FusionGraph:
    """Return the same from a module's program; its `inputs` and `outputs` name the buffers of arguments and results."""
    on_tpu = target.startswith("tpu")
    on_gpu = not on_tpu and target != "cpu"
    with collector_paused():
        buffers = tuple(
            Buffer(b.name, b.shape, b.dtype, b.bytes, b.role, b.space, b.padding, b.decides) for b in program.buffers
        )
        elsewhere = {buffer.name: buffer.space for buffer in buffers if buffer.space}
        kernels = tuple(
            _kernel(launch, phase, provenance.get(launch.kernel.name, ""), elsewhere, on_gpu, on_tpu)
            for launch in program.launches
        )
    return FusionGraph(
        name=program.name,
        compiler="xla",
        kernels=kernels,
        buffers=buffers,
        unparsed=(*unparsed, *(text[:_MAX_TEXT] for text in program.unresolved)),
        versions=dict(versions),
        target=target,
        notes=(_ON_TPU,) if on_tpu else (),
    )


def _kernel(
    launch: gpu_program.Launch, phase: Phase, provenance: str, elsewhere: Mapping[str, str], on_gpu: bool, on_tpu: bool
) -> Kernel:
    """Return a launch as a kernel. elsewhere: the memory of each buffer that is not in device memory.

    The rule for runtime names is that of XLA for GPUs and CPUs, so a kernel on a TPU has none.
    """
    kernel, instruction = launch.kernel, launch.instruction
    other_memory: Counter[str] = Counter()
    for access in (*launch.reads, *launch.writes):
        if access.buffer in elsewhere:
            other_memory[elsewhere[access.buffer]] += access.bytes

    def accesses(side: Iterable[gpu_program.Access]) -> tuple[Access, ...]:
        return tuple([
            Access(
                a.buffer, 0 if a.buffer in elsewhere else a.bytes, shape=None if a.shape is None else a.shape.dims,
                strides=None if a.shape is None else a.shape.strides,
            )
            for a in side
        ])

    facts: dict[str, Any] = {
        "opcode": instruction.opcode,
        "opcodes": [] if kernel.opcodes == (instruction.opcode,) else list(kernel.opcodes),
        "fusion_kind": instruction.fusion_kind,
        "custom_call_target": instruction.custom_call_target,
        "tunable": kernel.tunable,
        "around": [list(each) for each in kernel.around],
        "split_k": kernel.split_k,
        "gpus": kernel.gpus,
        "overlaps": kernel.kind == "collective" and _overlaps(instruction),
        "other_memory": dict(other_memory),
        "estimated_cycles": tpu_estimate.cycles(instruction.backend_config),
        "xla_estimates_us": estimates_us(instruction.backend_config),
    }
    launches = kernel.launches
    if on_gpu and "sort" in (instruction.opcode, *kernel.opcodes):
        facts["sort_launches"] = _UNKNOWN
        launches = None
    if kernel.branches:
        facts |= {"branches": list(map(list, kernel.branches)), "launches_if_taken": kernel.least_launches}
    return Kernel(
        name=kernel.name,
        kind=kernel.kind,
        phase=phase,
        runtime_name=None if on_tpu else kernel.runtime_name,
        source_ops=tuple([
            SourceOp(op.op, op.stage, op.line, op.site, op.backward, op.rematerialized, op.place)
            for op in launch.source_ops
        ]),
        inputs=accesses(launch.reads),
        outputs=accesses(launch.writes),
        workspace_bytes=launch.workspace_bytes,
        flops=launch.flops,
        launches=launches,
        least_launches=0 if launches is not None or kernel.branches else kernel.least_launches,
        provenance=provenance,
        launch=Launch(config=launch.config or None),
        facts={name: value for name, value in facts.items() if value},
    )


def _overlaps(instruction: gpu_program.Instruction) -> bool:
    """Return whether XLA's schedule has other kernels between a collective's start and its end."""
    return instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.backend_config


def with_thunks(graph: FusionGraph, thunks: Mapping[str, Sequence[Thunk]]) -> FusionGraph:
    """Return the graph with what a dump says of its launches. thunks: `xlafuse.dumps.thunks.read`.

    A thunk is a launch that XLA's runtime makes of an instruction: one of its kernel, or a step of a sort. A sort
    becomes a copy of its operands and several kernels.
    """
    sites = Counter(kernel.name for kernel in graph.kernels or ())

    def told(kernel: Kernel) -> Kernel:
        found = thunks.get(kernel.name, ())
        own = [thunk for thunk in found if thunk.kernel is not None]
        first = [thunk for thunk in own if thunk.kernel == own[0].kernel]  # later ones are a sort's further steps
        if first:
            stated = agreed({
                name: [getattr(thunk, name) for thunk in first] for name in ("grid", "block", "shared_bytes")
            })
            kernel = replace(kernel, launch=replace(stated, config=kernel.launch.config))
        if kernel.facts.get("sort_launches") != _UNKNOWN or not found or sites[kernel.name] > 1:
            return kernel
        once = len(found) == 1 and kernel.least_launches == 1
        return replace(
            kernel, launches=1 if once else None, least_launches=0 if once else kernel.least_launches,
            facts={**kernel.facts, "sort_launches": dict(Counter(thunk.kind for thunk in found))},
        )

    return graph if graph.kernels is None else replace(graph, kernels=tuple(map(told, graph.kernels)))
