"""Timelines: host launches and GPU kernels of one call as Chrome trace events, with the graph's names.

    document = of_call({"forward": trace, "backward": trace}, graph, name=record.id)
    merge([document, ...])        several records in one document, a process each

The format is the JSON of Chrome's trace viewer ("Trace Event Format"), which https://ui.perfetto.dev and
chrome://tracing open. Times are in microseconds. A record is a process; its phases, host threads and streams are
threads. Time 0 is a call's first host launch, so merged calls begin together. A training step's backward phase begins
where its forward phase ends: the L2 flush between the two is cut out.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import atomic_write
from ..base.exchange_kernels import PEER_COPY
from ..graph.join.kernel_records import MEMCPY, MEMSET, assign, main_name
from ..graph.model import FusionGraph, Kernel
from ..graph.store import Readable
from .clock import CallTrace, HostRecord, TracedRecord

Event = dict[str, Any]
Document = dict[str, Any]

_PHASES, _HOST, _STREAMS = 1, 2, 500  # the first thread numbers of each kind, in the order shown
_THREADS = 1000  # offset between two processes, so that no thread number repeats
_CATEGORIES = {MEMCPY: "gpu_memcpy", PEER_COPY: "gpu_memcpy", MEMSET: "gpu_memset"}
_ORDER = {"M": 0, "X": 1, "s": 2, "f": 3}


class TimelineError(ValueError):
    """A file that holds no timeline; the message names it."""


class TimelineMissing(TimelineError):
    """A file that does not exist."""


def of_call(traces: Mapping[str, CallTrace], graph: FusionGraph | None, *, name: str) -> Document:
    """Return the timeline of one call. traces: by phase, in order.

    graph: as compiled, not joined with records. Without one, or without kernels, events have only runtime names.
    """
    events: list[Event] = []
    threads = _Threads()
    at = 0.0  # where the phase begins, in seconds
    for phase, trace in traces.items():
        found: list[HostRecord | TracedRecord] = [*trace.host, *trace.device]
        first = min((record.start for record in found), default=0.0)
        last = max([trace.returned, *(record.end for record in found)])
        offset = at - first
        events.append(
            _span(phase, "phase", _PHASES, at, last + offset, {
                "host_before_first_launch_us": _microseconds(first),
                "host_returned_us": _microseconds(trace.returned + offset),
            })
        )
        kernels = _kernels(graph, phase, trace.device)
        sources: dict[int, tuple[int, float]] = {}
        for call in trace.host:
            thread = threads.host(call)
            sources[call.correlation] = thread, call.start + offset
            arguments = {"correlation": call.correlation}
            events.append(_span(call.name, "host", thread, call.start + offset, call.end + offset, arguments))
        for record in trace.device:
            thread = threads.stream(record, offset)
            kernel, is_main = kernels.get(id(record), (None, True))
            events.append(
                _span(
                    kernel.name if kernel is not None else record.name, _CATEGORIES.get(record.name, "kernel"), thread,
                    record.start + offset, record.end + offset, _arguments(record, kernel, is_main),
                )
            )
            if record.correlation in sources:
                source, started = sources[record.correlation]
                arrow = {"cat": "launch", "name": "launch", "id": len(events)}
                events.append({"ph": "s", **arrow, "tid": source, "ts": _microseconds(started)})
                end = {"ph": "f", "bp": "e", **arrow, "tid": thread, "ts": _microseconds(record.start + offset)}
                events.append(end)
        at = last + offset
    return _document([*_metadata(name, threads.names()), *events], [name])


def of_ranks(traces: Sequence[CallTrace], graph: FusionGraph | None, *, name: str) -> Document:
    """Return the timeline of one call on several GPUs, a process each on one time axis. traces: by rank.

    Time 0 is the first launch of any rank. CUPTI gives host and GPU times of all processes on one clock.
    """
    origin = min(trace.began for trace in traces)
    begins = [(trace.began - origin) * 1e-9 + _first(trace) for trace in traces]
    documents = [of_call({"forward": trace}, graph, name=f"{name}/rank{rank}") for rank, trace in enumerate(traces)]
    for begin, document in zip(begins, documents, strict=True):
        for event in document["traceEvents"]:
            if "ts" in event:
                event["ts"] = round(event["ts"] + _microseconds(begin - min(begins)), 3)
    return merge(documents)


def launches_of_ranks(document: Document) -> list[list[Event]]:
    """Return the kernels, copies and memsets of each rank of a document that `of_ranks` made."""
    found: dict[int, list[Event]] = {pid: [] for pid in sorted({event["pid"] for event in document["traceEvents"]})}
    for event in document["traceEvents"]:
        if event["ph"] == "X" and isinstance(event["args"].get("runtime_name"), str):
            found[event["pid"]].append(event)
    return list(found.values())


def _first(trace: CallTrace) -> float:
    """Return when a call's first launch or kernel began, in seconds since the call began."""
    records: list[HostRecord | TracedRecord] = [*trace.host, *trace.device]
    return min((record.start for record in records), default=0.0)


def merge(documents: Sequence[Document]) -> Document:
    """Return one document with the processes of all `documents`, which `of_call`, `of_ranks` or `load` made."""
    events: list[Event] = []
    arrows = number = 0  # those of the documents before
    for document in documents:
        ids = [event["id"] for event in document["traceEvents"] if "id" in event]
        for event in document["traceEvents"]:
            moved = {"pid": event["pid"] + number, "tid": event["tid"] + number * _THREADS}
            if "id" in event:
                moved["id"] = event["id"] + arrows
            if event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": moved["pid"]}
            events.append(event | moved)
        arrows += max(ids, default=0) + 1
        number += max((event["pid"] for event in document["traceEvents"]), default=0)
    return _document(events, [name for document in documents for name in document["otherData"]["records"]])


