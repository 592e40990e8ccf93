"""Inputs, memory and bounds for property tests of kernels.

Inputs have unusual shapes, strides and values, memory reveals a stray access, and bounds limit the effect of rounding.

A result is right if each element lies within the bound of the float64 reference. If fp32 arithmetic overflows or has no
value (inf, NaN), the result of PyTorch's own operation is right too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

FP32 = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
GUARD = 64  # elements of NaN on either side of a tensor
# The same examples in every run. They are not shrunk: sizes are small, and the interpreter would take minutes.
COMMON = settings(
    derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)

# Prime, next to a power of two, or one: no multiple of a block.
SIZES = [1, 2, 3, 7, 16, 17, 31, 33, 64, 67, 127, 129, 131]
sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Row:
    """A way to draw one row of values."""

    name: str
    fill: Callable[[np.random.Generator, int, torch.finfo], np.ndarray]


def _with(value: float) -> Callable[[np.random.Generator, int, torch.finfo], np.ndarray]:
    def fill(generator: np.random.Generator, count: int, info: torch.finfo) -> np.ndarray:
        row = generator.standard_normal(count)
        row[generator.integers(count)] = value
        return row

    return fill


ORDINARY = Row("ordinary", lambda g, n, info: g.standard_normal(n))
FINITE = [
    ORDINARY,
    Row("equal", lambda g, n, info: np.full(n, g.standard_normal())),
    Row("zeros of both signs", lambda g, n, info: np.copysign(0.0, g.standard_normal(n))),
    Row("denormal", lambda g, n, info: g.uniform(-1, 1, n) * float(info.tiny)),
    Row("large", lambda g, n, info: g.standard_normal(n) * 1e4),
    Row("near overflow", lambda g, n, info: g.uniform(-1, 1, n) * float(info.max)),
    Row("one dominates", lambda g, n, info: np.where(np.arange(n) == g.integers(n), 50.0, g.standard_normal(n))),
]
NOT_FINITE = [
    Row("an infinity", _with(np.inf)),
    Row("a negative infinity", _with(-np.inf)),
    Row("a NaN", _with(np.nan)),
    Row("-inf alone", lambda g, n, info: np.full(n, -np.inf)),
    Row("NaN alone", lambda g, n, info: np.full(n, np.nan)),
    Row("half -inf", lambda g, n, info: np.where(np.arange(n) <= n // 2, -np.inf, g.standard_normal(n))),
]
rows_of_any_kind = st.lists(st.sampled_from(FINITE + NOT_FINITE), min_size=1, max_size=5)
rows_of_numbers = st.lists(st.sampled_from(FINITE), min_size=1, max_size=4)


def matrix(rows: int, columns: int, kinds: Sequence[Row], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [rows, columns] on the CPU; row i has the kind i modulo their number."""
    generator, info = np.random.default_rng(seed), torch.finfo(dtype)
    values = [kinds[i % len(kinds)].fill(generator, columns, info) for i in range(rows)]
    return torch.from_numpy(np.stack(values)).to(dtype)


# A layout is a function of (flat NaN memory, shape) that returns the view to fill.
def _dense(memory: torch.Tensor, shape: torch.Size, offset: int = 0) -> torch.Tensor:
    return memory[GUARD + offset : GUARD + offset + shape.numel()].view(shape)


