"""The fusion graph of a hand-written implementation: its Triton and CUDA launches, and PyTorch operations among them.

Each launch is a kernel. Its source declares its operations; its compiled code shows the tensors that it reads and
writes (triton_side.calls.effects). An ATen operation among the launches is a library kernel; only a device tells its
name (compare.graph.join.kernel_records).

Bytes are those that the launch needs: each tensor that it reads or writes counts once. A view counts its own elements,
and a lookup table its used rows. Repeated reads (tiles of a product, a second pass over a row) count as cache hits. A
causal attention kernel counts all of k and v.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from xlafuse.hlo.shape import LONG_NAMES

from ...base.archive import portable_line
from ..model import Access, Buffer, FusionGraph, Kernel, Launch, Phase, Role, SourceOp

if TYPE_CHECKING:
    from xlafuse.triton_side.calls.dispatch import Operation, Recorded
    from xlafuse.triton_side.calls.launches import TensorArgument

_SHORT_NAMES = {name: short for short, name in LONG_NAMES.items()}


def from_launches(
    recorded: Recorded, *, name: str, compiler: str, target: str = "", versions: Mapping[str, str] | None = None
) -> FusionGraph:
    """Return the graph of a call that `xlafuse.triton_side.calls.dispatch.record_call` recorded.

    compiler: "triton" or "cuda".
    """
    buffers = Buffers(recorded)
    kernels: list[Kernel] = []
    sites = Sites()
    for phase, events in recorded.parts.items():
        for event in events:
            kernels.append(
                _of_operation(event, cast(Phase, phase), buffers, sites) if hasattr(event, "op")  # of ATen
                else _of_launch(event, cast(Phase, phase), buffers, sites)
            )
    return FusionGraph(
        name, compiler, tuple(kernels), buffers.all(), versions=dict(versions or {}), target=target
    )


class Buffers:
    """Names and roles of the memory that a recorded call uses. All views of one storage are one buffer."""

    def __init__(self, recorded: Recorded) -> None:
        self._tensors: dict[int, TensorArgument] = {}  # storage -> its largest view
        self._names: dict[int, str] = {}
        self._taken: set[str] = set()
        self._outputs = {tensor.storage for tensor in recorded.outputs.values()}
        self._inputs = {tensor.storage for tensor in recorded.inputs.values()}
        self._saved = _saved(recorded)
        for tensors in (recorded.inputs, recorded.outputs):
            for name, tensor in tensors.items():
                self.name(tensor, name)

    def name(self, tensor: TensorArgument, hint: str) -> str:
        """Return the name of the tensor's buffer; a new buffer is called `hint`, with a number if that is taken."""
        storage = tensor.storage
        if storage not in self._names:
            base = name = hint or "buffer"
            number = 0
            while name in self._taken:
                number += 1
                name = f"{base}_{number}"
            self._taken.add(name)
            self._names[storage] = name
        if storage not in self._tensors or tensor.bytes > self._tensors[storage].bytes:
            self._tensors[storage] = tensor
        return self._names[storage]

    def accesses(self, tensors: Iterable[TensorArgument], hint: str = "") -> tuple[Access, ...]:
        """Return one access for each buffer, over all views of it."""
        found: dict[str, list[TensorArgument]] = {}
        for tensor in tensors:
            found.setdefault(self.name(tensor, tensor.name or hint), []).append(tensor)
        return tuple(_access(buffer, views) for buffer, views in found.items())

    def all(self) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(name, tensor.shape, _SHORT_NAMES.get(tensor.dtype, tensor.dtype), tensor.bytes, self._role(storage))
            for storage, name in self._names.items()
            for tensor in [self._tensors[storage]]
        )

    def _role(self, storage: int) -> Role:
        if storage in self._outputs:
            return "output"
        if storage in self._inputs:
            return "input"
        return "saved" if storage in self._saved else "intermediate"


def _access(buffer: str, views: list[TensorArgument]) -> Access:
    layouts = {(view.shape, view.strides) for view in views}
    shape, strides = layouts.pop() if len(layouts) == 1 else (None, None)
    return Access(buffer, _bytes_of_views(views), shape=shape, strides=strides)


