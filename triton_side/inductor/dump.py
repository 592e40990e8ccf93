"""Read TorchInductor's dumps without torch, by `read`. Nothing in a dump is executed.

There are three kinds of dump:
- a `torch_compile_debug` folder (TORCH_COMPILE_DEBUG=1);
- a TORCH_TRACE folder, or one of its logs, by any name, which may be gzipped or in a zip;
- the output of `compiler.Captured.write`, as a folder or a zip.

Kernels are in the order of the emitted code. Its comments, the FX graphs, the provenance mappings and the scheduler IR
say which operations are in each kernel.

A value that a dump lacks is None or empty. No dump says why Inductor did not fuse more, and only our own says what was
autotuned. The bytes that a kernel touches in a buffer larger than its loop need the scheduler IR, which a TORCH_TRACE
lacks. A backward operation with the name of a forward operation is that operation computed again.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import md5
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast, get_args

from xlafuse.triton_side.inductor.attribution import shares
from xlafuse.triton_side.inductor.graph import (
    REDUCTIONS,
    Buffer,
    Call,
    CompiledGraph,
    GraphBreak,
    Kernel,
    Program,
    Provenance,
    SourceNode,
    kind_of,
    operation_of,
    own_operations,
    part_viewed,
    second_step,
    without_views,
    without_waits,
)
from xlafuse.triton_side.inductor.ir_text import SIZES, FxText, IrNode, memory, read_fx, read_ir, replaced
from xlafuse.triton_side.inductor.output_code import USERS_OWN, EmittedCall, EmittedCode, read_code

MAX_BYTES = 256 << 20  # the largest text that is read
_MAX_FILES = 100_000


class DumpError(ValueError):
    """The path is no dump of Inductor; the message names it and says what was expected."""


@dataclass
class _Texts:
    """The texts of one graph in a dump.

    before, after: the FX graph before and after Inductor's post-grad passes.
    elsewhere: nodes of `before` that another graph has. compiled: Dynamo's numbers of the frame and of its compile.
    """

    source: str
    code: str
    before: str = ""
    after: str = ""
    ir: str = ""
    handles: Mapping[str, list[str]] = field(default_factory=dict)
    kernels: list[dict[str, Any]] | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    compiled: tuple[int, int] = (0, 0)


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


def _texts(path: Path, rank: int | None, breaks: list[GraphBreak], notes: list[str]) -> list[_Texts]:
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


def _of_file(path: Path, breaks: list[GraphBreak], notes: list[str]) -> list[_Texts]:
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
        return [_Texts(str(path), _text(path))]
    return list(_of_log(path, breaks, notes))


def _of_folder(path: Path, rank: int | None, breaks: list[GraphBreak], notes: list[str]) -> list[_Texts]:
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
        return [texts for log in _logs(path) for texts in _of_log(log, breaks, notes)]
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
    for log in _logs(folder):
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


def _logs(folder: Path) -> list[Path]:
    files = sorted(path for path in islice(folder.rglob("*"), _MAX_FILES) if not path.is_dir())
    return [
        path for path in files
        if (_is_file(path) if path.name.endswith((".log", ".log.gz")) else path.is_file() and is_trace_log(path))
    ]


def _early_line(stream: IO[bytes], pattern: re.Pattern[str], size: int) -> re.Match[str] | None:
    """Return the match of a line in the first `size` characters of a stream."""
    try:
        for line in _lines(stream, size):
            if match := pattern.match(line):
                return match
            size -= len(line)
            if size <= 0:
                break
    except _DAMAGED:
        pass
    return None


def _lines(stream: IO[bytes], most: int) -> Iterator[str]:
    """Yield the lines of a text, unpacked, in pieces of at most so many characters. Raises _DAMAGED."""
    packed = cast("io.BufferedReader", stream).peek(2).startswith(b"\x1f\x8b")
    with io.TextIOWrapper(gzip.open(stream) if packed else stream, "utf-8-sig", errors="replace") as text:
        while line := text.readline(most):
            yield line


_RANK_OF_NAME = re.compile(r"_rank_(\d{1,6})_")
_HEADER = re.compile(r"V\d{4} \S+ \d+ \S+\] \{")
_RANK = re.compile(rf'{_HEADER.pattern}.*"rank": (\d{{1,6}})[,}}]')
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


def _difference(own: Iterable[_Texts], other: Iterable[_Texts]) -> str:
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


def _of_debug(code: Path) -> _Texts:
    """Read torchinductor/model__0_forward_1.0/output_code.py and the other files of its folder."""
    folder = code.parent
    return _Texts(
        source=str(folder.parent),
        code=_text(code),
        before=_text(folder / "fx_graph_readable.py"),
        after=_text(folder / "fx_graph_transformed.py"),
        ir=_text(folder / "ir_post_fusion.txt"),
        handles=_handles(_text(folder / "inductor_provenance_tracking_node_mappings.json")),
    )


def _of_capture(source: str, member: Callable[[str], str], names: Iterable[str]) -> Iterator[_Texts]:
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
        yield _Texts(
            source=source,
            code=code,
            before=member("joint_graph.py") or after,
            after=after,
            ir=member(f"{folder}/ir_post_fusion.txt"),
            kernels=rest if len(rest) == count else None,
            resources=_resources(_json(member(f"{folder}/triton/resources.json"))),
            elsewhere=frozenset().union(*(names for other, names in nodes.items() if other != folder)),
        )


def _of_log(log: Path, breaks: list[GraphBreak], notes: list[str]) -> list[_Texts]:
    with log.open("rb") as file:
        return _of_trace(str(log), file, breaks, notes)


def _of_trace(source: str, stream: IO[bytes], breaks: list[GraphBreak], notes: list[str]) -> list[_Texts]:
    found: list[_Texts] = []
    before = after = ""
    for name, compiled, payload in _events(source, stream, notes):
        if name == "before_post_grad_graph":
            before = payload
        elif name == "inductor_post_grad_graph":
            after = payload
        elif name == "inductor_output_code":
            found.append(_Texts(source, payload, before, after, compiled=compiled))
            before = after = ""
        elif name == "inductor_provenance_tracking_node_mappings" and found:
            found[-1].handles = _handles(payload)
        elif name == "dynamo_graph_break_reason":
            breaks.append(_graph_break(payload))
        elif name == "recompile_reasons":
            notes.append(_recompile(compiled, payload))
    return found


_EVENT = re.compile(r"V\d{4} \S+ \d+ \S+\] (\{.*\})\s*$")
_WANTED = {
    "before_post_grad_graph", "inductor_post_grad_graph", "inductor_output_code",
    "inductor_provenance_tracking_node_mappings", "dynamo_graph_break_reason", "recompile_reasons",
}


def _events(source: str, stream: IO[bytes], notes: list[str]) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Yield the name, compile and payload of a structured log's events about graphs; its lines begin with a tab.

    An event in which the log is cut off is left out, and noted.
    """
    name, size, compiled, digest, line = "", 0, (0, 0), "", "\n"
    payload: list[str] = []
    try:
        for line in _lines(stream, MAX_BYTES):
            if line.startswith("\t"):
                size += len(line)
                if name and size <= MAX_BYTES:
                    payload.append(line[1:])
                continue
            if name:
                yield name, compiled, "".join(payload)
            name, size, payload = "", 0, []
            if match := _EVENT.match(line):
                event = _json(match[1])
                name, compiled = _event_name(event), _compile_of(event)
                digest = event.get("has_payload") if name else ""
    except _DAMAGED as problem:
        notes.append(f"{source}: {problem}; later compiles are missing")
        return
    text = "".join(payload)
    if not line.endswith("\n") and digest != md5(text.encode(), usedforsecurity=False).hexdigest():
        notes.append(f"{source}: the file ends within a line; later compiles are missing")
    elif name:
        yield name, compiled, text


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
    found = mappings.get("cppCodeToPost") if isinstance(mappings, dict) else None
    if not isinstance(found, dict):
        return {}
    return {str(handle): [str(name) for name in names] for handle, names in found.items() if isinstance(names, list)}


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


