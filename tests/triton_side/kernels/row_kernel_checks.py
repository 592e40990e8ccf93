"""Devices, inputs, error bounds and mutants for the tests of single kernels."""

import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from xlafuse.compare.workers.pytorch.worker import NanEmpty
from xlafuse.triton_side.configs.tuned import TUNED
from xlafuse.triton_side.kernels.shared.launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"

# Triton's interpreter adds bfloat16 numbers wrongly, so bfloat16 needs the GPU.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# For compositions of kernels that have float16 cases of their own.
DTYPES_OF_COMPOSITIONS = [
    torch.float32, *(pytest.param(dtype, marks=pytest.mark.gpu) for dtype in (torch.float16, torch.bfloat16)),
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=DEVICE, dtype=dtype)


def is_accurate(
    got: torch.Tensor, plain: torch.Tensor, reference: torch.Tensor, term: torch.Tensor | None = None,
    others: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> bool:
    """Return whether max|got - reference| is at most twice plain code's in the same dtype, or one ulp of the largest.

    got and plain are in one dtype, reference in float64. If the reference is a difference of nearly equal terms, `term`
    holds them, because no evaluation can do better than their ulp. others: plain code and reference on other inputs.
    """
    if got.dtype != plain.dtype or got.shape != reference.shape:
        return False
    error = (got.double() - reference).abs().max().item()
    plain_error = max((p.double() - r).abs().max().item() for p, r in [(plain, reference), *others])
    largest = (reference if term is None else term).abs().max().item()
    return math.isfinite(error) and error <= max(2 * plain_error, torch.finfo(got.dtype).eps * largest)


def with_gradients(function, *inputs: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the function's output, then each input's gradient. Memory that is not written holds NaN."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with NanEmpty():
        y = function(*leaves)
        y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves)


def mutant(module: ModuleType, sound: str, broken: str, folder: Path) -> ModuleType:
    """Return a copy of the module with every occurrence of the text `sound` replaced by `broken`."""
    source = Path(module.__file__).read_text()
    assert sound in source
    path = folder / "mutant.py"
    path.write_text(source.replace(sound, broken))
    spec = importlib.util.spec_from_file_location("mutant", path)
    copy = importlib.util.module_from_spec(spec)
    with mock.patch.dict(TUNED):  # the copy's choices stay out of the table of choices
        spec.loader.exec_module(copy)
    return copy


def built_on(broken: ModuleType, part: ModuleType, user: ModuleType) -> ModuleType:
    """Return a copy of the module `user` that imports `broken`, a mutant, in place of `part`."""
    folder = Path(broken.__file__).parent / "user"
    folder.mkdir()
    with mock.patch.dict(sys.modules, broken_part=broken):
        return mutant(user, part.__name__, "broken_part", folder)