def _bytes_of_views(views: list[TensorArgument]) -> int:
    """Return the bytes that several views of one storage use together.

    Equal views count once, in any order of their axes. The sum is at most the distance from the first to the last byte.
    """
    once: dict[tuple[Any, ...], int] = {}
    begins, ends = [], []
    for view in views:
        axes = [(stride, size) for stride, size in zip(view.strides, view.shape, strict=True) if size != 1]
        key = (view.offset, *sorted(axes))
        once[key] = max(once.get(key, 0), view.bytes_used)
        begins.append(view.offset * view.itemsize)
        ends.append((view.offset + 1 + sum((size - 1) * stride for stride, size in axes)) * view.itemsize)
    return max(max(once.values()), min(max(ends) - min(begins), sum(once.values())))


def _saved(recorded: Recorded) -> set[int]:
    """Return the storages that forward touches and backward reads, without the gradients of the outputs."""
    forward, backward = (recorded.parts.get(phase, ()) for phase in ("forward", "backward"))
    known = {tensor.storage for event in forward for tensor in (*event.reads, *event.writes)}
    known -= {
        tensor.storage for name, tensor in recorded.inputs.items()
        if name.startswith("d") and name[1:] in recorded.outputs  # a gradient of an output
    }
    written: set[int] = set()
    saved: set[int] = set()
    for event in backward:
        saved |= {tensor.storage for tensor in event.reads} & known - written
        written |= {tensor.storage for tensor in event.writes}
    return saved


class Sites:
    """Sites of operations, from a declaration or a line; repeated ones get a number."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def of(self, kernel: str, site: str) -> str:
        """Return the site for its next use in `kernel`."""
        self._seen[kernel, site] += 1
        repeat = self._seen[kernel, site] - 1
        return f"{site}#{repeat}" if repeat else site

    def repeated(self, kernel: str, site: str) -> str:
        """Return the site that a repeated operation shares with the original; "" where that is ambiguous."""
        return site if self._seen[kernel, site] == 1 else ""


def _of_launch(launch: Any, phase: Phase, buffers: Buffers, sites: Sites) -> Kernel:
    line = portable_line(f"{launch.source}:{launch.line}")
    resources = launch.resources
    outputs = buffers.accesses(launch.writes)
    return Kernel(
        name=launch.label,
        kind="custom",
        phase=phase,
        runtime_name=launch.name,
        source_ops=tuple(
            SourceOp(
                computed.op, computed.stage, line, sites.of(f"{phase} {launch.label}", computed.site),
                computed.backward, computed.rematerialized,
            )
            for computed in launch.operations
        ),
        inputs=buffers.accesses(launch.reads),
        outputs=outputs,
        flops=launch.flops,
        provenance="compiled",
        launch=Launch(
            launch.grid, launch.block, resources.registers, resources.shared_bytes, resources.spill_bytes,
            config=_config(launch),
        ),
        facts={"language": launch.kind},
    )


def _config(launch: Any) -> dict[str, Any]:
    """Return a launch's constexprs and options, values that JSON lacks as text. CUDA C++ has none but its threads."""
    options = {"num_warps": launch.num_warps}
    if launch.kind == "triton":
        options["num_stages"] = launch.num_stages
    plain = (bool, int, float, str, type(None))
    return {k: v if isinstance(v, plain) else str(v) for k, v in launch.constants.items()} | options


def _of_operation(operation: Any, phase: Phase, buffers: Buffers, sites: Sites) -> Kernel:
    hint = short(operation.op)
    return Kernel(
        name=operation.op,
        kind=operation.kind,
        phase=phase,
        source_ops=(source_op(operation, phase, sites),),
        inputs=buffers.accesses(operation.reads, hint),
        outputs=buffers.accesses(operation.writes, hint),
        flops=operation.flops,
    )


def source_op(operation: Operation, phase: Phase, sites: Sites) -> SourceOp:
    """Return an ATen operation as a SourceOp; its site is its line and its number among equal operations there."""
    line = portable_line(operation.line) if operation.line else ""
    if not line:
        site = ""
    elif operation.rematerialized:  # the line cannot tell which of several layers it repeats
        site = sites.repeated("", f"forward:{line}:{operation.op}")
    else:
        site = sites.of("", f"{phase}:{line}:{operation.op}")
    op = "aten." + short(operation.op) if operation.op.startswith("aten.") else operation.op
    return SourceOp(op, operation.stage, line, site, operation.backward, operation.rematerialized)


def short(op: str) -> str:
    """Return an operation's short name: "aten.mul.Tensor" -> "mul"."""
    return op.split(".")[1] if "." in op else op
