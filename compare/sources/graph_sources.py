"""The fusion graphs of a path: a run, a folder or archive of dumps, or one file.

Listing reads names and sizes. Each graph is read on demand. Nothing in a file is executed.
"""

from __future__ import annotations

import codecs
import fnmatch
import gzip
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xlafuse.hlo.regular_file import require_regular

from ..base.text import printable
from ..base.usage import UsageError, join_some, one_of
from ..record.record import Record
from ..record.run_files import recorded_file
from ..record.run_folder import read_records, read_run

if TYPE_CHECKING:
    from xlafuse.dumps.dump_folder import Artifacts
    from xlafuse.hlo.text_reader import Module

    from ..graph.analyse.roofline import Ceilings
    from ..graph.model import FusionGraph

Kind = Literal["run", "dump", "file"]
MOST_NAMED = 10
SHOWN_AT_ONCE = 2  # modules of a folder, such as forward and backward of one function
EXPECTED = (
    "expected a run folder, a folder or archive of dumps (XLA's --xla_dump_to, TORCH_COMPILE_DEBUG, TORCH_TRACE, what "
    "`xlafuse dumps` wrote), HLO as text or proto, Inductor's output_code.py, a fusion graph's JSON, or a profile "
    "(*.xplane.pb, a trace of torch.profiler, the SQLite of `nsys export --type sqlite`)"
)


@dataclass(frozen=True)
class GraphSource:
    """A graph that can be read.

    name: the record's id, the module's or the file's name. number: the place in the list, from 1. read: returns the
    graph; None where none was recorded. cost: bytes of text, the order of the list; None where unknown. order: XLA's
    number of the module. record: in a run. ceilings: of the run's device. artifacts: of an XLA module.
    """

    name: str
    number: int
    path: Path
    read: Callable[[], FusionGraph] | None
    cost: int | None = None
    order: int = 0
    record: Record | None = None
    ceilings: Ceilings | None = None
    artifacts: Artifacts | None = None

    def graph(self) -> FusionGraph:
        """Read the graph. Raises UsageError, which names the file, where that fails or nothing could be read."""
        if self.read is None:
            raise UsageError(f"{self.path}: {self.name}: no graph recorded")
        with reading_errors_as_usage(self.path):
            graph = self.read()
        if graph.unparsed and graph.kernels == ():
            lines = f"{len(graph.unparsed)} line{'s' * (len(graph.unparsed) > 1)}"
            raise UsageError(
                f"{self.path}: {self.name}: no kernels found, and {lines} could not be read; the first is "
                f"{printable(graph.unparsed[0], 100)!r}"
            )
        return graph

    def compiled(self) -> list[tuple[str, Artifacts]]:
        """Return the XLA modules behind the graph by name: itself, or those in its record's archive, forward first.

        The list is empty where another compiler made the graph. Raises UsageError for an unreadable archive.
        """
        if self.artifacts is not None:
            return [(self.name, self.artifacts)]
        if self.record is None or self.record.dumps is None:
            return []
        from xlafuse.dumps import dump_folder

        with reading_errors_as_usage(self.path):
            packed = recorded_file(self.path, self.record, self.record.dumps)
            made = dump_folder.modules(dump_folder.Archive(str(packed), packed.read_bytes()))
        made.sort(key=lambda module: (module.name == "backward", module.name))
        return [(f"{self.name} {m.name}" if len(made) > 1 else self.name, m.artifacts) for m in made]

    def ceilings_for(self, graph: FusionGraph, target: str | None) -> tuple[Ceilings | None, str]:
        """Return ceilings and their origin.

        These are `target`'s if one is named, else the run's own, else those of the device that the graph was compiled
        for, or None. For a record, they are at its case's precision.

        Raises UsageError where a target is named for code that runs on another kind of device.
        """
        from .. import targets
        from .target_ceilings import origin, own_ceilings, target_ceilings

        found, whose = self.ceilings, "this run's device"
        if target is not None:
            found, whose = target_ceilings(target), origin(target)
            kind = "tpu" if graph.target.startswith("tpu") else graph.target
            if kind == "cpu" or (kind == "tpu") != targets.is_tpu(target):
                device = kind.upper() if kind in ("cpu", "tpu") else graph.target or "GPU"
                raise UsageError(f"{self.path}: compiled for the {device}; {target} cannot price its bytes")
        elif found is None:
            found, whose = own_ceilings(graph)
        return found and found.at(None if self.record is None else self.record.case.precision), whose


