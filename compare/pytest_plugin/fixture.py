"""The fixture `fusion`: compiles a function once a session, and compares its graph with the test's snapshots."""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.frameworks import Framework
from ..base.text import printable
from ..graph import store
from ..user.explain import TIMEOUT, ExplainError, identify
from . import snapshot
from .autotune_choices import AutotuneChoices, compile_choices
from .fusion import Fusion
from .session_summary import SessionSummary

__tracebackhide__ = True  # pytest: a failing test ends at its own line

# Modules that each framework needs to compile for an absent GPU.
_NEEDED = {"jax": ("jax", "jax_plugins.xla_cuda13"), "torch": ("torch", "triton")}
_INSTALL = 'pip install "xlafuse[cpu]"'
# Errors without a line of the user's code that name a missing version or tool: an untested build of torch, no g++, a
# jax series that the target pack does not know.
_OF_ENVIRONMENT = ("Unsupported", "Skip")


class NotCompiled(Exception):
    """The function could not be compiled. The message begins with the traceback's frames in the user's code."""


class MissingPackage(Exception):
    """Compiling needs a package, or a version of one, that is missing. The message names it."""


class SnapshotMismatch(AssertionError):
    """The graph differs from the snapshot, or there is no snapshot."""


@dataclass
class Session:
    """State of one process's tests.

    update: write snapshots instead of comparing. other_versions: the category of the warning about snapshots of other
    versions. autotune: a folder of XLA's recorded results. save: a folder for all graphs. compiled: by call digest,
    gradient and target.
    """

    update: bool
    other_versions: type[Warning]
    autotune: Path | None = None
    save: Path | None = None
    summary: SessionSummary = field(default_factory=SessionSummary)
    compiled: dict[tuple[str, bool, str], AutotuneChoices | ExplainError] = field(default_factory=dict)


class FusionFixture:
    """The fixture of one test: `fusion(fn, *args, **kwargs)`."""

    def __init__(self, session: Session, test_file: Path, test: str) -> None:
        self._session, self._test_file, self._test = session, test_file, test
        self._labels: dict[str, Fusion] = {}
        self.made: list[Fusion] = []
        self.traceback = ""  # of a failed compile, in full

    def __repr__(self) -> str:
        return "<fixture fusion>"

    def __call__(
        self, fn: Any, *args: Any, grad: bool = False, target: str = "h200", name: str | None = None,
        framework: Framework | None = None, timeout: float = TIMEOUT, **kwargs: Any,
    ) -> Fusion:
        """Return the fusion graph of `fn(*args, **kwargs)` on a possibly absent GPU; arguments as of `xlafuse.explain`.

        Raises NotCompiled, MissingPackage.
        """
        try:
            choices = self._compile(fn, args, kwargs, grad, target, framework, timeout)
        except ExplainError as problem:
            if problem.kind in _OF_ENVIRONMENT and not problem.frames:
                raise MissingPackage(f"{_shown(str(problem))}: {_INSTALL}") from None
            self.traceback = _shown(problem.traceback)
            own = f"Traceback in your code (most recent call last):\n{problem.frames}\n" if problem.frames else ""
            raise NotCompiled(_shown(f"{own}{problem}")) from None
        if unread := [line for graph in choices.graphs.values() for line in graph.unparsed]:
            raise NotCompiled(
                f"{choices.name}: part of the compiled code could not be read, so no assert on it is possible: "
                + "; ".join(printable(line, 200) for line in unread[:3])
            )
        if name is not None:
            graphs = {choice: replace(graph, name=name) for choice, graph in choices.graphs.items()}
            choices = AutotuneChoices(name, graphs, choices.notes)
        made = Fusion(choices, self._match)
        self.made.append(made)
        if self._session.save is not None:
            self._save(made, self._session.save)
        return made

    def _save(self, fusion: Fusion, folder: Path) -> None:
        """Write each choice's graph to a file: tests.test_fusion.test_mlp+2-cuBLAS.json of a test's second graph."""
        module = ".".join(Path(os.path.relpath(self._test_file)).with_suffix("").parts)
        number = str(len(self.made)) if len(self.made) > 1 else ""
        for choice, view in fusion.choices.items():
            label = "-".join(filter(None, (number, choice if len(fusion.choices) > 1 else ""))).replace(" ", "-")
            key = snapshot.Key(self._test_file, self._test, label, "", "")
            store.save(view.graph, folder / f"{module}.{key.stem}.json")

    def matches_snapshot(self, name: str | None = None) -> bool:
        """Compare the test's only graph with its snapshot, as `Fusion.matches_snapshot` does."""
        if len(self.made) != 1:
            count = len(self.made) or "no"
            raise ValueError(f"this test made {count} fusion graphs: call matches_snapshot on one of them")
        return self._match(self.made[0], name)

    def _compile(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, target: str,
        framework: Framework | None, timeout: float,
    ) -> AutotuneChoices:
        found = identify(fn, args, kwargs, framework=framework, grad=grad)
        _require(found.framework)
        key = found.digest, grad, target
        known = self._session.compiled
        if key not in known:
            try:
                known[key] = compile_choices(
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
        graphs = {choice: view.graph for choice, view in fusion.choices.items()}
        first = next(iter(graphs.values()))
        key = snapshot.Key(self._test_file, self._test, label, snapshot.versions_of(first), first.target)
        summary, path, now = self._session.summary, key.path, snapshot.text(key, graphs)
        summary.used.add(f"{key.folder}/{key.stem}")
        recorded = path.read_text() if path.is_file() else None
        if recorded == now:
            return True
        if self._session.update:
            snapshot.write(path, now)
            summary.written.add(str(path))
            return True
        if recorded is not None:
            raise SnapshotMismatch(
                f"{fusion!r} differs from {path.name}:\n{snapshot.difference(recorded, now)}\n"
                "if the change is right: pytest --xlafuse-update, and commit the file"
            )
        others = key.others()
        if not others:
            raise SnapshotMismatch(
                f"{fusion!r} has no snapshot yet ({path}); pytest --xlafuse-update writes it; commit it"
            )
        have = "; ".join(others)
        message = f"no snapshot for {key.versions_text}; have {have}. pytest --xlafuse-update records this one"
        summary.uncompared.add(f"{self._test_file.name}::{snapshot.shown_test(self._test)}: {message}")
        warnings.warn(self._session.other_versions(message), stacklevel=3)
        return True


def _shown(text: str) -> str:
    """Return a traceback of printable, indented lines of limited length and number."""
    lines = [" " * min(40, len(line) - len(line.lstrip(" "))) + printable(line, 500) for line in text.split("\n")]
    return "\n".join([*lines[:200], *(["..."] if len(lines) > 200 else [])])


def _require(framework: str) -> None:
    def missing(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is None
        except ImportError:  # of its parent package
            return True

    if absent := [module for module in _NEEDED[framework] if missing(module)]:
        raise MissingPackage(f"{framework} code for a GPU cannot be compiled without {', '.join(absent)}: {_INSTALL}")
