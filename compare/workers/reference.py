"""The reference's worker: draws inputs, evaluates the float64 reference, and stores both for the other workers.

Gradients come from float64 autograd over the same formula, so PyTorch is needed; it runs on a GPU where there is one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compare import arrays
from compare.blocks import BLOCKS
from compare.check import Scale, relative_error
from compare.spec import Block, Case


def methods() -> dict[str, Callable[..., Any]]:
    def produce_json(case: dict[str, Any], seed: int, folder: str) -> dict[str, Any]:
        return produce(Case.from_json(case), seed, Path(folder))

    return {"produce": produce_json}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def produce(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    """Store input bits, cotangents, reference outputs and gradients of `case` in `folder`.

    Returns {tensor name: Scale as a dict}, gradients named `d_<input>`.
    """
    block = BLOCKS[case.block]
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {t.name: _store(case, t, "input", seed, folder) for t in block.inputs}
    cotangents = {}
    if case.direction == "train":
        cotangents = {t.name: _store(case, t, "cotangent", seed, folder) for t in block.outputs}
    exact = evaluate(block, inputs, cotangents, torch.float64)
    rounded = evaluate(block, inputs, cotangents, getattr(torch, case.dtype), case.precision)
    scales = {}
    for name, values in exact.items():
        rms = float(values.square().mean().sqrt()) if values.numel() else 0.0
        scale = Scale(
            rms=rms,
            largest=float(values.abs().max()) if values.numel() else 0.0,
            independent_error=relative_error(rounded[name].double(), values, rms),
        )
        scales[name] = {"rms": scale.rms, "largest": scale.largest, "independent_error": scale.independent_error}
        role, tensor = ("gradient", name.removeprefix("d_")) if name.startswith("d_") else ("output", name)
        np.save(arrays.path_of(folder, role, tensor), values.cpu().numpy())
    (folder / "scales.json").write_text(json.dumps(scales))
    return scales


def evaluate(
    block: Block,
    inputs: dict[str, torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    dtype: torch.dtype,
    precision: str = "ieee",
) -> dict[str, torch.Tensor]:
    """Outputs, and gradients as `d_<input>` where cotangents are given, of the reference formula in `dtype`."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    leaves = {name: value.to(dtype).requires_grad_(bool(cotangents)) for name, value in inputs.items()}
    outputs: dict[str, torch.Tensor] = {}
    for index in _slices(block, leaves):
        views = {name: index(block.tensor(name).axes, leaf) for name, leaf in leaves.items()}
        part = block.reference(torch, views, **block.attributes)
        for name, value in part.items():
            axes = block.tensor(name).axes
            if cotangents:
                value.backward(index(axes, cotangents[name]).to(dtype), retain_graph=len(part) > 1)
            if name not in outputs:
                sizes = {a: n for t in block.inputs for a, n in zip(t.axes, leaves[t.name].shape, strict=True)}
                outputs[name] = value.new_empty(block.tensor(name).shape(sizes))
            index(axes, outputs[name]).copy_(value.detach())
    gradients = {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return outputs | gradients


def _slices(block: Block, tensors: dict[str, torch.Tensor]) -> Iterator[Any]:
    """Views over the axes that no output mixes, one index at a time, so that S x S scores fit in memory."""
    sizes = {a: n for t in block.inputs for a, n in zip(t.axes, tensors[t.name].shape, strict=True)}
    for position in itertools.product(*(range(sizes[axis]) for axis in block.slices)):
        at = dict(zip(block.slices, position, strict=True))

        def view(axes: tuple[str, ...], tensor: torch.Tensor, at: dict[str, int] = at) -> torch.Tensor:
            return tensor[tuple(slice(at[a], at[a] + 1) if a in at else slice(None) for a in axes)]

        yield view


def _store(case: Case, tensor: Any, role: str, seed: int, folder: Path) -> torch.Tensor:
    # A cotangent has its output's name; another seed stream keeps it independent of an input of the same name.
    values = arrays.draw(case, tensor, seed if role == "input" else seed + 1_000_000)
    stored = arrays.round_to(values, case.dtype)
    np.save(arrays.path_of(folder, role, tensor.name), stored)
    tensor = torch.from_numpy(stored.view(np.int16) if case.dtype == "bfloat16" else stored)
    return (tensor.view(torch.bfloat16) if case.dtype == "bfloat16" else tensor).to(device())
