"""The fusion graph of TorchInductor's output: a live capture, or a dump folder."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xlafuse.triton_side.inductor.graph import Call, CompiledGraph, Program, SourceNode
from xlafuse.triton_side.inductor.launch import configuration

from ...base.archive import portable_line, users_line
from ..model import Access, Buffer, FusionGraph, Kernel, Launch, Reason, Role, SourceOp
from ..operations import hides_flops
from .kernel_edges import barrier, bytes_saved, kernel_edges
from .phases import join_phases

# Messages of torch 2.11 to 2.13 (`WhyNoFuse` in scheduler.py, choices.py, codegen/simd.py). The first match counts.
PHRASES = (
    (r"^no shared data", "no-shared-data"),
    (r"^score_fusion_memory_threshold", "unprofitable"),
    (r"^exceeds max fusion|^fusion_prevent_too_many_reads_and_writes|^register spilling", "resources"),
    (r"peak memory", "peak-memory"),
    (r"^numel/rnumel mismatch|^nodes numel", "shape"),
    (r"^tiling mismatch|^invalid tiling|^invalid loop order|^memory deps did not match|buf layouts$", "layout"),
    (r"^intermediate nodes between|^will create cycle|must go before", "order"),
    (r"^template prologue can only fuse nodes with a single use", "recompute"),
    (r"^prologue fusion will not increase|^prologue fusion that must be upcast", "unprofitable"),
    (r"^prologue fusion|^template |^multi-output template", "gemm"),
    (r"^node[12] is (extern|nop)", "library"),
    (r"^Split scan|foreach|^device mismatch|^epilogue reads|doesn't support epilogue", "unsupported"),
    (r"^grouped node|^fusion for buffer explicit disabled", "other"),
)


def from_inductor(captured: Any, *, target: str = "", versions: Mapping[str, str] | None = None) -> FusionGraph:
    """Return the graph of a `xlafuse.triton_side.inductor.compiler.Captured`, or of the `Program` of a capture or dump.

    Kernels: forward's, then backward's. After graph breaks, forward's units are in the order of the trace and
    backward's in the opposite order. Later calls of a name carry a number (`extern_kernels.mm#2`); `facts["call"]` is
    the name in the code.

    Buffers are Inductor's logical ones: two that share an allocation are two, and a view is the buffer that it views.
    Names of later units begin with "graph-1/", unless the buffer comes from an earlier unit. A capture recognizes such
    buffers by their memory addresses; a dump cannot, and a note says so. `join_phases` joins forward and backward.

    Source operations are the FX nodes before Inductor's pattern matchers. `site` is the node's name in the joint graph.
    So a forward operation that the partitioner computes again in backward has the same site, and is `rematerialized`.

    Reasons: one for each pair of kernels of a compiled graph where the second reads the first one's result, and for
    pairs with common reads where Inductor gave one. There are none between forward and backward: in a training step,
    other blocks run between them. A graph break has a line, and no kernels.

    Raises ValueError if there is no compiled graph.
    """
    program: Program = captured if isinstance(captured, Program) else captured.program()
    forward, backward = _phases(program)
    sites = {_whole(_site(node, graph.unit)) for graph in forward for call in graph.calls for node in call.sources}
    about: dict[str, Any] = {"target": target, "versions": dict(versions or {})}
    calls: Counter[str] = Counter()
    same = _same_memory(forward)
    between = _same_memory(backward)
    if between is None and same is not None:
        between = _gradients(forward, backward, same)
    phases = [
        _phase_graph(graphs, taken, calls, sites, about)
        for graphs, taken in ((forward, same), (backward, between)) if graphs
    ]
    if not phases:
        raise ValueError("nothing was compiled during the capture: call the compiled function inside it")
    joined = phases[0]
    if len(phases) == 2:
        known = same or {}
        passed, visible = _passed_on(forward, backward)
        merged = between or {}  # two units may keep one array: the later one's name is gone
        passed = {taken: known.get(given, given) for taken, given in passed.items() if taken not in merged}
        read_on = set(known.values())
        visible = [name for name in visible if name not in known and name not in read_on]
        joined = join_phases(phases[0], phases[1], passed, outputs=visible)
    breaks = tuple(
        Reason("", "", "graph-break", cut.text, "dynamo", line=portable_line(cut.line)) for cut in program.breaks
    )
    name = "+".join(phase.name for phase in phases)
    return dataclasses.replace(
        joined, name=name, reasons=(*joined.reasons, *breaks), notes=(*program.notes, *joined.notes)
    )


def calls_in_order(program: Program) -> list[Call]:
    """Return the calls behind the kernels of `from_inductor`, in their order."""
    return [call for graphs in _phases(program) for graph in graphs for call in graph.calls]


def _phases(program: Program) -> tuple[list[CompiledGraph], list[CompiledGraph]]:
    forward = [graph for graph in program.graphs if graph.part == "forward"]
    backward = sorted((graph for graph in program.graphs if graph.part == "backward"), key=lambda graph: -graph.unit)
    return forward, backward


def _phase_graph(
    units: list[CompiledGraph], taken: Mapping[str, str] | None, calls: Counter[str], forward_sites: set[str],
    about: Mapping[str, Any],
) -> FusionGraph:
    """Return the graph of all units of one phase.

    taken: inputs of units -> the same buffers in other units; None where they are unknown. calls: the number of calls
    of each name so far; this function adds to it.
    """
    kernels = []
    for graph in units:
        for call in graph.calls:
            calls[call.kernel.name] += 1
            number = calls[call.kernel.name]
            name = call.kernel.name if number == 1 else f"{call.kernel.name}#{number}"
            kernels.append(_kernel(call, name, graph, forward_sites))
    same = taken or {}
    unknown = (_unknown_connections(units),) if taken is None else ()
    phase = FusionGraph(
        name=units[0].part,
        compiler="inductor",
        kernels=tuple(_renamed(kernel, same) for kernel in kernels),
        buffers=tuple(_joined_buffers(units, same)),
        unparsed=tuple(text for graph in units for text in graph.unparsed),
        notes=unknown,
        **about,
    )
    return dataclasses.replace(phase, reasons=tuple(_reasons(units, phase)))


def _kernel(call: Call, name: str, graph: CompiledGraph, forward_sites: set[str]) -> Kernel:
    known = call.kernel
    facts = {
        "call": known.name, "config": known.config, "template": known.is_template, "extern": known.is_extern,
        "views": list(call.views),
    }

    def accesses(buffers: Iterable[Any] | None, *, reads: bool) -> tuple[Access, ...] | None:
        if buffers is None:
            return None
        # A name without memory is no data: such a call only mutates buffers of others.
        known_buffers = [(b, graph.memory[b.name]) for b in buffers if b.name in graph.memory]
        layouts = [call.layout_of(memory, reads=reads) or (None, None) for _, memory in known_buffers]
        return tuple(
            Access(_name(b.name, graph), b.bytes, shape=shape, strides=strides)
            for (b, _), (shape, strides) in zip(known_buffers, layouts, strict=True)
        )

    kernel = Kernel(
        name=name,
        kind=known.kind,
        phase=graph.part,
        runtime_name=call.runtime_name,
        source_ops=tuple(_source_op(node, graph, forward_sites) for node in call.sources),
        inputs=accesses(known.inputs, reads=True),
        outputs=accesses(known.outputs, reads=False),
        workspace_bytes=call.workspace_bytes,
        flops=call.flops,
        provenance=known.provenance,
        launch=_launch(call),
        facts={key: value for key, value in facts.items() if value},
    )
    if kernel.kind == "library" and hides_flops(kernel):  # it may be a whole layer, with arrays between its kernels
        return dataclasses.replace(kernel, launches=None, least_launches=1)
    return kernel


def _launch(call: Call) -> Launch:
    grid = None if call.grid is None else (call.grid[0], call.grid[1], call.grid[2])
    found = Launch(grid, config=configuration(call.kernel.config) or None)
    if (code := call.resources) is None:
        return found
    return dataclasses.replace(
        found, block=(32 * code["num_warps"], 1, 1), registers=code["registers"], shared_bytes=code["shared_bytes"],
        local_bytes=code["spill_bytes"],
    )


def _source_op(node: SourceNode, graph: CompiledGraph, forward_sites: set[str]) -> SourceOp:
    site = _site(node, graph.unit)
    return SourceOp(
        op=node.op,
        stage=node.stage or "",
        line=users_line(node.line or ""),
        site=site,
        backward=node.backward,
        rematerialized=graph.part == "backward" and not node.backward and _whole(site) in forward_sites,
        place=users_line(node.place or ""),
    )


def _buffers(graph: CompiledGraph) -> Iterator[Buffer]:
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    sides = [side or () for call in graph.calls for side in (call.kernel.inputs, call.kernel.outputs)]
    used = {access.name for side in sides for access in side}

    def role(name: str) -> Role:
        if graph.memory[name].constant:
            return "constant"
        return "input" if name in inputs else "output" if name in outputs else "intermediate"

    for name, memory in graph.memory.items():
        if name in used or name in inputs or name in outputs:
            yield Buffer(_name(name, graph), memory.shape, memory.dtype, memory.bytes, role(name))


def _same_memory(units: Iterable[CompiledGraph]) -> dict[str, str] | None:
    """Return, for inputs of later units, the earlier units' buffers at the same memory addresses.

    None if there are several units and the addresses were not recorded.
    """
    units = list(units)
    if len(units) > 1 and not all(graph.storages for graph in units):
        return None
    owners: dict[tuple[int, int, str], str] = {}
    same: dict[str, str] = {}
    for graph in units:
        places = {
            name: (graph.storages[name], graph.memory[name].bytes, graph.memory[name].dtype)
            for name in (*graph.inputs, *graph.outputs) if name is not None and name in graph.storages
        }
        same |= {_name(name, graph): owners[places[name]] for name in graph.inputs if places.get(name) in owners}
        for name, place in places.items():
            owners.setdefault(place, _name(name, graph))
    return same


def _gradients(
    forward: Iterable[CompiledGraph], backward: Iterable[CompiledGraph], same: Mapping[str, str]
) -> dict[str, str] | None:
    """Return, for backward code that did not run, each unit's cotangents -> the gradients that other units write.

    None where the code does not show what belongs together. same: the result of `_same_memory` for forward. A result
    that several units read has no single gradient, because autograd adds theirs up.
    """
    later = {graph.unit: graph for graph in backward}
    pairs = [(graph, later[graph.unit]) for graph in forward if graph.unit in later]
    given: dict[str, list[tuple[CompiledGraph, str | None]]] = {}
    for graph, reader in pairs:
        if len(graph.inputs) != len(reader.outputs):  # backward returns the gradient of each input
            return None
        for name, gradient in zip(graph.inputs, reader.outputs, strict=True):
            if (owner := same.get(_name(name, graph))) is not None:
                given.setdefault(owner, []).append((reader, gradient))
    found: dict[str, str] = {}
    for graph, reader in pairs:
        cotangents = [name for name in reader.inputs if name.startswith("tangents_")]
        results = [name for name in _visible(graph, reader) if name not in graph.inputs]
        if len(results) != len(cotangents):  # some have no gradient
            return None
        for result, cotangent in zip(results, cotangents, strict=True):
            match given.get(_name(result, graph)):
                case [(giver, str(gradient))] if _same_data(reader, cotangent, giver, gradient):
                    found[_name(cotangent, reader)] = _name(gradient, giver)
    return found


def _unknown_connections(units: list[CompiledGraph]) -> str:
    return (
        f"{units[0].part} is compiled in {len(units)} graphs, and the buffers that they pass on are unknown: "
        "these count as inputs and outputs, so the fusion efficiency is too high"
    )


def _renamed(kernel: Kernel, same: Mapping[str, str]) -> Kernel:
    def renamed(accesses: tuple[Access, ...] | None) -> tuple[Access, ...] | None:
        if accesses is None:
            return None
        return tuple(dataclasses.replace(access, buffer=same.get(access.buffer, access.buffer)) for access in accesses)

    return dataclasses.replace(kernel, inputs=renamed(kernel.inputs), outputs=renamed(kernel.outputs))


def _joined_buffers(units: Iterable[CompiledGraph], same: Mapping[str, str]) -> Iterator[Buffer]:
    """Yield the buffers of all units; an output that another unit reads becomes an intermediate."""
    read_on = set(same.values())
    for buffer in (buffer for graph in units for buffer in _buffers(graph)):
        if buffer.name in same:
            continue
        passes = buffer.role == "output" and buffer.name in read_on
        yield dataclasses.replace(buffer, role="intermediate") if passes else buffer


def _name(buffer: str, graph: CompiledGraph) -> str:
    return f"graph-{graph.unit}/{buffer}" if graph.unit else buffer


def _site(node: SourceNode, unit: int) -> str:
    return f"graph-{unit}/{node.name}" if unit else node.name


def _whole(site: str) -> str:
    """Return the site of a whole operation for that of one of its kernels, which has a "#"."""
    return site.partition("#")[0]


# Buffers that forward passes to backward

# AOTAutograd's names for backward's other inputs: cotangents, and states of random numbers.
_NO_RESIDUAL = re.compile(r"tangents_|(fwd|bwd)_(seed|base_offset|rng_state)")


def _passed_on(
    forward: Iterable[CompiledGraph], backward: Iterable[CompiledGraph]
) -> tuple[dict[str, str], list[str]]:
    """Return backward's residuals -> forward's buffers, and forward's results that the caller sees.

    Forward returns its results first, and then the residuals in the order of backward's inputs. Two that differ in
    bytes or dtype are not joined.
    """
    passed: dict[str, str] = {}
    visible: list[str] = []
    later = {graph.unit: graph for graph in backward}
    for graph in forward:
        reader = later.get(graph.unit)
        seen = _visible(graph, reader)
        visible += [_name(name, graph) for name in seen]
        wanted = _residuals(reader)
        kept = [name for name in graph.outputs if name is not None][len(seen) :]
        if reader is not None and len(kept) == len(wanted):
            for taken, given in zip(wanted, kept, strict=True):
                if _same_data(reader, taken, graph, given):
                    passed[_name(taken, reader)] = _name(given, graph)
    return passed, visible


def _residuals(reader: CompiledGraph | None) -> list[str]:
    return [name for name in reader.inputs if not _NO_RESIDUAL.match(name)] if reader is not None else []


def _visible(graph: CompiledGraph, reader: CompiledGraph | None) -> list[str]:
    """Return forward's results, without the residuals."""
    results = [name for name in graph.outputs if name is not None]
    return results[: max(len(results) - len(_residuals(reader)), 0)]


