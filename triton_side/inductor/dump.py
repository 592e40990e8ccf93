"""Read TorchInductor's dumps without torch, by `read`. Nothing in a dump is executed.

There are three kinds of dump:
- a `torch_compile_debug` folder (TORCH_COMPILE_DEBUG=1);
- a TORCH_TRACE folder, or one of its logs, by any name, which may be gzipped or in a zip;
- the output of `compiler.Captured.write`, as a folder or a zip.

graph_reader.py makes the graphs from the texts.

A value that a dump lacks is None or empty. No dump says why Inductor did not fuse more, and only our own says what was
autotuned. The bytes that a kernel touches in a buffer larger than its loop need the scheduler IR, which a TORCH_TRACE
lacks. A backward operation with the name of a forward operation is that operation computed again.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import md5
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from xlafuse.triton_side.inductor.graph import CompiledGraph, GraphBreak, Program, without_views, without_waits
from xlafuse.triton_side.inductor.graph_reader import MAPPINGS, GraphReader, Texts
from xlafuse.triton_side.inductor.ir_text import read_fx
from xlafuse.triton_side.inductor.output_code import read_code

MAX_BYTES = 256 << 20  # the largest text that is read
_MAX_FILES = 100_000


class DumpError(ValueError):
    """The path is no dump of Inductor; the message names it and says what was expected."""


def read(path: str | Path, rank: int | None = None) -> Program:
    """Return all graphs in a folder, log or zip. Units are numbered in the order of their compilation.

    A TORCH_TRACE folder of several ranks yields `rank`, by default its lowest, and a note on how the others differ.

    Raises DumpError if there is no graph, OSError if the path cannot be read.
    """
    breaks: list[GraphBreak] = []
    notes: list[str] = []
    texts = _texts(Path(path), rank, breaks, notes)
    graphs = tuple(_graphs(texts))
    if any(read_code(one.code).on_cpu for one in texts):
        notes.append("compiled for a CPU: its kernels are C++ code, not a GPU's")
    if not any(graph.calls or graph.outputs for graph in graphs):
        raise DumpError(f"{path}: no kernel call in its emitted code; {'; '.join(graphs[0].unparsed[:1])}")
    return Program(graphs, tuple(dict.fromkeys(breaks)), tuple(notes))


def emitted_codes(path: str | Path, rank: int | None = None) -> list[str]:
    """Return the text of each output_code.py in a folder, log or zip. Raises as `read` does."""
    return [each.code for each in _texts(Path(path), rank, [], [])]


def _texts(path: Path, rank: int | None, breaks: list[GraphBreak], notes: list[str]) -> list[Texts]:
    try:
        if rank is not None and (path.is_file() or rank not in ranks(path)):
            known = ", ".join(map(str, sorted(ranks(path)))) if path.is_dir() else ""
            raise DumpError(f"{path}: no TORCH_TRACE log of rank {rank}" + (f"; it has ranks {known}" if known else ""))
        if path.is_file():
            texts = _of_file(path, breaks, notes)
        else:
            texts = _of_folder(path, rank, breaks, notes)
    except (EOFError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, NotImplementedError, RecursionError) as problem:
        raise DumpError(f"{path}: {problem}") from None
    if not texts:
        raise DumpError(
            f"{path}: no emitted code in it; expected output_code.py files (TORCH_COMPILE_DEBUG=1), a "
            "dedicated_log_torch_trace_*.log with inductor_output_code (TORCH_TRACE), or kernels.json with "
            "forward/output_code.py"
        )
    return texts


def _of_file(path: Path, breaks: list[GraphBreak], notes: list[str]) -> list[Texts]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = {info.filename: info for info in archive.infolist()[:_MAX_FILES]}

            def member(name: str) -> str:
                if name not in names or names[name].file_size > MAX_BYTES:
                    return ""
                with archive.open(name) as stream:
                    return stream.read(MAX_BYTES).decode(errors="replace")

            found = list(_of_capture(str(path), member, sorted(names)))
            for name in [] if found else trace_logs_in(archive):
                with archive.open(name) as log:
                    found += _of_trace(f"{path}/{name}", log, breaks, notes)
            return found
    if path.suffix == ".py":
        return [Texts(str(path), _text(path))]
    return list(_of_log(path, breaks, notes))


def _of_folder(path: Path, rank: int | None, breaks: list[GraphBreak], notes: list[str]) -> list[Texts]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if (path / "kernels.json").is_file():
        names = [str(file.relative_to(path)) for file in sorted(path.rglob("output_code.py"))]
        return list(_of_capture(str(path), lambda name: _text(path / name), names))
    codes = sorted(path.rglob("output_code.py"))[:_MAX_FILES]
    if codes:
        return [_of_debug(code) for code in codes]
    of_rank = ranks(path)
    if len(of_rank) < 2:
        return [texts for log in logs(path) for texts in _of_log(log, breaks, notes)]
    first = min(of_rank) if rank is None else rank
    chosen = [texts for log in of_rank[first] for texts in _of_log(log, breaks, notes)]
    differences: dict[str, list[str]] = {}
    for other in sorted(of_rank.keys() - {first}):
        found = [texts for log in of_rank[other] for texts in _of_log(log, [], [])]
        differences.setdefault(_difference(chosen, found), []).append(str(other))
    notes.append(f"rank {first} of {len(of_rank)} ranks" + "".join(
        f"; rank{'s' if len(alike) > 1 else ''} {', '.join(alike)}: {words}" for words, alike in differences.items()
    ) + "; --rank chooses another")
    return chosen


def ranks(folder: Path) -> dict[int, list[Path]]:
    """Return the logs of each rank in a TORCH_TRACE folder, by their names, else by their events."""
    found: dict[int, list[Path]] = {}
    for log in logs(folder):
        match = _RANK_OF_NAME.search(log.name)
        if match is None:
            with log.open("rb") as file:
                match = _early_line(file, _RANK, 1 << 16)
        if match:
            found.setdefault(int(match[1]), []).append(log)
    return found


def is_trace_log(path: Path) -> bool:
    """Return whether a file is a log of TORCH_TRACE, plain or gzipped, by its content."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _early_line(file, _HEADER, 1 << 12) is not None
    except OSError:
        return False