def _graphs(texts: list[_Texts]) -> Iterator[CompiledGraph]:
    codes = [read_code(one.code) for one in texts]
    # A compile that the cache answers has the unit of the earlier one in its code, so the compile counts, too.
    keys = [(one.source, code.unit, one.compiled) for one, code in zip(texts, codes, strict=True)]
    units = {key: number for number, key in enumerate(sorted(set(keys)))}
    forward: dict[int, set[str]] = {}
    graphs = []
    for one, code in sorted(zip(texts, codes, strict=True), key=lambda pair: pair[1].part == "backward"):
        unit = units[one.source, code.unit, one.compiled]
        graph = _Graph(one, code, forward.get(unit, set()) if code.part == "backward" else set())
        if code.part == "forward":
            forward[unit] = set(graph.after.nodes) | {name for call in graph.named for name in call}
        graphs.append(graph.compiled(unit))
    yield from sorted(graphs, key=lambda graph: (graph.part == "backward", graph.unit))


class _Graph:
    """One graph, joined from its texts. forward: for a backward graph, the FX node names of its forward graph."""

    def __init__(self, texts: _Texts, code: EmittedCode, forward: set[str]) -> None:
        self.texts = texts
        self.code = code
        self.forward = forward
        self.after = read_fx(texts.after)
        self.before = read_fx(texts.before) if texts.before != texts.after else self.after
        ir, made = read_ir(texts.ir)
        self.ir_of = {buffer: node for node in ir for buffer in node.writes}
        self.memory = self.after.memory | made | code.memory
        self.replaced = replaced(self.before, self.after.nodes.keys() | texts.elsewhere)
        self.named = self._named()
        self.shares = shares(code.calls, self.named, code, self.after.nodes)
        # Sums before a cast have another dtype than the result, so each has its own buffer.
        casts = [call for call in code.calls if call.sums_partials and call.name == "aten.to"]
        converted = {call.reads[0]: call.writes[0] for call in casts}
        for call, names in zip(code.calls, self.named, strict=True):  # a library call's result is known by its FX node
            results = [converted.get(buffer, buffer) for buffer in call.writes]
            unknown = [buffer for buffer in results if buffer not in self.memory]
            if len(unknown) == 1 and names and names[-1] in self.after.memory:
                self.memory[unknown[0]] = dataclasses.replace(self.after.memory[names[-1]], name=unknown[0])
            if call.sums_partials and results != call.writes:
                result, workspace = self.memory.get(results[0]), self.memory.get(call.reads[0])
                if result is not None and workspace is not None:
                    own_dtype = (workspace.dtype, SIZES[workspace.dtype])
                    self.memory[call.writes[0]] = memory(call.writes[0], result.shape, own_dtype)

    def _named(self) -> list[list[str]]:
        """Return each call's FX nodes after the passes, in the graph's order."""
        order = {name: index for index, name in enumerate(self.after.nodes)}
        named: list[list[str]] = []
        for index, call in enumerate(self.code.calls):
            names = self.texts.handles.get(call.handle, [])
            # A definition has the nodes of its first call, whose operations a later call repeats on other arrays. Our
            # own list has those that a kernel computes.
            if not names and call.name in self.code.definitions:
                names = list(self.code.definitions[call.name].fragment.nodes)
            if (not names or self._is_library(call)) and self.texts.kernels is not None:
                names = [str(name) for name in self.texts.kernels[index].get("fx_nodes") or ()]
            names = [name.partition("#")[0] for name in names]
            named.append(sorted((name for name in names if name in order), key=order.__getitem__))
        for index, names in self._unnamed(named).items():
            named[index] = sorted(names, key=order.__getitem__)
        return named

    def _unnamed(self, named: list[list[str]]) -> dict[int, list[str]]:
        """Return the FX nodes of calls of which neither a comment nor a mapping names any.

        Inductor names no node of a call in place of PyTorch: the graph has as many such nodes as the code has calls, in
        the same order. It names none of a foreach kernel that changes its inputs either: these are the nodes that
        compute the new values of the inputs that it writes, from the results of other kernels.
        """
        found: dict[int, list[str]] = {}
        calls: dict[str, list[int]] = {}
        taken = {name for names in named for name in names}
        changes = {
            node.inputs[0]: name for name, node in self.after.nodes.items() if node.op == "aten.copy_" and node.inputs
        }
        for index, (call, names) in enumerate(zip(self.code.calls, named, strict=True)):
            if not names and call.scatters:
                calls.setdefault(operation_of(call.name), []).append(index)
            elif not names and self._heuristic(call) == "foreach":
                found[index] = self._computing([changes[name] for name in call.writes if name in changes], taken)
        for operation, indices in calls.items():
            alike = {"aten.scatter_add", operation} if operation == "aten.scatter_reduce" else {operation}
            nodes = [name for name, node in self.after.nodes.items() if node.op.removesuffix("_") in alike]
            if len(nodes) == len(indices):
                found |= {index: [name] for index, name in zip(indices, nodes, strict=True)}
        return found

    def _computing(self, results: list[str], taken: Collection[str]) -> list[str]:
        """Return the nodes that compute `results` from inputs and from `taken` nodes."""
        found: dict[str, None] = {}
        waiting = list(results)
        while waiting:
            name = waiting.pop()
            if name not in found and name not in taken and name in self.after.nodes:
                found[name] = None
                waiting += self.after.nodes[name].inputs
        return [name for name in found if self.after.nodes[name].op != "getitem"]

    def _of_name(self, call: EmittedCall) -> tuple[str, ...]:
        return (operation_of(call.name),) if call.scatters else ()

    def _is_library(self, call: EmittedCall) -> bool:
        return call.is_extern or self._heuristic(call) == "template"

    def _heuristic(self, call: EmittedCall) -> str:
        definition = self.code.definitions.get(call.name)
        return definition.heuristic if definition is not None else ""

    def compiled(self, unit: int) -> CompiledGraph:
        scratch = self._scratch()
        calls = [self._call(index, call, scratch) for index, call in enumerate(self.code.calls)]
        used = {buffer for call in self.code.calls for buffer in (*call.reads, *call.writes)}
        unknown = sorted(name for name in used if name not in self.memory)
        return without_views(without_waits(CompiledGraph(
            part=self.code.part,
            unit=unit,
            calls=tuple(calls),
            memory=self.code.with_strides(
                {name: memory for name, memory in self.memory.items() if name in used or name in self.code.inputs}
                | {name: self.memory[name] for name in self.code.outputs if name in self.memory}
            ),
            inputs=tuple(name for name in self.code.inputs if name in self.memory),
            outputs=tuple(name if name in self.memory else None for name in self.code.outputs),
            unparsed=(
                *self.code.unparsed,
                *self._unknown_effects(),
                *(f"{name}: its shape and dtype are not in the dump" for name in unknown),
            ),
        )))

    def _unknown_effects(self) -> Iterator[str]:
        """Yield a sentence for each user's Triton kernel of which the dump does not say what it reads and writes."""
        if self.texts.kernels is None:
            names = dict.fromkeys(call.name for call in self.code.calls if self._heuristic(call) == USERS_OWN)
            yield from (f"{name}: without its TTIR, each array counts as read and written" for name in names)

    def _scratch(self) -> dict[str, int]:
        """Return the arrays that only their own kernel reads, with their bytes.

        These are workspaces, and the arrays between the loops of one C++ function.
        """
        read = {buffer for call in self.code.calls for buffer in call.reads}
        loops = [call for call in self.code.calls if self.code.on_cpu and not call.is_extern]
        own = {buffer for call in loops for buffer in call.writes}.difference(self.code.inputs, self.code.outputs)
        unread = [n for n in self.memory if n not in read and (n in own or n.startswith("workspace_"))]
        return {name: self.memory[name].bytes for name in unread}

    def _call(self, index: int, call: EmittedCall, scratch: Mapping[str, int]) -> Call:
        share = self.shares[index]
        nodes, sources = share.operations(self._after, self._before, self.memory)
        if not nodes:  # use the call's comment; for a library call it also names the operations before it
            atens = (call.atens or self._of_name(call))[-1:] if call.is_extern else call.atens
            sources = tuple(SourceNode("", aten, None, None, (), self.code.part == "backward") for aten in atens)
        targets = {node.op for node in nodes or sources}
        heuristic = self._heuristic(call)
        reduces = "reduction" in heuristic or (not heuristic and bool(targets & REDUCTIONS))
        definition = self.code.definitions.get(call.name)
        scheduled = self._ir(call)
        written = [name for name in call.writes if name not in scratch]
        listed = self.texts.kernels[index] if self.texts.kernels is not None else {}
        if listed.get("name") == call.name:
            sources = self._listed(index, listed) or _as_listed(sources, listed)
        kernel = Kernel(
            name=call.name,
            part=self.code.part,
            kind=kind_of(
                call.name,
                targets,
                own_operations(sources),
                by_code=definition.kind if definition is not None else None,
                is_template=heuristic == "template",
                is_extern=call.is_extern,
                is_reduction=reduces,
            ),
            ops=tuple(source.op for source in sources),
            fx_nodes=share.computed,
            stages=tuple(dict.fromkeys(source.stage for source in sources if source.stage)),
            lines=tuple(dict.fromkeys(source.line for source in sources if source.line)),
            inputs=tuple(Buffer(name, self._bytes(call, name, reads=True)) for name in call.reads),
            outputs=tuple(Buffer(name, self._bytes(call, name, reads=False)) for name in written),
            is_template=heuristic == "template",
            is_extern=call.is_extern,
            provenance="",
            config=None,
        )
        kernel = self._measured(kernel, listed)
        return Call(
            kernel=kernel,
            sources=sources,
            nodes=nodes,
            operations=frozenset() if scheduled is None else scheduled.operations,
            runtime_name=definition.runtime_name if definition is not None else None,
            workspace_bytes=sum(scratch.get(name, 0) for name in call.writes),
            views=call.views,
            grid=self.code.grid(call, kernel.config),
            resources=self.texts.resources.get(call.name),
            layouts=call.layouts,
        )

    def _measured(self, kernel: Kernel, listed: Mapping[str, Any]) -> Kernel:
        """Add what only our own kernels.json knows."""
        if listed.get("name") != kernel.name:
            return kernel

        def buffers(side: str) -> tuple[Buffer, ...] | None:
            entries = listed.get(side)
            return None if entries is None else tuple(Buffer(str(e["name"]), int(e["bytes"])) for e in entries)

        try:
            return dataclasses.replace(
                kernel,
                inputs=buffers("inputs"),
                outputs=buffers("outputs"),
                provenance=listed["provenance"] if listed["provenance"] in get_args(Provenance) else "",
                config=None if listed.get("config") is None else str(listed["config"]),
            )
        except (KeyError, TypeError, ValueError):
            return kernel

    def _node(self, name: str, graph: FxText) -> SourceNode:
        node = graph.nodes[name]
        return dataclasses.replace(node, backward=self.code.part == "backward" and name not in self.forward)

    def _after(self, name: str) -> SourceNode:
        return self._node(name, self.after)

    def _before(self, name: str) -> list[SourceNode]:
        """Return the nodes that a node replaced, or that it was, before the passes."""
        if name in self.before.nodes:
            return [self._node(name, self.before)]
        node = self._after(name)
        names = self.replaced.get(frozenset(node.inputs), ())
        return [self._node(name, self.before) for name in names] or [node]

    def _listed(self, index: int, listed: Mapping[str, Any]) -> tuple[SourceNode, ...]:
        """Return the operations in kernels.json; an older one also has operations that the kernel does not compute."""
        share = self.shares[index]
        dropped = set(self.named[index]).difference(share.computed)
        finished = {source.name: buffer for name, buffer in share.finished.items() for source in self._before(name)}
        found: list[SourceNode] = []
        for source in _listed_sources(listed) or ():
            if source.name in finished:
                found += second_step([source], self.memory.get(finished[source.name]))
            elif source.name not in dropped:
                found.append(source)
        return tuple(found)

    def _ir(self, call: EmittedCall) -> IrNode | None:
        return next((self.ir_of[buffer] for buffer in call.writes if buffer in self.ir_of), None)

    def _bytes(self, call: EmittedCall, buffer: str, *, reads: bool) -> int | None:
        """Count bytes as Inductor does: the loop's elements for each access, at most the whole buffer."""
        memory = self.memory.get(buffer)
        if memory is None:
            return None
        definition = self.code.definitions.get(call.name)
        elements: int | None = None
        if self._is_library(call):
            return part_viewed(memory, memory.bytes, call.viewed) if reads or call.scatters else memory.bytes
        if definition is not None and definition.points is not None:
            counts = definition.loads if reads else definition.stores
            own = [counts.get(name, 0) for name, argument in call.arguments.items() if argument == buffer]
            elements = sum(own) or definition.points
        elif (node := self._ir(call)) is not None:
            if node.elements is None:
                return memory.bytes
            elements = node.elements * max(node.reads[buffer] if reads else 1, 1)
        return None if elements is None else min(memory.bytes, elements * SIZES[memory.dtype])


