"""A case: a block at one set of axis sizes, dtype, product precision and direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .dtype import DTYPES

Sizes = Mapping[str, int]

# joint: outputs and gradients in one program, the only part of which is called forward.
PARTS = {"fwd": ("forward",), "train": ("forward", "backward"), "joint": ("forward",)}
CONTIGUOUS, TRANSPOSED = "contiguous", "transposed"  # layouts of a shape's inputs
MAGNITUDE = "magnitude"  # of a shape's sizes: how many times larger than elsewhere what is `magnified` is


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