def save(document: Document, path: Path) -> None:
    """Write one JSON file, compressed where the name ends in .gz."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    atomic_write.write(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text + b"\n")


def load(file: Readable) -> Document:
    """Read a saved document. Raises TimelineError, with the file, for another file or an unreadable one.

    The error is TimelineMissing for a file that does not exist.
    """
    try:
        raw = file.read_bytes()
        document = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
        return _document([_checked(event) for event in document["traceEvents"]], document["otherData"]["records"])
    except FileNotFoundError:
        raise TimelineMissing(f"{file}: missing; a run may be kept without its timelines") from None
    except (AttributeError, EOFError, KeyError, OSError, RecursionError, TypeError, ValueError, zlib.error) as problem:
        raise TimelineError(f"{file}: not a timeline: {type(problem).__name__}: {problem}") from None


def _checked(event: Event) -> Event:
    numbers = (event["pid"], event["tid"], event.get("id", 0), event.get("ts", 0), event.get("dur", 0))
    if event["ph"] not in _ORDER or not isinstance(event["name"], str):
        raise ValueError(f"an event of phase {event['ph']!r} called {event['name']!r}")
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError(f"an event with numbers {numbers}")
    if event["ph"] == "X" and not ({"ts", "dur"} <= event.keys() and isinstance(event["args"], dict)):
        raise TypeError(f"a span {event['name']!r} without its time or arguments")
    return event


class _Threads:
    """Thread numbers of host threads, in order of appearance, and of streams.

    Kernels of a CUDA graph's branches may overlap in one stream. A viewer draws overlapping events of one thread as
    nested, so they go to further rows of the stream.
    """

    def __init__(self) -> None:
        self._host: dict[int, int] = {}
        self._rows: dict[int, list[float]] = {}  # by stream, the end of the last event in each row
        self._numbers: dict[tuple[int, int], int] = {}

    def host(self, call: HostRecord) -> int:
        return self._host.setdefault(call.thread, _HOST + len(self._host))

    def stream(self, record: TracedRecord, offset: float) -> int:
        rows = self._rows.setdefault(record.stream, [])
        start, end = record.start + offset, record.end + offset
        row = next((index for index, last in enumerate(rows) if last <= start), len(rows))
        rows[row : row + 1] = [end]
        return self._numbers.setdefault((record.stream, row), _STREAMS + len(self._numbers))

    def names(self) -> dict[int, str]:
        hosts = {number: f"host thread {number - _HOST + 1}" for number in self._host.values()}
        streams = {
            number: f"stream {stream}" + (f", row {row + 1}" if row else "")
            for (stream, row), number in self._numbers.items()
        }
        return {_PHASES: "phases", **hosts, **streams}


def _kernels(
    graph: FusionGraph | None, phase: str, records: Sequence[TracedRecord]
) -> dict[int, tuple[Kernel, bool]]:
    """Return the kernel of each record, by the record's id(), and whether the record is the kernel or a helper."""
    if graph is None or graph.kernels is None:
        return {}
    joined, _ = assign(graph, {phase: records})
    found = {}
    for index, ran in joined.items():
        kernel = graph.kernels[index]
        names = {record.name for record in ran}
        helpers = set(kernel.facts.get("with", {})) - {kernel.runtime_name}  # of an eager operation
        if kernel.runtime_name is None:
            helpers = names - {main_name([record.name for record in ran])}
        found.update({id(record): (kernel, record.name not in helpers) for record in ran})
    return found


def _arguments(record: TracedRecord, kernel: Kernel | None, is_main: bool) -> Event:
    """Return an event's arguments: bytes and FLOPs of one launch in the graph, or the size of a copy or memset."""
    found: Event = {
        "runtime_name": record.name, "bytes": record.bytes, "grid": record.grid, "stream": record.stream,
        "correlation": record.correlation,
    }
    if kernel is not None:
        found["stage"] = ", ".join(kernel.stages) or None
        if is_main:
            found |= {"bytes_read": kernel.bytes_read, "bytes_written": kernel.bytes_written, "flops": kernel.flops}
    return {name: value for name, value in found.items() if value is not None}


def _span(name: str, category: str, thread: int, start: float, end: float, arguments: Mapping[str, Any]) -> Event:
    ts = _microseconds(start)
    duration = max(0.0, round(_microseconds(end) - ts, 3))
    return {
        "ph": "X", "name": name, "cat": category, "tid": thread, "ts": ts, "dur": duration, "args": dict(arguments)
    }


def _metadata(name: str, threads: Mapping[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "tid": _PHASES, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "tid": _PHASES, "args": {"sort_index": 0}}
    for number, label in threads.items():
        yield {"ph": "M", "name": "thread_name", "tid": number, "args": {"name": label}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": number, "args": {"sort_index": number}}


def _document(events: Iterable[Event], names: Sequence[str]) -> Document:
    """Sort by time: an enclosing span before the spans inside it, and a span before the arrows at it."""

    def order(event: Event) -> tuple[float, int, float]:
        return event.get("ts", -1.0), _ORDER[event["ph"]], -event.get("dur", 0.0)

    ordered = sorted(({"pid": 1, **event} for event in events), key=order)
    return {"displayTimeUnit": "ns", "otherData": {"records": list(names)}, "traceEvents": ordered}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