def _listed_sources(listed: Mapping[str, Any]) -> list[SourceNode] | None:
    """Return the operations in kernels.json; None for an older one, which has separate lists of ops, stages and lines.
    """

    def text(value: Any) -> str | None:
        return None if value is None else str(value)

    def shapes(values: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(int(extent) for extent in shape) for shape in values)

    try:
        return [
            SourceNode(
                str(each["name"]), str(each["op"]), text(each["stage"]), text(each["line"]),
                tuple(map(str, each["inputs"])), bool(each["backward"]), shapes(each["shapes"]),
                shapes(each["input_shapes"]), each["causal"] if isinstance(each["causal"], bool) else None,
            )
            for each in listed["sources"]
        ]
    except (KeyError, TypeError, ValueError):
        return None


def _as_listed(sources: tuple[SourceNode, ...], listed: Mapping[str, Any]) -> tuple[SourceNode, ...]:
    """Return the operations of an older kernels.json, each as the node in `sources` with that operation, if any.

    An inference graph has no text from before the passes, but the list has those operations.
    """
    ops = listed.get("ops")
    if not isinstance(ops, list) or ops == [source.op for source in sources]:
        return sources
    waiting = list(sources)
    found = []
    for index, op in enumerate(map(str, ops)):
        known = next((source for source in waiting if source.op == op), None)
        if known is not None:
            waiting.remove(known)
        stage, line = (_nth(listed.get(key), index, len(ops)) for key in ("stages", "lines"))
        found.append(known or SourceNode("", op, stage, line, ()))
    return tuple(found)


def _nth(values: Any, index: int, count: int) -> str | None:
    return str(values[index]) if isinstance(values, list) and len(values) == count else None
