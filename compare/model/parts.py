"""Parts of a user's model: the calls in the user's own files, with the kernels, times and FLOPs of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..graph.alike import any_layer
from ..graph.model import STEP_PHASES, Access, FusionGraph, Kernel, StepPhase
from .phases import step_phases
from .weights import weight

_MOST = 0.9  # of the time of parts that repeat
_MOST_ROUNDS = 50  # in which kernels without a part take that of their neighbours


@dataclass(frozen=True)
class Piece:
    """A kernel with its part.

    graph, index: its graph's name and its number there. key: of its part; "" where none is known. others: the further
    parts that it computes something of.
    """

    graph: str
    index: int
    kernel: Kernel
    key: str
    phase: StepPhase
    others: tuple[str, ...] = ()

    @property
    def is_product(self) -> bool:
        return self.kernel.kind in ("gemm", "attention")

    @property
    def time_us(self) -> float:
        """Device time of all its launches in a step; 0 where it is unknown.

        It is predicted where nothing of the step was measured (`Step.predicted`).
        """
        return self.kernel.device_time_us or self.kernel.predicted_us or 0.0

    @property
    def bytes(self) -> int:
        """Bytes that all its launches in a step declare to move, as far as they are known."""
        return ((self.kernel.bytes_read or 0) + (self.kernel.bytes_written or 0)) * self.kernel.certain_launches

    @property
    def flops(self) -> float:
        """FLOPs of all its launches in a step, as far as they are known."""
        return (self.kernel.flops or 0.0) * self.kernel.certain_launches


@dataclass(frozen=True)
class Part:
    """A part of a model: a named scope, else a call in the user's own files. key: that scope, or that place."""

    key: str
    pieces: tuple[Piece, ...]

    @cached_property
    def time_us(self) -> float:
        return sum(piece.time_us for piece in self.pieces)

    @cached_property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @cached_property
    def layers(self) -> int:
        """The number of times that the model has it: how often most of its operations run in one phase."""
        runs: dict[str, dict[str, int]] = {}
        for piece in self.pieces:
            for op in piece.kernel.source_ops if piece.phase == self.pieces[0].phase else ():
                if op.site and key_of(op.stage, op.place) == self.key:
                    sites = runs.setdefault(any_layer(op.site.partition("~")[0]), {})
                    sites[op.site] = max(sites.get(op.site, 0), piece.kernel.certain_launches)
        counts = Counter(sum(sites.values()) for sites in runs.values())
        return min(counts, key=lambda count: (-counts[count], count), default=1)


def key_of(stage: str, place: str) -> str:
    """Return the part of an operation: its named scope without numbers of layers, else its place; "" for neither."""
    return any_layer(stage) or place


def pieces(graphs: Mapping[str, FusionGraph]) -> list[Piece]:
    """Return every kernel of the graphs with its part, in launch order.

    A kernel of several parts belongs to that with most of its work. One whose operations name none, as a copy that the
    compiler added, belongs to the part that reads its result, else to that which made its operand.
    """
    found: list[Piece] = []
    for name, graph in graphs.items():
        ranked = [_ranked(kernel) for kernel in graph.kernels or ()]
        keys = _spread(graph, [of_kernel[0] if of_kernel else "" for of_kernel in ranked])
        for index, (kernel, phase) in enumerate(zip(graph.kernels or (), step_phases(graph), strict=True)):
            found.append(Piece(name, index, kernel, keys[index], phase, tuple(ranked[index][1:])))
    return found


def parts(found: Iterable[Piece]) -> list[Part]:
    """Return the parts of the pieces, the longest first; of those without times, that with the most bytes."""
    by_key: dict[str, list[Piece]] = {}
    for piece in found:
        by_key.setdefault(piece.key, []).append(piece)
    return sorted((Part(key, tuple(own)) for key, own in by_key.items()), key=lambda part: (-part.time_us, -part.bytes))


def time_by_phase(found: Iterable[Piece]) -> dict[StepPhase, float]:
    """Return the microseconds of each phase that the pieces have, in the order of a step."""
    times: dict[StepPhase, float] = {}
    for piece in found:
        times[piece.phase] = times.get(piece.phase, 0.0) + piece.time_us
    return {phase: times[phase] for phase in STEP_PHASES if phase in times}


def layers_of(found: Sequence[Part]) -> int:
    """Return the number of layers of the model; 1 where no part repeats.

    It is the largest number of some part that divides those of the parts with most of the time: a part may be several
    times in a layer.
    """
    def time_of_multiples(layers: int) -> float:
        return sum(part.time_us for part in found if part.layers % layers == 0)

    times = {count: time_of_multiples(count) for part in found if (count := part.layers) > 1}
    return max((count for count, time in times.items() if time >= _MOST * max(times.values())), default=1)


def _ranked(kernel: Kernel) -> list[str]:
    """Return the parts that a kernel has operations of, that with most of its work first."""
    work: dict[str, float] = {}
    for op in kernel.source_ops:
        if key := key_of(op.stage, op.place):
            work[key] = work.get(key, 0.0) + weight(op, kernel)
    return sorted(work, key=lambda key: -work[key])


def _spread(graph: FusionGraph, keys: list[str]) -> list[str]:
    """Return the keys, with those of neighbours for kernels that have none: of readers, else of writers."""
    kernels = graph.kernels or ()
    readers = [_users(graph.consumers, kernel.outputs) for kernel in kernels]
    writers = [_users(graph.producers, kernel.inputs) for kernel in kernels]
    for neighbours in (readers, writers):
        for _ in range(_MOST_ROUNDS):
            told = {
                index: key for index, beside in enumerate(neighbours)
                if not keys[index] and (key := next((keys[other] for other in beside if keys[other]), ""))
            }
            if not told:
                break
            keys = [told.get(index, key) for index, key in enumerate(keys)]
    return keys


def _users(users: Mapping[str, Sequence[int]], accesses: Sequence[Access] | None) -> list[int]:
    return [user for access in accesses or () for user in users.get(access.buffer, ())]
