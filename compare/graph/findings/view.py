"""The words of findings: for a graph and its parts, for lists and for numbers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

from .. import formats
from ..analyse.align import phase_of
from ..analyse.totals import Recomputed, declared_bytes, recomputed, tally
from ..model import PHASES, Buffer, FusionGraph, Phase, SourceOp
from ..operations import cause, is_product, summarized, token

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LISTED = 8
_DISPLAY_NAMES = {
    "xla": "XLA", "inductor": "Inductor", "triton": "Triton", "cuda": "CUDA", "eager": "Eager PyTorch",
    "library": "PyTorch's library call",
}
_SIGNIFICANT = 0.01  # of a graph's traffic; less makes no finding
# "inputs__gate_weight__.1" is how XLA writes inputs['gate_weight'].
_PARAMETER = re.compile(r"[A-Za-z]\w*?__([A-Za-z]\w*?)__(?:\.\d+)?$")


def count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def how_often(number: int) -> str:
    return "twice" if number == 2 else f"{count(number)} times"


def named(place: str, ops: Iterable[str]) -> str:
    """Return `place (operations)`."""
    listed = ", ".join(ops)
    return f"{place} ({listed})" if place else listed


def series(words: Iterable[str]) -> str:
    """Return `a, b and c`, each word once; a long list ends in "3 more"."""
    listed = list(dict.fromkeys(word for word in words if word))
    if len(listed) > _LISTED:
        listed[_LISTED - 1 :] = [f"{len(listed) - _LISTED + 1} more"]
    if len(listed) < 2:
        return "".join(listed)
    return f"{', '.join(listed[:-1])} and {listed[-1]}"


def verb(names: list[str], stem: str) -> str:
    """Return the names and the verb: "XLA computes", "XLA and Triton compute"."""
    return f"{series(names)} {stem}{'s' if len(names) == 1 else ''}"


def display_name(name: str) -> str:
    """Return an implementation's name as sentences spell it."""
    return _DISPLAY_NAMES.get(name) or formats.name(name)