@dataclass(frozen=True)
class Contents:
    kind: Kind
    path: Path
    graphs: tuple[GraphSource, ...]
    warnings: tuple[str, ...] = ()

    def modules(self, name: str) -> list[GraphSource]:
        """Find modules by number, name or pattern. Raises UsageError for none, or for more than SHOWN_AT_ONCE."""
        found = [each for each in self.graphs if name == str(each.number)]
        found = found or [each for each in self.graphs if each.name == name]
        found = found or [each for each in self.graphs if fnmatch.fnmatchcase(each.name, name)]
        if not found:
            one_of("module", name, [each.name for each in self.graphs], most=MOST_NAMED)
        if len(found) > SHOWN_AT_ONCE:
            numbers = join_some([str(each.number) for each in found], MOST_NAMED)
            raise UsageError(f"{self.path}: {len(found)} modules are called {name!r}; choose by number: {numbers}")
        return found

    def module(self, name: str | None) -> GraphSource:
        """Return the module of that name, or the only one. Raises UsageError where there are several."""
        found = list(self.graphs) if name is None else self.modules(name)
        if len(found) != 1:
            names = join_some([printable(f"{each.number} {each.name}", 60) for each in found], 5)
            runs = "; to compare two runs: `xlafuse diff`" if self.kind == "run" else ""
            raise UsageError(
                f"{self.path}: holds {len(found)} graphs ({names}), and one is needed: --module NUMBER or NAME{runs}"
            )
        return found[0]


def contents(path: Path, rank: int | None = None) -> Contents:
    """Return the graphs of a path. rank: of a TORCH_TRACE folder of several; by default its lowest.

    Raises UsageError where the path has no graph, or no such rank, and RunFolderError for a broken run.
    """
    with reading_errors_as_usage(path):
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        if rank is not None:
            return _of_rank(path, rank)
        if path.is_dir():
            return _of_run(path) if is_run(path) else _of_folder(path)
        if not path.is_file():
            raise UsageError(f"{path}: neither a file nor a folder; {EXPECTED}")
        return _of_file(path)


def is_run(path: Path) -> bool:
    """Return whether the path is the folder of a run, which has records."""
    return (path / "run.json").exists()


def has_profile(path: Path) -> bool:
    """Return whether a path is a profile, or a folder that has one and is no run.

    Raises UsageError where its files cannot be read.
    """
    with reading_errors_as_usage(path):
        if is_run(path):
            return False
        from ..profiles.files import profile_files

        return bool(profile_files(path))


@contextmanager
def reading_errors_as_usage(path: Path) -> Iterator[None]:
    """Turn errors of the file readers into a UsageError that names the file."""
    try:
        yield
    except (EOFError, OSError, RecursionError, ValueError, zlib.error) as problem:
        words = str(problem) or type(problem).__name__
        if isinstance(problem, OSError) and problem.filename and problem.strerror:
            words = f"{problem.filename}: {problem.strerror}"
        raise UsageError(words if str(path) in words else f"{path}: {words}") from None


def _of_run(folder: Path) -> Contents:
    run = read_run(folder)
    records, warnings = read_records(folder)
    opened = contents_of_records(folder, run, records)
    return replace(opened, warnings=(*warnings, *opened.warnings))


def contents_of_records(folder: Path, run: dict[str, Any], records: Iterable[Record]) -> Contents:
    """Return the contents of a run's folder that was already read."""
    ceilings = _segment_ceilings(run)
    found = [
        GraphSource(
            record.id, 1, folder, _recorded(folder, record), record=record, ceilings=ceilings.get(record.segment or "")
        )
        for record in records
    ]
    return Contents("run", folder, tuple(_numbered(found)))


def _recorded(folder: Path, record: Record) -> Callable[[], FusionGraph] | None:
    """Return a reader of the record's graph, which reads only files in the run's folder."""
    name = record.graph
    if name is None:
        return None

    def read() -> FusionGraph:
        from ..graph import store
        from ..graph.render import measured_bytes

        graph = store.load(recorded_file(folder, record, name))
        return measured_bytes.with_measured_bytes(graph, record.traffic or {})

    return read


def _segment_ceilings(run: dict[str, Any]) -> dict[str, Ceilings]:
    from ..graph.analyse.roofline import Ceilings

    found = {}
    listed = run.get("segments")
    for segment in listed if isinstance(listed, list) else ():
        try:
            found[segment["id"]] = Ceilings.from_json(segment["ceilings"])
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # a segment without a GPU has no ceilings
    return found


def _of_folder(folder: Path) -> Contents:
    found = [*_of_modules(folder), *_of_inductor(folder)]
    warnings = _warn_of_phases(found)
    found = found or _of_graphs(folder) or _of_files(folder)
    if not found:
        raise UsageError(f"{folder}: no graph found; {EXPECTED}")
    return Contents("dump", folder, tuple(_numbered(found)), warnings)


def _of_rank(folder: Path, rank: int) -> Contents:
    if not folder.is_dir() or is_run(folder) or not (found := _of_inductor(folder, rank)):
        raise UsageError(f"{folder}: --rank chooses in a TORCH_TRACE folder of several ranks")
    return Contents("dump", folder, tuple(_numbered(found)))


def _of_files(folder: Path) -> list[GraphSource]:
    """Return the HLO files and archives of dumps in a folder, by file name."""
    found = []
    for path in _files(folder):
        if zipfile.is_zipfile(path):
            modules = _of_modules(path)
            for each in modules:
                found.append(replace(each, name=f"{path.stem}/{each.name}" if len(modules) > 1 else path.stem))
            found += [replace(each, name=path.stem) for each in _of_inductor(path)]
        elif b"HloModule" in _head_of_any(path) or path.name.removesuffix(".gz").endswith((".hlo", ".hlo.pb")):
            found.append(GraphSource(path.name, 1, path, partial(_from_hlo_file, path), path.stat().st_size))
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


