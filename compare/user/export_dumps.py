"""Export one record's compiler artifacts from its archive, under names that other tools expect.

XLA's files get XLA's own names (module_0001.jit_forward.sm_9.0_gpu_after_optimizations.txt, ...), which hlo-opt and
readers of an --xla_dump_to folder find. XProf gets the protos in its own log folder. Files of Inductor, Triton and
NVRTC keep their names. Nothing is executed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..base.text import printable
from ..base.usage import UsageError, join_some
from ..record.record import Record
from ..record.run_files import RunFile, archived, recorded_file
from ..record.run_folder import read_records
from . import xplane

MAX_BYTES = 4 << 30  # unpacked, in total, so that a damaged or hostile archive fills no disk
MOST_FILES = 20_000
XPROF = "xprof/plugins/profile"

# Name in an archive -> XLA's name after "module_0001.jit_f."; {sm}: "sm_9.0_gpu_", or "" where it is unknown.
_XLA = {
    "before.hlo.txt": "before_optimizations.txt",
    "optimized.hlo.txt": "{sm}after_optimizations.txt",
    "optimized.hlo.pb": "{sm}after_optimizations.hlo.pb",
    "buffers.txt": "{sm}after_optimizations-buffer-assignment.txt",
    "memory.txt": "{sm}after_optimizations-memory-usage-report.txt",
    "thunks.txt": "thunk_sequence.txt",
    "thunks_after_passes.txt": "thunk_sequence_after_thunk_passes.txt",
    "thunk_metadata.txt": "thunk_metadata.txt",
    "priority_fusion.txt": "priority_fusion_dump.txt",
    "autotune_results.pbtxt": "autotune_results.pbtxt",
    "target_config.pbtxt": "gpu_target_config.pbtxt",
    "stablehlo.mlir": "stablehlo.mlir",  # jax writes it; XLA has no name for it
}
_CAPABILITY = re.compile(r"cuda_compute_capability \{\s*major: (\d{1,2})(?:\s*minor: (\d{1,2}))?")
_MODULE = re.compile(r"HloModule ([\w.\-]{1,200})")


@dataclass(frozen=True)
class Exported:
    """The exported files. files: sorted names below the folder. modules: prefixes of XLA's modules."""

    record: Record
    folder: Path
    files: tuple[str, ...]
    modules: tuple[str, ...]


def export(run: Path, record: Record, out: Path) -> Exported:
    """Write the artifacts of a run's record into `out`, a new or empty folder.

    Raises UsageError for a record without an archive; an archive that is damaged, too large or names files outside
    itself; and a folder that is not empty or cannot be written.
    """
    if record.dumps is None:
        raise UsageError(f"{run}: {record.id}: no compiler artifacts were kept ({record.status})")
    try:
        archive = recorded_file(run, record, record.dumps)
        packed = archive.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{archive}: missing; {_kept_in(run, record)}") from None
    except (OSError, ValueError) as problem:
        raise UsageError(str(problem)) from None
    contents = _read(archive, packed)
    modules = _modules(contents)
    files = {name: contents[source] for name, source in _named(contents, modules)}
    protos = {
        prefix.partition(".")[2]: contents[proto]
        for folder, (prefix, _) in modules.items() if (proto := f"{folder}/optimized.hlo.pb") in contents
    }
    if protos:
        files[f"{XPROF}/{record.id.replace('/', '-')}/xlafuse.xplane.pb"] = xplane.space(protos)
    _write(out, files)
    return Exported(record, out, tuple(sorted(files)), tuple(prefix for prefix, _ in modules.values()))


def _kept_in(run: Path, record: Record) -> str:
    """Return a sentence about the archives that the run was kept with, those of the record's block first."""
    there = {file.name for file in archived(run, "dumps")}
    records = [
        one for one in read_records(run)[0] if one.dumps and (one.dumps in there or (run / one.dumps).is_file())
    ]
    records.sort(key=lambda one: (one.case.block != record.case.block, one.case.id != record.case.id))
    if not records:
        return "this run was kept without compiler artifacts"
    named = join_some([one.id for one in records], 3)
    return f"this run was kept with the artifacts of {len(records)} records: {named}"


