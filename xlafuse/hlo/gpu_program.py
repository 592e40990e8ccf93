"""The kernels that a GPU launches for an optimized HLO module, and the buffers between them.

Each kernel has its source operations and lines, the buffers it reads and writes, and the bytes it moves. No framework
is needed; `text_reader` and `proto_reader` make the `Module`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xlafuse.hlo import launch_config
from xlafuse.hlo.buffers import Buffer
from xlafuse.hlo.call_expansion import check_expansion
from xlafuse.hlo.gc_pause import collector_paused
from xlafuse.hlo.kernel_kind import Kind, is_tunable, runtime_name
from xlafuse.hlo.module_walk import Around, Branch, KernelSite, ModuleWalk, Use, named
from xlafuse.hlo.platform import platform_of
from xlafuse.hlo.source_lines import SourceOp, stage_of
from xlafuse.hlo.text_reader import Computation, Instruction, Module, Shape, parse

__all__ = [
    "Access", "Buffer", "Computation", "Instruction", "Kernel", "Kind", "Launch", "Module", "Program", "Shape",
    "SourceOp", "kernels", "parse", "program", "stage_of",
]


@dataclass(frozen=True)
class Kernel:
    """One entry of the schedule that runs on the GPU.

    name: the HLO instruction's name.
    runtime_name: the kernel's name at run time; None if a library or the author of a custom call chooses it. Fusions
        with equal bodies share one kernel, and all run under the name of one of them.
    ops: the source operations inside, in order, each once: the last part of its op_name, or the opcode if XLA recorded
        no op_name.
    stages: the named scopes of these operations, outermost first ("norm/mean_square").
    lines: "file:line", sorted.
    opcodes: the HLO instructions inside that compute or move data, in order.
    bytes_read, bytes_written: declared bytes of one launch. Each distinct buffer and each result counts once. A slice
        or gather reads as much as it returns, and an in-place update writes its update. A library's scratch space is
        left out.
    launches: in one call of the module; None if that depends on data (a conditional, a loop of unknown length).
    least_launches: the fewest in one call, if `branches` are taken. Loops of unknown length make no iteration.
    branches: those of the conditionals around it, outermost first.
    around: the loops and branches that hold it, outermost first: each a name that no other one has, and the iterations
        of one entry (None if data decides).
    split_k: of a product, the partial sums of each element of its result, if all its readers add them up; else 0.
    gpus: of a collective, how many exchange with each other; 0 where that is not known, and of other kernels.
    tunable: XLA's autotuner chooses the configuration by measuring, if there is a device.
    """

    name: str
    kind: Kind
    ops: tuple[str, ...]
    stages: tuple[str, ...]
    lines: tuple[str, ...]
    opcodes: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    runtime_name: str | None
    launches: int | None
    least_launches: int
    branches: tuple[Branch, ...]
    around: Around
    split_k: int
    gpus: int
    tunable: bool


@dataclass(frozen=True)
class Access:
    """The bytes that one launch reads or writes of the buffer with this name, in whatever memory it is.

    shape: of the array that the kernel is given; None if it is given several of this buffer that differ.
    """

    buffer: str
    bytes: int
    shape: Shape | None = None


@dataclass(frozen=True)
class Launch:
    """A kernel at its place in the program.

    reads, writes: each buffer once; their bytes add up to the kernel's. source_ops: in the order of the kernel's ops.
    flops: of one launch (see `flops`), None if unknown. workspace_bytes: a library's scratch space. instruction: the
    HLO instruction that the kernel runs. config: its configuration (see `launch_config`).
    """

    kernel: Kernel
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    source_ops: tuple[SourceOp, ...]
    flops: float | None
    workspace_bytes: int
    instruction: Instruction
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """A module as a GPU runs it.

    launches: in the order of the text.
    buffers: the inputs by parameter number, then the buffers that launches use or the module returns, in the order of
        their appearance.
    inputs, outputs: names of buffers, in the order of the entry's parameters and results. A buffer that is returned
        twice is listed twice.
    unresolved: a sentence for each operand whose buffer is unknown and each missing computation.
    """

    name: str
    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    unresolved: tuple[str, ...]


def kernels(module: Module) -> list[Kernel]:
    """Return the module's kernels in the order of the text. Raises as `program` does."""
    return [launch.kernel for launch in program(module).launches]


