"""Places in the user's own files: which call encloses which, and what its author calls it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Position = tuple[int, int]  # line, column
_PLACE = re.compile(
    r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+)-(?:(?P<last>\d+):)?(?P<end>\d+))?(?: (?P<function>.+))?$"
)
_MOST_BYTES = 1 << 24  # of a source file
_MOST_LABEL = 60
LIBRARIES = "site-packages"  # the folder of packages' files among a capture's copies


@dataclass(frozen=True)
class Place:
    """A call in a user's file, as `SourceOp.place` writes it. begin, end: None where no columns are known."""

    file: str
    line: int
    function: str = ""
    begin: Position | None = None
    end: Position | None = None

    @property
    def where(self) -> str:
        """The file's own name and the line."""
        return f"{Path(self.file).name}:{self.line}"

    def encloses(self, other: Place) -> bool:
        """Return whether the other place is a smaller piece of this one's code."""
        if (self.file, self.function) != (other.file, other.function) or self == other:
            return False
        if self.begin is None or self.end is None or other.begin is None or other.end is None:
            return False
        return self.begin <= other.begin and other.end <= self.end


def parse(text: str) -> Place | None:
    """Return the place that `SourceOp.place` names; None for another text, as "" where none is known."""
    match = _PLACE.match(text)
    if match is None:
        return None
    line = int(match["line"])
    if match["end"] is None:
        return Place(match["file"], line, match["function"] or "")
    end = int(match["last"] or line), int(match["end"])
    return Place(match["file"], line, match["function"] or "", (line, int(match["column"])), end)


def parent_of(place: Place, places: Iterable[Place]) -> Place | None:
    """Return the smallest of the places that encloses this one."""
    around = [other for other in places if other.encloses(place)]
    return max(around, key=lambda other: (other.begin or (0, 0), _before(other.end)), default=None)


def _before(end: Position | None) -> Position:
    """Return an order of ends in which the nearest one of several calls that begin together comes last."""
    line, column = end or (0, 0)
    return -line, -column


@dataclass
class Sources:
    """The user's files, read where they are found.

    folders: where a relative name may lie. copies: a folder of copies, which are the only ones then: the files
    themselves may have changed since.
    """

    folders: Sequence[Path] = ()
    copies: Path | None = None
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    def label(self, place: Place) -> str:
        """Return what the code at a place calls, such as "jax.nn.silu".

        Where no file is found or no columns are known, it is the function.
        """
        if called := self.called(place):
            return called[:_MOST_LABEL]
        function = self.function(place)
        return place.function or place.where if function is None else function.function

    def called(self, place: Place) -> str:
        """Return what the code at a place calls; "" where no file is found or no columns are known."""
        tree = self._tree(place.file)
        call = None
        if tree is not None and place.begin is not None and place.end is not None:
            call = _innermost_call(tree, place.begin, place.end)
        return "" if call is None else ast.unparse(call.func)

    def function(self, place: Place) -> Place | None:
        """Return the function around a place, with its classes: "Attention.forward"; None where no file is found."""
        tree = self._tree(place.file)
        found: Place | None = None
        around: list[tuple[str, ast.AST]] = [] if tree is None else [("", tree)]
        while around:
            prefix, node = around.pop()
            for inner in ast.iter_child_nodes(node):
                if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    if inner.lineno <= place.line <= (inner.end_lineno or 0):
                        name = f"{prefix}{inner.name}"
                        if not isinstance(inner, ast.ClassDef):
                            found = Place(place.file, inner.lineno, name)
                        around.append((f"{name}.", inner))
        return found

    def calls(self, names: Collection[str], files: Iterable[str]) -> list[str]:
        """Return the lines of these files, as places name them, that call a method or function: "train.py:33"."""
        return list(dict.fromkeys(
            f"{Path(name).name}:{node.lineno}" for name in files if (tree := self._tree(name)) is not None
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in names
        ))

    def _tree(self, name: str) -> ast.Module | None:
        if name not in self._trees:
            self._trees[name] = next((tree for path in self._paths(name) if (tree := _parsed(path)) is not None), None)
        return self._trees[name]

    @property
    def own_files(self) -> list[str]:
        """The names of the copies that are of no installed package."""
        copies = sorted(self.copies.rglob("*.py")) if self.copies is not None else ()
        names = [copy.relative_to(self.copies or "") for copy in copies]
        return [str(name) for name in names if name.parts[0] != LIBRARIES]

    def _paths(self, name: str) -> list[Path]:
        if self.copies is not None:
            copies = [folder / name.lstrip("/") for folder in (self.copies, self.copies / LIBRARIES)]
            return [copy for copy in copies if copy.resolve().is_relative_to(self.copies.resolve())]
        return [Path(name)] if Path(name).is_absolute() else [folder / name for folder in self.folders]


def sources_beside(path: Path) -> Sources:
    """Return a capture's copies of the user's files, else the files beside a path or in the current folder."""
    copies = path / "sources"
    return Sources((path, path.parent, Path()), copies if copies.is_dir() else None)


def _parsed(path: Path) -> ast.Module | None:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _innermost_call(tree: ast.Module, begin: Position, end: Position) -> ast.Call | None:
    """Return the call at these columns, else the first call within them, else the smallest call around them."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    spans = [((call.lineno, call.col_offset), (call.end_lineno or 0, call.end_col_offset or 0)) for call in calls]
    within = [number for number, (first, last) in enumerate(spans) if begin <= first and last <= end]
    around = [number for number, (first, last) in enumerate(spans) if first <= begin and end <= last]
    if within:
        return calls[min(within, key=lambda number: (spans[number][0], _before(spans[number][1])))]
    return calls[max(around, key=lambda number: spans[number][0])] if around else None