def trace_logs_in(archive: zipfile.ZipFile) -> list[str]:
    """Return the members of an archive that are logs of TORCH_TRACE, by their content."""
    found = []
    for name in archive.namelist()[:_MAX_FILES]:
        try:
            with archive.open(name) as member:
                if _early_line(member, _HEADER, 1 << 12):
                    found.append(name)
        except (zipfile.BadZipFile, lzma.LZMAError, OSError, RuntimeError):  # damaged, encrypted, an unknown method
            continue
    return found


def logs(folder: Path) -> list[Path]:
    files = sorted(path for path in islice(folder.rglob("*"), _MAX_FILES) if not path.is_dir())
    return [
        path for path in files
        if (_is_file(path) if path.name.endswith((".log", ".log.gz")) else path.is_file() and is_trace_log(path))
    ]


def _early_line(stream: IO[bytes], pattern: re.Pattern[str], size: int) -> re.Match[str] | None:
    """Return the match of a line in the first `size` characters of a stream."""
    try:
        for line in lines(stream, size):
            if match := pattern.match(line):
                return match
            size -= len(line)
            if size <= 0:
                break
    except DAMAGED:
        pass
    return None


def lines(stream: IO[bytes], most: int) -> Iterator[str]:
    """Yield the lines of a text, unpacked, in pieces of at most so many characters. Raises DAMAGED."""
    packed = cast("io.BufferedReader", stream).peek(2).startswith(b"\x1f\x8b")
    with io.TextIOWrapper(gzip.open(stream) if packed else stream, "utf-8-sig", errors="replace") as text:
        while line := text.readline(most):
            yield line


_RANK_OF_NAME = re.compile(r"_rank_(\d{1,6})_")
_HEADER = re.compile(r"V\d{4} \S+ \d+ \S+\] \{")
_RANK = re.compile(rf'{_HEADER.pattern}.*"rank": (\d{{1,6}})[,}}]')
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


def _difference(own: Iterable[Texts], other: Iterable[Texts]) -> str:
    """Return how another rank's kernels differ from the chosen rank's."""
    codes, others = ([read_code(each.code) for each in texts] for texts in (own, other))
    names, other_names = ([call.name for code in each for call in code.calls] for each in (codes, others))
    more, fewer = Counter(other_names) - Counter(names), Counter(names) - Counter(other_names)
    if more or fewer:
        sides = [(word, found) for word, found in (("with", more), ("without", fewer)) if found]
        return "other kernels (" + ", ".join(f"{word} {_some(found)}" for word, found in sides) + ")"
    if names != other_names:
        return "the same kernels in another order"
    same_shapes = [code.memory for code in codes] == [code.memory for code in others]
    return "the same kernels" if same_shapes else "the same kernels on other shapes"


