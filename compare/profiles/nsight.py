"""A reader of Nsight Systems' SQLite export (`nsys export --type sqlite`). Times are in nanoseconds.

Kernels, copies and memsets are rows of CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY and _MEMSET; CUPTI_ACTIVITY_KIND_GRAPH_TRACE
has CUDA graphs that were recorded as a whole, and CUPTI_ACTIVITY_KIND_RUNTIME the host's calls. A name is a row of
StringIds. A step is an NVTX range of the process, such as "ProfilerStep#3", "step 3" or "iteration 3". A process
numbers the GPUs that it sees; TARGET_INFO_CUDA_DEVICE has the machine's numbers. The file is opened for reading only,
and only tables are read: a view could hold any statement.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..graph.join.kernel_records import MEMCPY, MEMSET
from .bounded import GZIP, ZIP, copy, too_large
from .model import MOST_EVENTS, DeviceEvent, Profile, ProfileError, Step

MOST_BYTES = 8 << 30
MOST_ROWS = 5_000_000  # of one table
MOST_TEXT = 1 << 20  # bytes of one value

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_OTHERS = {"CUPTI_ACTIVITY_KIND_MEMCPY": MEMCPY, "CUPTI_ACTIVITY_KIND_MEMSET": MEMSET, _GRAPHS: "[CUDA graph]"}
_RUNTIME, _STRINGS, _RANGES, _GPUS = "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds", "NVTX_EVENTS", "TARGET_INFO_GPU"
_SEEN = "TARGET_INFO_CUDA_DEVICE"
_GRID = ("gridX", "gridY", "gridZ")
_STEP = re.compile(r"(?:ProfilerStep#|(?:train[ _]?)?(?:step|iter|iteration)[ _#:=]*)(\d{1,18})", re.IGNORECASE)
_PROCESS = ~0xFFFFFF  # the bits of a globalTid or globalPid that tell the process


def read(path: Path) -> list[Profile]:
    """Return the profile of each process and GPU.

    Raises ProfileError for other files and above the limits, and OSError.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ProfileError(too_large(path, MOST_BYTES))
    try:
        with _plain(path) as file, closing(_connected(file)) as base:
            (pages,), (size,) = (base.execute(f"PRAGMA page_{fact}").fetchone() for fact in ("count", "size"))
            if file.stat().st_size < pages * size:  # SQLite reads the rest of a page as zeros
                raise ProfileError(f"{path}: not a SQLite export of Nsight Systems that can be read: it is cut off")
            return _Export(path, base).profiles()
    except (sqlite3.Error, OverflowError) as problem:
        raise ProfileError(f"{path}: not a SQLite export of Nsight Systems that can be read: {problem}") from None


