"""A reader of the traces of torch.profiler (Kineto): Chrome trace events as JSON. Times are in us.

A GPU's work has the categories kernel, gpu_memcpy and gpu_memset. Its `correlation` is that of the launch on the host
(cuda_runtime, cuda_driver). The operation that launched it is the innermost cpu_op around the launch, in its thread. An
`External id` tells it only where the launch is unknown: several operations may have one id, and old traces have the
correlation there. A step is an event "ProfilerStep#3" of the host. Ranges of torch.profiler.record_function are
user_annotations. Calls of Python functions (python_function) are there with `with_stack=True`. PyTorch before 1.12 has
other names for the categories.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..graph.join.kernel_records import MEMCPY, MEMSET
from .chrome_trace import ChromeTrace
from .model import MOST_EVENTS, DeviceEvent, HostWait, Profile, ProfileError, Step
from .python_frames import Call, around, user_functions

MOST_BYTES = 1 << 30  # unpacked
T = TypeVar("T")

_ON_DEVICE = {
    "kernel": "", "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET, "Kernel": "", "Memcpy": MEMCPY, "Memset": MEMSET,
}
_LAUNCHES = ("cuda_runtime", "cuda_driver", "Runtime")
_OPERATIONS = ("cpu_op", "Operator")
_RANGE = "user_annotation"
_SYNCHRONISES = "Synchronize"  # in the name of a call of the CUDA runtime
_INPUT, _COMPILE = "enumerate(DataLoader)", "(dynamo_timed)"  # in the names of ranges
_COMPILED = "dynamo_data: compile_id="  # a range at the beginning of a compile
_PAGEABLE = "Memcpy HtoD (Pageable"
_STEP = "ProfilerStep#"
_LATEST_US = 1e18
_EPOCH_US = 10**9  # times are kept from a multiple of this on, because a float of the time since 1970 has 0.25 us
_MOST_CATEGORIES = 4
_NONE = -(1 << 63)  # for no correlation, and no external id


def read(path: Path) -> list[Profile]:
    """Return the profile of each GPU. Raises ProfileError for other files and above the limits, and OSError."""
    trace = ChromeTrace(path, MOST_BYTES, ("deviceProperties", "distributedInfo"))
    events = _Events(path)
    for event in trace.events():
        events.add(event)
    names = _device_names(trace.top.get("deviceProperties"))
    devices = events.by_device(next(iter(names)) if len(names) == 1 else None)
    if not devices:
        raise ProfileError(f"{path}: {_why_none(trace, events)}")
    waits = events.waits()
    return [
        Profile(
            "torch.profiler", str(path), "GPU ?" if number is None else names.get(number, f"GPU {number}"), work,
            events.steps(), _rank(trace.top.get("distributedInfo")), gpu=number,
            skipped=events.skipped + trace.unreadable,
            notes=(f"{trace.problem}: steps may lack kernels",) if trace.problem else (), waits=waits,
        )
        for number, work in devices.items()
    ]


def _why_none(trace: ChromeTrace, events: _Events) -> str:
    """Return why a trace has no work of a GPU: what was expected, and what came."""
    if not trace.found or (trace.problem and not events.categories):
        what = "no trace of torch.profiler"
        return f"{what} can be read: {trace.problem}" if trace.problem else f"{what}: it has no list of `traceEvents`"
    what = "no kernels of a GPU in this trace"
    if skipped := events.skipped + trace.unreadable:
        return f"{what}; {skipped} could not be read"
    if trace.problem:
        return f"{what}; {trace.problem}"
    if events.is_of_jax:
        return f"{what}: it is of jax.profiler, whose *.xplane.pb beside it can be read"
    came = ", ".join(f"{count:,} {name}" for name, count in events.categories.most_common(_MOST_CATEGORIES))
    return f"{what}; torch.profiler records them with activity CUDA; its events: {came or 'none'}"


class _Events:
    """The parts of a trace's events that a profile needs. Times are in seconds."""

    def __init__(self, path: Path) -> None:
        self.categories: Counter[str] = Counter()
        self.skipped = 0
        self.is_of_jax = False
        self._path = path
        self._base: int | None = None
        self._work: list[tuple[int | None, DeviceEvent, int, int]] = []  # with device, correlation, external id
        self._counts: Counter[int | None] = Counter()
        self._launches: dict[int, tuple[object, float]] = {}
        self._operations: list[Call] = []
        self._ranges: list[Call] = []
        self._of_id: dict[int, str] = {}
        self._calls: list[Call] = []
        self._steps: list[Step] = []
        self._waits: list[tuple[Literal["synchronisation", "input", "compile"], Call]] = []
        self._compiled: list[Call] = []
        self._pageable: set[int] = set()  # launches of copies from pageable memory

    def add(self, event: Any) -> None:
        if not isinstance(event, dict):
            return
        category, name, args = event.get("cat"), event.get("name"), event.get("args")
        args = args if isinstance(args, dict) else {}
        name = sys.intern(name) if isinstance(name, str) else ""
        if event.get("ph") != "X" or not isinstance(category, str):
            self.is_of_jax |= name == "process_name" and str(args.get("name")).startswith(("/device:", "/host:"))
            return
        self.categories[category] += 1
        start, duration = self._seconds(event.get("ts")), _number(event.get("dur"))
        if category in _ON_DEVICE:
            self._add_work(_ON_DEVICE[category] or name, start, duration, args)
            if name.startswith(_PAGEABLE) and (number := _integer(args.get("correlation"))) is not None:
                self._pageable.add(number)
        elif start is not None:
            thread = (str(event.get("pid")), str(event.get("tid")))
            end = start + (duration or 0) * 1e-6
            call = Call(thread, start, end, name)
            if category in _LAUNCHES and _SYNCHRONISES in name:
                self._waits.append(("synchronisation", call))
            elif _INPUT in name or _COMPILE in name:
                self._waits.append(("input" if _INPUT in name else "compile", call))
            elif name.startswith(_COMPILED):
                self._compiled.append(call)
            if name.startswith(_STEP) and category in (_RANGE, *_OPERATIONS):
                self._steps.append(Step(f"step {name.removeprefix(_STEP)}", start, end))
            elif category in _LAUNCHES and (number := _integer(args.get("correlation"))) is not None:
                self._launches[number] = (thread, start)
            elif category in _OPERATIONS:
                self._add_operation(call, args)
            elif category == _RANGE:
                self._ranges.append(call)
            elif category == "python_function":
                self._calls.append(call)

    def _seconds(self, value: Any) -> float | None:
        """Return a time from the first one on, or shortly before it."""
        found = _number(value)
        if found is None:
            return None
        if self._base is None:
            self._base = int(found) // _EPOCH_US * _EPOCH_US
        return (found - self._base) * 1e-6

    def _add_work(self, name: str, start: float | None, duration: float | None, args: Mapping[str, Any]) -> None:
        if start is None or duration is None or duration < 0 or not name:
            self.skipped += 1
            return
        grid = args.get("grid")
        extents = tuple(grid) if isinstance(grid, list) and all(isinstance(extent, int) for extent in grid) else None
        device = _integer(args.get("device", args.get("inDevice")))  # a copy between GPUs has the latter
        self._counts[device] += 1
        if self._counts[device] > MOST_EVENTS:
            raise ProfileError(f"{self._path}: more than {MOST_EVENTS:,} events of one GPU; profile fewer steps")
        event = DeviceEvent(name, start, start + duration * 1e-6, extents)
        launch, external = _integer(args.get("correlation")), _external(args)
        self._work.append((device, event, _NONE if launch is None else launch, _NONE if external is None else external))

    def _add_operation(self, call: Call, args: Mapping[str, Any]) -> None:
        self._operations.append(call)
        if (number := _external(args)) is not None:
            self._of_id[number] = call.name if self._of_id.get(number, call.name) == call.name else ""

    def steps(self) -> tuple[Step, ...]:
        return tuple(sorted(self._steps, key=lambda step: step.start))

    def waits(self) -> tuple[HostWait, ...]:
        """Return the host's waits by their beginning."""
        begun = {number: (call.thread, call.start) for number, (_, call) in enumerate(self._waits)}
        operations, functions = around(self._operations, begun), user_functions(self._calls, begun)
        compiled = _latest(begun, ((call.thread, call.start, call.name) for call in self._compiled))
        launches = {launch for _, _, launch, _ in self._work} & self._launches.keys()
        launched = _latest(begun, ((*self._launches[launch], launch) for launch in launches))
        found = []
        for number, (kind, call) in enumerate(self._waits):
            name, function = call.name, functions.get(number, "")
            if kind == "compile" and number in compiled:
                name = f"torch.compile {compiled[number].removeprefix(_COMPILED)}"
            if kind == "synchronisation" and number in operations:
                name = operations[number][0]
                is_copy = launched.get(number) in self._pageable
                found.append(HostWait("copy" if is_copy else kind, name, call.start, call.end, function))
            else:
                found.append(HostWait(kind, name, call.start, call.end, function))
        return tuple(sorted(found, key=lambda wait: wait.start))

    def by_device(self, only: int | None) -> dict[int | None, tuple[DeviceEvent, ...]]:
        """Return the work of each GPU, with what launched it; that of an unknown GPU last, by the key None.

        only: the GPU of a process that has but one.
        """
        threads = {call.thread for call in self._operations}
        operations = around(self._operations, self._launches)
        paths = around([*self._ranges, *self._operations], self._launches) if self._ranges else operations
        functions = user_functions(self._calls, self._launches)
        found: dict[int | None, list[DeviceEvent]] = {}
        for device, event, launch, external in self._work:
            called = self._launches.get(launch)
            is_known = called is not None and called[0] in threads
            found.setdefault(only if device is None else device, []).append(replace(
                event, launched=None if called is None else called[1], host_function=functions.get(launch, ""),
                host_op=operations.get(launch, ("",))[-1] if is_known else self._of_id.get(external, ""),
                host_path=paths.get(launch, ()),
            ))
        return {
            device: tuple(sorted(found[device], key=lambda event: (event.start, event.end)))
            for device in sorted(found, key=lambda device: (device is None, device))
        }


