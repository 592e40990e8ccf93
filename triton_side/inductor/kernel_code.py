"""Tell from the Triton source of a generated kernel whether it copies, scatters, reduces or computes.

The operations that Inductor gives to a kernel do not tell: a copy that lays out operands for a call has the call's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Literal

Work = Literal["copy", "scatter", "reduction", "elementwise"]

_TYPED = re.compile(r"'(\w+)': '\*(\w+)'")  # 'in_ptr0': '*bf16'
_POINTER = re.compile(r"(in|out|in_out)_ptr\d+")
_REDUCES = re.compile(r"'num_reduction': [1-9]")
_SAME_VALUE = {"broadcast_to", "reshape", "trans", "view", "to"}


def work_of(source: str, name: str, heuristic: str) -> Work | None:
    """Return the work of the kernel `name` in `source`; None if the source is no Python or stores nothing.

    A copy stores what it loads, unchanged, also where an index chooses between loads or constants. A gather chooses by
    data, so it is no copy.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    stores = list(_stores(functions[0])) if functions else []
    if not stores:
        return None
    dtypes = dict(_TYPED.findall(source))
    values = _Values(functions[0], dtypes)
    if any(atomic or values.depend_on_data(place) for place, _, atomic in stores):
        return "scatter"
    if "reduction" in heuristic or "scan" in heuristic or _REDUCES.search(source):
        return "reduction"
    copied = all(values.are_copied(value, dtypes.get(_pointer(place), "")) for place, value, _ in stores)
    return "copy" if copied and values.loads() else "elementwise"


def _stores(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Yield place, value and whether it is atomic, for each store to a buffer; semaphores are none."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1:
            atomic = node.func.attr.startswith("atomic_")
            if (atomic or node.func.attr == "store") and _pointer(node.args[0]):
                yield node.args[0], node.args[1], atomic


def _pointer(place: ast.expr) -> str:
    names = (node.id for node in ast.walk(place) if isinstance(node, ast.Name))
    return next((name for name in names if _POINTER.fullmatch(name)), "")


class _Values:
    """The values of a kernel's variables, as expressions; a loop gives a variable several."""

    def __init__(self, function: ast.FunctionDef, dtypes: Mapping[str, str]) -> None:
        self._of: dict[str, list[ast.expr]] = {}
        self._function, self._dtypes = function, dtypes
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self._of.setdefault(name.id, []).append(node.value)

    def loads(self) -> bool:
        return any(_is_load(node) for node in ast.walk(self._function))

    def depend_on_data(self, *expressions: ast.expr) -> bool:
        """Return whether an expression uses a loaded value."""
        seen: set[str] = set()
        waiting = list(expressions)
        while waiting:
            for node in ast.walk(waiting.pop()):
                if _is_load(node):
                    return True
                if isinstance(node, ast.Name) and node.id not in seen:
                    seen.add(node.id)
                    waiting += self._of.get(node.id, ())
        return False

    def are_copied(self, value: ast.expr, dtype: str) -> bool:
        """Return whether a value is loaded from a buffer of this dtype, or constant, and only moved since."""
        seen: set[str] = set()
        waiting = [value]
        while waiting:
            match waiting.pop():
                case ast.Constant():
                    pass
                case ast.Name(id=name):
                    if name not in seen:
                        seen.add(name)
                        waiting += self._of.get(name, ())
                case ast.Subscript(value=inner):
                    waiting.append(inner)
                case ast.Call(func=ast.Attribute(attr="full")):
                    pass
                case ast.Call(func=ast.Attribute(attr="load"), args=[place, *_]):
                    if self._dtypes.get(_pointer(place)) != dtype or self.depend_on_data(place):
                        return False
                case ast.Call(func=ast.Attribute(attr="where"), args=[condition, first, second]):
                    if self.depend_on_data(condition):
                        return False
                    waiting += [first, second]
                case ast.Call(func=ast.Attribute(value=ast.Name(id="tl"), attr=attr), args=[inner, *_]) if (
                    attr in _SAME_VALUE
                ):
                    waiting.append(inner)
                case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in _SAME_VALUE:
                    waiting.append(inner)
                case _:
                    return False
        return True


def _is_load(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load"
