"""Private names of jax, torch and triton stay in the files that CONTRIBUTING.md lists; the project's own stay in their
module. The test reads imported names from the syntax, so it does not see private methods of objects.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("compare", "xlafuse", "triton_side")
THEIRS = ("jax", "jaxlib", "torch", "triton")
FILES = {str(file.relative_to(ROOT)): file for package in OURS for file in sorted((ROOT / package).rglob("*.py"))}
MODULES = {
    name.removesuffix(".py").removesuffix("/__init__").replace("/", ".").removeprefix("xlafuse.") for name in FILES
}


def named(file: str) -> Iterator[str]:
    """Yield the full names that a file takes from modules: "torch._C._current_autograd_node"."""
    tree = ast.parse(FILES[file].read_text())
    package = file.split("/")[:-1]
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            for alias in node.names:
                bound[alias.asname or alias.name] = ".".join(filter(None, (*above, node.module, alias.name)))
                yield bound[alias.asname or alias.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in bound and re.fullmatch(r"[\w.]+", rest):
                yield f"{bound[first]}.{rest}"


def private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")


def allowed() -> tuple[set[str], set[str]]:
    """Return the files that may use private names, and the names that all files may use, from CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    words = re.findall(r"`([^`]+)`", text[text.index("- Private names of jax") : text.index("- A kernel file reads")])
    return {word for word in words if word.endswith(".py")}, {word for word in words if not word.endswith(".py")}


def test_private_names_of_frameworks_stay_in_the_listed_files() -> None:
    files, offered = allowed()
    assert files <= FILES.keys()
    used: dict[str, set[str]] = {}
    for file in FILES:
        for name in named(file):
            root, *words = name.split(".")
            if root in THEIRS and any(map(private, words)):
                used.setdefault(file, set()).add(name)
    short = {file: {n for n in names if not {n, n.rpartition(".")[2]} & offered} for file, names in used.items()}
    assert {file: names for file, names in short.items() if names and file not in files} == {}
    assert offered <= {name for names in used.values() for n in names for name in (n, n.rpartition(".")[2])}


def test_relative_imports_are_seen() -> None:
    assert "compare.record.run_folder" in named("compare/run/run.py")


def test_private_names_of_the_project_stay_in_their_module() -> None:
    for file in FILES:
        for name in named(file):
            root, *words = name.split(".")
            if root in OURS and any(map(private, words)):
                # A module's name may begin with an underscore, but not a name taken from it.
                taken = name.removeprefix("xlafuse.")
                while taken and taken not in MODULES:
                    assert not private(taken.rpartition(".")[2]), (file, name)
                    taken = taken.rpartition(".")[0]