def _some(names: Counter[str]) -> str:
    listed = [name if count == 1 else f"{count} {name}" for name, count in names.most_common(3)]
    return " and ".join(listed) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _text(path: Path) -> str:
    if not _is_file(path):
        return ""
    if path.stat().st_size > MAX_BYTES:
        raise DumpError(f"{path}: more than {MAX_BYTES >> 20} MiB")
    return path.read_text(errors="replace")


def _is_file(path: Path) -> bool:
    """Return whether a file is there. Raises DumpError for a FIFO or a device, whose reader may wait forever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DumpError(f"{path}: neither a regular file nor a folder")
    return path.is_file()


def _of_debug(code: Path) -> Texts:
    """Read torchinductor/model__0_forward_1.0/output_code.py and the other files of its folder."""
    folder = code.parent
    return Texts(
        source=str(folder.parent),
        code=_text(code),
        before=_text(folder / "fx_graph_readable.py"),
        after=_text(folder / "fx_graph_transformed.py"),
        ir=_text(folder / "ir_post_fusion.txt"),
        handles=_handles(_text(folder / MAPPINGS)),
    )


def _of_capture(source: str, member: Callable[[str], str], names: Iterable[str]) -> Iterator[Texts]:
    listed = _json(member("kernels.json"))
    kernels = [kernel for kernel in listed if isinstance(kernel, dict)] if isinstance(listed, list) else []
    taken = {"forward": 0, "backward": 0}
    matches = (re.fullmatch(r"((forward|backward)(?:-(\d{1,9}))?)/output_code\.py", name) for name in names)
    found = [match for match in matches if match is not None]
    nodes = {match[1]: frozenset(read_fx(member(f"{match[1]}/fx_graph.py")).nodes) for match in found}
    for folder, part, _ in sorted((match.groups(default="0") for match in found), key=lambda g: (g[1], int(g[2]))):
        name = f"{folder}/output_code.py"
        code = member(name)
        own = [kernel for kernel in kernels if kernel.get("part") == part]
        count = len(read_code(code).calls)
        rest = own[taken[part] : taken[part] + count]
        taken[part] += count
        after = member(f"{folder}/fx_graph.py")
        yield Texts(
            source=source,
            code=code,
            before=member("joint_graph.py") or after,
            after=after,
            ir=member(f"{folder}/ir_post_fusion.txt"),
            handles=_handles(member(f"{folder}/{MAPPINGS}")),
            kernels=rest if len(rest) == count else None,
            resources=_resources(_json(member(f"{folder}/triton/resources.json"))),
            elsewhere=frozenset().union(*(names for other, names in nodes.items() if other != folder)),
        )


def _of_log(log: Path, breaks: list[GraphBreak], notes: list[str]) -> list[Texts]:
    with log.open("rb") as file:
        return _of_trace(str(log), file, breaks, notes)


def _of_trace(source: str, stream: IO[bytes], breaks: list[GraphBreak], notes: list[str]) -> list[Texts]:
    found: list[Texts] = []
    before = after = ""
    for name, compiled, payload in _events(source, stream, notes):
        if name == "before_post_grad_graph":
            before = payload
        elif name == "inductor_post_grad_graph":
            after = payload
        elif name == "inductor_output_code":
            found.append(Texts(source, payload, before, after, compiled=compiled))
            before = after = ""
        elif name == "inductor_provenance_tracking_node_mappings" and found:
            found[-1].handles = _handles(payload)
        elif name == STACKS and found:
            found[-1].stacks = _lists(_json(payload))
        elif name == "dynamo_graph_break_reason":
            breaks.append(_graph_break(payload))
        elif name == "recompile_reasons":
            notes.append(_recompile(compiled, payload))
    return found


STACKS = "inductor_provenance_tracking_kernel_stack_traces"
_EVENT = re.compile(r"V\d{4} \S+ \d+ \S+\] (\{.*\})\s*$")
_WANTED = {
    "before_post_grad_graph", "inductor_post_grad_graph", "inductor_output_code",
    "inductor_provenance_tracking_node_mappings", STACKS, "dynamo_graph_break_reason", "recompile_reasons",
}


def _events(source: str, stream: IO[bytes], notes: list[str]) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Yield the name, compile and payload of a structured log's events about graphs; its lines begin with a tab.

    An event in which the log is cut off is left out, and noted.
    """
    name, size, compiled, digest, line = "", 0, (0, 0), "", "\n"
    payload: list[str] = []
    try:
        for line in lines(stream, MAX_BYTES):
            if line.startswith("\t"):
                size += len(line)
                if name and size <= MAX_BYTES:
                    payload.append(line[1:])
                continue
            if name:
                yield name, compiled, "".join(payload)
            name, size, payload = "", 0, []
            if (event := event_of(line)) is not None:
                name, compiled = _event_name(event), _compile_of(event)
                digest = event.get("has_payload") if name else ""
    except DAMAGED as problem:
        notes.append(f"{source}: {problem}; later compiles are missing")
        return
    text = "".join(payload)
    if not line.endswith("\n") and digest != md5(text.encode(), usedforsecurity=False).hexdigest():
        notes.append(f"{source}: the file ends within a line; later compiles are missing")
    elif name:
        yield name, compiled, text


