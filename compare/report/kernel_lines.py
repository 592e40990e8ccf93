"""Lines of code of an implementation, without comments, docstrings and blank lines.

Kernel lines run on the GPU: the Triton functions that the implementation's `apply` reaches, the Pallas kernels and the
functions that they call, and the CUDA files that it names. Other lines surround them: launchers, their configuration,
autograd functions, or the whole block where a compiler makes the kernels. Only the implementation's own package and its
subpackages count (`triton_side.kernels`, `xlafuse.blocks`), not the libraries below it. Source is read, never imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pygments.lexer import Lexer
from pygments.lexers import CudaLexer, PythonLexer
from pygments.token import Comment, String

from ..spec.implementation import Implementation

_LOCAL_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Lines:
    """Numbers of lines. kernel: code that runs on the GPU. other: the Python code around it."""

    kernel: int
    other: int


def lines_of(implementation: Implementation) -> Lines:
    """Return the lines of forward and backward together. Raises LookupError where the target's source is missing."""
    package = implementation.target.partition(":")[0].rpartition(".")[0]
    reached = reached_by(implementation)
    # The body of a Pallas kernel is Python, and so are the functions that it calls.
    on_gpu = {name for each in reached if _is_decorated(each, "kernel") for name in _reached(package, each)}
    on_gpu |= {each for each in reached if _is_decorated(each, "triton.jit") or _is_decorated(each, "gluon.jit")}
    kernel = other = 0
    files: set[Path] = set()
    for each in reached:
        parsed = _parsed(each[0])
        node = parsed.definitions[each[1]]
        count = _code_lines(parsed.text(node), PythonLexer)
        if each in on_gpu:
            kernel += count
        else:
            other += count
            files |= _cuda_files(parsed.path.parent, node)
    for file in files:
        kernel += _code_lines(file.read_text(), CudaLexer)
    return Lines(kernel, other)


def reached_by(implementation: Implementation) -> list[Name]:
    """Return the implementation's `apply` and the definitions of its package that it uses, directly or through others.

    Raises LookupError where a source is missing.
    """
    module, _, function = implementation.target.partition(":")
    return _reached(module.rpartition(".")[0], (module, function))


Name = tuple[str, str]  # module, top-level definition in it
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class _Module:
    """A parsed source file.

    assigned: the values of names that the module assigns, such as a tuple of kernels. imported: local name ->
    (module, name in it, or "" for the module itself). vjp: the functions that `f.defvjp(forward, backward)` gives a
    function f.
    """

    path: Path
    source: str
    definitions: dict[str, Definition]
    assigned: dict[str, ast.expr]
    imported: dict[str, Name]
    vjp: dict[str, list[ast.expr]]

    @property
    def names(self) -> set[str]:
        return {*self.definitions, *self.assigned}

    def text(self, node: Definition) -> str:
        """The source of a definition, without its decorators."""
        return "\n".join(self.source.splitlines()[node.lineno - 1 : node.end_lineno])


@cache
def _parsed(module: str) -> _Module:
    root, *rest = module.split(".")
    spec = find_spec(root)  # the root package alone: find_spec of a submodule would import its parents
    folder = Path(next(iter((spec and spec.submodule_search_locations) or [""])))
    path = folder.joinpath(*rest).with_suffix(".py")
    if not path.is_file():
        path = folder.joinpath(*rest, "__init__.py")
    if not path.is_file():
        raise LookupError(f"no source of {module}: {path}")
    source = path.read_text()
    tree = ast.parse(source)
    imported: dict[str, Name] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    definitions = {node.name: node for node in tree.body if isinstance(node, Definition)}
    assigned = {
        target.id: node.value
        for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)
    }
    calls = [node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    vjp = {
        function.removesuffix(".defvjp"): call.args for call in calls
        if (function := ast.unparse(call.func)).endswith(".defvjp")
    }
    return _Module(path, source, definitions, assigned, imported, vjp)


def _reached(package: str, start: Name) -> list[Name]:
    """Return `start`, and the definitions of the package that it uses, directly or through others."""
    if start[1] not in _parsed(start[0]).definitions:
        raise LookupError(f"{start[0]} defines no {start[1]}")
    found, pending = {start: None}, [start]
    while pending:
        module, name = pending.pop()
        parsed = _parsed(module)
        for used in _uses(package, module, parsed.definitions.get(name) or parsed.assigned[name]):
            if used not in found:
                found[used] = None
                pending.append(used)
    return [name for name in found if name[1] in _parsed(name[0]).definitions]


def _uses(package: str, module: str, node: Definition | ast.expr) -> Iterator[Name]:
    """Yield the definitions and assigned names of the package in a definition's body, or in an assigned value."""
    parsed = _parsed(module)
    body: list[ast.AST] = [node]
    if isinstance(node, Definition):
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        body = [*node.body, *bases, *parsed.vjp.get(node.name, [])]
    for part in (part for statement in body for part in ast.walk(statement)):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            outer, inner = parsed.imported.get(part.value.id, ("", ""))
            whole = f"{outer}.{inner}"
            if (outer + ".").startswith(package + ".") and part.attr in _names(whole):
                yield whole, part.attr
        elif isinstance(part, ast.Name):
            if part.id in parsed.names:
                yield module, part.id
            other, definition = parsed.imported.get(part.id, ("", ""))
            if (other + ".").startswith(package + ".") and definition in _names(other):
                yield other, definition


def _names(module: str) -> set[str]:
    try:
        return _parsed(module).names
    except LookupError:
        return set()  # not a module


def _is_decorated(name: Name, decorator: str) -> bool:
    decorators = _parsed(name[0]).definitions[name[1]].decorator_list
    return any(ast.unparse(each).startswith(decorator) for each in decorators)


def _cuda_files(folder: Path, node: Definition) -> set[Path]:
    """The CUDA files that the definition names, with the files of their folder that they include."""
    names = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    pending = [folder / name for name in names if name.endswith(".cu") and (folder / name).is_file()]
    found: set[Path] = set()
    while pending:
        file = pending.pop()
        if file not in found:
            found.add(file)
            pending += [file.parent / name for name in _LOCAL_INCLUDE.findall(file.read_text())]
    return found


@cache
def _code_lines(source: str, lexer: type[Lexer]) -> int:
    """Lines that hold more than comments, docstrings and white space."""
    counted: set[int] = set()
    line = 0
    for kind, text in lexer().get_tokens(source):
        remark = kind in Comment and kind not in Comment.Preproc and kind not in Comment.PreprocFile
        if not remark and kind not in String.Doc:
            counted |= {line + offset for offset, part in enumerate(text.splitlines()) if part.strip()}
        line += text.count("\n")
    return len(counted)