def _read(archive: RunFile, content: bytes) -> dict[str, bytes]:
    """Return each file's content by name. archive: names it in messages. Raises UsageError."""
    import zipfile
    import zlib
    from lzma import LZMAError

    found: dict[str, bytes] = {}
    left = MAX_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            members = [info for info in packed.infolist() if not info.is_dir()]
            if len(members) > MOST_FILES:
                raise UsageError(f"{archive}: {len(members):,} files, more than {MOST_FILES:,}; nothing was written")
            for info in members:
                _require_inside(archive, info.filename)
                with packed.open(info) as stream:
                    found[info.filename] = stream.read(left + 1)
                left -= len(found[info.filename])
                if left < 0:
                    raise UsageError(f"{archive}: more than {MAX_BYTES >> 30} GiB unpacked; nothing was written")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, zlib.error, LZMAError) as bad:
        raise UsageError(f"{archive}: damaged: {bad or type(bad).__name__}; nothing was written") from None
    return found


def _require_inside(archive: RunFile, name: str) -> None:
    pieces = PurePosixPath(name).parts
    if not pieces or name.startswith("/") or ".." in pieces or "\\" in name or "\0" in name or ":" in pieces[0]:
        raise UsageError(f"{archive}: names a file outside itself, {printable(name, 80)!r}; nothing was written")


def _named(contents: Iterable[str], modules: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (name below the folder, name in the archive)."""
    for source in contents:
        folder, _, rest = source.partition("/")
        if folder not in modules or not rest:
            yield source, source
            continue
        prefix, sm = modules[folder]
        if rest in _XLA:
            yield f"{prefix}.{_XLA[rest].format(sm=sm)}", source
        elif rest.startswith("ptx/"):
            yield f"{prefix}.{rest.removeprefix('ptx/')}", source
        else:
            yield f"{prefix}.{rest}", source


def _modules(contents: dict[str, bytes]) -> dict[str, tuple[str, str]]:
    """Map a folder in the archive ("forward") to its prefix "module_0001.jit_forward" and "sm_9.0_gpu_"."""
    folders = {name.split("/")[0] for name in contents if name.endswith(("/optimized.hlo.txt", "/optimized.hlo.pb"))}
    found = {}
    for number, folder in enumerate(sorted(folders, key=lambda folder: (folder == "backward", folder)), 1):
        text = contents.get(f"{folder}/optimized.hlo.txt", b"")[:1000].decode(errors="replace")
        config = contents.get(f"{folder}/target_config.pbtxt", b"")[:20_000].decode(errors="replace")
        name, capability = _MODULE.match(text), _CAPABILITY.search(config)
        sm = f"sm_{capability[1]}.{capability[2] or 0}_gpu_" if capability else ""
        found[folder] = f"module_{number:04}.{name[1] if name else folder}", sm
    return found


def as_text(exported: Exported) -> str:
    """Return lines about the exported files and tools that read them, and about files that were not kept."""
    lines = [f"{exported.folder}: {len(exported.files)} files of {printable(exported.record.id)}"]
    if exported.modules:
        first = f"{exported.folder}/{exported.modules[0]}"
        lines += [
            f"XLA's files, under XLA's names: {', '.join(exported.modules)}",
            f"  hlo-opt --platform=gpu --stage=hlo --xla_gpu_target_config_filename={first}.gpu_target_config.pbtxt "
            f"{first}.before_optimizations.txt",
            f"  xprof --logdir {exported.folder / 'xprof'}   graph viewer and memory viewer; nothing was profiled",
            "not kept: snapshots of passes that do not decide fusion, and LLVM's IR",
        ]
    if any(name.endswith("output_code.py") for name in exported.files):
        lines += [
            "Inductor's files: its code, FX graphs and scheduler IR, Triton's IRs, PTX and SASS",
            "not kept: the structured log that tlparse reads; TORCH_TRACE=DIR xlafuse run ... writes it",
        ]
    lines.append(f"xlafuse inspect {exported.folder}")
    return "\n".join(lines)


def _write(out: Path, files: dict[str, bytes]) -> None:
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out}: not an empty folder; name a new one, so that nothing is overwritten")
        for name, content in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(content)
    except (OSError, ValueError) as problem:  # ValueError: a name that no file can have
        raise UsageError(f"{getattr(problem, 'filename', None) or out}: cannot be written: {problem}") from None
