"""The results of a folder or archive of dumps, or of one file.

Listing reads names and sizes. Each graph is read on demand. Nothing in a file is executed.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xlafuse.hlo.regular_file import require_regular

from ..base.usage import UsageError
from .result import Result, reader_of
from .run_source import is_run
from .source import Source

if TYPE_CHECKING:
    from xlafuse.dumps.dump_folder import Artifacts
    from xlafuse.hlo.text_reader import Module
    from xlafuse.triton_side.inductor.graph import Program

    from ..graph.model import FusionGraph

EXPECTED = (
    "expected a run folder, a folder or archive of dumps (XLA's --xla_dump_to, TORCH_COMPILE_DEBUG, TORCH_TRACE, what "
    "`xlafuse export` wrote), HLO as text or proto, Inductor's output_code.py, a fusion graph's JSON, or a profile "
    "(*.xplane.pb, a trace of torch.profiler, the SQLite of `nsys export --type sqlite`)"
)


def open_files(path: Path, rank: int | None = None) -> Source:
    """Return the results of a folder, an archive or a file. rank: of a TORCH_TRACE folder of several; default: lowest.

    Raises UsageError where the path has no graph, or no such rank.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if rank is not None:
        return _of_rank(path, rank)
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        raise UsageError(f"{path}: neither a file nor a folder; {EXPECTED}")
    return _of_file(path)


def _of_folder(folder: Path) -> Source:
    found = [*_of_modules(folder), *_of_inductor(folder)]
    warnings = _warn_of_phases(found)
    found = found or _of_graphs(folder) or _of_files(folder)
    if not found:
        raise UsageError(f"{folder}: no graph found; {EXPECTED}")
    return Source("dump", folder, tuple(_numbered(found)), warnings)


def _of_rank(folder: Path, rank: int) -> Source:
    if not folder.is_dir() or is_run(folder) or not (found := _of_inductor(folder, rank)):
        raise UsageError(f"{folder}: --rank chooses in a TORCH_TRACE folder of several ranks")
    return Source("dump", folder, tuple(_numbered(found)))


def _of_files(folder: Path) -> list[Result]:
    """Return the HLO files and archives of dumps in a folder, by file name."""
    found = []
    for path in _files(folder):
        if zipfile.is_zipfile(path):
            modules = _of_modules(path)
            for each in modules:
                found.append(replace(each, id=f"{path.stem}/{each.id}" if len(modules) > 1 else path.stem))
            found += [replace(each, id=path.stem) for each in _of_inductor(path)]
        elif b"HloModule" in _head_of_any(path) or path.name.removesuffix(".gz").endswith((".hlo", ".hlo.pb")):
            found.append(Result(path.name, 1, path, partial(_from_hlo_file, path), cost=path.stat().st_size))
    return found


def _files(folder: Path) -> list[Path]:
    """Return the files in a folder, sorted. Raises OSError where one is a FIFO, a socket or a device."""
    found = sorted(path for path in folder.iterdir() if path.exists() and not path.is_dir())
    for path in found:
        require_regular(path)
    return found


def _head_of_any(path: Path) -> bytes:
    try:
        return _head(path)
    except (EOFError, OSError, zlib.error):
        return b""  # not a gzip file in spite of its name


def _warn_of_phases(found: Sequence[Result]) -> tuple[str, ...]:
    """Return a warning for the two phases of a training step.

    Two modules do not say which result of forward is which parameter of backward; a run's graph does.
    """
    if {result.id for result in found} != {"forward", "backward"} or len(found) != 2:
        return ()
    return (
        "forward and backward are two graphs here: saved arrays count as outputs of forward and inputs of backward, so "
        "their efficiencies exceed the step's; the step's run has both in one graph",
    )


