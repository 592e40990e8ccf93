"""A block's case in tests of plain code: its inputs, and the results of the block's float64 reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xlafuse.compare.numerics import input_arrays
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case

ONE_GPU = [block for block in BLOCKS.values() if not block.spans_gpus]
# Attributes large enough that a block which leaves one out is wrong.
ATTRIBUTES = {"eps": 0.05, "theta": 100.0, "smoothing": 0.3, "z_loss": 0.2, "p": 0.25}


def case_of(block: str, dtype: str, shape: str | None = None, **sizes: int) -> Case:
    """Return a case of the block's last direction at a shape of suite `check`, with some sizes replaced.

    Without `shape` it is the ordinary one with incomplete tiles.
    """
    names = (shape,) if shape else ("odd", "small")
    found = next(found for found in BLOCKS[block].shapes if found.edge and found.name in names)
    return Case(block, found.name, {**found.sizes, **sizes}, dtype, BLOCKS[block].directions[-1])


def attributes_of(case: Case) -> dict[str, Any]:
    """Return the attributes of the block and of the case, with the values of `ATTRIBUTES`."""
    attributes = BLOCKS[case.block].attributes_of(case)
    return attributes | {name: value for name, value in ATTRIBUTES.items() if name in attributes}


def inputs_of(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Draw the inputs. Positions are small, because they multiply the error of an angle."""
    inputs = _drawn(case, BLOCKS[case.block].inputs, seed)
    return inputs | {name: x % 16 for name, x in inputs.items() if name == "positions"}


def cotangents_of(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Draw a cotangent of each output; none in a forward pass."""
    return _drawn(case, BLOCKS[case.block].outputs, seed + 1000) if case.differentiates else {}


def _drawn(case: Case, tensors: Any, seed: int) -> dict[str, Tensor]:
    arrays = {tensor.name: torch.from_numpy(input_arrays.draw(case, tensor, seed)) for tensor in tensors}
    return {tensor.name: arrays[tensor.name].to(getattr(torch, tensor.dtype_in(case))) for tensor in tensors}


def evaluated(apply: Any, inputs: dict[str, Tensor], cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of `apply`, and the gradient of each floating input x as d_x where cotangents are given."""
    leaves = {
        name: value.detach().requires_grad_(bool(cotangents)) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    outputs = apply(leaves)
    if cotangents:
        torch.autograd.backward(list(outputs.values()), [cotangents[name] for name in outputs])
    gradients = {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: value.detach() for name, value in outputs.items()} | gradients


def exact(case: Case, inputs: dict[str, Tensor], cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs and gradients of the block's reference for these values in float64."""

    def widened(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}

    def reference(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = BLOCKS[case.block].reference(torch, inputs, **attributes_of(case))
        return found

    return evaluated(reference, widened(inputs), widened(cotangents))
