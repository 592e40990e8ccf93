"""A graph with the words in which findings speak of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

from .. import formats
from ..analyse.align import phase_of
from ..analyse.causes import cause
from ..analyse.totals import Recomputed, declared_bytes, recomputed
from ..model import Buffer, FusionGraph, Phase, SourceOp
from ..operations import MOVEMENT, is_product, token
from .phrases import series

DISPLAY_NAMES = {"xla": "XLA", "inductor": "Inductor", "triton": "Triton", "cuda": "CUDA", "eager": "Eager PyTorch"}
_WORTH = 0.01  # of a graph's traffic: what is less is not told
# "inputs__gate_weight__.1" is how XLA writes inputs['gate_weight'].
_PARAMETER = re.compile(r"[A-Za-z]\w*?__([A-Za-z]\w*?)__(?:\.\d+)?$")


class View:
    """A graph with the words in which findings speak of it."""

    def __init__(self, name: str, graph: FusionGraph, shorten: Callable[[str], str]) -> None:
        self.key = name
        self.name = DISPLAY_NAMES.get(name, formats.name(name))
        self.graph = graph
        self.kernels = graph.kernels or ()
        self._shorten = shorten
        self._traffic = sum(declared_bytes(kernel) or 0 for kernel in self.kernels)

    def worth(self, size: float) -> bool:
        return size > 0 and size >= _WORTH * self._traffic

    def stage(self, op: SourceOp) -> str:
        return self._shorten(op.stage) if op.stage else ""

    @cached_property
    def stages(self) -> Sequence[set[tuple[Phase, str]]]:
        """By kernel."""
        return [{(phase_of(k, op), self.stage(op)) for op in k.source_ops if op.stage} for k in self.kernels]

    @cached_property
    def recomputed(self) -> Sequence[Recomputed]:
        return recomputed(self.graph)

    @cached_property
    def holders(self) -> Mapping[tuple[Phase, str], list[int]]:
        """Kernels by the stages in them."""
        found: dict[tuple[Phase, str], list[int]] = defaultdict(list)
        for index, stages in enumerate(self.stages):
            for stage in stages:
                found[stage].append(index)
        return found

    def place(self, indices: Iterable[int]) -> str:
        """Where in the program kernels come from: stages, else lines, else the kernels' own names."""
        held = [self.kernels[index] for index in dict.fromkeys(indices)]
        stages = [self.stage(op) for kernel in held for op in kernel.source_ops if op.stage]
        lines = [formats.place(line) for kernel in held for line in kernel.lines]
        return series(stages or lines or [formats.name(kernel.name) for kernel in held])

    def maker(self, buffer: Buffer) -> str:
        """Where in the program the buffer comes from; its kernel's name where that is not known."""
        found = cause(self.graph, buffer.name)
        stages = [self._shorten(stage) for stage in found.stages]
        writers = self.graph.producers[buffer.name]
        return series(stages) or formats.place(found.line) or formats.name(self.kernels[writers[-1]].name)

    def moved(self, indices: Iterable[int]) -> int:
        return sum(declared_bytes(self.kernels[index]) or 0 for index in indices)

    def time(self, indices: Sequence[int]) -> float | None:
        """Measured, None unless all of them were."""
        times = [self.kernels[index].device_time_us for index in indices]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    def buffers(self, index: int, side: Literal["inputs", "outputs"]) -> list[Buffer]:
        accesses = self.kernels[index].inputs if side == "inputs" else self.kernels[index].outputs
        return [self.graph.buffer[access.buffer] for access in accesses or ()]

    def array(self, buffer: Buffer) -> str:
        """An input by its name, what a kernel wrote by where it comes from."""
        writers = self.graph.producers.get(buffer.name)
        if writers:
            return f"the result of {self.maker(buffer)}"
        named = _PARAMETER.match(buffer.name)
        return formats.name(named[1] if named else buffer.name)

    def described(self, buffer: Buffer) -> str:
        """Shape, size and origin."""
        maker, line = self.maker(buffer), formats.place(cause(self.graph, buffer.name).line)
        where = f" ({line})" if line and line != maker else ""
        return f"{formats.shape(buffer)}, {formats.size(buffer.bytes)}, written by {maker}{where}"

    def work(self, indices: Sequence[int]) -> str:
        kernel = self.kernels[indices[0]]
        kind = "product" if is_product(kernel) else f"{kernel.kind} kernel"
        return f"the {kind} of {self.place(indices)}"

    def operations(self, indices: Iterable[int]) -> str:
        tokens = [token(op.op) for index in indices for op in self.kernels[index].source_ops]
        return series([name for name in tokens if name not in MOVEMENT])

    def traffic(self, buffer: Buffer, readers: Sequence[Phase] = ("forward", "backward")) -> int:
        """Bytes of all writes of it, and of the reads in these phases."""
        total = 0
        users = {*self.graph.producers.get(buffer.name, ()), *self.graph.consumers.get(buffer.name, ())}
        for kernel in (self.kernels[index] for index in users):
            for access in (*((kernel.inputs or ()) if kernel.phase in readers else ()), *(kernel.outputs or ())):
                if access.buffer == buffer.name:
                    total += (buffer.bytes if access.bytes is None else access.bytes) * (kernel.launches or 1)
        return total