def _of_file(path: Path) -> Source:
    head = _head(path)
    if not head:
        raise UsageError(f"{path}: the file is empty; {EXPECTED}")
    if head.startswith(b"PK\x03\x04"):
        found = [*_of_modules(path), *_of_inductor(path)]
        if not found:
            raise UsageError(
                f"{path}: the archive has neither HLO, nor Inductor's code, nor one profile alone (unpack several); "
                "graphs of Triton and CUDA kernels are in their run: inspect its folder"
            )
        return Source("dump", path, tuple(_numbered(found)), _warn_of_phases(found))
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"["):
        return Source("file", path, tuple(_numbered(_of_json(path))))
    if b"HloModule" not in head and (path.name.removesuffix(".gz").endswith((".py", ".log")) or _is_trace_log(path)):
        return Source("file", path, tuple(_numbered(_of_inductor(path))))
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise UsageError(f"{path}: a report of Nsight Systems; `nsys export --type sqlite` makes the file to read")
    module = Result(path.name, 1, path, partial(_from_hlo_file, path), program=partial(_module_of_file, path))
    return Source("file", path, (module,))


def _head(path: Path, size: int = 4096) -> bytes:
    """Return the beginning of a file, unpacked."""
    with path.open("rb") as file:
        if not file.peek(2).startswith(b"\x1f\x8b"):
            return file.read(size)
        with gzip.open(file) as unpacked:
            return unpacked.read(size)


def _numbered(found: Iterable[Result]) -> Iterator[Result]:
    for number, each in enumerate(found, 1):
        yield replace(each, number=number)


# XLA


def _of_modules(source: Path) -> list[Result]:
    """Return the modules of a folder or archive, largest first."""
    from xlafuse.dumps import dump_folder

    return [
        Result(
            m.name, 1, source, partial(_from_artifacts, m.name, m.artifacts), cost=m.cost, order=m.id,
            artifacts=m.artifacts, program=partial(_module, m.name, m.artifacts),
        )
        for m in dump_folder.modules(source)
    ]


def _from_artifacts(name: str, artifacts: Artifacts) -> FusionGraph:
    from xlafuse.dumps import thunks
    from xlafuse.hlo import file_reader
    from xlafuse.reasons import fusion_decisions

    from ..graph.build import xla_reasons
    from ..graph.build.epilogues import with_epilogues
    from ..graph.build.from_hlo import from_hlo, with_thunks

    module = _module(name, artifacts)
    graph = from_hlo(module, phase="backward" if name == "backward" else "forward", target=_target(artifacts, module))
    if before := artifacts.find("hlo_before"):
        with before.local() as path:
            graph = with_epilogues(graph, file_reader.read(path))
    graph = with_thunks(graph, thunks.read(artifacts))
    return replace(graph, reasons=xla_reasons.reasons(graph, fusion_decisions.read_decisions(artifacts)))


def _module(name: str, artifacts: Artifacts) -> Module:
    from xlafuse.hlo import file_reader

    file = artifacts.find("hlo") or artifacts.find("hlo_proto")
    if file is None:
        raise ValueError(f"{artifacts.where}: {name}: no optimized HLO; XLA writes it with --xla_dump_hlo_as_text")
    with file.local() as path:
        return _optimized(file_reader.read(path))


_DEVICE = re.compile(r'^\s*device_description_str: "([^"]{1,100})"', re.MULTILINE)


def _target(artifacts: Artifacts, module: Module) -> str:
    """Return the GPU that XLA compiled for, else "cpu" or "tpu", or "" where its files do not say."""
    file = artifacts.find("target_config")
    if file is None:
        return _other_platform(module)
    with file.open_binary() as stream:
        found = _DEVICE.search(stream.read(1 << 16).decode(errors="replace"))
    return found[1] if found else ""


def _other_platform(module: Module) -> str:
    """Return "cpu" or "tpu"; "" for a GPU, because a module does not name it, and where nothing tells."""
    from xlafuse.hlo.platform import platform_of

    found = platform_of(module)
    return "" if found in (None, "gpu") else found


