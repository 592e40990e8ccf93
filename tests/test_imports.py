"""The imports between modules and folders, read from the syntax of all files, also within functions.

Imports for types only (`if TYPE_CHECKING:`), and imports by a name made at run time, are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import xlafuse

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compare", "xlafuse", "triton_side")
# Folders within a folder, from the foundation upward; "" stands for the folder's own files.
SUBFOLDERS = {
    "xlafuse.compare.graph": ("", "analyse", "join", "build", "findings", "render"),
    "xlafuse.compare.report.page": ("content", "drawing", "listings", ""),
}
ENTRIES = {"xlafuse", "xlafuse.__main__", "xlafuse.pytest_plugin"}  # they name modules of compare
_LINKED = re.compile(r"^xlafuse\.(?=(compare|triton_side)\b)")


@cache
def files() -> dict[str, Path]:
    return {_module(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules of this project that each module imports."""
    found = {}
    for name, file in files().items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        named = {_LINKED.sub("", each) for each in _named(ast.parse(file.read_text()), package)}
        modules = {each if each in files() else each.rpartition(".")[0] for each in named}  # from a import b: a.b, or a
        found[name] = (modules & files().keys()) - {name}
    return found


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _named(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
        base = ".".join(filter(None, (above, node.module)))
        yield from (f"{base}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _named(child, package)


def _folder(module: str) -> str:
    return module if files()[module].name == "__init__.py" else module.rpartition(".")[0]


def _below(parent: str, module: str) -> str | None:
    """Return the folder directly below `parent` that holds the module, "" for a file of its own; None elsewhere."""
    folder = _folder(module)
    if folder != parent and not folder.startswith(f"{parent}."):
        return None
    return folder.removeprefix(parent).lstrip(".").partition(".")[0]


def _documented_order() -> list[str]:
    """Return compare's folders as docs/architecture.md lists them, from the foundation upward."""
    tree = (ROOT / "docs" / "architecture.md").read_text().partition("    compare/")[2].partition("    tools/")[0]
    return re.findall(r"^ {6}(\w+)/", tree, re.MULTILINE)


def _require_no_circle(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(reversed(circle.args[1])))


def test_modules_have_no_circle() -> None:
    _require_no_circle(imports())


@pytest.mark.parametrize("parent", sorted({_folder(module) for module in files()}))
def test_folders_have_no_circle(parent: str) -> None:
    """The folders directly below `parent` import each other, and its own files, without a circle."""
    graph: dict[str, set[str]] = {}
    for name, others in imports().items():
        if (here := _below(parent, name)) is not None:
            graph.setdefault(here, set()).update({_below(parent, other) for other in others} - {here, None})
    _require_no_circle(graph)


def test_the_documented_order_has_all_folders_of_compare() -> None:
    assert sorted(_documented_order()) == sorted(
        path.parent.name for path in (ROOT / "compare").glob("*/__init__.py")
    )


def test_folders_of_compare_import_only_from_folders_below() -> None:
    _require_order("compare", [*_documented_order(), ""])


@pytest.mark.parametrize("parent", SUBFOLDERS)
def test_subfolders_import_only_from_folders_below(parent: str) -> None:
    _require_order(parent, SUBFOLDERS[parent])


def _require_order(parent: str, order: list[str] | tuple[str, ...]) -> None:
    """Require that no folder directly below `parent` imports from one that comes later in `order`."""
    for name, others in imports().items():
        for other in others:
            here, there = _below(parent, name), _below(parent, other)
            if here is not None and there is not None:
                assert order.index(there) <= order.index(here), f"{name} imports {other}, a folder above it"


def test_xlafuse_and_triton_side_import_neither_each_other_nor_compare() -> None:
    for name, others in imports().items():
        package = name.partition(".")[0]
        if package != "compare" and name not in ENTRIES:
            assert {other.partition(".")[0] for other in others} <= {package}, name


def test_only_the_api_and_the_pytest_plugin_name_modules_of_compare() -> None:
    """They import these by name, when a user first asks for them, and all names are right."""
    named = set(xlafuse._LAZY_IMPORTS.values())
    named |= set(re.findall(r'"\.compare\.([^"]+)"', files()["xlafuse.pytest_plugin"].read_text()))
    assert len(named) > 5 and {f"compare.{name}" for name in named} <= files().keys()
    naming = {
        name for name, file in files().items()
        if not name.startswith("compare") and re.search(r"""["']\.{0,2}(xlafuse\.)?compare\.""", file.read_text())
    }
    assert naming == ENTRIES - {"xlafuse.__main__"}


def test_only_the_public_kernels_name_modules_of_triton_side() -> None:
    naming = {
        name for name, file in files().items()
        if name.startswith("xlafuse") and re.search(r"""["'](xlafuse\.)?triton_side\.""", file.read_text())
    }
    assert naming == {"xlafuse.kernels.triton"}


def test_compare_names_its_own_modules_relative_to_itself() -> None:
    """Installed, the package has another name than in a checkout, so no string or import has its full name."""
    for name, file in files().items():
        tree = ast.parse(file.read_text())
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in documentation]
        assert not [text for text in texts if isinstance(text, str) and re.match(r"compare\.\w", text)], name
        assert not any(re.match(r"(xlafuse\.)?compare\b", each) for each in _written(tree)), name


def _written(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of absolute imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def test_imports_within_functions_are_seen() -> None:
    assert "xlafuse.reasons.pass_changes" in imports()["compare.report.graph_views"]
    assert "compare.graph.model" in imports()["xlafuse"]  # for types only


def test_no_package_imports_a_tool() -> None:
    for name, file in files().items():
        named = _named(ast.parse(file.read_text()), name)
        assert not any(each.partition(".")[0] == "tools" for each in named), file
