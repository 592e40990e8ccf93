"""What the tests of the memory-bound kernels share: where they run, how an error is judged, how a kernel is broken."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compare.workers.pytorch.worker import NanEmpty
from triton_side.kernels._launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"

# Triton's interpreter adds bfloat16 numbers wrongly, so bfloat16 needs the GPU.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=DEVICE, dtype=dtype)


def is_accurate(
    got: torch.Tensor, plain: torch.Tensor, reference: torch.Tensor, term: torch.Tensor | None = None,
    others: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> bool:
    """Whether max|got - reference| is at most twice that of plain code in the same dtype, or one ulp of the largest.

    got and plain are in one dtype, reference in float64. Where the reference is a difference of nearly equal terms,
    `term` holds them: no evaluation can do better than their ulp. others: plain code and reference on other inputs.
    """
    if got.dtype != plain.dtype or got.shape != reference.shape:
        return False
    error = (got.double() - reference).abs().max().item()
    plain_error = max((p.double() - r).abs().max().item() for p, r in [(plain, reference), *others])
    largest = (reference if term is None else term).abs().max().item()
    return math.isfinite(error) and error <= max(2 * plain_error, torch.finfo(got.dtype).eps * largest)


def with_gradients(function, *inputs: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output of function, then the gradient of each input. What is not written is NaN, not the last call's."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with NanEmpty():
        y = function(*leaves)
        y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves)


def mutant(module: ModuleType, sound: str, broken: str, folder: Path) -> ModuleType:
    """A copy of the module with the text `sound` replaced by `broken` wherever it stands."""
    source = Path(module.__file__).read_text()
    assert sound in source
    path = folder / "mutant.py"
    path.write_text(source.replace(sound, broken))
    spec = importlib.util.spec_from_file_location("mutant", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
