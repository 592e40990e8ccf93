"""The view of one fusion graph that asserts read: kernels, stages, materialized buffers, bytes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..base.text import printable
from ..graph import formats
from ..graph.analyse.missed_fusions import missed
from ..graph.analyse.totals import declared_bytes, tally, totals
from ..graph.model import Buffer, FusionGraph, Kernel, Phase
from ..graph.operations import cause

_MOST = 3  # stages of a kernel named in a message
__tracebackhide__ = True  # pytest: a failing test ends at its own line


class UnknownName(LookupError):
    """The graph has no such stage or buffer; the message lists those that it has."""


class NotKnown(ValueError):
    """The graph does not know the answer; the message names the kernels."""


@dataclass(frozen=True, repr=False)
class KernelView:
    """A kernel at its place in launch order, with the attributes of `compare.graph.model.Kernel` (name, kind, stages,
    bytes_read, ...). Two kernels that do the same are not equal."""

    index: int
    kernel: Kernel = field(compare=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __repr__(self) -> str:
        stages = [formats.name(stage, 40) for stage in self.kernel.stages[:_MOST]]
        held = ", ".join(stages) + (", ..." if len(self.kernel.stages) > _MOST else "")
        return f"<{self.index + 1}. {self.kernel.kind}{': ' if held else ''}{held}>"


class Materialized:
    """Buffers that one kernel writes for another to read, intermediates and residuals, largest first.

    `name in materialized` asks whether a buffer is the result of an operation of that stage. name: a stage, one or
    several scopes of a stage's path, or the compiler's name of a buffer. Where a kernel writes several buffers, each
    counts for all stages of the kernel, because the compiler does not say which stage wrote which buffer.

    Raises UnknownName for a name that nothing in the graph has, so a misspelt name never counts as absent. Raises
    NotKnown where the compiler does not say which operation a buffer is the result of.
    """

    def __init__(self, view: View, buffers: Iterable[Buffer]) -> None:
        self._view, self._buffers = view, tuple(buffers)

    def __contains__(self, name: object) -> bool:
        return bool(self.named(str(name)))

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def named(self, name: str) -> tuple[Buffer, ...]:
        """Return the buffers of that name, as `in` finds them.

        Raises UnknownName. Raises NotKnown where none is found and a buffer's operation is unknown.
        """
        found = tuple(b for b in self._buffers if name == b.name or self._is_of(b, name))
        if not found and name not in self._view.graph.buffer:
            self._view.require_stage(name)
            if lost := [formats.name(b.name, 40) for b in self._buffers if self._is_lost(b)]:
                raise NotKnown(
                    f"the compiler does not say which operations wrote {', '.join(lost[:5])}; they may belong to "
                    f"{formats.name(name)!r}; assert on g.materialized.bytes or .largest"
                )
        return found

    def only(self, *names: str) -> bool:
        """Return True where these names cover all materialized buffers. Raises UnknownName."""
        found = {buffer for name in names for buffer in self.named(name)}
        return found.issuperset(self._buffers)

    @property
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self._buffers)

    @property
    def largest(self) -> int:
        """The bytes of the largest buffer; 0 where nothing is materialized."""
        return max((buffer.bytes for buffer in self._buffers), default=0)

    def described(self, name: str | None = None) -> list[str]:
        """Return one line for each buffer, or for each of that name."""
        graph = self._view.graph
        return [_described(graph, buffer) for buffer in (self._buffers if name is None else self.named(name))]

    def _is_lost(self, buffer: Buffer) -> bool:
        graph = self._view.graph
        writers = ((graph.kernels or ())[index] for index in graph.producers[buffer.name])
        return not any(kernel.stages or kernel.lines or kernel.kind in ("copy", "memset") for kernel in writers)

    def _is_of(self, buffer: Buffer, name: str) -> bool:
        return any(within(stage, name) for stage in cause(self._view.graph, buffer.name).stages)

    def __repr__(self) -> str:
        stages = {b: " and ".join(cause(self._view.graph, b.name).stages) for b in self._buffers}
        return "{" + ", ".join(f"{formats.name(of or b.name, 60)} {formats.shape(b)}" for b, of in stages.items()) + "}"


@dataclass(frozen=True, repr=False)
class StageView:
    """One stage: the kernels with an operation of it, and its materialized results."""

    name: str
    kernels: tuple[KernelView, ...]
    materialized: Materialized

    def __repr__(self) -> str:
        return f"<stage {formats.name(self.name, 40)}>"

    @property
    def kernel_count(self) -> int:
        return len(self.kernels)

    @property
    def bytes_moved(self) -> int:
        """Bytes that the stage's kernels read and write, for all stages in them. Raises NotKnown."""
        return _moved(view.kernel for view in self.kernels)