def _latest(begun: Mapping[int, tuple[object, float]], others: Iterable[tuple[object, float, T]]) -> dict[int, T]:
    """Return for each call that of the others which began last before it, in its thread. Both have thread and time."""
    of_thread: dict[object, list[tuple[float, T]]] = {}
    for thread, at, value in others:
        of_thread.setdefault(thread, []).append((at, value))
    for own in of_thread.values():
        own.sort(key=itemgetter(0))
    found = {}
    for number, (thread, at) in begun.items():
        own = of_thread.get(thread, [])
        if index := bisect_left(own, at, key=itemgetter(0)):
            found[number] = own[index - 1][1]
    return found


def _external(args: Mapping[str, Any]) -> int | None:
    """Return the number of the operation around an event; None where it is that of the launch."""
    found = _integer(args.get("External id", args.get("external id")))
    return None if found == _integer(args.get("correlation")) else found


def _number(value: Any) -> float | None:
    """Return a number, which may be written as a string; None for others."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _LATEST_US else None  # None for NaN, too


def _integer(value: Any) -> int | None:
    found = _number(value)
    return int(found) if found is not None and found == int(found) else None


def _device_names(listed: Any) -> dict[int, str]:
    """Return the names of the GPUs that the process saw, by number."""
    found = {}
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("name") and (number := _integer(each.get("id"))) is not None:
            found[number] = str(each["name"])
    return found


def _rank(found: Any) -> int | None:
    return _integer(found.get("rank")) if isinstance(found, dict) else None
