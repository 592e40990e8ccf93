"""Fusion graphs as JSON files: `save` and `load`. Reading executes no code and needs no framework."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict

import msgspec

from ..base import atomic_write
from .model import REASONS, FusionGraph, Kernel

KIND = "xlafuse.fusion-graph/"
SCHEMA = KIND + "3"
MAX_BYTES = 1 << 30
_MOST_BRANCHES = 8  # as in xlafuse/hlo/module_walk.py

# The facts of a kernel that other code reads without a check. A branch is (name, index, number).
_Facts = TypedDict(
    "_Facts",
    {
        "opcodes": list[Any], "views": list[Any], "with": dict[str, Any], "counted": dict[str, Any],
        "branches": Annotated[list[tuple[str, int, int]], msgspec.Meta(max_length=_MOST_BRANCHES)],
        "launches_if_taken": int,
    },
    total=False,
)


class Readable(Protocol):
    """A file: a Path, or one of a run. str() names it in messages."""

    def read_bytes(self) -> bytes: ...


class GraphError(ValueError):
    """The input is not a fusion graph. The message names the file or field, and what was expected."""


def to_json(graph: FusionGraph) -> dict[str, Any]:
    """Return the graph as JSON, with values that are derived from it.

    `Kernel`, `Buffer` and `Reason` keep their field names. Kernels add `index`, `bytes_read`, `bytes_written`, `stages`
    and `lines`, and have `predicted` only where it was computed. Buffers add `producer` (the index of the first kernel
    that writes it, or null) and `consumers` (indices). Unknown fields of a launch and of an access are absent.
    """
    kernels = None
    if graph.kernels is not None:
        kernels = [
            {
                "index": index, **_plain_kernel(kernel), "bytes_read": kernel.bytes_read,
                "bytes_written": kernel.bytes_written, "stages": list(kernel.stages), "lines": list(kernel.lines),
            }
            for index, kernel in enumerate(graph.kernels)
        ]
    buffers = [
        {
            **dataclasses.asdict(buffer), "producer": next(iter(graph.producers.get(buffer.name, ())), None),
            "consumers": list(graph.consumers.get(buffer.name, ())),
        }
        for buffer in graph.buffers
    ]
    return {"schema": SCHEMA, **dataclasses.asdict(graph), "kernels": kernels, "buffers": buffers}


def from_json(data: Any) -> FusionGraph:
    """Return the graph that `to_json` wrote. Raises GraphError that names the first error."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise GraphError(f"expected an object of schema {SCHEMA!r}, got {found!r}{other_version(found, SCHEMA)}")
    try:
        graph = msgspec.convert(data, FusionGraph)
    except msgspec.ValidationError as problem:
        raise GraphError(f"a field is missing or misshapen: {problem}") from None
    _check(graph)
    return graph


def other_version(found: Any, schema: str) -> str:
    """Return what to do with a file of another version of a schema; "" for one of another kind."""
    return ": use the xlafuse that wrote it" if str(found).startswith(schema.rpartition("/")[0] + "/") else ""


def save(graph: FusionGraph, path: Path) -> None:
    """Write one JSON file, compressed if its name ends in .gz. Equal graphs give equal bytes."""
    text = json.dumps(to_json(graph), separators=(",", ":")).encode()
    atomic_write.write(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text + b"\n")


def load(file: Readable) -> FusionGraph:
    """Return the graph of a file. Raises GraphError that names the file, and OSError if it cannot be read."""
    raw = file.read_bytes()
    try:
        if raw.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(raw)) as stream:
                raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise GraphError(f"more than {MAX_BYTES >> 30} GiB")
        return from_json(json.loads(raw))
    except (EOFError, OSError, RecursionError, ValueError, zlib.error) as problem:
        raise GraphError(f"{file}: {problem}") from None


def _check(graph: FusionGraph) -> None:
    for kernel in graph.kernels or ():
        try:
            msgspec.convert(kernel.facts, _Facts)
        except msgspec.ValidationError as problem:
            raise GraphError(f"kernel {kernel.name!r}: its facts: {problem}") from None
        for access in (*(kernel.inputs or ()), *(kernel.outputs or ())):
            if access.buffer not in graph.buffer:
                raise GraphError(f"kernel {kernel.name!r} uses buffer {access.buffer!r}, which is not among `buffers`")
    for reason in graph.reasons:
        if reason.code not in REASONS:
            raise GraphError(f"reason {reason.code!r} is not one of {', '.join(REASONS)}")


def _plain_kernel(kernel: Kernel) -> dict[str, Any]:
    plain = dataclasses.asdict(kernel)
    if kernel.predicted is None:
        del plain["predicted"]
    for access in (*(plain["inputs"] or ()), *(plain["outputs"] or ())):
        for name in ("shape", "strides"):
            if access[name] is None:
                del access[name]
    return plain | {"launch": {name: value for name, value in plain["launch"].items() if value is not None}}
