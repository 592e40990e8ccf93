"""The fusion graph: kernels in launch order, the buffers between them, and the reasons for missed fusions.

XLA, Inductor, Triton, CUDA and eager PyTorch share this one model. A graph holds one compiled module, or both phases of
a training step. Each kernel names its phase; residuals are buffers that forward writes and backward reads.
`build/` makes graphs from each compiler's output; `store` reads and writes them as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Kind = Literal[
    "elementwise", "reduction", "gemm", "attention", "copy", "scatter", "collective", "library", "custom", "memset"
]
Role = Literal["input", "output", "intermediate", "saved", "constant"]
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
StepPhase = Literal["forward", "recompute", "backward", "update"]  # of a user's step
STEP_PHASES: tuple[StepPhase, ...] = ("forward", "recompute", "backward", "update")

# Why two kernels were not fused, in the same words for every compiler. `Reason.text` has the compiler's own words.
REASONS = {
    "gemm": "one side is a matrix product, and this compiler fuses little or nothing into one",
    "library": "one side is a library call, and nothing can be fused into one",
    "unsupported": "the compiler has no code for such a fusion",
    "reduction": "one side needs the complete result of the other side's reduction",
    "shape": "the two sides iterate over different shapes",
    "layout": "the two sides walk memory in different orders",
    "no-shared-data": "the compiler sees no data that both sides access by the same index",
    "recompute": "the producer has other consumers, and fusion would compute it again for each",
    "unprofitable": "the compiler expects no gain from this fusion, or a loss elsewhere",
    "peak-memory": "the compiler expects a higher peak memory from the fused program",
    "resources": "the fused kernel would need too many registers, operands, or too much shared memory",
    "order": "fusing would create a cycle, or reorder operations that must stay in order",
    "graph-break": "a graph break separates the two sides",
    "author": "the two sides are written as separate kernels",
    "other": "none of the other codes fits",
}

UNMEASURED_CHOICES = ("predicted choice", "not autotuned")  # provenances of kernels where a GPU may choose others
_LINE = re.compile(r".+?:\d+")  # at the beginning of a place


@dataclass(frozen=True)
class SourceOp:
    """An operation of the user's program.

    op: its name in the program ("mul", "dot_general", "aten.mul").
    stage: the named scopes around it, outermost first ("norm/scale").
    line: "file:line". place: the innermost call in the user's own files that leads to it, with its columns and function
        where they are known: "train.py:8:20-82 Layer.__call__".
    site: identifies the operation within the program; "" where it is unknown. Two kernels with one site compute one
        operation twice.
    backward: it computes a gradient.
    rematerialized: it repeats a forward operation on purpose (checkpointing).
    """

    op: str
    stage: str = ""
    line: str = ""
    site: str = ""
    backward: bool = False
    rematerialized: bool = False
    place: str = ""

    @property
    def users_line(self) -> str:
        """The line, or where that is a package's, the line of the user's call that leads to it."""
        found = _LINE.match(self.place) if "-packages/" in self.line else None
        return self.line if found is None else found[0]


@dataclass(frozen=True)
class Access:
    """Bytes of a buffer that one launch reads or writes in device memory; None where they are unknown.

    shape, strides: of the array that the kernel is given, strides in elements. They may differ from the buffer's, as of
    a view. None where they are unknown, or where several views of the buffer differ.
    """

    buffer: str
    bytes: int | None
    shape: tuple[int, ...] | None = field(default=None, kw_only=True, compare=False)
    strides: tuple[int, ...] | None = field(default=None, kw_only=True, compare=False)


Extent = tuple[int, int, int]  # in x, y, z


@dataclass(frozen=True)
class Launch:
    """How a GPU launches a kernel, and the resources of its code; None where they are unknown.

    A kernel that launches several times has a value only where all its launches have the same.

    grid: blocks. block: threads of a block.
    registers: of a thread. local_bytes: local memory of a thread, for spilled registers and its stack.
    shared_bytes: shared memory of a block, static and dynamic.
    config: the configuration that the compiler or author chose, in the compiler's names (num_warps, XBLOCK, ...).
    differing: the values of each field above of which launches differ, each once, in the order of the launches.
    """

    grid: Extent | None = None
    block: Extent | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    local_bytes: int | None = None
    config: Mapping[str, Any] | None = None
    differing: Mapping[str, Sequence[Any]] | None = None


@dataclass(frozen=True)
class PredictedTime:
    """A predicted device time in µs of a kernel's launches or of a call, and the interval that claims to hold it.

    A kernel's interval claims to hold the time in four of five cases. us, low_us, high_us: None where there is no
    prediction, for `reason`.
    """

    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Kernel:
    """One launch site.

    name: the compiler's name.
    runtime_name: the name that profilers show; None where a library chooses the kernel, and on a TPU.
    inputs, outputs: of one launch; None where they are unknown.
    workspace_bytes: a library's scratch space; no other number includes it.
    flops: of one launch; None where they are unknown.
    launches: per call; None where the number depends on data, or a library does not tell it. least_launches: the fewest
        then.
    provenance: where its configuration comes from ("compiled", "device", "replayed", one of UNMEASURED_CHOICES, or "");
        "eager" for an operation that PyTorch runs beside compiled graphs.
    device_time_us: the measured time of all launches of one call; None without a GPU.
    predicted: what compare.predict expects for them; None where it was not asked for.
    launch: of the kernel named `runtime_name`, not of its helpers (`facts["with"]`). On a GPU as CUPTI recorded it,
        else as the compiler states it; `config` is always the compiler's.
    facts: details that only some compilers give.
    """

    name: str
    kind: Kind
    phase: Phase = "forward"
    runtime_name: str | None = None
    source_ops: tuple[SourceOp, ...] = ()
    inputs: tuple[Access, ...] | None = ()
    outputs: tuple[Access, ...] | None = ()
    workspace_bytes: int = 0
    flops: float | None = None
    launches: int | None = 1
    least_launches: int = 0
    provenance: str = ""
    device_time_us: float | None = None
    launch: Launch = Launch()
    facts: Mapping[str, Any] = field(default_factory=dict)
    predicted: PredictedTime | None = field(default=None, kw_only=True, compare=False)

    @property
    def predicted_us(self) -> float | None:
        return None if self.predicted is None else self.predicted.us

    @cached_property
    def bytes_read(self) -> int | None:
        return _total(self.inputs)

    @cached_property
    def bytes_written(self) -> int | None:
        return _total(self.outputs)

    @property
    def certain_launches(self) -> int:
        """The launches of one call; the fewest where data decides."""
        return self.least_launches if self.launches is None else self.launches

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of its operations, each once, in order of appearance."""
        return tuple(dict.fromkeys(op.stage for op in self.source_ops if op.stage))

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.users_line for op in self.source_ops if op.line))


