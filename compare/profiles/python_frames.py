"""The user's Python functions that launched a device's work, from a trace of torch.profiler with `with_stack=True`.

Such a trace has an event for each call of a Python function: "train.py(60): main", where 60 is the line of its `def`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_FRAME = re.compile(r"(?P<file>[^<].*)\((?P<line>\d{1,9})\): (?P<function>.+)")
_LIBRARY = re.compile(r"(?:.*/)?(?:site-packages|dist-packages|torch|lib/python3\.\d+)/")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a Python function. Times are in seconds."""

    thread: object
    start: float
    end: float
    name: str


def user_functions(calls: Iterable[Call], launches: Mapping[int, tuple[object, float]]) -> dict[int, str]:
    """Return the innermost user's function around each launch, as "main (train.py:60)".

    launches: thread and time by number. A launch outside of such functions, as in the threads of autograd, is left out.
    """
    frames: dict[object, list[tuple[float, float, str]]] = {}
    for call in calls:
        if (match := _FRAME.fullmatch(call.name)) and not _LIBRARY.match(match["file"]):
            shown = f"{match['function']} ({match['file']}:{match['line']})"
            frames.setdefault(call.thread, []).append((call.start, call.end, shown))
    for of_thread in frames.values():
        of_thread.sort(reverse=True)
    found: dict[int, str] = {}
    stacks: dict[object, list[tuple[float, float, str]]] = {}
    for number, (thread, at) in sorted(launches.items(), key=lambda item: item[1][1]):
        waiting, stack = frames.get(thread, []), stacks.setdefault(thread, [])
        while waiting and waiting[-1][0] <= at:
            frame = waiting.pop()
            while stack and stack[-1][1] <= frame[0]:
                stack.pop()
            stack.append(frame)
        while stack and stack[-1][1] < at:
            stack.pop()
        if stack:
            found[number] = stack[-1][2]
    return found
