"""The time that checkpointing costs a step, and the memory that it saves."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass

from xlafuse.hlo.text_reader import Module

from ..graph.model import FusionGraph
from .memory import memory
from .parts import Piece
from .places import parse
from .step import Step

_CHECKPOINT = re.compile(r"[\w.]*(?:remat|checkpoint)\w*")


@dataclass(frozen=True)
class Checkpoint:
    """Kernels that compute a forward pass again.

    name: what the user's code calls to have that ("nnx.remat"). place: of that call; "" where it is unknown.
    memory_bytes: how much more memory a step needs without it.
    """

    pieces: tuple[Piece, ...]
    name: str
    place: str
    memory_bytes: int

    @property
    def time_us(self) -> float:
        return sum(piece.time_us for piece in self.pieces)


def checkpoint(step: Step, changed: Collection[Piece]) -> Checkpoint | None:
    """Return what XLA computes again in the program with the most memory; None where it is nothing.

    changed: kernels of other remedies, which are not counted: neither their time nor the buffers between them.
    Inductor decides by itself what it computes again.
    """
    name = step.largest
    graph, program = step.graphs.get(name), step.programs.get(name)
    if graph is None or not isinstance(program, Module):
        return None
    own = [piece for piece in step.pieces if piece.graph == name]
    others = {piece.index for piece in changed if piece.graph == name}
    again = tuple(piece for piece in own if piece.phase == "recompute" and piece.index not in others)
    backward = [piece.index for piece in own if piece.phase == "backward"]
    if not again or not backward:
        return None
    without = [name for name in graph.producers if _is_between(graph, name, others)]
    keys = step.keys(name)
    kept = _kept(graph, {piece.index for piece in own if piece.phase == "recompute"})
    now = memory(graph, keys, without=without).bytes
    then = memory(graph, keys, without=without, early=kept, since=min(backward)).bytes
    call, place = _call(step, program)
    return Checkpoint(again, call, place, then - now)


def freed_bytes(step: Step, pieces: Collection[Piece]) -> int:
    """Return how much less memory a step needs where one kernel replaces these: without the buffers between them."""
    name = step.largest
    own = {piece.index for piece in pieces if piece.graph == name}
    graph = step.graphs[name]
    without = [name for name in graph.producers if _is_between(graph, name, own)]
    after = memory(graph, step.keys(name), donated=step.donated(name), without=without)
    return step.memory[name].bytes - after.bytes


def _is_between(graph: FusionGraph, buffer: str, kernels: Collection[int]) -> bool:
    """Return whether only these kernels use a buffer."""
    users = (*graph.producers[buffer], *graph.consumers.get(buffer, ()))
    return all(user in kernels for user in users)


def _kept(graph: FusionGraph, again: set[int]) -> list[str]:
    """Return the buffers that forward would keep for backward: those that are computed again, and read by others."""
    return [
        name for name, writers in graph.producers.items()
        if not again.isdisjoint(writers) and not again.issuperset(graph.consumers.get(name, ()))
    ]


def _call(step: Step, program: Module) -> tuple[str, str]:
    """Return what the user's code calls to have a part computed again, and the place of the call.

    It is among the calls that lead to all that is computed again. Without a name that tells, it is the innermost one.
    """
    common: list[str] | None = None  # outermost first
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            if "rematted_computation" in instruction.op_name and instruction.site.isdecimal():
                chain = [*program.stack.places(int(instruction.site))][::-1]
                pairs = zip(chain if common is None else common, chain, strict=False)
                common = [place for place, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    for text in reversed(common or []):
        place = parse(text)
        called = None if place is None else _CHECKPOINT.search(step.sources.label(place))
        if called is not None:
            return called[0], text
    return "the checkpointing", common[-1] if common else ""
