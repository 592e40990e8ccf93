"""The fixture `fusion`: compiles a function once a session, and compares its graph with the test's snapshots."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ..base.text import printable
from ..user.explain import TIMEOUT, ExplainError, Framework, identify
from . import snapshot
from .autotune_choices import Worlds, compiled
from .fusion import Fusion
from .session_summary import Book

__tracebackhide__ = True  # pytest: a failing test ends at its own line

# What compiling for a GPU that is not here needs of each framework.
_NEEDED = {"jax": ("jax", "jax_plugins.xla_cuda13"), "torch": ("torch", "triton")}
_INSTALL = 'pip install "xlafuse[cpu]"'
# Errors, of no line of the user's, that say which version or tool is missing: a build of torch that is not known, no
# g++, a series of jax of which the target pack knows nothing.
_OF_ENVIRONMENT = ("Unsupported", "Skip")


class NotCompiled(Exception):
    """The function could not be compiled; the message begins with the user's own part of the traceback."""


class MissingPackage(Exception):
    """A package, or a version of one, is missing without which nothing can be compiled; the message says which."""


class SnapshotMismatch(AssertionError):
    """The graph is not as in the snapshot, or there is none."""


class OtherVersions(pytest.PytestWarning):
    """There is a snapshot, but none of the versions that are installed."""


@dataclass
class Session:
    """Of one process's tests. update: write snapshots instead of comparing. autotune: a folder of recorded choices."""

    update: bool
    autotune: Path | None = None
    book: Book = field(default_factory=Book)
    compiled: dict[tuple[str, bool, str], Worlds | ExplainError] = field(default_factory=dict)


class FusionFixture:
    """`fusion(fn, *args, **kwargs)`, in one test."""

    def __init__(self, session: Session, test_file: Path, test: str) -> None:
        self._session, self._test_file, self._test = session, test_file, test
        self._labels: dict[str, Fusion] = {}
        self.made: list[Fusion] = []
        self.traceback = ""  # of a compile that failed, all of it

    def __repr__(self) -> str:
        return "<fixture fusion>"

    def __call__(
        self, fn: Any, *args: Any, grad: bool = False, target: str = "h200", name: str | None = None,
        framework: Framework | None = None, timeout: float = TIMEOUT, **kwargs: Any,
    ) -> Fusion:
        """The fusion graph of `fn(*args, **kwargs)` on a GPU that need not be here; arguments as of `xlafuse.explain`.

        Raises NotCompiled, MissingPackage.
        """
        try:
            worlds = self._compiled(fn, args, kwargs, grad, target, framework, timeout)
        except ExplainError as problem:
            if problem.kind in _OF_ENVIRONMENT and not problem.frames:
                raise MissingPackage(f"{_shown(str(problem))}: {_INSTALL}") from None
            self.traceback = _shown(problem.traceback)
            own = f"Traceback in your code (most recent call last):\n{problem.frames}\n" if problem.frames else ""
            raise NotCompiled(_shown(f"{own}{problem}")) from None
        if unread := [line for graph in worlds.graphs.values() for line in graph.unparsed]:
            raise NotCompiled(
                f"{worlds.name}: a part of what was compiled could not be read, so that nothing can be asserted on it: "
                + "; ".join(printable(line, 200) for line in unread[:3])
            )
        if name is not None:
            graphs = {world: replace(graph, name=name) for world, graph in worlds.graphs.items()}
            worlds = Worlds(name, graphs, worlds.notes)
        made = Fusion(worlds, self._match)
        self.made.append(made)
        return made

    def matches_snapshot(self, name: str | None = None) -> bool:
        """`Fusion.matches_snapshot` of the test's only graph."""
        if len(self.made) != 1:
            count = len(self.made) or "no"
            raise ValueError(f"this test made {count} fusion graphs: call matches_snapshot of the one that you mean")
        return self._match(self.made[0], name)

    def _compiled(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, target: str,
        framework: Framework | None, timeout: float,
    ) -> Worlds:
        found = identify(fn, args, kwargs, framework=framework, grad=grad)
        _require(found.framework)
        key = found.digest, grad, target
        known = self._session.compiled
        if key not in known:
            try:
                known[key] = compiled(
                    fn, args, kwargs, name=found.name, grad=grad, target=target, framework=framework, timeout=timeout,
                    autotune=self._session.autotune,
                )
            except ExplainError as problem:
                known[key] = problem
        result = known[key]
        if isinstance(result, ExplainError):
            raise result
        return result

    def _match(self, fusion: Fusion, name: str | None) -> bool:
        label = name or ""
        if self._labels.setdefault(label, fusion) is not fusion:
            raise ValueError("two graphs of one test need names for their snapshots: g.matches_snapshot('forward')")
        graphs = {world: view.graph for world, view in fusion.worlds.items()}
        first = next(iter(graphs.values()))
        key = snapshot.Key(self._test_file, self._test, label, snapshot.versions_of(first), first.target)
        book, path, now = self._session.book, key.path, snapshot.text(key, graphs)
        book.used.add(f"{key.folder}/{key.stem}")
        recorded = path.read_text() if path.is_file() else None
        if recorded == now:
            return True
        if self._session.update:
            snapshot.write(path, now)
            book.written.add(str(path))
            return True
        if recorded is not None:
            raise SnapshotMismatch(
                f"{fusion!r} is not as recorded in {path.name}:\n{snapshot.difference(recorded, now)}\n"
                "if that is right: pytest --xlafuse-update, and commit the file"
            )
        others = key.others()
        if not others:
            raise SnapshotMismatch(
                f"{fusion!r} has no snapshot yet ({path}); pytest --xlafuse-update writes it; commit it"
            )
        message = f"no snapshot for {key.spoken}; have {'; '.join(others)}. pytest --xlafuse-update records this one"
        book.uncompared.add(f"{self._test_file.name}::{snapshot.shown_test(self._test)}: {message}")
        warnings.warn(OtherVersions(message), stacklevel=3)
        return True


def _shown(text: str) -> str:
    """A traceback for a terminal, whatever is in it: lines, with their indentation, of no endless length."""
    lines = [" " * min(40, len(line) - len(line.lstrip(" "))) + printable(line, 500) for line in text.split("\n")]
    return "\n".join([*lines[:200], *(["..."] if len(lines) > 200 else [])])


def _require(framework: str) -> None:
    def missing(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is None
        except ImportError:  # of the package that it is in
            return True

    if absent := [module for module in _NEEDED[framework] if missing(module)]:
        raise MissingPackage(f"{framework} code for a GPU cannot be compiled without {', '.join(absent)}: {_INSTALL}")
