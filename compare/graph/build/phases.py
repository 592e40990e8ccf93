"""One graph for a training step, from its two compiled phases."""

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
    """Return one graph with forward's kernels, then backward's; a buffer that forward passes to backward is one buffer.

    passed: backward's input buffer -> the buffer of forward that holds it (a view may have another shape).
    outputs: the outputs of forward that the caller sees. Without it, every output that backward reads counts as a
        residual, which is wrong where backward reads a result (softmax's y).

    A buffer that backward reads is "saved", unless it is an input, a constant or a visible output of forward. Names of
    backward's kernels and other buffers get the prefix "backward/" where forward has the same name.

    Raises ValueError if a name in `passed` or `outputs` is no buffer of its graph, if the phases come from different
    compilers or targets, or if only one has kernels.
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
            *(_renamed_kernel(kernel, kernel_names, buffer_names) for kernel in backward.kernels),
        )
    own = [replace(b, name=buffer_names[b.name]) for b in backward.buffers if b.name not in passed]
    return replace(
        forward,
        kernels=kernels,
        buffers=(*map(role, forward.buffers), *own),
        reasons=(*forward.reasons, *(_renamed_reason(reason, kernel_names) for reason in backward.reasons)),
        operations=forward.operations + backward.operations,
        unparsed=forward.unparsed + backward.unparsed,
        notes=tuple(dict.fromkeys(forward.notes + backward.notes)),
        versions={**backward.versions, **forward.versions},
    )


def as_one_phase(graph: FusionGraph) -> FusionGraph:
    """Return a training step's graph as the graph of one call: every kernel's phase is forward.

    Operations of backward keep their mark, and residuals become intermediates.
    """

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
            "both phases of a training step must come from one compiler and target; forward is "
            f"{forward.compiler!r} for {forward.target!r}, backward {backward.compiler!r} for {backward.target!r}"
        )
    if (forward.kernels is None) != (backward.kernels is None):
        raise ValueError("only one phase has kernels; give both phases with kernels, or both without")
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


def _renamed_kernel(kernel: Kernel, kernel_names: Mapping[str, str], buffer_names: Mapping[str, str]) -> Kernel:
    def renamed(accesses: tuple[Access, ...] | None) -> tuple[Access, ...] | None:
        if accesses is None:
            return None
        return tuple(replace(access, buffer=buffer_names[access.buffer]) for access in accesses)

    name = kernel_names[kernel.name]
    return replace(kernel, name=name, phase="backward", inputs=renamed(kernel.inputs), outputs=renamed(kernel.outputs))


def _renamed_reason(reason: Reason, names: Mapping[str, str]) -> Reason:
    producer, consumer = (names.get(name, name) for name in (reason.producer, reason.consumer))
    return replace(reason, producer=producer, consumer=consumer)
