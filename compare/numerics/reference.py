"""The reference worker: it draws inputs, evaluates the float64 reference, and stores both for the other workers.

Gradients come from float64 autograd over the same formula, so it needs PyTorch. It uses a GPU where there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..spec.block import Block
from ..spec.blocks import BLOCKS
from ..spec.case import MAGNITUDE, Case
from ..spec.dtype import DTYPES
from ..spec.tensor import Tensor
from . import input_arrays
from .errors import relative_error
from .rounded_sums import ORDERS, RoundedSums, row_tolerances
from .tolerance import Scale

Tensors = dict[str, torch.Tensor]


def methods() -> dict[str, Callable[..., Any]]:
    drawn: dict[str, tuple[Tensors, Tensors]] = {}

    def produce_json(case: dict[str, Any], seed: int, folder: str) -> dict[str, Any]:
        try:
            return produce(Case.from_json(case), seed, Path(folder), drawn.pop(folder, None))
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # a large case in float64 fills much of the GPU, which other workers share

    def draw_json(case: dict[str, Any], seed: int, folder: str, keep: bool = False) -> None:
        """keep: keep the inputs until `produce` takes them, or another case's inputs are drawn."""
        for other in [name for name in drawn if Path(name).parent != Path(folder).parent]:
            del drawn[other]
        found = store_inputs(Case.from_json(case), seed, Path(folder))
        if keep:
            drawn[folder] = found

    return {"produce": produce_json, "draw": draw_json}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def store_inputs(case: Case, seed: int, folder: Path) -> tuple[Tensors, Tensors]:
    """Draw inputs and cotangents of `case`, store their bits in `folder`, and return both."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs, cotangents = _draw(case, seed)
    for role, tensors in (("input", inputs), ("cotangent", cotangents)):
        for name, tensor in tensors.items():
            integer = input_arrays.BITS.get(str(tensor.dtype).removeprefix("torch."))
            bits = tensor.view(getattr(torch, integer)) if integer else tensor
            np.save(input_arrays.path_of(folder, role, name), bits.cpu().numpy())
    return inputs, cotangents


def produce(
    case: Case, seed: int, folder: Path, drawn: tuple[Tensors, Tensors] | None = None
) -> dict[str, Any]:
    """Store inputs, cotangents, reference outputs and gradients of `case` in `folder`, and return their scales.

    drawn: the result of `store_inputs` for this seed, if it was called. Returns {tensor name:
    compare.numerics.tolerance.Scale as a dict}, with gradients named `d_<input>`.
    """
    block = BLOCKS[case.block]
    inputs, cotangents = drawn or store_inputs(case, seed, folder)
    exact = evaluate(case, inputs, cotangents, torch.float64)
    for name, values in exact.items():
        role, tensor_name = ("gradient", name.removeprefix("d_")) if name.startswith("d_") else ("output", name)
        stored = values.to(_stored_dtype(case, tensor_name))
        np.save(input_arrays.path_of(folder, role, tensor_name), stored.cpu().numpy())
    errors = _independent_errors(case, inputs, cotangents, exact)
    rounded_errors = _rounded_errors(case, inputs, cotangents, exact, folder)
    for redraw in range(1, _redraws(block, case)):
        inputs, cotangents = _draw(case, seed + 1000 * redraw)
        other = evaluate(case, inputs, cotangents, torch.float64)
        again = _independent_errors(case, inputs, cotangents, other)
        errors = {name: max(error, again[name]) for name, error in errors.items()}
        again = _rounded_errors(case, inputs, cotangents, other)
        rounded_errors = {name: max(error, again[name]) for name, error in rounded_errors.items()}
    return {
        name: asdict(Scale(_rms(values), float(values.abs().max()), errors[name], rounded_errors.get(name)))
        for name, values in exact.items()
    }


def _rounded_errors(
    case: Case, inputs: Tensors, cotangents: Tensors, exact: Tensors, folder: Path | None = None
) -> dict[str, float]:
    """Return the errors of gradients whose sums are rounded after each addition, for programs that sum so.

    A matrix has a tolerance for each row instead, which is stored in `folder`.
    """
    block, dtype = BLOCKS[case.block], _independent_dtype(case)
    names = dict.fromkeys(name for i in block.implementations for name in i.rounded_sums if f"d_{name}" in exact)
    if not names or dtype == torch.float32:
        return {}

    def evaluated(order: int) -> Tensors:
        with RoundedSums(dtype, order):
            found = evaluate(case, inputs, cotangents, dtype)
        return {name: found[f"d_{name}"] for name in names}

    rounded, errors = evaluated(0), {}
    for name in names:
        values = exact[f"d_{name}"]
        if values.dim() == 1:
            errors[f"d_{name}"] = relative_error(rounded[name], values, _rms(values), _largest_difference)
        elif folder is not None:
            orders = [rounded[name], *(evaluated(order)[name] for order in range(1, ORDERS))]
            allowed = row_tolerances(orders, values, DTYPES[case.dtype].eps)
            np.save(input_arrays.path_of(folder, "tolerance", name), allowed.cpu().numpy())
    return errors


def _stored_dtype(case: Case, name: str) -> torch.dtype:
    """Return the dtype of a stored reference: float32 where results have a half type, else float64.

    float32 halves the memory of every checking process. Its error of 2**-24 is at most 2**-14 of the tolerance.
    """
    eps = DTYPES[BLOCKS[case.block].tensor(name).dtype_in(case)].eps
    return torch.float32 if eps >= 2.0**-10 else torch.float64


def _redraws(block: Block, case: Case) -> int:
    """Return the number of fresh inputs for the independent evaluation; a maximum over few elements is luck.

    Large inputs are drawn less often, because drawing a billion numbers takes seconds.
    """
    smallest = min(t.elements(case.sizes) for t in block.outputs)
    drawn = sum(t.elements(case.sizes) for t in block.inputs)
    return max(1, min(16, 65536 // smallest, 2**30 // drawn))


def _independent_errors(
    case: Case, inputs: Tensors, cotangents: Tensors, exact: Tensors
) -> dict[str, float]:
    """Return the error of each output and gradient when the formula runs operation by operation in the case's dtype.

    For large values it runs in float32 and rounds each result. PlainFloat32 makes its float32 functions and sums no
    more accurate than plain code's; in half types the rounding after each operation is far coarser than that.
    """
    plain = PlainFloat32(case.precision)
    errors = _errors_of(plain, case, inputs, cotangents, exact)
    if plain.moved_few:
        again = _errors_of(PlainFloat32(case.precision, sign=-1), case, inputs, cotangents, exact)
        errors = {name: max(error, again[name]) for name, error in errors.items()}
    return errors


def _errors_of(
    plain: PlainFloat32, case: Case, inputs: Tensors, cotangents: Tensors, exact: Tensors
) -> dict[str, float]:
    with plain:
        rounded = evaluate(case, inputs, cotangents, _independent_dtype(case))
    if MAGNITUDE in case.sizes:
        own = {name: BLOCKS[case.block].tensor(name.removeprefix("d_")).dtype_in(case) for name in rounded}
        rounded = {name: values.to(getattr(torch, own[name])) for name, values in rounded.items()}
    return {n: relative_error(rounded[n], values, _rms(values), _largest_difference) for n, values in exact.items()}


def _independent_dtype(case: Case) -> torch.dtype:
    """Return the case's dtype, or float32 where values are near its largest number.

    Squares of such values overflow in the case's dtype. A formula that then gives zeros would tolerate anything.
    """
    return torch.float32 if MAGNITUDE in case.sizes else cast(torch.dtype, getattr(torch, case.dtype))


def _largest_difference(values: torch.Tensor, reference: torch.Tensor) -> float:
    return float((reference - values).abs_().max())  # in float64; in place, for one copy of a large case


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


class PlainFloat32(TorchDispatchMode):
    """Makes float32 arithmetic as inexact as plain GPU code may be, whatever this machine's libraries do.

    Results of `_FUNCTIONS` move by up to two units in the last place, at random with a fixed seed. GPU code need not
    round them correctly: the CUDA C++ Programming Guide (Mathematical Functions) allows two units for 1/sqrt, sin and
    cos, four for pow, and two for a division compiled without -prec-div. IEEE products are summed term by term into one
    accumulator, while a library may split the sum and be more exact.

    moved_few: a result of at most `_FEW` values was moved. A result that depends on one such value, as on AdamW's
    1 - beta^t, is luck, so the caller tries the opposite moves (`sign`), too.
    """

    _FEW = 16
    _FUNCTIONS = {
        torch.ops.aten.exp.default, torch.ops.aten.log.default, torch.ops.aten.tanh.default,
        torch.ops.aten.sqrt.default, torch.ops.aten.div.Tensor, torch.ops.aten.reciprocal.default,
        torch.ops.aten.cos.default, torch.ops.aten.sin.default, torch.ops.aten.pow.Scalar,
    }
    _PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}

    def __init__(self, precision: str, sign: int = 1) -> None:
        super().__init__()
        self.moved_few = False
        self._ieee, self._sign = precision == "ieee", sign
        self._generator = torch.Generator(device=device()).manual_seed(0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._PRODUCTS and self._ieee and args[0].dtype == torch.float32:
            return _summed_in_order(*args)
        result = function(*args, **(kwargs or {}))
        if function not in self._FUNCTIONS or result.dtype != torch.float32:
            return result
        ulps = torch.rand(result.shape, generator=self._generator, device=result.device) * 4 - 2
        if result.numel() <= self._FEW:
            self.moved_few = True
            ulps = 2 * torch.where(ulps < 0, -1.0, 1.0)
        if function == torch.ops.aten.pow.Scalar:
            ulps[result == 1] = 0  # x^0 is exact everywhere (C17, F.10.4.4)
        return result * (1 + 2.0**-23 * self._sign * ulps)


def _summed_in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, summed into one accumulator an element from the first term to the last."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for k in range(a.shape[-1]):
        total.addcmul_(a[..., :, k : k + 1], b[..., k : k + 1, :])
    return total


def evaluate(case: Case, inputs: Tensors, cotangents: Tensors, dtype: torch.dtype) -> Tensors:
    """Return outputs of the reference formula in `dtype`, and gradients as `d_<input>` where cotangents are given.

    An input whose own dtype is float32, such as a scale, is not rounded to a narrower one.
    """
    block = BLOCKS[case.block]

    def evaluated_in(name: str) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32) if block.tensor(name).dtype == "float32" else dtype

    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    leaves = {  # detached, because a second evaluation would add its gradients to the first one's
        name: value.detach().to(evaluated_in(name)).requires_grad_(bool(cotangents))
        if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    outputs: Tensors = {}
    axes_of = {t.name: t.axes_in(case.sizes) for t in (*block.inputs, *block.outputs)}
    sizes = {a: n for name, leaf in leaves.items() for a, n in zip(axes_of[name], leaf.shape, strict=True)}
    for index in _slices(block, sizes, finest=dtype == torch.float64):
        views = {name: index(axes_of[name], leaf) for name, leaf in leaves.items()}
        part = block.reference(torch, views, **block.attributes_of(case))
        for name, value in part.items():
            axes = axes_of[name]
            if cotangents:
                value.backward(index(axes, cotangents[name]).to(value.dtype), retain_graph=len(part) > 1)
            if name not in outputs:
                outputs[name] = value.detach().new_empty([sizes[axis] for axis in axes])
            index(axes, outputs[name]).copy_(value.detach())
    gradients = {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return outputs | gradients


def _slices(block: Block, sizes: Mapping[str, int], finest: bool) -> Iterator[Any]:
    """Yield views of one index along the axes that no output mixes, so that S x S scores fit in memory.

    finest: of axes that go together, an index of the longest, such as a head of q with the head of k that it shares. A
    gradient then is a sum over more slices, whose rounding is harmless in float64 alone.
    """
    groups = [(axes,) if isinstance(axes, str) else axes for axes in block.slices]
    counts = [max(sizes[a] for a in axes) if finest else sizes[axes[0]] for axes in groups]
    for indices in itertools.product(*map(range, counts)):
        at = {
            axis: slice(begin := i * sizes[axis] // count, max(begin + 1, (i + 1) * sizes[axis] // count))
            for axes, i, count in zip(groups, indices, counts, strict=True) for axis in axes
        }

        def view(axes: tuple[str, ...], tensor: torch.Tensor, at: dict[str, slice] = at) -> torch.Tensor:
            return tensor[tuple(at.get(a, slice(None)) for a in axes)]

        yield view


def _draw(case: Case, seed: int) -> tuple[Tensors, Tensors]:
    """Draw inputs, and cotangents where the case has gradients, in their dtypes on this device."""
    block = BLOCKS[case.block]

    def rounded(tensor: Tensor, seed: int) -> torch.Tensor:
        drawn = torch.from_numpy(input_arrays.draw(case, tensor, seed))
        return drawn.to(getattr(torch, tensor.dtype_in(case))).to(device())

    inputs = {t.name: rounded(t, seed) for t in block.inputs}
    # A cotangent has its output's name; another seed makes it independent of an input with the same name.
    cotangents = {t.name: rounded(t, seed + 1_000_000) for t in block.outputs if case.differentiates}
    return inputs, cotangents