def program(module: Module) -> Program:
    """Return the launches of a module and the buffers between them.

    A copy of an array without elements is not a launch.

    Raises ValueError if a computation calls itself, or if calls expand to more instructions than XLA ever writes.
    """
    check_expansion(module)
    walk = ModuleWalk(module)
    with collector_paused():
        walk.run()
        return _program(module, walk)


def _program(module: Module, walk: ModuleWalk) -> Program:
    values = walk.values
    reads = [_merged(walk, site.reads, at_most_once=True) for site in walk.sites]
    writes = [_merged(walk, site.writes, at_most_once=False) for site in walk.sites]
    outputs = [values.find(value) for value in walk.outputs if values.is_array(value)]
    used = {value for accesses in (*reads, *writes) for value in accesses}
    deciding = {values.find(value): reader for value, reader in walk.deciding.items()}
    buffers = values.buffers(used, set(outputs), platform_of(module) if values.in_other_memory() else None, deciding)
    parts = _partial_sums(walk, reads, writes)
    return Program(
        name=module.name,
        launches=tuple(
            [
                Launch(
                    _kernel(site, split_k, sum(read.values()), sum(written.values())),
                    _accesses(walk, buffers, read, site.reads),
                    _accesses(walk, buffers, written, site.writes),
                    site.source_ops, site.flops, site.workspace_bytes, site.instruction,
                    launch_config.of(site.instruction, site.work),
                )
                for site, split_k, read, written in zip(walk.sites, parts, reads, writes, strict=True)
            ]
        ),
        buffers=tuple(buffers.values()),
        inputs=tuple(buffers[value].name for value in walk.inputs if values.is_array(value)),
        outputs=tuple(buffers[value].name for value in outputs),
        unresolved=tuple(walk.unresolved),
    )


def _partial_sums(walk: ModuleWalk, reads: list[dict[int, int]], writes: list[dict[int, int]]) -> list[int]:
    """Return, for each site, the partial sums of each element of its product, which all readers add up; else 0.

    XLA splits a product along the summed dimension, and names the sum of the parts after the product.
    """
    readers: dict[int, list[KernelSite]] = {}
    for site, read in zip(walk.sites, reads, strict=True):
        for value in read:
            readers.setdefault(value, []).append(site)
    found = []
    for site, written in zip(walk.sites, writes, strict=True):
        parts: set[tuple[int, ...]] = set()
        if len(written) == 1 and site.kind == "gemm":
            names = {named(part) for part in site.work}
            users = readers.get(next(iter(written)), ())
            parts = {tuple(user.sums[name] for name in names & user.sums.keys()) for user in users}
        match list(parts):
            case [(count,)] if count > 1:  # every reader adds up as many
                found.append(count)
            case _:
                found.append(0)
    return found


def _accesses(
    walk: ModuleWalk, buffers: dict[int, Buffer], sizes: dict[int, int], uses: list[Use]
) -> tuple[Access, ...]:
    shapes: dict[int, set[tuple[Any, ...]]] = {}
    of: dict[int, Shape | None] = {}
    for value, _, shape in uses:
        buffer = walk.values.find(value)
        of[buffer] = shape
        shapes.setdefault(buffer, set()).add((shape, None if shape is None or shape.tiled else shape.order))
    return tuple([
        Access(buffers[value].name, size, of[value] if len(shapes[value]) == 1 else None)
        for value, size in sizes.items()
    ])


def _merged(walk: ModuleWalk, accesses: list[Use], at_most_once: bool) -> dict[int, int]:
    """Return bytes by buffer. at_most_once: a buffer counts at most its size, however often it is accessed."""
    merged: dict[int, int] = {}
    for value, size, _ in accesses:
        buffer = walk.values.find(value)
        total = merged.get(buffer, 0) + size
        merged[buffer] = min(total, walk.values.bytes(buffer)) if at_most_once else total
    return merged


def _kernel(site: KernelSite, split_k: int, bytes_read: int, bytes_written: int) -> Kernel:
    instruction, work, kind = site.instruction, site.work, site.kind
    return Kernel(
        name=instruction.name,
        kind=kind,
        ops=tuple([op.op for op in site.source_ops]),
        stages=tuple(dict.fromkeys([op.stage for op in site.source_ops if op.stage])),
        lines=tuple(sorted({part.source for part in work if part.source})),
        opcodes=tuple([part.opcode for part in work]),
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        runtime_name=runtime_name(instruction, kind, work),
        launches=site.launches,
        least_launches=site.least,
        branches=site.branches,
        around=site.around,
        split_k=split_k,
        gpus=max((part.gpus for part in work), default=0),
        tunable=is_tunable(instruction, kind),
    )
