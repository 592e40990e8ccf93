"""What is compared: blocks, their cases, their implementations. Plain data that knows no framework."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Sizes = Mapping[str, int]
Arrays = Mapping[str, Any]

# joint: outputs and gradients in one program, the only part of which is called forward.
PARTS = {"fwd": ("forward",), "train": ("forward", "backward"), "joint": ("forward",)}


@dataclass(frozen=True)
class DType:
    """A floating-point storage type: `eps` is the distance from 1 to the next value."""

    name: str
    short: str
    itemsize: int
    eps: float


DTYPES = {
    d.name: d
    for d in (
        DType("bfloat16", "bf16", 2, 2.0**-7),
        DType("float16", "fp16", 2, 2.0**-10),
        DType("float32", "fp32", 4, 2.0**-23),
    )
}
# Types that inputs may have besides, and no gradient has: integers, and what is only stored in.
OTHER_BYTES = {"int32": 4, "int64": 8, "float8_e4m3fn": 1}
CONTIGUOUS, TRANSPOSED = "contiguous", "transposed"  # layouts of a shape's inputs
MAGNITUDE = "magnitude"  # of a shape's sizes: how many times larger than elsewhere what is `magnified` is
DTYPE_BY_ANY_NAME = {**{d.name: d.name for d in DTYPES.values()}, **{d.short: d.name for d in DTYPES.values()}}


@dataclass(frozen=True)
class Tensor:
    """A named array with named axes.

    An input is drawn from a normal distribution of this `mean` and `std`; `fan_in` names the axis whose size n scales
    `std` by 1/sqrt(n), so that products of inputs and weights keep unit variance. `draw(generator, sizes)` makes, with
    a numpy.random.Generator, what is not so distributed, or None for sizes of which it is. `dtype` is its own whatever
    the case's is: "int32", "float32", "float8_e4m3fn". Integers, as labels and positions are, and fp8 have no gradient.
    `read` says how many elements a part that needs it must read, where that is fewer than all: of a table, the rows
    that are looked up. What is `magnified` has `magnitude` times this `std` in shapes whose sizes have one: values near
    the dtype's largest.
    """

    name: str
    axes: tuple[str, ...]
    mean: float = 0.0
    std: float = 1.0
    fan_in: str | None = None
    dtype: str | None = None
    draw: Callable[[Any, Sizes], Any] | None = None
    read: Callable[[Sizes], int] | None = None
    magnified: bool = False

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in self.axes)

    def elements(self, sizes: Sizes) -> int:
        return math.prod(self.shape(sizes))

    def dtype_in(self, case: Case) -> str:
        return self.dtype or case.dtype

    def itemsize(self, case: Case) -> int:
        dtype = self.dtype_in(case)
        return OTHER_BYTES.get(dtype) or DTYPES[dtype].itemsize

    def bytes(self, case: Case) -> int:
        return self.elements(case.sizes) * self.itemsize(case)

    def bytes_read(self, case: Case) -> int:
        """By a part that needs it, at least."""
        return self.read(case.sizes) * self.itemsize(case) if self.read else self.bytes(case)

    @property
    def differentiable(self) -> bool:
        return self.dtype not in OTHER_BYTES

    def scale(self, sizes: Sizes) -> float:
        std = self.std * sizes.get(MAGNITUDE, 1) if self.magnified else self.std
        return std / math.sqrt(sizes[self.fan_in]) if self.fan_in else std


@dataclass(frozen=True)
class Case:
    """A block at one set of axis sizes, dtype, product precision and direction; `layout` as its `Shape` has it."""

    block: str
    name: str
    sizes: Sizes
    dtype: str
    direction: str
    precision: str = "ieee"
    layout: str = CONTIGUOUS

    @property
    def id(self) -> str:
        precision = "" if self.precision == "ieee" else f"-{self.precision}"
        return f"{self.block}/{self.name}/{DTYPES[self.dtype].short}{precision}/{self.direction}"

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS[self.direction]

    @property
    def differentiates(self) -> bool:
        return self.direction != "fwd"

    def to_json(self) -> dict[str, Any]:
        layout = {} if self.layout == CONTIGUOUS else {"layout": self.layout}
        return {
            "block": self.block, "name": self.name, "sizes": dict(self.sizes), "dtype": self.dtype,
            "direction": self.direction, "precision": self.precision, **layout,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        return cls(**data)


@dataclass(frozen=True)
class Shape:
    """One named set of sizes, with the dtypes it is compared in and the suites it belongs to.

    `sizes` are those of the axes, the block's `parameters`, what else an input's `draw` wants to know, as how many
    labels are ignored, and a `magnitude` where values are large.

    Suites: `quick` (minutes), `full` (everything but `check`), `check` (small odd sizes: CPU checks and tests).
    `tuned`: whether implementations that tune for minutes (`Implementation.tunes`) take part, if it is in `quick`.
    `layout`: how each input of two axes or more lies in the memory that PyTorch's side is given: contiguous, or
    transposed, its last two axes swapped. Arrays of JAX have no strides, nor have inputs that are only compiled for.
    """

    name: str
    sizes: Sizes
    dtypes: tuple[str, ...] = ("bfloat16",)
    suites: tuple[str, ...] = ("full",)
    precisions: tuple[str, ...] = ("ieee",)
    directions: tuple[str, ...] = tuple(PARTS)
    tuned: bool = True
    layout: str = CONTIGUOUS


def load(target: str) -> Callable[..., Any]:
    """The function that "package.module:function" names, its module imported."""
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


@dataclass(frozen=True)
class Implementation:
    """One way to compute a block.

    `target` is `package.module:function`: the contract `apply(inputs, **attributes) -> outputs` on dicts of arrays.
    `compiler` says what takes it: xla, xla-unfused, xla-remat, eager, inductor, inductor-max, flex, triton,
    triton-library, cuda; or xla-triton, for which a target of PyTorch's side is planned there and compiled by XLA.
    `unsupported` says why a case cannot be taken, or None. `directions` leaves out those in which it would only repeat
    another implementation. `baseline` ones show what it costs to fuse nothing, which a block's shapes of `quick` show
    well enough. `requires` are the packages that it needs beyond its framework, as pip takes them
    ("liger-kernel==0.8.5": any version is used, the row was written for this one), and what it needs of the framework
    itself ("torch>=2.12"). Only its worker knows whether they are there.
    """

    name: str
    target: str
    compiler: str
    summary: str
    needs_gpu: str | None = None
    unsupported: Callable[[Case], str | None] = field(default=lambda case: None)
    directions: tuple[str, ...] = tuple(PARTS)
    tunes: bool = False
    baseline: bool = False
    requires: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        """Import the target function; imports its framework, so only a worker calls it."""
        return load(self.target)

    @property
    def framework(self) -> str:
        return "xla" if self.compiler.startswith("xla") else "torch"

    @property
    def compiled_on_host(self) -> bool:
        """Whether a compiler makes all of it: work for the host, and for the GPU its inputs and one call at most."""
        return self.compiler.startswith(("xla", "inductor")) or self.compiler == "flex"


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
