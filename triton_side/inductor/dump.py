"""Read TorchInductor's dumps without torch, by `read`. Nothing in a dump is executed.

There are three kinds of dump:
- a `torch_compile_debug` folder (TORCH_COMPILE_DEBUG=1);
- a TORCH_TRACE folder, or one of its logs, which may be gzipped;
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
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from triton_side.inductor.attribution import shares
from triton_side.inductor.graph import (
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
    part_viewed,
    second_step,
    without_views,
    without_waits,
)
from triton_side.inductor.ir_text import SIZES, FxText, IrNode, memory, read_fx, read_ir, replaced
from triton_side.inductor.output_code import USERS_OWN, EmittedCall, EmittedCode, read_code

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
        if rank is not None and (path.is_file() or rank not in _ranks(path)):
            known = ", ".join(map(str, sorted(_ranks(path)))) if path.is_dir() else ""
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

            return list(_of_capture(str(path), member, sorted(names)))
    if path.suffix == ".py":
        return [_Texts(str(path), _text(path))]
    return list(_of_trace(path, breaks, notes))


def _of_folder(path: Path, rank: int | None, breaks: list[GraphBreak], notes: list[str]) -> list[_Texts]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if (path / "kernels.json").is_file():
        names = [str(file.relative_to(path)) for file in sorted(path.rglob("output_code.py"))]
        return list(_of_capture(str(path), lambda name: _text(path / name), names))
    codes = sorted(path.rglob("output_code.py"))[:_MAX_FILES]
    if codes:
        return [_of_debug(code) for code in codes]
    logs = _logs(path)
    ranks = _ranks(path)
    if len(ranks) < 2:
        return [texts for log in logs for texts in _of_trace(log, breaks, notes)]
    first = min(ranks) if rank is None else rank
    chosen = [texts for log in ranks[first] for texts in _of_trace(log, breaks, notes)]
    differences: dict[str, list[str]] = {}
    for other in sorted(ranks.keys() - {first}):
        found = [texts for log in ranks[other] for texts in _of_trace(log, [], [])]
        differences.setdefault(_difference(chosen, found), []).append(str(other))
    notes.append(f"rank {first} of {len(ranks)} ranks" + "".join(
        f"; rank{'s' if len(alike) > 1 else ''} {', '.join(alike)}: {words}" for words, alike in differences.items()
    ) + "; --rank chooses another")
    return chosen


def _ranks(folder: Path) -> dict[int, list[Path]]:
    """Return the logs of each rank in a TORCH_TRACE folder."""
    ranks: dict[int, list[Path]] = {}
    for log in _logs(folder):
        if match := _RANK.search(log.name):
            ranks.setdefault(int(match[1]), []).append(log)
    return ranks


def _logs(folder: Path) -> list[Path]:
    return sorted([*folder.rglob("*.log"), *folder.rglob("*.log.gz")])


_RANK = re.compile(r"_rank_(\d{1,6})_")


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
    if not path.is_file():
        return ""
    if path.stat().st_size > MAX_BYTES:
        raise DumpError(f"{path}: more than {MAX_BYTES >> 20} MiB")
    return path.read_text(errors="replace")


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
            elsewhere=frozenset().union(*(names for other, names in nodes.items() if other != folder)),
        )


def _of_trace(log: Path, breaks: list[GraphBreak], notes: list[str]) -> Iterator[_Texts]:
    found: list[_Texts] = []
    before = after = ""
    for name, compiled, payload in _events(log):
        if name == "before_post_grad_graph":
            before = payload
        elif name == "inductor_post_grad_graph":
            after = payload
        elif name == "inductor_output_code":
            found.append(_Texts(str(log), payload, before, after, compiled=compiled))
            before = after = ""
        elif name == "inductor_provenance_tracking_node_mappings" and found:
            found[-1].handles = _handles(payload)
        elif name == "dynamo_graph_break_reason":
            breaks.append(_graph_break(payload))
        elif name == "recompile_reasons":
            notes.append(_recompile(compiled, payload))
    yield from found


_EVENT = re.compile(r"V\d{4} \S+ \d+ \S+\] (\{.*\})\s*$")
_WANTED = {
    "before_post_grad_graph", "inductor_post_grad_graph", "inductor_output_code",
    "inductor_provenance_tracking_node_mappings", "dynamo_graph_break_reason", "recompile_reasons",
}


def _events(log: Path) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Yield the name, compile and payload of a structured log's events about graphs; its lines begin with a tab."""
    name, size, compiled = "", 0, (0, 0)
    payload: list[str] = []
    with (gzip.open if log.suffix == ".gz" else open)(log, "rt", errors="replace") as stream:
        while line := stream.readline(MAX_BYTES):
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
    if name:
        yield name, compiled, "".join(payload)


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
        defined: set[str] = set()
        for index, call in enumerate(self.code.calls):
            names = self.texts.handles.get(call.handle, [])
            # A definition has the nodes of its first call. Our own list has those that a kernel computes.
            if not names and call.name in self.code.definitions and call.name not in defined:
                names = list(self.code.definitions[call.name].fragment.nodes)
                defined.add(call.name)
            if (not names or self._is_library(call)) and self.texts.kernels is not None:
                names = [str(name) for name in self.texts.kernels[index].get("fx_nodes") or ()]
            names = [name.partition("#")[0] for name in names]
            named.append(sorted((name for name in names if name in order), key=order.__getitem__))
        return named

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
            memory={name: memory for name, memory in self.memory.items() if name in used or name in self.code.inputs}
            | {name: self.memory[name] for name in self.code.outputs if name in self.memory},
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
            atens = call.atens[-1:] if call.is_extern else call.atens
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
                {source.op for source in sources} or {"unknown"},
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
        return Call(
            kernel=self._measured(kernel, listed),
            sources=sources,
            nodes=nodes,
            operations=frozenset() if scheduled is None else scheduled.operations,
            runtime_name=definition.runtime_name if definition is not None else None,
            workspace_bytes=sum(scratch.get(name, 0) for name in call.writes),
            views=call.views,
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
        node = self._ir(call)
        if self._is_library(call) or (node is not None and node.elements is None):
            return part_viewed(memory, memory.bytes, call.viewed) if reads else memory.bytes
        points = 1
        for extent in memory.shape:
            points *= extent
        if node is not None and node.elements is not None:
            accesses = node.reads[buffer] if reads else 1
            return min(memory.bytes, node.elements * max(accesses, 1) * (memory.bytes // points if points else 0))
        return memory.bytes if call.elements is not None and call.elements >= points else None


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