def _connected(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro&immutable=1", uri=True)


@contextmanager
def _plain(path: Path) -> Iterator[Path]:
    """Yield the file, or an unpacked copy that is deleted afterwards."""
    with path.open("rb") as file:
        is_packed = file.read(4).startswith((GZIP, ZIP))
    if not is_packed:
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as copied:
        copy(path, copied, MOST_BYTES)
        copied.flush()
        yield Path(copied.name)


class _Export:
    def __init__(self, path: Path, base: sqlite3.Connection) -> None:
        self._path = path
        self._base = base
        base.execute("PRAGMA trusted_schema=OFF")
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_TEXT)
        tables = [name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        self._columns = {
            name: {row[1] for row in base.execute(f'PRAGMA table_info("{name}")')}
            for name in (_KERNELS, *_OTHERS, _RUNTIME, _STRINGS, _RANGES, _GPUS, _SEEN) if name in tables
        }

    def profiles(self) -> list[Profile]:
        if _KERNELS not in self._columns and _GRAPHS not in self._columns:
            raise ProfileError(
                f"{self._path}: no table {_KERNELS}: no GPU work in this export; record it with nsys profile "
                "--trace=cuda, and export it with nsys export --type sqlite"
            )
        devices: dict[tuple[int, int], list[DeviceEvent]] = {}
        launches = self._launches()
        skipped = 0
        for process, device, event in self._events(launches):
            if event is None:
                skipped += 1
                continue
            events = devices.setdefault((process, device), [])
            events.append(event)
            if len(events) > MOST_EVENTS:
                raise ProfileError(f"{self._path}: more than {MOST_EVENTS:,} events of one GPU; profile fewer steps")
        if not devices:
            raise ProfileError(f"{self._path}: no kernels of a GPU in this export")
        names, numbers, steps = self._device_names(), self._device_numbers(), self._steps()
        notes: tuple[str, ...] = ()
        if any(self._rows(_GRAPHS, "start")):
            notes = ("CUDA graphs are recorded as a whole; nsys profile --cuda-graph-trace=node records their kernels",)
        found = []
        for (process, device), events in sorted(devices.items()):
            gpu = numbers.get((process >> 24 & 0xFFFFFF, device), device)
            found.append(Profile(
                "Nsight Systems", str(self._path), names.get(gpu, f"GPU {gpu}"),
                tuple(sorted(events, key=lambda event: (event.start, event.end))),
                steps.get(process, steps.get(None, ())), gpu=gpu, skipped=skipped, notes=notes,
            ))
        return found

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the columns of a table; None for those that it lacks."""
        if table not in self._columns:
            return
        picked = ", ".join(f'"{name}"' if name in self._columns[table] else "NULL" for name in columns)
        for number, row in enumerate(self._base.execute(f'SELECT {picked} FROM "{table}"')):
            if number == MOST_ROWS:
                raise ProfileError(f"{self._path}: more than {MOST_ROWS:,} rows in {table}; profile fewer steps")
            yield row

    @cached_property
    def _strings(self) -> dict[int, str]:
        return {key: str(value) for key, value in self._rows(_STRINGS, "id", "value")}

    def _launches(self) -> dict[tuple[int, int], float]:
        """Return when each launch began on the host, by process and correlation."""
        return {
            (thread & _PROCESS, number): start * 1e-9
            for thread, number, start in self._rows(_RUNTIME, "globalTid", "correlationId", "start")
            if _are_integers(thread, number, start)
        }

    def _events(self, launches: dict[tuple[int, int], float]) -> Iterator[tuple[int, int, DeviceEvent | None]]:
        """Yield each event with its process and the process's number of the GPU; None for one that cannot be read."""
        common = ("start", "end", "deviceId", "correlationId", "globalPid")
        for table, fixed in ((_KERNELS, ""), *_OTHERS.items()):
            named = () if fixed else ("demangledName", "shortName", *_GRID)
            for start, end, device, number, process, *rest in self._rows(table, *common, *named):
                name = fixed or self._strings.get(rest[0]) or self._strings.get(rest[1]) or ""
                if not _are_integers(start, end, device) or end < start or not name:
                    yield 0, 0, None
                    continue
                grid = tuple(rest[2:]) if rest and _are_integers(*rest[2:]) else None
                process = (process if _are_integers(process) else 0) & _PROCESS
                launched = launches.get((process, number))
                yield process, device, DeviceEvent(name, start * 1e-9, end * 1e-9, grid, launched=launched)

    def _device_names(self) -> dict[int, str]:
        return {key: str(name) for key, name in self._rows(_GPUS, "id", "name") if name}

    def _device_numbers(self) -> dict[tuple[int, int], int]:
        """Return the machine's number of each GPU by the process's id and number."""
        return {
            (process, seen): number
            for number, seen, process in self._rows(_SEEN, "gpuId", "cudaId", "pid")
            if _are_integers(number, seen, process)
        }

    def _steps(self) -> dict[int | None, tuple[Step, ...]]:
        """Return the steps by process; by None where the export does not tell it."""
        found: dict[int | None, list[Step]] = {}
        for start, end, text, key, thread in self._rows(_RANGES, "start", "end", "text", "textId", "globalTid"):
            match = _STEP.fullmatch(str(text or self._strings.get(key, "")))
            if match and _are_integers(start, end):
                process = thread & _PROCESS if _are_integers(thread) else None
                found.setdefault(process, []).append(Step(f"step {match[1]}", start * 1e-9, end * 1e-9))
        return {process: tuple(sorted(steps, key=lambda step: step.start)) for process, steps in found.items()}


def _are_integers(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)