class View:
    """A graph and the words that findings use for its stages, kernels and buffers."""

    def __init__(self, name: str, graph: FusionGraph, shorten: Callable[[str], str]) -> None:
        self.key = name
        self.name = display_name(name)
        self.graph = graph
        self.kernels = graph.kernels or ()
        self.predicted = not graph.measured  # so times are predictions
        self._shorten = shorten
        self._traffic = sum(declared_bytes(kernel) or 0 for kernel in self.kernels)

    def is_significant(self, size: float) -> bool:
        return size > 0 and size >= _SIGNIFICANT * self._traffic

    def stage(self, op: SourceOp) -> str:
        return self._shorten(op.stage) if op.stage else ""

    @cached_property
    def stages(self) -> Sequence[set[tuple[Phase, str]]]:
        """The stages of each kernel, with their phases."""
        return [{(phase_of(k, op), self.stage(op)) for op in k.source_ops if op.stage} for k in self.kernels]

    @cached_property
    def recomputed(self) -> Sequence[Recomputed]:
        return recomputed(self.graph)

    @cached_property
    def holders(self) -> Mapping[tuple[Phase, str], list[int]]:
        """The kernels of each stage."""
        found: dict[tuple[Phase, str], list[int]] = defaultdict(list)
        for index, stages in enumerate(self.stages):
            for stage in stages:
                found[stage].append(index)
        return found

    def place(self, indices: Iterable[int]) -> str:
        """Return where in the program the kernels come from: stages, else lines, else the kernels' names."""
        held = [self.kernels[index] for index in dict.fromkeys(indices)]
        stages = [self.stage(op) for kernel in held for op in kernel.source_ops if op.stage]
        lines = [formats.place(line) for kernel in held for line in kernel.lines]
        return series(stages or lines or [formats.name(kernel.name) for kernel in held])

    def maker(self, buffer: Buffer) -> str:
        """Return where in the program the buffer comes from; its kernel's name where that is unknown."""
        found = cause(self.graph, buffer.name)
        stages = [self._shorten(stage) for stage in found.stages]
        writers = self.graph.producers[buffer.name]
        return series(stages) or formats.place(found.line) or formats.name(self.kernels[writers[-1]].name)

    def declared_bytes(self, indices: Iterable[int]) -> int:
        return sum(declared_bytes(self.kernels[index]) or 0 for index in indices)

    def time(self, indices: Iterable[int]) -> float | None:
        """Return the measured or predicted time; None unless it is known of all of the kernels."""
        held = [self.kernels[index] for index in indices]
        return tally(kernel.predicted_us if self.predicted else kernel.device_time_us for kernel in held).exact

    def time_words(self, us: float) -> str:
        return f"{'~' if self.predicted else ''}{formats.microseconds(us)}"

    def buffers(self, index: int, side: Literal["inputs", "outputs"]) -> list[Buffer]:
        accesses = self.kernels[index].inputs if side == "inputs" else self.kernels[index].outputs
        return [self.graph.buffer[access.buffer] for access in accesses or ()]

    def array(self, buffer: Buffer) -> str:
        """Return an input's name, or "the result of" the operation that wrote the buffer."""
        writers = self.graph.producers.get(buffer.name)
        if writers:
            return f"the result of {self.maker(buffer)}"
        named = _PARAMETER.match(buffer.name)
        return formats.name(named[1] if named else buffer.name)

    def described(self, buffer: Buffer) -> str:
        """Return the buffer's shape, size and origin."""
        maker, line = self.maker(buffer), formats.place(cause(self.graph, buffer.name).line)
        where = f" ({line})" if line and line != maker else ""
        return f"{formats.shape(buffer)}, {formats.size(buffer.bytes)}, written by {maker}{where}"

    def kernel_label(self, index: int) -> str:
        """Return "XLA's fusion.9 of norm", or "PyTorch's softmax backward" for an ATen operation."""
        kernel, place = self.kernels[index], self.place([index])
        owner, name = self.name, formats.name(kernel.name)
        if kernel.name.startswith("aten."):
            owner = "PyTorch"
            name = formats.name(kernel.name.split(".")[1].strip("_").removesuffix("_data").replace("_", " "))
        return f"{owner}'s {name}" + (f" of {place}" if place not in (name, formats.name(kernel.name)) else "")

    def kernel_kind(self, indices: Sequence[int]) -> str:
        """Return "the product of gate", "the reduction kernel of norm"."""
        kernel = self.kernels[indices[0]]
        kind = "product" if is_product(kernel) else f"{kernel.kind} kernel"
        return f"the {kind} of {self.place(indices)}"

    def operations(self, indices: Iterable[int]) -> str:
        return series(summarized(token(op.op) for index in indices for op in self.kernels[index].source_ops))

    def work(self, indices: Sequence[int]) -> str:
        """Return the kernels' operations and their place: "exp and sub (model.py:15)"."""
        names = self.operations(indices) or series([formats.name(self.kernels[index].name) for index in indices])
        return f"{names} ({self.place(indices)})"

    def traffic(self, buffer: Buffer, readers: Sequence[Phase] = PHASES) -> int:
        """Return the bytes of all writes of the buffer, and of its reads in these phases."""
        return self.traffic_by_kernel(buffer, readers).total()

    def traffic_by_kernel(self, buffer: Buffer, readers: Sequence[Phase] = PHASES) -> Counter[int]:
        total: Counter[int] = Counter()
        users = {*self.graph.producers.get(buffer.name, ()), *self.graph.consumers.get(buffer.name, ())}
        for index in users:
            kernel = self.kernels[index]
            for access in (*((kernel.inputs or ()) if kernel.phase in readers else ()), *(kernel.outputs or ())):
                if access.buffer == buffer.name:
                    total[index] += (buffer.bytes if access.bytes is None else access.bytes) * (kernel.launches or 1)
        return total