def _total(accesses: tuple[Access, ...] | None) -> int | None:
    if accesses is None:
        return None
    known = [access.bytes for access in accesses]
    return None if None in known else sum(size for size in known if size is not None)


@dataclass(frozen=True)
class Buffer:
    """Memory between kernels.

    dtype: the short form ("bf16", "f32", "s8"). role: "saved" is a residual that forward writes or keeps for backward.
    space: a memory other than the device's ("host", "VMEM", "S(6)"). Accesses of such a buffer count 0 bytes.
    padding: the part of `bytes` that a tiled layout adds to the array's elements.
    decides: the conditional or loop that reads it to choose a branch or to end ("while while.3"), or "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    role: Role
    space: str = ""
    padding: int = 0
    decides: str = ""


@dataclass(frozen=True)
class Reason:
    """Why a producer and a consumer were not fused.

    producer, consumer: names of kernels; "" where the compiler's name led to no kernel.
    code: a key of REASONS.
    text: the compiler's own words, or ours where `origin` is "inferred".
    origin: the source of the text ("xla priority-fusion", "inductor", "inferred").
    bytes_saved: the most that fusing the two would save: writes and reads of buffers that only pass between them; None
        where they are unknown.
    fused_us, unfused_us: the compiler's own estimates.
    line: the source line of a graph break.
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
    """The kernels, buffers and reasons of one compiled function.

    compiler: "xla", "inductor", "triton", "cuda" or "eager".
    kernels: in launch order; None where only the operations are known (eager PyTorch without a GPU).
    operations: the program's operations where `kernels` is None.
    unparsed: pieces of the compiler's output that could not be read, verbatim.
    notes: sentences about the whole graph without which its numbers mislead.
    versions: package -> version.
    target: the GPU or TPU that the code was compiled for, or "".
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
    notes: tuple[str, ...] = ()

    @cached_property
    def measured(self) -> bool:
        """True if a kernel has a measured time."""
        return any(kernel.device_time_us is not None for kernel in self.kernels or ())

    @cached_property
    def buffer(self) -> Mapping[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def named(self) -> Mapping[str, tuple[int, ...]]:
        """Kernel name -> launch indices; several kernels may share a name."""
        indices: dict[str, tuple[int, ...]] = {}
        for index, kernel in enumerate(self.kernels or ()):
            indices[kernel.name] = (*indices.get(kernel.name, ()), index)
        return indices

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
        """Intermediates and residuals that a kernel writes to device memory, largest first."""
        kept = [
            buffer for buffer in self.buffers
            if buffer.role in ("intermediate", "saved") and not buffer.space and buffer.name in self.producers
        ]
        return tuple(sorted(kept, key=lambda buffer: -buffer.bytes))

    @property
    def saved(self) -> tuple[Buffer, ...]:
        """Residuals: buffers that forward writes only for backward. Inputs that backward reads again stay inputs."""
        return tuple(buffer for buffer in self.buffers if buffer.role == "saved")