def _warn_of_phases(found: Sequence[GraphSource]) -> tuple[str, ...]:
    """Return a warning for the two phases of a training step.

    Two modules do not say which result of forward is which parameter of backward; a run's graph does.
    """
    if {each.name for each in found} != {"forward", "backward"} or len(found) != 2:
        return ()
    return (
        "forward and backward are two graphs here: saved arrays count as outputs of forward and inputs of backward, so "
        "their efficiencies exceed the step's; the step's run has both in one graph",
    )


def _of_file(path: Path) -> Contents:
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
        return Contents("dump", path, tuple(_numbered(found)), _warn_of_phases(found))
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"["):
        return Contents("file", path, tuple(_numbered(_of_json(path))))
    if b"HloModule" not in head and (path.name.removesuffix(".gz").endswith((".py", ".log")) or _is_trace_log(path)):
        return Contents("file", path, tuple(_numbered(_of_inductor(path))))
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise UsageError(f"{path}: a report of Nsight Systems; `nsys export --type sqlite` makes the file to read")
    return Contents("file", path, (GraphSource(path.name, 1, path, partial(_from_hlo_file, path)),))


def _head(path: Path, size: int = 4096) -> bytes:
    """Return the beginning of a file, unpacked."""
    with path.open("rb") as file:
        if not file.peek(2).startswith(b"\x1f\x8b"):
            return file.read(size)
        with gzip.open(file) as unpacked:
            return unpacked.read(size)


def _numbered(found: Iterable[GraphSource]) -> Iterator[GraphSource]:
    for number, each in enumerate(found, 1):
        yield replace(each, number=number)


# XLA


def _of_modules(source: Path) -> list[GraphSource]:
    """Return the modules of a folder or archive, largest first."""
    from xlafuse.dumps import dump_folder

    return [
        GraphSource(
            m.name, 1, source, partial(_from_artifacts, m.name, m.artifacts), m.cost, m.id, artifacts=m.artifacts
        )
        for m in dump_folder.modules(source)
    ]


def _from_artifacts(name: str, artifacts: Artifacts) -> FusionGraph:
    from xlafuse.dumps import thunks
    from xlafuse.hlo import file_reader
    from xlafuse.reasons import fusion_decisions

    from ..graph.build import xla_reasons
    from ..graph.build.epilogues import with_epilogues
    from ..graph.build.from_hlo import from_hlo
    from ..graph.build.xla_thunks import with_thunks

    file = artifacts.find("hlo") or artifacts.find("hlo_proto")
    if file is None:
        raise ValueError(f"{artifacts.where}: {name}: no optimized HLO; XLA writes it with --xla_dump_hlo_as_text")
    with file.local() as path:
        module = _optimized(file_reader.read(path))
    graph = from_hlo(module, phase="backward" if name == "backward" else "forward", target=_target(artifacts, module))
    if before := artifacts.find("hlo_before"):
        with before.local() as path:
            graph = with_epilogues(graph, file_reader.read(path))
    graph = with_thunks(graph, thunks.read(artifacts))
    return replace(graph, reasons=xla_reasons.reasons(graph, fusion_decisions.read_decisions(artifacts)))


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
    from xlafuse.hlo import file_reader

    from ..graph.build import xla_reasons
    from ..graph.build.from_hlo import from_hlo

    module = _optimized(file_reader.read(path))
    graph = from_hlo(module, target=_other_platform(module))
    return replace(graph, reasons=xla_reasons.reasons(graph, ()))


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


def _of_inductor(path: Path, rank: int | None = None) -> list[GraphSource]:
    """Return one graph of all code of Inductor in a path, or nothing where it left none. rank: as in `contents`."""
    if not _holds_inductor(path):
        return []

    def read() -> FusionGraph:
        from xlafuse.triton_side.inductor import dump

        from ..graph.build.from_inductor import from_inductor

        graph = from_inductor(dump.read(path, rank))
        if not graph.kernels:
            raise ValueError("no kernels found; expected Inductor's output_code.py, or a folder of it")
        return replace(graph, name=path.name)

    return [GraphSource(path.name, 1, path, read)]


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


def _of_json(path: Path) -> list[GraphSource]:
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
    return [GraphSource(name, 1, path, partial(_itself, graph)) for name, graph in graphs.items()]


def _itself(graph: FusionGraph) -> FusionGraph:
    return graph


def _of_graphs(folder: Path) -> list[GraphSource]:
    from ..graph import store

    files = [p for p in _files(folder) if p.name.endswith((".json", ".json.gz"))]
    files = [p for p in files if store.KIND.encode() in _head_of_any(p)]
    return [GraphSource(p.name.split(".json")[0], 1, p, partial(store.load, p), p.stat().st_size) for p in files]


def read_bytes(path: Path, most: int) -> bytes:
    """Return the file's bytes, unpacked if gzipped. Raises ValueError for more than `most`."""
    with path.open("rb") as file:
        packed = file.peek(2).startswith(b"\x1f\x8b")
        with gzip.open(file) if packed else file as stream:
            data = stream.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    return data