def _from_hlo_file(path: Path) -> FusionGraph:
    from ..graph.build import xla_reasons
    from ..graph.build.from_hlo import from_hlo

    module = _module_of_file(path)
    graph = from_hlo(module, target=_other_platform(module))
    return replace(graph, reasons=xla_reasons.reasons(graph, ()))


def _module_of_file(path: Path) -> Module:
    from xlafuse.hlo import file_reader

    return _optimized(file_reader.read(path))


def _optimized(module: Module) -> Module:
    """Return the module. Raises ValueError for a program before XLA's fusion passes, whose operations are no kernels.

    XLA schedules a module after all other passes. A module with fusions and without a schedule is from between passes.
    """
    opcodes = {part.opcode for each in module.computations.values() for part in each.instructions.values()}
    if module.is_scheduled or opcodes & {"fusion", "fusion-start"} or not opcodes:
        return module
    raise ValueError(
        "this is a program before fusion: it has neither a schedule nor a fusion, and its operations are no kernels; "
        "give the module after optimizations (XLA's file *after_optimizations.txt)"
    )


# Inductor


def _of_inductor(path: Path, rank: int | None = None) -> list[Result]:
    """Return one graph of all code of Inductor in a path, or nothing where it left none. rank: as in `open_files`."""
    if not _holds_inductor(path):
        return []

    def program() -> Program:
        from xlafuse.triton_side.inductor import dump

        return dump.read(path, rank)

    def read() -> FusionGraph:
        from ..graph.build.from_inductor import from_inductor

        graph = from_inductor(program())
        if not graph.kernels:
            raise ValueError("no kernels found; expected Inductor's output_code.py, or a folder of it")
        return replace(graph, name=path.name)

    return [Result(path.name, 1, path, read, program=program)]


def _holds_inductor(path: Path) -> bool:
    from xlafuse.triton_side.inductor.dump import is_trace_log, trace_logs_in

    if path.is_dir():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        return any(file.name == "output_code.py" for file in files) or any(map(is_trace_log, files))
    if not zipfile.is_zipfile(path):
        return True
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("output_code.py") for name in archive.namelist()) or bool(trace_logs_in(archive))


def _is_trace_log(path: Path) -> bool:
    from xlafuse.triton_side.inductor.dump import is_trace_log

    return is_trace_log(path)


# xlafuse's JSON


def _of_json(path: Path) -> list[Result]:
    """Return the graph in a file, or the graphs of a saved `Explained`, by name."""
    from ..graph import store
    from . import explained

    data = json.loads(read_bytes(path, store.MAX_BYTES))
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError(f"JSON that is neither a fusion graph nor a profile; {EXPECTED}")
    schema = data["schema"]
    if schema != explained.SCHEMA and (remedy := store.other_version(schema, explained.SCHEMA)):
        raise ValueError(f"expected an object of schema {explained.SCHEMA!r}, got {schema!r}{remedy}")
    if schema == explained.SCHEMA:
        if not isinstance(data.get("graphs"), dict):
            raise ValueError(f"expected an object `graphs` of name and graph in a file of schema {explained.SCHEMA!r}")
        graphs = {name: store.from_json(each) for name, each in data["graphs"].items()}
    else:
        graph = store.from_json(data)
        graphs = {graph.name: graph}
    return [Result(name, 1, path, reader_of(graph)) for name, graph in graphs.items()]


def _of_graphs(folder: Path) -> list[Result]:
    from ..graph import store

    files = [p for p in _files(folder) if p.name.endswith((".json", ".json.gz"))]
    files = [p for p in files if store.KIND.encode() in _head_of_any(p)]
    return [Result(p.name.split(".json")[0], 1, p, partial(store.load, p), cost=p.stat().st_size) for p in files]


def read_bytes(path: Path, most: int) -> bytes:
    """Return the file's bytes, unpacked if gzipped. Raises ValueError for more than `most`."""
    with path.open("rb") as file:
        packed = file.peek(2).startswith(b"\x1f\x8b")
        with gzip.open(file) if packed else file as stream:
            data = stream.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    return data
