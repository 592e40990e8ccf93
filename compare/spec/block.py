"""What is compared: blocks, their cases, their implementations. Plain data that knows no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .case import Case, Shape, Sizes
from .implementation import Implementation
from .tensor import Arrays, Tensor


@dataclass(frozen=True)
class Block:
    """A mathematical function with named axes and a float64 reference.

    `reference(xp, inputs, **attributes)` is written against the names that NumPy and PyTorch share, so that float64
    NumPy reads and tests it and float64 tensors differentiate it. `backward_needs` are the fewest inputs or outputs
    that the gradients need (they count as compulsory reads of backward); the gradients of inputs that `passes_on` names
    are an output's cotangent itself, which backward may return without writing it. `slices` are axes along which the
    reference may be evaluated one index at a time, because no output mixes them; of axes in a tuple, an index of the
    first takes along its share of the others, as a head of keys the heads of queries that share it. `working_bytes` is
    what the plain formula has in memory between its operations, where that is far more than inputs and outputs: a run
    goes by it in what it does at once. `work` is what a rate of this block counts. The reference and every target get
    `attributes`, and of a case those of its sizes that `parameters` name.
    """

    name: str
    summary: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    reference: Callable[..., dict[str, Any]]
    shapes: tuple[Shape, ...]
    implementations: tuple[Implementation, ...]
    flops: Callable[[Sizes], float]
    backward_flops: Callable[[Sizes], float] = field(default=lambda sizes: 0.0)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    backward_needs: tuple[str, ...] = ()
    passes_on: tuple[str, ...] = ()
    directions: tuple[str, ...] = ("fwd", "train")
    slices: tuple[str | tuple[str, ...], ...] = ()
    working_bytes: Callable[[Sizes], int] = field(default=lambda sizes: 0)
    work: str = "bytes"

    def tensor(self, name: str) -> Tensor:
        for tensor in self.inputs + self.outputs:
            if tensor.name == name:
                return tensor
        raise KeyError(f"block {self.name} has no tensor {name!r}")

    def attributes_of(self, case: Case) -> dict[str, Any]:
        return {**self.attributes, **{name: case.sizes[name] for name in self.parameters if name in case.sizes}}

    def joined(self, inputs: Arrays, cotangents: Arrays) -> dict[str, Any]:
        """What a joint program is given: the inputs, and of each output y its cotangent as d_y. Among what it returns,
        d_x is the gradient of an input x."""
        return {**inputs, **{f"d_{name}": cotangent for name, cotangent in cotangents.items()}}

    def separated(self, given: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        """(inputs, cotangents) of what a joint program is given."""
        inputs = {t.name: given[t.name] for t in self.inputs}
        return inputs, {t.name: given[f"d_{t.name}"] for t in self.outputs}

    def implementation(self, name: str) -> Implementation:
        for implementation in self.implementations:
            if implementation.name == name:
                return implementation
        raise KeyError(f"block {self.name} has no implementation {name!r}")

    def takes(self, case: Case, implementation: Implementation, suite: str) -> bool:
        """Whether the implementation takes part in this case of the suite where nobody asks for it by name."""
        if case.direction not in implementation.directions:
            return False
        shape = next(s for s in self.shapes if s.name == case.name)
        if suite == "check":
            return True
        if implementation.tunes:
            # A training step's products took one to two minutes each on an H200, and the forward ones half of that.
            affordable = self.work == "bytes" or not case.differentiates
            return affordable and shape.tuned and "quick" in shape.suites
        return not implementation.baseline or "quick" in shape.suites

    def cases(self, suite: str) -> list[Case]:
        return [
            Case(self.name, shape.name, shape.sizes, dtype, direction, precision, shape.layout)
            for shape in self.shapes
            if suite in shape.suites
            for dtype in shape.dtypes
            for precision in shape.precisions
            for direction in self.directions
            if direction in shape.directions
        ]

    def compulsory_traffic(self, case: Case) -> dict[str, tuple[int, int]]:
        """Fewest bytes that each part must read and write: every used input read once, every output written once.

        Backward reads the cotangents and `backward_needs`, and writes one gradient per differentiable input but for
        `passes_on`. What does both at once needs nothing twice.
        """

        def read(tensors: Iterable[Tensor]) -> int:
            return sum(tensor.bytes_read(case) for tensor in tensors)

        def written(tensors: Iterable[Tensor]) -> int:
            return sum(tensor.bytes(case) for tensor in tensors)

        given, outputs = read(self.inputs), written(self.outputs)
        gradients = written(t for t in self.inputs if t.differentiable and t.name not in self.passes_on)
        if case.direction == "joint":
            return {"forward": (given + outputs, outputs + gradients)}
        result = {"forward": (given, outputs)}
        if "backward" in case.parts:
            result["backward"] = (outputs + read(map(self.tensor, self.backward_needs)), gradients)
        return result

    def bytes_compulsory(self, case: Case) -> dict[str, int]:
        """Fewest bytes that each part must move: `compulsory_traffic`, reads and writes together."""
        return {part: read + written for part, (read, written) in self.compulsory_traffic(case).items()}

    def part_flops(self, case: Case) -> dict[str, float]:
        """Model FLOPs of each part (the algorithm's, not what an implementation recomputes)."""
        flops = {"forward": self.flops(case.sizes), "backward": self.backward_flops(case.sizes)}
        if case.direction == "joint":
            return {"forward": sum(flops.values())}
        return {part: flops[part] for part in case.parts}
