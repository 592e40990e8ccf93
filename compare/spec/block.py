"""A block: a mathematical function that every implementation computes. Plain data that knows no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import convert

from .case import Case, Shape, Sizes
from .implementation import Implementation, OwnFunction
from .tensor import Arrays, Tensor

CPU_ELEMENTS = 250_000  # over all tensors; a CPU and Triton's interpreter compute such a case in seconds
MAIN_IMPLEMENTATIONS = ("xla", "inductor", "triton", "cuda")  # of suite `tour`; reports show them first


@dataclass(frozen=True)
class Block:
    """A mathematical function with named axes and a float64 reference.

    reference: `reference(xp, inputs, **attributes)`, written with the names that NumPy and PyTorch share. Float64 NumPy
        tests it, and float64 tensors differentiate it.
    shapes: the main shape first.
    sizes: a function that returns all sizes of a shape from those that do not follow from others. None: none follows.
    attributes: given to the reference and to every target, together with the sizes that `parameters` names.
    backward_needs: the fewest inputs or outputs that the gradients need, which are compulsory reads of backward.
    passes_on: inputs whose gradient is an output's cotangent itself, which backward may return without writing it.
    slices: axes along which the reference may be evaluated one index at a time, because no output mixes them. In a
        tuple of axes, an index of the first takes its share of the others: a key's head takes the query heads that
        share it. In float64 the reference may also be evaluated for each query head alone.
    working_bytes: memory of the plain formula between its operations, where it is far more than inputs and outputs. A
        run plans its memory by it.
    work: the unit of this block's rate, "bytes" or "flops".
    least_sent: of a block that spans several GPUs, `least_sent(case, rank, inputs)`: the fewest bytes that a rank must
        send to the others in one call, given its float32 slices of the inputs.
    autotuned_in_quick: directions of the main shape in which implementations that autotune for minutes belong to suite
        `quick`.
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
    sizes: Callable[..., Sizes] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    backward_needs: tuple[str, ...] = ()
    passes_on: tuple[str, ...] = ()
    directions: tuple[str, ...] = ("fwd", "train")
    slices: tuple[str | tuple[str, ...], ...] = ()
    working_bytes: Callable[[Sizes], int] = field(default=lambda sizes: 0)
    work: str = "bytes"
    least_sent: Callable[[Case, int, Arrays], int] | None = None
    autotuned_in_quick: tuple[str, ...] = ()

    @property
    def spans_gpus(self) -> bool:
        """Return whether its tensors are split over several GPUs. Only suite `parallel` has such blocks, unless named.
        """
        return self.least_sent is not None

    def tensor(self, name: str) -> Tensor:
        for tensor in self.inputs + self.outputs:
            if tensor.name == name:
                return tensor
        raise KeyError(f"block {self.name} has no tensor {name!r}")

    def implementation(self, name: str | Mapping[str, Any]) -> Implementation:
        """Return the implementation of that name, or of an `Implementation.request`. Raises KeyError."""
        if isinstance(name, Mapping):
            return convert(name, OwnFunction).row()
        for implementation in self.implementations:
            if implementation.name == name:
                return implementation
        raise KeyError(f"block {self.name} has no implementation {name!r}")

    def attributes_of(self, case: Case) -> dict[str, Any]:
        """Return the block's attributes and the case's parameters."""
        return {**self.attributes, **{name: case.sizes[name] for name in self.parameters if name in case.sizes}}

    def joined(self, inputs: Arrays, cotangents: Arrays) -> dict[str, Any]:
        """Return the arguments of a joint program: the inputs, and the cotangent of each output y as d_y.

        Its results name the gradient of an input x d_x.
        """
        return {**inputs, **{f"d_{name}": cotangent for name, cotangent in cotangents.items()}}

    def separated(self, given: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (inputs, cotangents) from the arguments of a joint program."""
        inputs = {t.name: given[t.name] for t in self.inputs}
        return inputs, {t.name: given[f"d_{t.name}"] for t in self.outputs}

    def shapes_in(self, suite: str) -> list[Shape]:
        """Return the shapes of a suite; `tour` has the main shape alone."""
        if suite == "parallel" and not self.spans_gpus:
            return []
        return [self.shapes[0]] if suite == "tour" else [shape for shape in self.shapes if suite in shape.suites]

    def cases(self, suite: str, shapes: Iterable[Shape] | None = None) -> list[Case]:
        """Return the cases of the suite's shapes, or of `shapes`, in the suite's precisions."""
        return [
            Case(self.name, shape.name, shape.sizes, dtype, direction, precision, shape.layout)
            for shape in (self.shapes_in(suite) if shapes is None else shapes)
            for dtype in shape.dtypes
            for precision in shape.precisions_in(suite)
            for direction in self.directions
            if direction in shape.directions
        ]

    def is_main(self, case: Case) -> bool:
        """Return whether the case has the main shape, in its first dtype."""
        return (case.name, case.dtype) == (self.shapes[0].name, self.shapes[0].dtypes[0])

    def cpu_check_cases(self) -> list[Case]:
        """Return the check cases that a CPU computes in seconds: at most CPU_ELEMENTS over all tensors."""

        def elements(case: Case) -> int:
            return sum(tensor.elements(case.sizes) for tensor in (*self.inputs, *self.outputs))

        return [case for case in self.cases("check") if elements(case) <= CPU_ELEMENTS]

    def takes(self, case: Case, implementation: Implementation, suite: str) -> bool:
        """Return whether the implementation belongs to this case of the suite when it is not selected by name."""
        if case.direction not in implementation.directions:
            return False
        if implementation.own is not None:
            return True
        chosen = next((shape.implementations for shape in self.shapes if shape.name == case.name), ())
        if chosen or implementation.by_shape:
            return implementation.name in chosen
        if suite == "check":
            return True
        if suite == "tour":
            return implementation.name in MAIN_IMPLEMENTATIONS
        if implementation.backend.autotunes_for_minutes:
            if case.name != self.shapes[0].name:
                return False
            if suite == "quick":
                return case.direction in self.autotuned_in_quick
            # Autotuning the products of a training step took one to two minutes each on an H200, of forward half that.
            return self.work == "bytes" or not case.differentiates
        if implementation.unfused_of is None:
            return True
        if suite == "full":
            return self.is_main(case)
        # Code made to be slow shows the cost of no fusion well enough in a block's bfloat16 cases.
        return case.dtype == "bfloat16" and any(shape.quick for shape in self.shapes if shape.name == case.name)

    def compulsory_traffic(self, case: Case) -> dict[str, tuple[int, int]]:
        """Return the fewest bytes that each phase must (read, write): each used input and each output once.

        Backward reads the cotangents and `backward_needs`, and writes one gradient per differentiable input except
        those of `passes_on`. A joint program reads nothing twice. A case that spans several GPUs has the bytes of
        one, whose slices are in its own memory.
        """

        def of_rank(tensor: Tensor, size: int) -> int:
            return size // case.ranks if tensor.split else size

        def read(tensors: Iterable[Tensor]) -> int:
            return sum(of_rank(tensor, tensor.bytes_read(case)) for tensor in tensors)

        def written(tensors: Iterable[Tensor]) -> int:
            return sum(of_rank(tensor, tensor.bytes(case)) for tensor in tensors)

        given, outputs = read(self.inputs), written(self.outputs)
        gradients = written(t for t in self.inputs if t.differentiable and t.name not in self.passes_on)
        if case.direction == "joint":
            return {"forward": (given + outputs, outputs + gradients)}
        result = {"forward": (given, outputs)}
        if "backward" in case.phases:
            result["backward"] = (outputs + read(map(self.tensor, self.backward_needs)), gradients)
        return result

    def bytes_compulsory(self, case: Case) -> dict[str, int]:
        """Return the fewest bytes that each phase must move: `compulsory_traffic`, reads plus writes."""
        return {phase: read + written for phase, (read, written) in self.compulsory_traffic(case).items()}

    def phase_flops(self, case: Case) -> dict[str, float]:
        """Return the model FLOPs of each phase: the algorithm's, without what an implementation recomputes.

        A case that spans several GPUs has the FLOPs of one; all have the same share.
        """
        flops = {
            "forward": self.flops(case.sizes) / case.ranks, "backward": self.backward_flops(case.sizes) / case.ranks
        }
        if case.direction == "joint":
            return {"forward": sum(flops.values())}
        return {phase: flops[phase] for phase in case.phases}
