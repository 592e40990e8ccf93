"""The order of findings: implementations that a user would choose come first, then the largest cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ...spec.blocks import UNFUSED

# Those without fusion, and the CUDA kernels that are written for teaching.
NEVER_LEADING = frozenset((*UNFUSED.values(), "cuda"))

Item = TypeVar("Item")


def rank(items: Iterable[Item], implementation: Callable[[Item], str], cost: Callable[[Item], float]) -> list[Item]:
    """Return the items sorted: those about an implementation in NEVER_LEADING last, and larger costs first."""
    return sorted(items, key=lambda item: (implementation(item) in NEVER_LEADING, -cost(item)))
