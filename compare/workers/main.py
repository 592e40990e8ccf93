"""A worker process: `python -m xlafuse.compare.workers.main ROLE` serves requests one at a time until its input closes.

Only replies go to the process's original standard output. The framework's own output goes to standard error, so it
cannot break the protocol.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..base.paths import PACKAGE
from ..base.worker_protocol import NotAutotuned, Skip
from ..measure.measurement import WrongResult

Methods = dict[str, Callable[..., Any]]


# The module of each role, as a string, because its import also imports the role's framework.
PROGRAMS = {
    "reference": ".numerics.reference",
    "xla": ".workers.xla.worker",
    "torch": ".workers.pytorch.worker",
    "interpreter": ".workers.pytorch.worker",
    "target": ".workers.pytorch.target",
    "tuning": ".workers.pytorch.tuning",
    "explain-jax": ".workers.xla.explain",
    "explain-torch": ".workers.pytorch.explain",
    "xla-ranks": ".workers.xla.ranks",
    "torch-ranks": ".workers.pytorch.ranks",
}


def methods_of(role: str) -> Methods:
    """Import the role's framework and return the methods that it serves. Raises ValueError for an unknown role."""
    if role not in PROGRAMS:
        raise ValueError(f"unknown role {role!r}; expected one of {', '.join(PROGRAMS)}")
    if role == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is imported
    methods: Methods = importlib.import_module(PROGRAMS[role], PACKAGE).methods()
    return methods


def main() -> int:
    return serve(lambda: methods_of(sys.argv[1]))


def serve(load: Callable[[], Methods]) -> int:
    """Serve the methods that `load` imports until the process's input closes; return the exit code."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # code that reads its input gets none
    os.dup2(2, 1)
    runner = os.getppid()
    try:
        methods = load()
    except ModuleNotFoundError as problem:
        install = f'in the checkout: {sys.executable} -m pip install -e ".[cpu]", or ".[cuda]" with an NVIDIA GPU'
        skip = Skip(f"{problem.name} is not installed; {install}")
        print(json.dumps(_error(skip)), file=replies)
        return 1
    except BaseException as problem:  # the runner also gets the reason of a failed import
        print(json.dumps(_error(problem)), file=replies)
        return 1
    print(json.dumps({"result": os.getpid()}), file=replies)
    threading.Thread(target=_end_with, args=(runner,), daemon=True).start()
    for line in requests:
        request = json.loads(line)
        started = time.perf_counter()
        try:
            reply = {"result": methods[request["method"]](**request["params"])}
        except Exception as problem:
            reply = _error(problem)
            if not methods.get("device_works", lambda: True)():
                reply["error"]["kind"] = "lost"  # later requests to this process would fail, too, whatever they ask
            if not isinstance(problem, NotAutotuned):
                traceback.print_exc()  # complete in the worker's log; the record gets the beginning of the message
        done = f"{request['method']} {request['params'].get('id', '')}"
        at = time.strftime("%H:%M:%S")  # lets a reader line up the logs of several workers
        print(f"{at} {time.perf_counter() - started:8.2f} s  {done}", file=sys.stderr, flush=True)
        print(json.dumps(reply), file=replies)
    return 0


def _end_with(runner: int) -> None:
    """End this process when its runner is gone.

    A busy worker does not read its input, so it would not notice and would use the GPU until its request is done.
    """
    while os.getppid() == runner:
        time.sleep(1)
    os._exit(1)


_KINDS = {WrongResult: "wrong", Skip: "skipped", NotAutotuned: "not_autotuned"}
# Parts of out-of-memory messages of PyTorch, XLA and the CUDA driver, also inside the messages of other errors.
_OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "OUT_OF_MEMORY", "RESOURCE_EXHAUSTED")


def _error(problem: BaseException) -> dict[str, Any]:
    kind = next((kind for type_, kind in _KINDS.items() if isinstance(problem, type_)), "failed")
    message = str(problem) if kind != "failed" else f"{type(problem).__name__}: {problem}"
    if kind == "failed" and any(words in message for words in _OUT_OF_MEMORY):
        kind = "out_of_memory"
    return {"error": {"kind": kind, "message": _head(message)}}


def _head(message: str, length: int = 600) -> str:
    """Return the beginning of a message. Messages of PyTorch and XLA can have tens of kilobytes."""
    return message if len(message) <= length else f"{message[:length]} ... (whole in the worker's log)"


if __name__ == "__main__":
    sys.exit(main())
