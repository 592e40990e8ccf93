"""Tests with several parameters: `make test` runs each value of each parameter, `make test-full` every combination.

Dtypes, shapes and configurations multiply, and Triton's interpreter takes up to seconds for a launch.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.is_relative_to(FOLDER):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_function in cases.values():
        for item in beyond_each_value(of_function):
            item.add_marker(pytest.mark.full)


def beyond_each_value(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test that are left when each value of each parameter has occurred."""
    values = {item: values_of(item) for item in items if values_of(item)}
    rest, missing = list(values), set().union(*values.values())
    while missing:
        item = max(rest, key=lambda item: len(missing & values[item]))
        missing -= values[item]
        rest.remove(item)
    return rest


def values_of(item: pytest.Item) -> set[tuple[object, ...]]:
    """Return ((name, identity of its value), ...) for each `parametrize` and each parameter of a fixture."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [[name.strip() for name in group.split(",")] if isinstance(group, str) else group for group in names]
    groups += [[name] for name in params if not any(name in group for group in groups)]
    return {tuple((name, id(params[name])) for name in group) for group in groups}