def _same_data(reader: CompiledGraph, taken: str, writer: CompiledGraph, given: str) -> bool:
    first, second = reader.memory[taken], writer.memory[given]
    return (first.bytes, first.dtype) == (second.bytes, second.dtype)


# Reasons


def _reasons(units: Iterable[CompiledGraph], phase: FusionGraph) -> Iterator[Reason]:
    kernels = phase.kernels or ()
    refusals: dict[tuple[int, int], str] = {}
    first = 0
    unit_of: list[int] = []
    for graph in units:
        unit_of += [graph.unit] * len(graph.calls)
        refusals |= {(first + one, first + other): text for (one, other), text in _refusals(graph).items()}
        first += len(graph.calls)
    for edge in kernel_edges(phase):
        text = refusals.pop((edge.producer, edge.consumer), None)
        producer, consumer = kernels[edge.producer], kernels[edge.consumer]
        saved = bytes_saved(phase, edge)
        if unit_of[edge.producer] != unit_of[edge.consumer]:
            text = "a graph break lies between the two"
            yield Reason(producer.name, consumer.name, "graph-break", text, "inferred", saved)
        elif text is not None:
            yield _refused(text, producer, consumer, saved)
        else:
            inferred = Reason(producer.name, consumer.name, "other", "Inductor gave no reason", "inferred", saved)
            yield barrier(phase, edge) or inferred
    for (one, other), text in sorted(refusals.items()):
        shared = _shared_reads(kernels[one], kernels[other])
        if shared != 0:
            yield _refused(text, kernels[one], kernels[other], shared)


