"""One graph of a training step out of its two compiled halves, or with both as one phase."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ..model import Access, Buffer, FusionGraph, Kernel, Reason

_PREFIX = "backward/"


def join_phases(
    forward: FusionGraph,
    backward: FusionGraph,
    passed: Mapping[str, str],
    *,
    outputs: Collection[str] | None = None,
) -> FusionGraph:
    """Forward's kernels, then backward's, with what forward hands to backward as one buffer instead of two.

    passed: backward's input buffer -> forward's buffer that holds it (of another shape where it is a view).
    outputs: those of forward's outputs that the block's caller sees. Without it, every output of forward that is passed
    on is taken for a residual, which is wrong where backward needs a result itself (a softmax's y).

    Roles in the result: an input or constant of forward stays one though backward reads it again; so does a visible
    output. What else is passed on is "saved". An output of forward that is not passed on stays an output, because
    somebody sees it. Names of backward's other buffers, and of its kernels, get the prefix "backward/" where forward
    has the name already.

    Raises ValueError where a name in `passed` or `outputs` is no buffer of its side, or the two halves are not of one
    compiler and target, or only one of them has kernels.
    """
    _check(forward, backward, passed, outputs)
    buffer_names = _free_names((b.name for b in backward.buffers), {b.name for b in forward.buffers}) | dict(passed)
    kernel_names = _free_names((k.name for k in backward.kernels or ()), {k.name for k in forward.kernels or ()})
    residuals = set(passed.values()) - set(outputs or ())

    def role(buffer: Buffer) -> Buffer:
        saved = buffer.name in residuals and buffer.role in ("output", "intermediate")
        return replace(buffer, role="saved") if saved else buffer

    kernels: tuple[Kernel, ...] | None = None
    if forward.kernels is not None and backward.kernels is not None:
        kernels = (
            *(replace(kernel, phase="forward") for kernel in forward.kernels),
            *(_moved(kernel, kernel_names, buffer_names) for kernel in backward.kernels),
        )
    own = [replace(b, name=buffer_names[b.name]) for b in backward.buffers if b.name not in passed]
    return replace(
        forward,
        kernels=kernels,
        buffers=(*map(role, forward.buffers), *own),
        reasons=(*forward.reasons, *(_renamed(reason, kernel_names) for reason in backward.reasons)),
        operations=forward.operations + backward.operations,
        unparsed=forward.unparsed + backward.unparsed,
        versions={**backward.versions, **forward.versions},
    )


def as_one_phase(graph: FusionGraph) -> FusionGraph:
    """A training step's graph as that of a call that does both: all its kernels are of one phase, which is called
    forward, the operations of backward's say that they are, and what was saved between the two is an intermediate."""

    def merged(kernel: Kernel) -> Kernel:
        if kernel.phase == "forward":
            return kernel
        ops = tuple(replace(op, backward=True) for op in kernel.source_ops)
        return replace(kernel, phase="forward", source_ops=ops)

    buffers = tuple(replace(b, role="intermediate") if b.role == "saved" else b for b in graph.buffers)
    return replace(graph, kernels=None if graph.kernels is None else tuple(map(merged, graph.kernels)), buffers=buffers)


def _check(
    forward: FusionGraph, backward: FusionGraph, passed: Mapping[str, str], outputs: Collection[str] | None
) -> None:
    if (forward.compiler, forward.target) != (backward.compiler, backward.target):
        raise ValueError(
            "the halves of a training step must come from one compiler and target; forward is "
            f"{forward.compiler!r} for {forward.target!r}, backward {backward.compiler!r} for {backward.target!r}"
        )
    if (forward.kernels is None) != (backward.kernels is None):
        raise ValueError("only one half has kernels; give both halves with kernels, or both without")
    named_of_forward = {*passed.values(), *(outputs or ())}
    for names, graph, side in ((set(passed), backward, "backward"), (named_of_forward, forward, "forward")):
        if unknown := sorted(names - set(graph.buffer)):
            raise ValueError(f"{', '.join(unknown)}: no such buffer in {side}, which has {', '.join(graph.buffer)}")


def _free_names(names: Iterable[str], taken: set[str]) -> dict[str, str]:
    result: dict[str, str] = {}
    own = list(names)
    used = taken | set(own)
    for name in own:
        if name in result:
            continue
        new = name
        while new in taken or (new != name and new in used):
            new = _PREFIX + new
        result[name] = new
        used.add(new)
    return result


def _moved(kernel: Kernel, kernel_names: Mapping[str, str], buffer_names: Mapping[str, str]) -> Kernel:
    def moved(accesses: tuple[Access, ...] | None) -> tuple[Access, ...] | None:
        if accesses is None:
            return None
        return tuple(replace(access, buffer=buffer_names[access.buffer]) for access in accesses)

    name = kernel_names[kernel.name]
    return replace(kernel, name=name, phase="backward", inputs=moved(kernel.inputs), outputs=moved(kernel.outputs))


def _renamed(reason: Reason, names: Mapping[str, str]) -> Reason:
    producer, consumer = (names.get(name, name) for name in (reason.producer, reason.consumer))
    return replace(reason, producer=producer, consumer=consumer)