def _padded(memory: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return _dense(memory, torch.Size((*shape[:-1], shape[-1] + 5)))[..., 2:-3]


def _stepped(memory: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return _dense(memory, torch.Size((*shape[:-1], 2 * shape[-1])))[..., ::2]


def _swapped(first: int, second: int) -> Callable[[torch.Tensor, torch.Size], torch.Tensor]:
    """Return a layout with two axes swapped in memory; a vector's elements are not contiguous."""

    def layout(memory: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if len(shape) < 2:
            return _stepped(memory, shape)
        a, b = (axis if -axis <= len(shape) else 0 for axis in (first, second))
        in_memory = list(shape)
        in_memory[a], in_memory[b] = in_memory[b], in_memory[a]
        return _dense(memory, torch.Size(in_memory)).transpose(a, b)

    return layout


LAYOUTS: dict[str, Callable[[torch.Tensor, torch.Size], torch.Tensor]] = {
    "dense": _dense,
    "one element past a boundary": lambda memory, shape: _dense(memory, shape, 1),
    "padded rows": _padded,
    "every other element": _stepped,
    "transposed": _swapped(-1, -2),
    "heads between positions": _swapped(-3, -2),
}
layouts = st.sampled_from(sorted(LAYOUTS))


def placed(values: torch.Tensor, layout: str, device: str) -> torch.Tensor:
    """Return the values in memory surrounded by NaN, so that an element read outside spoils the result."""
    memory = torch.full((2 * GUARD + 8 * values.numel(),), torch.nan, dtype=values.dtype, device=device)
    view = LAYOUTS[layout](memory, values.shape)
    view.copy_(values)
    assert torch.equal(view.isnan(), values.isnan().to(device)) and view.shape == values.shape
    return view


@dataclass
class GuardedMemory:
    """The tensors made by torch.empty and torch.empty_like, surrounded by NaN or the smallest integer."""

    bits: list[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = field(default_factory=list)

    def overrun(self) -> tuple[int, ...] | None:
        """Return the shape of a tensor around which something was written, or None."""
        for memory, before, shape in self.bits:
            count = memory.numel() - 2 * GUARD
            for side in (slice(0, GUARD), slice(GUARD + count, None)):
                if not torch.equal(memory[side].view(before.dtype), before[side]):
                    return shape
        return None


@contextlib.contextmanager
def guarded_memory() -> Iterator[GuardedMemory]:
    """Make torch.empty and torch.empty_like return guarded tensors within the context.

    They are full of NaN or, for int32 and int64, of the smallest integer.
    """
    guarded = GuardedMemory()

    def empty(*shape: object, dtype: torch.dtype | None = None, device: object = None, **other: object) -> torch.Tensor:
        sizes = torch.Size(shape[0]) if isinstance(shape[0], Sequence) else torch.Size(shape)
        dtype = dtype or torch.get_default_dtype()
        if not (dtype.is_floating_point or dtype in (torch.int32, torch.int64)) or other:
            return unguarded(*shape, dtype=dtype, device=device, **other)
        fill = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        memory = torch.full((sizes.numel() + 2 * GUARD,), fill, dtype=dtype, device=device)
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        guarded.bits.append((memory, memory.view(integers).clone(), tuple(sizes)))
        return memory[GUARD : GUARD + sizes.numel()].view(sizes)

    def empty_like(tensor: torch.Tensor, **other: object) -> torch.Tensor:
        return empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, **other)

    unguarded = torch.empty
    with mock.patch.object(torch, "empty", empty), mock.patch.object(torch, "empty_like", empty_like):
        yield guarded


def problem(
    got: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor | float, native: torch.Tensor | None = None
) -> str | None:
    """Return the error of `got`, or None.

    reference: in float64. bound: of |got - reference|; one unit in the last place of got's dtype is added, and
    float32's smallest normal number, because hardware may flush smaller ones to zero. native: the result of PyTorch's
    operation in got's dtype. If it is not finite, or not within the bound itself, an element may equal it.
    """
    if got.shape != reference.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(reference.shape)}"
    info = torch.finfo(got.dtype)
    wide, reference = got.detach().double().cpu(), reference.detach().double().cpu()
    allowed = torch.as_tensor(bound, dtype=torch.float64).cpu() + info.eps * (reference.abs() + info.tiny) + TINY
    near = (wide - reference).abs() <= allowed
    rounded = reference.to(got.dtype).double()
    same = (wide == rounded) | (wide.isnan() & rounded.isnan())  # infinities and NaN have no distance
    # Rounding decides between the largest number and infinity.
    edge = wide.isinf() & (reference.sign() == wide.sign()) & (reference.abs() + allowed >= info.max)
    right = near | same | edge
    if native is not None:
        other = native.detach().double().cpu()
        beyond = ~other.isfinite() | ~reference.isfinite() | (other - reference).abs().gt(2 * allowed)
        right |= beyond & ((wide == other) | (wide.isnan() & other.isnan()) | ((wide - other).abs() <= allowed))
    if right.all():
        return None
    at = tuple(int(i) for i in (~right).nonzero()[0])
    bounds = allowed.expand(reference.shape)
    beside = "" if native is None else f", PyTorch {native[at].item():.9g}"
    return (
        f"{int((~right).sum())} of {right.numel()} elements are wrong; at {at}: {wide[at]:.9g}, expected "
        f"{reference[at]:.9g} within {bounds[at]:.3g}{beside}"
    )
