"""Which cases of a parametrized test `make test` runs, and how many examples of a property."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def full(*case: Any) -> Any:
    """Return a case of a parametrized test that is marked `full`."""
    return pytest.param(*case, marks=pytest.mark.full)


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], Hashable] = lambda case: None) -> list[Any]:
    """Return the cases as parameters: the first of each kind runs in `make test`, the others are marked `full`.

    A case is a value, or a tuple of values. Without `kind`, the first case runs alone.
    """
    kinds: set[Hashable] = set()
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(full(*values) if kind(case) in kinds else pytest.param(*values))
        kinds.add(kind(case))
    return parameters


def examples(in_make_test: int, full: int) -> int:
    """Return how many examples of a property to draw; `make test-full` loads hypothesis' profile `full`."""
    return full if settings.get_current_profile_name() == "full" else in_make_test