class View:
    """One fusion graph, or one phase of it ("forward" or "backward")."""

    def __init__(self, graph: FusionGraph, phase: Phase | None = None) -> None:
        self.graph, self._phase = graph, phase

    def __repr__(self) -> str:
        of_phase = f", {self._phase}" if self._phase else ""
        return f"<fusion graph of {formats.name(self.graph.name, 40)}{of_phase}: {len(self.kernels)} kernels>"

    @cached_property
    def kernels(self) -> tuple[KernelView, ...]:
        """In launch order."""
        views = (KernelView(index, kernel) for index, kernel in enumerate(self.graph.kernels or ()))
        return tuple(view for view in views if self._phase in (None, view.kernel.phase))

    @property
    def kernel_count(self) -> int:
        return len(self.kernels)

    @property
    def materialized(self) -> Materialized:
        return self._written(lambda buffer: True)

    @property
    def saved(self) -> Materialized:
        """The materialized buffers that forward leaves for backward."""
        return self._written(lambda buffer: buffer.role == "saved")

    @property
    def bytes_moved(self) -> int:
        """Bytes that all launches of a call read and write. Raises NotKnown."""
        return _moved(view.kernel for view in self.kernels)

    @property
    def bytes_compulsory(self) -> int:
        """The bytes of each used input once and each output once (docs/fusion-graph.md)."""
        compulsory = totals(self.graph).compulsory
        return sum(compulsory.values()) if self._phase is None else compulsory.get(self._phase, 0)

    @property
    def bytes_with_products(self) -> int:
        """The fewest bytes where each matrix product's result is written once and read once. Raises NotKnown."""
        found = totals(self.graph).gemm_barrier
        if found is None or self._phase is not None:
            raise NotKnown("bytes_with_products is unknown for a kernel with several products, and for one phase")
        return found

    def stage(self, name: str) -> StageView:
        """Return a stage with all stages inside it. name: its path ("layer/norm"), or some scopes of it ("norm").

        Raises UnknownName.
        """
        self.require_stage(name)
        kernels = tuple(view for view in self.kernels if any(within(stage, name) for stage in view.kernel.stages))
        return StageView(name, kernels, self._written(
            lambda buffer: any(within(stage, name) for stage in cause(self.graph, buffer.name).stages)
        ))

    def fused(self, *stages: str) -> bool:
        """Return True where a single kernel computes all of these stages. Raises UnknownName."""
        return len({view for stage in stages for view in self.stage(stage).kernels}) == 1

    def require_stage(self, name: str) -> None:
        known = list(dict.fromkeys(stage for view in self.kernels for stage in view.kernel.stages))
        if any(within(stage, name) for stage in known):
            return
        near = difflib.get_close_matches(name, [*known, *{scope for stage in known for scope in stage.split("/")}], 1)
        listed = ", ".join(formats.name(stage, 60) for stage in known[:40]) + (", ..." if len(known) > 40 else "")
        raise UnknownName(
            f"no operation of {formats.name(self.graph.name)} has a stage {formats.name(name)!r}"
            + (f"; did you mean {formats.name(near[0])!r}" if near else "")
            + (f"; stages: {listed}" if known else "; it has none: put jax.named_scope or "
               "xlafuse.triton_side.calls.stages.stage around the code to name")
        )

    def _written(self, wanted: Callable[[Buffer], bool]) -> Materialized:
        own = {view.index for view in self.kernels}
        producers = self.graph.producers
        kept = (buffer for buffer in self.graph.materialized if own.intersection(producers[buffer.name]))
        return Materialized(self, filter(wanted, kept))


def within(stage: str, name: str) -> bool:
    """Return True where `name` is a run of whole scopes in the stage's path: "norm" in "layer/norm/scale"."""
    return bool(name) and f"/{name}/" in f"/{stage}/"


def _moved(kernels: Iterable[Kernel]) -> int:
    listed = list(kernels)
    total = tally(map(declared_bytes, listed)).exact
    if total is None:
        unknown = [formats.name(kernel.name, 40) for kernel in listed if declared_bytes(kernel) is None]
        raise NotKnown(f"the bytes of {', '.join(unknown[:5])} are unknown; assert on other kernels' bytes_read")
    return int(total)


def _described(graph: FusionGraph, buffer: Buffer) -> str:
    def numbers(indices: Iterable[int]) -> str:
        return ", ".join(str(index + 1) for index in list(indices)[:8]) or "none"

    kind = "saved for backward, " if buffer.role == "saved" else ""
    found = cause(graph, buffer.name)
    place = ", ".join(filter(None, (*map(formats.name, found.stages), formats.place(found.line))))
    writers = graph.producers[buffer.name]
    ends = [{(graph.kernels or ())[i].name for i in side} for side in (writers, graph.consumers.get(buffer.name, ()))]
    between = (reason for reason in missed(graph) if reason.producer in ends[0] and reason.consumer in ends[1])
    why = dict.fromkeys(f"{reason.code}: {printable(reason.text, 120)}" for reason in between)
    return (
        f"{formats.shape(buffer)}, {kind}{formats.size(buffer.bytes)}{f', the result of {place}' if place else ''}; "
        f"kernel {numbers(writers)} writes it, {numbers(graph.consumers.get(buffer.name, ()))} reads it"
        + "".join(f"; not fused: {words}" for words in list(why)[:2])
    )
