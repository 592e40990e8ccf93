"""Which module imports which, by their syntax alone: at the top of a file and within functions.

What is imported only for types (`if TYPE_CHECKING:`), and by a name made at run time, is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compare", "xlafuse", "triton_side")


@cache
def imports() -> dict[str, set[str]]:
    """By module, those of this project that it imports."""
    files = {_module(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    found = {}
    for name, file in files.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        named = set(_named(ast.parse(file.read_text()), package))
        modules = {each if each in files else each.rpartition(".")[0] for each in named}  # "from a import b": a.b, or a
        found[name] = (modules & files.keys()) - {name}
    return found


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _named(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
        base = ".".join(filter(None, (above, node.module)))
        yield from (f"{base}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _named(child, package)


def test_there_is_no_circle() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(reversed(circle.args[1])))


def test_no_import_runs_upward() -> None:
    """Not even between the two sides."""
    for name, others in imports().items():
        package = name.partition(".")[0]
        if package != "compare":
            assert {other.partition(".")[0] for other in others} <= {package}, name


def test_imports_within_functions_are_seen() -> None:
    assert "xlafuse.reasons.pass_changes" in imports()["compare.cli.inspect"]
    assert "compare.graph.model" not in imports()["xlafuse"]  # for types alone


def test_no_package_imports_a_tool() -> None:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            named = _named(ast.parse(file.read_text()), package)
            assert not any(name.partition(".")[0] == "tools" for name in named), file
