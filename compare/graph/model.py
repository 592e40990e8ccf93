"""The fusion graph: kernels in launch order, the buffers between them, and why there are not fewer.

One kind of graph for XLA, Inductor, Triton, CUDA and eager PyTorch. A graph holds one compiled module, or the two parts
of a training step (each kernel says which), whose saved residuals are buffers that the one writes and the other reads.
Builders are `from_hlo`, `from_inductor`, `from_launches`, `from_eager`; `store` reads and writes the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Kind = Literal[
    "elementwise", "reduction", "gemm", "attention", "copy", "scatter", "collective", "library", "custom", "memset"
]
Role = Literal["input", "output", "intermediate", "saved", "constant"]
Part = Literal["forward", "backward"]

# Why two kernels are not one, in the same words for every compiler; the compiler's own are kept beside them.
REASONS = {
    "gemm": "one side is a matrix product, which this compiler fuses with nothing, or with little",
    "library": "one side is a library call, which nothing can be fused into",
    "unsupported": "the compiler has no code for such a fusion",
    "reduction": "one side needs the whole of a reduction that the other side is still computing",
    "shape": "the two sides iterate over different shapes",
    "layout": "the two sides walk memory in different orders",
    "no-shared-data": "the two sides share no data, so that fusing them would save no traffic",
    "recompute": "the producer has other consumers, and would be computed again for each",
    "unprofitable": "the compiler expects no gain, or a cost elsewhere",
    "peak-memory": "the compiler expects that the fused program would hold more memory at once",
    "resources": "the fused kernel would need too many registers, operands, or too much shared memory",
    "order": "fusing would make a cycle, or reorder what must stay in order",
    "graph-break": "the two sides are compiled apart",
    "author": "the two sides are written as separate kernels",
    "other": "none of the other words fits",
}


@dataclass(frozen=True)
class SourceOp:
    """An operation of the user's program.

    op: its name there ("mul", "dot_general", "aten.mul"). stage: the named scopes around it, outermost first
    ("norm/scale"). line: "file:line". site: what tells it from other operations of the program; equal sites in two
    kernels are one operation computed twice; "" where that is not known. backward: it computes a gradient.
    rematerialized: it repeats a forward operation on purpose (checkpointing).
    """

    op: str
    stage: str = ""
    line: str = ""
    site: str = ""
    backward: bool = False
    rematerialized: bool = False


@dataclass(frozen=True)
class Access:
    """Bytes of a buffer that one launch reads or writes; None where they are not known."""

    buffer: str
    bytes: int | None


@dataclass(frozen=True)
class Kernel:
    """One launch site.

    name: the compiler's. runtime_name: what profilers call it; None where a library chooses. launches: in one call;
    None where that depends on data. inputs, outputs: of one launch; None where they are not known. workspace_bytes: a
    library's scratch space, in no other number. flops: of one launch; None where not known. provenance: what its
    configuration rests on ("compiled", "device", "replayed", "not autotuned"; "" where nobody asks). device_time_us:
    measured, all launches of one call; None without a GPU. facts: what only some compilers say (grid, registers, ...).
    """

    name: str
    kind: Kind
    part: Part = "forward"
    runtime_name: str | None = None
    source_ops: tuple[SourceOp, ...] = ()
    inputs: tuple[Access, ...] | None = ()
    outputs: tuple[Access, ...] | None = ()
    workspace_bytes: int = 0
    flops: float | None = None
    launches: int | None = 1
    provenance: str = ""
    device_time_us: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def bytes_read(self) -> int | None:
        return _total(self.inputs)

    @cached_property
    def bytes_written(self) -> int | None:
        return _total(self.outputs)

    @property
    def stages(self) -> tuple[str, ...]:
        """Each once, in order of appearance."""
        return tuple(dict.fromkeys(op.stage for op in self.source_ops if op.stage))

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.line for op in self.source_ops if op.line))


def _total(accesses: tuple[Access, ...] | None) -> int | None:
    if accesses is None:
        return None
    known = [access.bytes for access in accesses]
    return None if None in known else sum(size for size in known if size is not None)


@dataclass(frozen=True)
class Buffer:
    """Device memory between kernels. dtype in the field's short form ("bf16", "f32", "s8"). saved: a residual that
    forward writes, or passes on, for backward."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    role: Role


@dataclass(frozen=True)
class Reason:
    """Why producer and consumer (kernels' names; "" where the compiler's name led to no kernel) are not one kernel.

    code: a key of REASONS. text: the compiler's own words; what we inferred says so in `origin`, which names who
    speaks ("xla priority-fusion", "inductor", "inferred"). bytes_saved: what fusing the two would save at most: the
    writes and reads of what only passes between them; None where that is not known. fused_us, unfused_us: the
    compiler's own estimate. line: of a graph break.
    """

    producer: str
    consumer: str
    code: str
    text: str
    origin: str
    bytes_saved: int | None = None
    fused_us: float | None = None
    unfused_us: float | None = None
    line: str = ""


@dataclass(frozen=True)
class FusionGraph:
    """kernels: in launch order; None where operations are known and kernels are not (eager PyTorch without a GPU), with
    the operations in `operations`. unparsed: what could not be read, each as it stood. compiler: "xla", "inductor",
    "triton", "cuda", "eager". versions: package -> version. target: the GPU compiled for, or "".
    """

    name: str
    compiler: str
    kernels: tuple[Kernel, ...] | None
    buffers: tuple[Buffer, ...] = ()
    reasons: tuple[Reason, ...] = ()
    operations: tuple[SourceOp, ...] = ()
    unparsed: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    target: str = ""

    @cached_property
    def buffer(self) -> Mapping[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def producers(self) -> Mapping[str, tuple[int, ...]]:
        """Buffer name -> launch indices of the kernels that write it."""
        return self._users("outputs")

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Buffer name -> launch indices of the kernels that read it."""
        return self._users("inputs")

    def _users(self, side: str) -> dict[str, tuple[int, ...]]:
        found: dict[str, dict[int, None]] = {}
        for index, kernel in enumerate(self.kernels or ()):
            for access in getattr(kernel, side) or ():
                found.setdefault(access.buffer, {})[index] = None
        return {name: tuple(indices) for name, indices in found.items()}

    @property
    def materialized(self) -> tuple[Buffer, ...]:
        """Intermediates and residuals: what a kernel wrote for another one to read, largest first."""
        kept = [b for b in self.buffers if b.role in ("intermediate", "saved") and b.name in self.producers]
        return tuple(sorted(kept, key=lambda buffer: -buffer.bytes))

    @property
    def saved(self) -> tuple[Buffer, ...]:
        """Residuals: what forward writes for backward beside its outputs; inputs that backward reads stay inputs."""
        return tuple(buffer for buffer in self.buffers if buffer.role == "saved")
