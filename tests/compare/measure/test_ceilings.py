"""A product that a GPU does not have costs its own rate alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.measure import ceilings  # noqa: E402

SHAPES = [(1, 1, 1), (2, 1, 1)]


def test_the_best_shape_counts() -> None:
    assert ceilings._best(lambda m, n, k: m * 1e12, SHAPES) == 2e12


def test_a_refused_product_has_no_rate() -> None:
    def refused(m: int, n: int, k: int) -> float:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    def without_memory(m: int, n: int, k: int) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert ceilings._best(refused, SHAPES) is None
    with pytest.raises(torch.OutOfMemoryError):
        ceilings._best(without_memory, SHAPES)
