"""Fusion graphs as JSON files: `save` and `load`. Reading executes no code and needs no framework."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import types
import typing
import zlib
from pathlib import Path
from typing import Any, Literal, Protocol

from ..base import atomic_write
from .model import REASONS, Access, Buffer, FusionGraph, Kernel, Launch, Reason, SourceOp

KIND = "xlafuse.fusion-graph/"
SCHEMA = KIND + "1"
MAX_BYTES = 1 << 30
_MOST_BRANCHES = 8  # as in xlafuse/hlo/module_walk.py


class Readable(Protocol):
    """A file: a Path, or one of a run. str() names it in messages."""

    def read_bytes(self) -> bytes: ...


class GraphError(ValueError):
    """The input is not a fusion graph. The message names the file or field, and what was expected."""


def to_json(graph: FusionGraph) -> dict[str, Any]:
    """Return the graph as JSON, with values that are derived from it.

    `Kernel`, `Buffer` and `Reason` keep their field names, but a kernel's phase is `part`. Kernels add `index`,
    `bytes_read`, `bytes_written`, `stages` and `lines`. Buffers add `producer` (the index of the first kernel that
    writes it, or null) and `consumers` (indices). Unknown fields of a launch and of an access are absent.
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
        kernels = data.get("kernels")
        graph = FusionGraph(
            name=str(data["name"]),
            compiler=str(data["compiler"]),
            kernels=None if kernels is None else tuple(map(_kernel, kernels)),
            buffers=tuple(_read(Buffer, b, shape=tuple(map(int, b["shape"])), bytes=int(b["bytes"]))
                          for b in data.get("buffers", ())),
            reasons=tuple(_read(Reason, reason) for reason in data.get("reasons", ())),
            operations=tuple(_read(SourceOp, op) for op in data.get("operations", ())),
            unparsed=tuple(map(str, data.get("unparsed", ()))),
            versions=dict(data.get("versions", {})),
            target=str(data.get("target", "")),
            notes=tuple(map(str, data.get("notes", ()))),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise GraphError(f"a field is missing or misshapen: {type(problem).__name__}: {problem}") from None
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
        for name in ("opcodes", "views", "branches"):
            if not isinstance(kernel.facts.get(name, ()), list | tuple):
                raise GraphError(f"kernel {kernel.name!r}: the fact {name!r} must be a list")
        for name in ("with", "counted"):
            if not isinstance(kernel.facts.get(name, {}), dict):
                raise GraphError(f"kernel {kernel.name!r}: the fact {name!r} must be an object")
        branches = kernel.facts.get("branches", ())
        if len(branches) > _MOST_BRANCHES or any(
            not isinstance(each, list | tuple) or list(map(type, each)) != [str, int, int] for each in branches
        ):
            raise GraphError(f"kernel {kernel.name!r}: the fact 'branches' must list a few [name, index, number]")
        if not isinstance(kernel.facts.get("launches_if_taken", 0), int):
            raise GraphError(f"kernel {kernel.name!r}: the fact 'launches_if_taken' must be a number")
        for access in (*(kernel.inputs or ()), *(kernel.outputs or ())):
            if access.buffer not in graph.buffer:
                raise GraphError(f"kernel {kernel.name!r} uses buffer {access.buffer!r}, which is not among `buffers`")
    for reason in graph.reasons:
        if reason.code not in REASONS:
            raise GraphError(f"reason {reason.code!r} is not one of {', '.join(REASONS)}")


def _kernel(data: dict[str, Any]) -> Kernel:
    def accesses(side: str) -> tuple[Access, ...] | None:
        return None if data.get(side) is None else tuple(map(_access, data[side]))

    ops = tuple(_read(SourceOp, op) for op in data.get("source_ops", ()))
    known, facts = data.get("launch"), {**data.get("facts", {})}
    if known is None:  # before launches had a place of their own
        known = {name: facts.pop(old) for old, name in _OLD_FACTS.items() if old in facts}
        if (warps := facts.pop("num_warps", None)) is not None:
            known["config"] = {"num_warps": warps}
    return _read(
        Kernel, data, source_ops=ops, inputs=accesses("inputs"), outputs=accesses("outputs"), facts=facts,
        launch=_read(Launch, {name: value for name, value in known.items() if name not in _EXTENTS},
                     **{name: _extent(known[name]) for name in _EXTENTS if known.get(name) is not None}),
    )


_EXTENTS = ("grid", "block")
# Facts of older graphs -> fields of a launch.
_OLD_FACTS = {
    "grid": "grid", "block": "block", "registers": "registers", "shared_bytes": "shared_bytes",
    "spills_bytes": "local_bytes",
}


def _extent(value: Any) -> tuple[int, int, int]:
    x, y, z = map(int, value)
    return x, y, z


def _access(data: dict[str, Any]) -> Access:
    view = {name: tuple(map(int, data[name])) for name in ("shape", "strides") if data.get(name) is not None}
    return _read(Access, data, **view)


def _read(kind: type[Any], data: dict[str, Any], **replaced: Any) -> Any:
    """Return an object of the data model. Raises TypeError or ValueError for a field of a wrong type or value."""
    values = {}
    for name, allowed in _ALLOWED[kind]:
        value = replaced.get(name, data.get(_KEYS.get(name, name), _ABSENT))
        if value is _ABSENT:
            continue
        if isinstance(allowed, frozenset):
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(sorted(allowed))}")
        elif not isinstance(value, allowed):
            raise TypeError(f"{name} is of type {type(value).__name__}")
        values[name] = value
    return kind(**values)


_ABSENT = object()
_KEYS = {"phase": "part"}  # fields that stored graphs have under another name


def _allowed(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return, by field, the types that its annotation allows, or the words of a Literal."""
    found: list[tuple[str, Any]] = []
    for name, hint in typing.get_type_hints(kind).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if typing.get_origin(hint) is Literal:
            found.append((name, frozenset(typing.get_args(hint))))
            continue
        plain = {typing.get_origin(option) or option for option in options}
        found.append((name, tuple(plain | ({int} if float in plain else set()))))
    return tuple(found)


_ALLOWED = {kind: _allowed(kind) for kind in (Access, Buffer, Kernel, Launch, Reason, SourceOp)}


def _plain_kernel(kernel: Kernel) -> dict[str, Any]:
    plain = {_KEYS.get(name, name): value for name, value in dataclasses.asdict(kernel).items()}
    for access in (*(plain["inputs"] or ()), *(plain["outputs"] or ())):
        for name in ("shape", "strides"):
            if access[name] is None:
                del access[name]
    return plain | {"launch": {name: value for name, value in plain["launch"].items() if value is not None}}