def _refusals(graph: CompiledGraph) -> dict[tuple[int, int], str]:
    """Return, by launch indices of two kernels, the refusal that covers most of their operations; the last one wins."""
    home = {operation: index for index, call in enumerate(graph.calls) for operation in call.operations}
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for refusal in graph.refusals:
        first = {home.get(operation) for operation in refusal.first}
        second = {home.get(operation) for operation in refusal.second}
        if len(first) != 1 or len(second) != 1 or first == second:
            continue
        one, other = first.pop(), second.pop()
        if one is None or other is None:
            continue
        if one > other and refusal.text.endswith("must go before node2"):
            continue  # Inductor asked in the wrong order; the answer to the other question counts
        size = len(refusal.first) + len(refusal.second)
        pair = (min(one, other), max(one, other))
        if pair not in found or size >= found[pair][0]:
            found[pair] = (size, refusal.text)
    return {pair: text for pair, (_, text) in found.items()}


def _refused(text: str, producer: Kernel, consumer: Kernel, saved: int | None) -> Reason:
    code = code_of(text)
    if code == "library" and "gemm" in (producer.kind, consumer.kind):
        code = "gemm"
    return Reason(producer.name, consumer.name, code, text, "inductor", saved)


def code_of(text: str) -> str:
    """Return the key of `REASONS` for a message of Inductor's scheduler; "other" for an unknown one."""
    return next((code for phrase, code in PHRASES if re.search(phrase, text)), "other")


def _shared_reads(first: Kernel, second: Kernel) -> int | None:
    """Return the bytes that both kernels read, the smaller access of each buffer; None where one is unknown."""
    one, other = ({access.buffer: access.bytes for access in kernel.inputs or ()} for kernel in (first, second))
    total = 0
    for name in one.keys() & other.keys():
        sizes = (one[name], other[name])
        if sizes[0] is None or sizes[1] is None:
            return None
        total += min(sizes[0], sizes[1])
    return total
