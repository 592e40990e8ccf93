"""A case: a block at one set of axis sizes, dtype, product precision and direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from .dtype import DTYPES

Sizes = Mapping[str, int]

# fwd: inference. train: a forward program that saves what the backward program needs. joint: outputs and gradients in
# one program, whose only phase is called forward.
PHASES = {"fwd": ("forward",), "train": ("forward", "backward"), "joint": ("forward",)}
CONTIGUOUS, TRANSPOSED = "contiguous", "transposed"  # layouts of a shape's inputs
RANKS = "ranks"  # a key of sizes: the number of GPUs that compute the case together, a process each
MAGNITUDE = "magnitude"  # a key of sizes: the factor on the standard deviation of `magnified` tensors


@dataclass(frozen=True)
class Case:
    """A block at one set of axis sizes, dtype, product precision and direction.

    layout: as in `Shape`.
    """

    block: str
    name: str
    sizes: Sizes
    dtype: str
    direction: str
    precision: str = "ieee"
    layout: str = CONTIGUOUS

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.direction not in PHASES:
            raise ValueError(f"unknown dtype {self.dtype!r} or direction {self.direction!r}")

    @property
    def id(self) -> str:
        precision = "" if self.precision == "ieee" else f"-{self.precision}"
        return f"{self.block}/{self.name}/{DTYPES[self.dtype].short}{precision}/{self.direction}"

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES[self.direction]

    @property
    def ranks(self) -> int:
        """Return the number of GPUs that the case spans; 1 for a case of one GPU."""
        return self.sizes.get(RANKS, 1)

    @property
    def differentiates(self) -> bool:
        return self.direction != "fwd"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """Return the case of JSON data. Raises ValueError naming the first field that is wrong."""
        return msgspec.convert(data, cls)


@dataclass(frozen=True)
class Shape:
    """One named set of sizes, with the dtypes, precisions and directions that it is compared in.

    sizes: of the axes, of the block's `parameters`, and of other arguments of an input's `draw`, such as the share of
        ignored labels; and a `magnitude` where values are large.
    quick: a realistic shape that belongs to suite `quick` as well as to `full`. The suite `tour` has each block's first
        shape.
    edge: a shape at the edge of what kernels handle (prime sizes, one row, one element, all labels ignored). It belongs
        to suite `check` only: its numbers are checked, and it is never timed.
    implementations: the only ones that belong to this shape in a suite; all of the block's if none is named.
    layout: how PyTorch gets each input of two axes or more: contiguous, or transposed (its last two axes swapped in
        memory). Arrays of JAX, and inputs of a compile for a target, have no strides.
    """

    name: str
    sizes: Sizes
    dtypes: tuple[str, ...] = ("bfloat16",)
    precisions: tuple[str, ...] = ("ieee",)
    directions: tuple[str, ...] = tuple(PHASES)
    quick: bool = False
    edge: bool = False
    implementations: tuple[str, ...] = ()
    layout: str = CONTIGUOUS

    @property
    def suites(self) -> tuple[str, ...]:
        if self.edge:
            return ("check",)
        return ("quick", "full", "parallel") if self.quick else ("full", "parallel")

    def precisions_in(self, suite: str) -> tuple[str, ...]:
        """Return the precisions of the products in a suite; `tour` and `quick` take only the first."""
        return self.precisions[:1] if suite in ("tour", "quick") else self.precisions
