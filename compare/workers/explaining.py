"""The common part of both explaining workers: reading the request; writing graphs, or the error.

A request is a folder with request.pickle. The reply names the files of graphs in it, or says why there are none.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..functions.names import FRAMEWORKS, is_users, own_frames
from ..functions.parcel import forget_classes
from ..graph import store
from ..graph.model import FusionGraph, SourceOp

Request = dict[str, Any]

# '  File "/home/me/block.py", line 12, in apply', as PyTorch quotes it in its own messages
_QUOTED = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class Answer:
    """The graph of one call, and notes.

    check: of a forced fusion: the "error" of its results and their coarsest "dtype"; or "code" with a "kernel".
    """

    graph: FusionGraph
    notes: Sequence[str] = ()
    check: Mapping[str, Any] | None = None


class Explainer(Protocol):
    """A framework's compiler for users' functions."""

    def begin(self, request: Request) -> None:
        """Take the caller's settings, and forget the calls of earlier requests."""
        ...

    def explain(self, call: Mapping[str, Any], dumps: Path) -> Answer:
        """Compile one call. One with "force" comes after the same call without it."""
        ...

    def time(self) -> Mapping[str, list[dict[str, Any]]]:
        """Return rounds of all calls of the request, taken in turns. Raises NotTimed."""
        ...


class NotTimed(Exception):
    """The calls cannot be timed; the message gives the reason."""


class NotReceived(Exception):
    """This Python, which is not the caller's, cannot import a function or make its arguments; the message says why."""


class Service:
    """Answers requests with one explainer, which the first request makes: its framework may need the request's path.

    Each request imports the user's modules anew: their files may have changed, and a function may have kept values of
    an earlier call.
    """

    def __init__(self, make: Callable[[], Explainer]) -> None:
        self._make = make
        self._explainer: Explainer | None = None
        self._imported: set[str] = set()  # the modules of the framework
        self._environment: dict[str, str] = {}

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {"explain": self.explain}

    def explain(self, folder: str) -> dict[str, Any]:
        """Compile the calls of the request, in order, and time them where it says so; a failed timing becomes a note.

        Return {"graphs", "notes", "rounds", "checks"}; {"error"} of the first call that fails; or {"not_received"}, why
        this Python cannot make a call.
        """
        request: Request = pickle.loads((Path(folder) / "request.pickle").read_bytes())
        sys.path[:] = request["path"] + [entry for entry in sys.path if entry not in request["path"]]
        os.chdir(request["folder"])
        return self._answer(request, Path(folder))

    def _begin(self, request: Request) -> Explainer:
        if self._explainer is None:
            self._explainer = self._make()
            self._imported, self._environment = set(sys.modules), dict(os.environ)
        else:
            for name, module in list(sys.modules.items()):
                if name not in self._imported and is_users(module):
                    del sys.modules[name]
            importlib.invalidate_caches()
            forget_classes()
            os.environ.clear()
            os.environ.update(self._environment)
        self._explainer.begin(request)
        return self._explainer

    def _answer(self, request: Request, folder: Path) -> dict[str, Any]:
        graphs, rounds, checks, name = [], {}, {}, None
        notes: list[str] = []
        try:
            explainer = self._begin(request)
            for index, call in enumerate(request["calls"]):
                name = call["name"]
                answer = explainer.explain(call, folder / f"dumps-{index}")
                file = folder / f"graph-{index}.json"
                store.save(_seen_from(request["folder"], replace(answer.graph, name=name)), file)
                graphs.append({"name": name, "file": str(file)})
                notes += answer.notes
                if answer.check is not None:
                    checks[name] = dict(answer.check)
        except NotReceived as problem:
            return {"not_received": str(problem)}
        except (Exception, SystemExit) as problem:
            traceback.print_exc()
            return {"error": {"name": name, **_error(problem)}}
        if request["timed"]:
            try:
                rounds = dict(explainer.time())
            except (Exception, SystemExit) as problem:
                traceback.print_exc()
                notes.append(f"not timed: {_head(str(problem)) or type(problem).__name__}")
        return {"graphs": graphs, "notes": notes, "rounds": rounds, "checks": checks}


def _seen_from(folder: str, graph: FusionGraph) -> FusionGraph:
    """Return the graph with source files named relative to the caller's folder, so it names no folder of a machine."""

    def short(text: str) -> str:
        return text.replace(f"{folder.rstrip('/')}/", "")

    def seen(ops: Iterable[SourceOp]) -> tuple[SourceOp, ...]:
        return tuple(replace(op, line=short(op.line), site=short(op.site), place=short(op.place)) for op in ops)

    kernels = graph.kernels and tuple(replace(kernel, source_ops=seen(kernel.source_ops)) for kernel in graph.kernels)
    return replace(
        graph, kernels=kernels, operations=seen(graph.operations),
        reasons=tuple(replace(reason, line=short(reason.line)) for reason in graph.reasons),
    )


def _error(problem: BaseException) -> dict[str, Any]:
    return {
        "kind": type(problem).__name__, "message": _head(str(problem)), "line": _line(problem),
        "frames": "".join(traceback.format_list(own_frames(problem))),
        "traceback": "".join(traceback.format_exception(problem)),
    }


def _head(message: str, length: int = 600) -> str:
    """Return the first paragraph of a message, shortened: PyTorch and XLA append advice and internals."""
    first = message.strip().split("\n\n")[0]
    return first if len(first) <= length else f"{first[:length]} ..."


def _line(problem: BaseException) -> str:
    """Return the innermost frame of the user's code, "file:line in function", or "" where the error has none."""
    frames = own_frames(problem)
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
    quoted = [match for match in _QUOTED.findall(str(problem)) if not FRAMEWORKS.search(match[0])]
    return f"{quoted[-1][0]}:{quoted[-1][1]}" if quoted else ""
