"""The operations of PyTorch and the user's Python functions that launched a device's work, by thread and time.

A trace of torch.profiler with `with_stack=True` has an event for each call of a Python function: "train.py(60): main",
where 60 is the line of its `def`. Files below a folder of sys.path have no folder: "contextlib.py(141): __exit__".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_FRAME = re.compile(r"(?P<file>[^<].*)\((?P<line>\d{1,9})\): (?P<function>.+)")
_LIBRARY = re.compile(r"(?:.*/)?(?:site-packages|dist-packages|torch|lib/python3\.\d+)/")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation or of a Python function. Times are in seconds."""

    thread: object
    start: float
    end: float
    name: str


def user_functions(calls: Iterable[Call], launches: Mapping[int, tuple[object, float]]) -> dict[int, str]:
    """Return the innermost user's function around each launch, as "main (train.py:60)".

    A launch outside of such functions, as in the threads of autograd, is left out.
    """
    own = ((call, _FRAME.fullmatch(call.name)) for call in calls)
    found = around((call for call, match in own if match and not _is_library(match["file"])), launches)
    return {number: _FRAME.sub(r"\g<function> (\g<file>:\g<line>)", names[-1]) for number, names in found.items()}


def _is_library(file: str) -> bool:
    """Return whether a file is of PyTorch, an installed package or Python itself."""
    return bool(_LIBRARY.match(file)) or file.partition("/")[0].removesuffix(".py") in sys.stdlib_module_names


def around(calls: Iterable[Call], launches: Mapping[int, tuple[object, float]]) -> dict[int, tuple[str, ...]]:
    """Return the names of the calls around each launch, outermost first; without launches that no call is around.

    launches: thread and time by number. If calls begin together, the inner one ends first, or is listed later.
    """
    waiting: dict[object, list[Call]] = {}
    for call in calls:
        waiting.setdefault(call.thread, []).append(call)
    for of_thread in waiting.values():
        of_thread.sort(key=lambda call: (call.start, -call.end))
        of_thread.reverse()
    found: dict[int, tuple[str, ...]] = {}
    once: dict[tuple[str, ...], tuple[str, ...]] = {}  # a step repeats its paths
    stacks: dict[object, list[Call]] = {}
    for number, (thread, at) in sorted(launches.items(), key=lambda item: item[1][1]):
        later, stack = waiting.get(thread, []), stacks.setdefault(thread, [])
        while later and later[-1].start <= at:
            call = later.pop()
            while stack and stack[-1].end <= call.start:
                stack.pop()
            stack.append(call)
        while stack and stack[-1].end < at:
            stack.pop()
        if stack:
            names = tuple(call.name for call in stack)
            found[number] = once.setdefault(names, names)
    return found