def event_of(line: str) -> Any:
    """Return the event of a log's line; None for another line."""
    match = _EVENT.match(line)
    return None if match is None else _json(match[1])


def _compile_of(event: Any) -> tuple[int, int]:
    numbers = [event.get(key) if isinstance(event, dict) else 0 for key in ("frame_id", "frame_compile_id")]
    frame, compiled = (number if isinstance(number, int) else 0 for number in numbers)
    return frame, compiled


def _event_name(event: Any) -> str:
    """Return the event's name, or "" if no reader needs it."""
    if not isinstance(event, dict):
        return ""
    artifact = event.get("artifact")
    name = artifact.get("name") if isinstance(artifact, dict) else "inductor_output_code"
    return name if name in _WANTED and (artifact or name in event) else ""


def _graph_break(payload: str) -> GraphBreak:
    place = re.search(r"^Graph break in user code at (.+:\d+)$", payload, flags=re.MULTILINE)
    text = re.search(r"Graph Break Reason: (.*?)(?=\n *User code traceback:|\Z)", payload, flags=re.DOTALL)
    return GraphBreak(text=(text[1] if text else payload).strip(), line=place[1] if place else "")


def _recompile(compiled: tuple[int, int], payload: str) -> str:
    reasons = _json(payload)
    first = str(reasons[0]) if isinstance(reasons, list) and reasons else payload.strip().partition("\n")[0]
    reason = " ".join(first.partition("#")[0].split())
    return (
        f"frame {compiled[0]} was compiled again ({compiled[0]}/{compiled[1]}) because a guard failed: {reason}; "
        "the totals add up all its compiles"
    )


def _handles(text: str) -> dict[str, list[str]]:
    mappings = _json(text)
    return _lists(mappings.get("cppCodeToPost") if isinstance(mappings, dict) else None)


def _lists(found: Any) -> dict[str, list[str]]:
    if not isinstance(found, dict):
        return {}
    return {str(handle): [str(word) for word in words] for handle, words in found.items() if isinstance(words, list)}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _resources(read: Any) -> dict[str, dict[str, int]]:
    """Return the resources of each kernel that has all of them as numbers."""
    names = ("registers", "spill_bytes", "shared_bytes", "num_warps")
    kernels = read.items() if isinstance(read, dict) else ()
    return {
        kernel: {name: own[name] for name in names} for kernel, own in kernels
        if isinstance(own, dict) and all(isinstance(own.get(name), int) for name in names)
    }


# Texts to graphs


def _graphs(texts: list[Texts]) -> Iterator[CompiledGraph]:
    codes = [read_code(one.code) for one in texts]
    # A compile that the cache answers has the unit of the earlier one in its code, so the compile counts, too.
    keys = [(one.source, code.unit, one.compiled) for one, code in zip(texts, codes, strict=True)]
    units = {key: number for number, key in enumerate(sorted(set(keys)))}
    forward: dict[int, set[str]] = {}
    graphs = []
    for one, code in sorted(zip(texts, codes, strict=True), key=lambda pair: pair[1].part == "backward"):
        unit = units[one.source, code.unit, one.compiled]
        reader = GraphReader(one, code, forward.get(unit, set()) if code.part == "backward" else set())
        if code.part == "forward":
            forward[unit] = reader.node_names
        graphs.append(without_views(without_waits(reader.compiled(unit))))
    yield from sorted(graphs, key=lambda graph: (graph.part == "backward", graph.unit))
