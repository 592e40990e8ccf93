"""A reader of the traces of torch.profiler (Kineto): Chrome trace events as JSON, plain or gzipped. Times are in us.

A GPU's work has the categories kernel, gpu_memcpy and gpu_memset. Its `correlation` is that of the launch on the host
(cuda_runtime, cuda_driver), and its `External id` that of the operation around the launch (cpu_op). A step is an event
"ProfilerStep#3" of the host. Calls of Python functions (python_function) are there with `with_stack=True`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..graph.join.kernel_records import MEMCPY, MEMSET
from .bounded import read_bytes
from .model import MOST_EVENTS, DeviceEvent, Profile, ProfileError, Step
from .python_frames import Call, user_functions

MOST_BYTES = 1 << 30  # unpacked

_ON_DEVICE = {"kernel": "", "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_STEP = "ProfilerStep#"
_LATEST_US = 1e18


def read(path: Path) -> list[Profile]:
    """Return the profile of each GPU. Raises ProfileError for other files and above the limits, and OSError."""
    try:
        data = json.loads(read_bytes(path, MOST_BYTES))
    except (ValueError, RecursionError) as problem:
        raise ProfileError(f"{path}: no trace of torch.profiler can be read: {problem}") from None
    listed = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(listed, list):
        raise ProfileError(f"{path}: no trace of torch.profiler: it has no list of `traceEvents`")
    devices: dict[int, list[DeviceEvent]] = {}
    skipped = 0
    host = _host(listed)
    for event in _of(listed, _ON_DEVICE):
        found = _device_event(event, host)
        if found is None:
            skipped += 1
            continue
        events = devices.setdefault(_integer(event["args"].get("device")) or 0, [])
        events.append(found)
        if len(events) > MOST_EVENTS:
            raise ProfileError(f"{path}: more than {MOST_EVENTS:,} events of one GPU; profile fewer steps")
    if not devices:
        raise ProfileError(
            f"{path}: no kernels of a GPU in this trace"
            + (f"; {skipped} could not be read" if skipped else "; torch.profiler records them with activity CUDA")
        )
    names, rank = _device_names(data), _rank(data)
    return [
        Profile(
            "torch.profiler", str(path), names.get(number, f"GPU {number}"),
            tuple(sorted(events, key=lambda event: (event.start, event.end))), host.steps, rank, skipped=skipped,
        )
        for number, events in sorted(devices.items())
    ]


def _of(listed: list[Any], categories: Mapping[str, Any] | tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for event in listed:
        if isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") in categories:
            yield event if isinstance(event.get("args"), dict) else {**event, "args": {}}


@dataclass(frozen=True)
class _Host:
    """Threads and times of launches by correlation, operations by external id, user's functions by correlation."""

    launches: Mapping[int, tuple[object, float]]
    operations: Mapping[int, str]
    functions: Mapping[int, str]
    steps: tuple[Step, ...]


def _host(listed: list[Any]) -> _Host:
    launches: dict[int, tuple[object, float]] = {}
    operations: dict[int, str] = {}
    steps = []
    calls = []
    for event in _of(listed, (*_LAUNCHES, "cpu_op", "user_annotation", "python_function")):
        times = _times(event)
        if times is None:
            continue
        category, args = event["cat"], event["args"]
        if category in _LAUNCHES and (number := _integer(args.get("correlation"))) is not None:
            launches[number] = (str(event.get("tid")), times[0])
        elif category == "cpu_op" and (number := _integer(args.get("External id"))) is not None:
            operations[number] = str(event.get("name", ""))
        elif category == "user_annotation" and str(event.get("name", "")).startswith(_STEP):
            steps.append(Step(f"step {str(event['name']).removeprefix(_STEP)}", *times))
        elif category == "python_function":
            calls.append(Call(str(event.get("tid")), *times, str(event.get("name", ""))))
    return _Host(
        launches, operations, user_functions(calls, launches), tuple(sorted(steps, key=lambda step: step.start))
    )


def _device_event(event: dict[str, Any], host: _Host) -> DeviceEvent | None:
    times, args = _times(event), event["args"]
    name = _ON_DEVICE[event["cat"]] or str(event.get("name", ""))
    if times is None or not name:
        return None
    launch = _integer(args.get("correlation"))
    called = None if launch is None else host.launches.get(launch)
    grid = args.get("grid")
    whole = isinstance(grid, list) and all(isinstance(extent, int) for extent in grid)
    return DeviceEvent(
        name, *times, tuple(grid) if whole else None,
        host_op=host.operations.get(_integer(args.get("External id")) or -1, ""),
        host_function="" if launch is None else host.functions.get(launch, ""),
        launched=None if called is None else called[1],
    )


def _times(event: dict[str, Any]) -> tuple[float, float] | None:
    """Return beginning and end in seconds."""
    start, duration = event.get("ts"), event.get("dur", 0)
    if isinstance(start, bool) or isinstance(duration, bool):
        return None
    if not isinstance(start, (int, float)) or not isinstance(duration, (int, float)):
        return None
    if not abs(start) < _LATEST_US or not 0 <= duration < _LATEST_US:  # also false for NaN
        return None
    return start * 1e-6, (start + duration) * 1e-6


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _device_names(data: Any) -> dict[int, str]:
    listed = data.get("deviceProperties") if isinstance(data, dict) else None
    return {
        each["id"]: str(each["name"]) for each in listed if isinstance(each, dict) and each.get("name")
        and _integer(each.get("id")) is not None
    } if isinstance(listed, list) else {}


def _rank(data: Any) -> int | None:
    found = data.get("distributedInfo") if isinstance(data, dict) else None
    return _integer(found.get("rank")) if isinstance(found, dict) else None
