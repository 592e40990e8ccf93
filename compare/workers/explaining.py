"""The common part of both explaining workers: reading the request; writing graphs and notes, or the error.

`python -m xlafuse.compare.workers.xla.explain FOLDER` (or `pytorch.explain`) reads FOLDER/request.pickle and leaves
FOLDER/reply.json with the graphs' files beside it.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.paths import PROJECT
from ..graph import store
from ..graph.model import FusionGraph, Kernel
from ..measure.rounds import Round

Request = dict[str, Any]
Explain = Callable[[Mapping[str, Any], Path], tuple[FusionGraph, list[str]]]
Time = Callable[[], Mapping[str, list[Round]]]

# Frames that are not the user's: below one of these folders, or in the interpreter's library.
_COMPARE = Path(__file__).resolve().parents[1]
_TOOLS = tuple(f"{folder}/" for folder in (_COMPARE, PROJECT / "xlafuse", PROJECT / "triton_side"))
_FRAMEWORKS = re.compile(
    r"/site-packages/(?:jax|jaxlib|flax|torch|triton|cloudpickle|numpy)/|/lib/python3\.\d+/(?!site-)|^<"
)
# '  File "/home/me/block.py", line 12, in apply', as PyTorch quotes it in its own messages
_QUOTED = re.compile(r'File "([^"]+)", line (\d+)')


def read_request(folder: Path) -> Request:
    """The caller's request. Makes the caller's import path ours."""
    request: Request = pickle.loads((folder / "request.pickle").read_bytes())
    sys.path[:] = request["path"] + [entry for entry in sys.path if entry not in request["path"]]
    return request


class NotTimed(Exception):
    """The calls cannot be timed; the message gives the reason."""


class NotReceived(Exception):
    """This Python, which is not the caller's, cannot import a function or make its arguments; the message says why."""


def serve(folder: Path, request: Request, explain: Explain, time: Time) -> int:
    """Answer every call of the request, in order; the first that fails is the answer. Returns the exit code.

    Where the request says so, all calls are then timed. A timing that fails becomes a note.
    """
    graphs, notes, rounds = [], [], {}
    for index, call in enumerate(request["calls"]):
        try:
            graph, own_notes = explain(call, folder / f"dumps-{index}")
        except NotReceived as problem:
            _write(folder, {"not_received": str(problem)})
            return 1
        except Exception as problem:
            traceback.print_exc()
            _write(folder, {"error": {"name": call["name"], **_error(problem)}})
            return 1
        file = folder / f"graph-{index}.json"
        store.save(_seen_from(request["folder"], replace(graph, name=call["name"])), file)
        graphs.append({"name": call["name"], "file": str(file)})
        notes += own_notes
    if request["timed"]:
        try:
            rounds = dict(time())
        except Exception as problem:
            traceback.print_exc()
            notes.append(f"not timed: {_head(str(problem)) or type(problem).__name__}")
    _write(folder, {"graphs": graphs, "notes": notes, "rounds": rounds})
    return 0


def fail(folder: Path, problem: BaseException) -> int:
    """Answer with an error that came before the first call; return the exit code."""
    traceback.print_exc()
    _write(folder, {"error": {"name": None, **_error(problem)}})
    return 1


def _seen_from(folder: str, graph: FusionGraph) -> FusionGraph:
    """Return the graph with source files named relative to the caller's folder."""

    def line(line: str) -> str:
        return line.removeprefix(folder.rstrip("/") + "/")

    def seen(kernel: Kernel) -> Kernel:
        return replace(kernel, source_ops=tuple(replace(op, line=line(op.line)) for op in kernel.source_ops))

    return replace(
        graph, kernels=None if graph.kernels is None else tuple(map(seen, graph.kernels)),
        reasons=tuple(replace(reason, line=line(reason.line)) for reason in graph.reasons),
    )


def _write(folder: Path, reply: Any) -> None:
    (folder / "reply.json").write_text(json.dumps(reply))


def _error(problem: BaseException) -> dict[str, Any]:
    return {
        "kind": type(problem).__name__, "message": _head(str(problem)), "line": _line(problem),
        "frames": "".join(traceback.format_list(_own_frames(problem))),
        "traceback": "".join(traceback.format_exception(problem)),
    }


def _head(message: str, length: int = 600) -> str:
    """Return the first paragraph of a message, shortened: PyTorch and XLA append advice and internals."""
    first = message.strip().split("\n\n")[0]
    return first if len(first) <= length else f"{first[:length]} ..."


def _line(problem: BaseException) -> str:
    """Return the innermost frame of the user's code, "file:line in function", or "" where the error has none."""
    frames = _own_frames(problem)
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
    quoted = [match for match in _QUOTED.findall(str(problem)) if not _FRAMEWORKS.search(match[0])]
    return f"{quoted[-1][0]}:{quoted[-1][1]}" if quoted else ""


def _own_frames(problem: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code, outermost first."""
    return [
        frame for frame in traceback.extract_tb(problem.__traceback__)
        if not frame.filename.startswith(_TOOLS) and not _FRAMEWORKS.search(frame.filename)
    ]
