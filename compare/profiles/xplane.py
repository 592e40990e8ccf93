"""A reader of `*.xplane.pb`, which jax.profiler writes: a serialized XSpace (tsl/profiler/protobuf/xplane.proto).

An XSpace has planes, a plane has lines, a line has events. A GPU is a plane "/device:GPU:0" with a line for each
stream. Launches are in the plane "/host:CUPTI", or in "/host:CPU" (jaxlib 0.11); steps are in "/host:CPU", and each
module's HloProto in "/host:metadata". On a CPU, XLA's operations are events of "/host:CPU" with the stat "hlo_op". The
definitions come from jaxlib's library; neither jax nor jaxlib is imported. The file may be gzipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from xlafuse.hlo.proto_reader import ProtoError, message_type

from ..graph.join.kernel_records import MEMCPY, MEMSET
from .bounded import read_bytes
from .model import MOST_EVENTS, DeviceEvent, HostWait, Profile, ProfileError, Step
from .python_frames import Call, around

MOST_BYTES = 1 << 30  # unpacked

_GPU = re.compile(r"/device:GPU:(\d+)")
_HOST, _CUPTI, _METADATA = "/host:CPU", "/host:CUPTI", "/host:metadata"
_MODULE = re.compile(r"(.+)\((\d{1,18})\)")
_GRID = re.compile(r"\bgrid:(\d+),(\d+),(\d+)")
_CALL = re.compile(r"PjitFunction\((.+)\)")  # jaxlib's event around the call of a jitted function
_COMPILES = ("lower_sharding_computation", "backend_compile_and_load")  # jax's events around lowering and compiling
_VERSIONS = {"jax_version": "jax", "jaxlib_version": "jaxlib"}

Stats = dict[str, Any]


def read(path: Path) -> list[Profile]:
    """Return the profile of each GPU, or of the CPU where no GPU ran anything.

    Raises ProfileError for other files, for files without events of a device and above the limits, OSError.
    """
    from google.protobuf.message import DecodeError

    try:
        space = message_type("tensorflow.profiler.XSpace").FromString(read_bytes(path, MOST_BYTES))
    except (DecodeError, ProtoError) as problem:
        raise ProfileError(f"{path}: no XSpace of jax.profiler can be read: {problem}") from None
    planes = {plane.name: _Plane(plane) for plane in space.planes}
    if not planes:
        raise ProfileError(f"{path}: no XSpace of jax.profiler: it has no planes; {'; '.join(space.errors)[:300]}")
    host = planes.get(_HOST)
    steps = tuple(sorted(host.steps(), key=lambda step: step.start)) if host else ()
    waits = host.compiles() if host else ()
    launches = {
        number: start for name in (_HOST, _CUPTI) if name in planes for number, start in planes[name].launches().items()
    }
    metadata = planes.get(_METADATA)
    found: list[tuple[int | None, str, list[DeviceEvent], int]] = []
    gpus = sorted((int(match[1]), name) for name in planes if (match := _GPU.fullmatch(name)))
    for number, name in gpus:
        events, skipped = planes[name].device_events(path, launches)
        if events:
            found.append((number, planes[name].device_name() or f"GPU {number}", events, skipped))
    if not found and host is not None:
        events, skipped = host.device_events(path, {}, on_host=True)
        if events:
            found.append((None, "cpu", events, skipped))
    if not found:
        raise ProfileError(
            f"{path}: neither a GPU's kernels nor XLA's operations on a CPU; its planes: "
            f"{', '.join(sorted(planes)[:8])}"
        )
    return [
        Profile(
            "jax.profiler", str(path), device, tuple(events), steps, modules=metadata.modules() if metadata else {},
            versions=metadata.versions() if metadata else {}, skipped=skipped, gpu=number, waits=waits,
        )
        for number, device, events, skipped in found
    ]


class _Plane:
    """A plane with its names looked up."""

    def __init__(self, plane: Any) -> None:
        self._plane = plane
        self._stat_names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
        self._names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
        self._shared = {
            key: self._stats(metadata.stats) for key, metadata in plane.event_metadata.items() if metadata.stats
        }

    def device_events(
        self, path: Path, launches: Mapping[int, float], *, on_host: bool = False
    ) -> tuple[list[DeviceEvent], int]:
        """Return the plane's events by their beginning, and the number of those without a time or a name.

        on_host: only XLA's operations, one for each event of that name.
        """
        found: list[DeviceEvent] = []
        skipped = 0
        for event, start, end in self._events():
            stats = self._of_event(event)
            if on_host and "hlo_op" not in stats:
                continue
            name = self._names.get(event.metadata_id, "")
            if not name or end < start:
                skipped += 1
                continue
            if len(found) == MOST_EVENTS:
                raise ProfileError(f"{path}: more than {MOST_EVENTS:,} events of one device; profile fewer steps")
            launch = stats.get("correlation_id")
            grid = _GRID.search(str(stats.get("kernel_details", "")))
            found.append(DeviceEvent(
                _kind(name, stats), start, end, tuple(map(int, grid.groups())) if grid else None,
                str(stats.get("hlo_module", "")), str(stats.get("hlo_op", "")),
                program if isinstance(program := stats.get("program_id"), int) else 0,
                launched=launches.get(launch) if isinstance(launch, int) else None,
            ))
        return sorted(found, key=lambda event: (event.start, event.end)), skipped

    def steps(self) -> Iterator[Step]:
        """Yield the steps of jax.profiler.StepTraceAnnotation, with the first call of a jitted function in each."""
        calls: list[tuple[float, str]] = []
        steps: list[Step] = []
        for event, start, end in self._events():
            name = self._names.get(event.metadata_id, "")
            if called := _CALL.fullmatch(name):
                calls.append((start, called[1]))
            elif event.stats and isinstance(number := self._of_event(event).get("step_num"), int):
                steps.append(Step(f"{name or 'step'} {number}", start, end))
        for step in steps:
            inside = [(at, name) for at, name in calls if step.start <= at <= step.end]
            called_at, program = min(inside, default=(None, ""))
            yield replace(step, program=program, called=called_at)

    def compiles(self) -> tuple[HostWait, ...]:
        """Return the times in which jax compiles, each with the jitted function that is called."""
        calls: list[Call] = []
        found: list[Call] = []
        for number, line in enumerate(self._plane.lines):
            for event, start, end in self._events([line]):
                name = self._names.get(event.metadata_id, "")
                if called := _CALL.fullmatch(name):
                    calls.append(Call(number, start, end, called[1]))
                elif name in _COMPILES:
                    found.append(Call(number, start, end, name))
        names = around(calls, {number: (call.thread, call.start) for number, call in enumerate(found)})
        waits = (
            HostWait("compile", names.get(number, ("",))[-1], call.start, call.end) for number, call in enumerate(found)
        )
        return tuple(sorted(waits, key=lambda wait: wait.start))

    def launches(self) -> dict[int, float]:
        """Return when each launch began on the host, by its correlation id."""
        found: dict[int, float] = {}
        for event, start, _ in self._events():
            number = self._of_event(event).get("correlation_id")
            if isinstance(number, int):
                found[number] = min(start, found.get(number, start))
        return found

    def device_name(self) -> str:
        """Return the GPU's name where the plane has it."""
        stats = self._stats(self._plane.stats)
        return str(stats.get("gpu_device_name") or stats.get("device_type_string") or "")

    def modules(self) -> dict[tuple[str, int], Any]:
        """Return readers of the modules' HloProtos by name and number."""
        found = {}
        for metadata in self._plane.event_metadata.values():
            match = _MODULE.fullmatch(metadata.name)
            for stat in metadata.stats:
                if match and self._stat_names.get(stat.metadata_id) == "Hlo Proto":
                    found[match[1], int(match[2])] = partial(getattr, stat, "bytes_value")
        return found

    def versions(self) -> dict[str, str]:
        stats = self._stats(self._plane.stats)
        return {package: str(stats[name]) for name, package in _VERSIONS.items() if name in stats}

    def _events(self, lines: Iterable[Any] | None = None) -> Iterator[tuple[Any, float, float]]:
        """Yield each event of some lines, by default of all, with its beginning and end in seconds."""
        for line in self._plane.lines if lines is None else lines:
            for event in line.events:
                start = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                yield event, start, start + event.duration_ps * 1e-12

    def _of_event(self, event: Any) -> Stats:
        return {**self._shared.get(event.metadata_id, {}), **self._stats(event.stats)}

    def _stats(self, stats: Any) -> Stats:
        found = {}
        for stat in stats:
            kind = stat.WhichOneof("value")
            if kind is not None and kind != "bytes_value":
                value = getattr(stat, kind)
                found[self._stat_names.get(stat.metadata_id, "")] = (
                    self._stat_names.get(value, "") if kind == "ref_value" else value
                )
        return found


def _kind(name: str, stats: Stats) -> str:
    if "memcpy_details" in stats or name.startswith("Memcpy"):
        return MEMCPY
    return MEMSET if "memset_details" in stats or name.startswith("Memset") else name
