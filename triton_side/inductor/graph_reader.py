"""Make a compiled graph from Inductor's texts, those of a compile in this process or of a dump. No torch is needed.

Kernels are in the order of the emitted code. Its comments, the FX graphs, the provenance mapping and the scheduler IR
say which operations are in each kernel. A compile adds `Facts`, which no text has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import msgspec

from xlafuse.triton_side.inductor.attribution import shares
from xlafuse.triton_side.inductor.graph import (
    REDUCTIONS,
    TWO_STEPS,
    Buffer,
    Call,
    CompiledGraph,
    FxText,
    Kernel,
    Memory,
    Provenance,
    Refusal,
    SourceNode,
    kind_of,
    operation_of,
    own_operations,
    part_viewed,
    second_step,
)
from xlafuse.triton_side.inductor.ir_text import (
    SIZES,
    IrNode,
    StackLines,
    is_library,
    may_be_model,
    memory,
    read_fx,
    read_ir,
    replaced,
    stack_lines,
)
from xlafuse.triton_side.inductor.output_code import USERS_OWN, EmittedCall, EmittedCode

MAPPINGS = "inductor_provenance_tracking_node_mappings.json"


@dataclass(frozen=True)
class Facts:
    """Facts about a graph that a compile knows and no text says.

    nodes: the FX nodes after Inductor's passes. before: by name of such a node, the nodes that it replaced, or that it
    was, before the passes.
    origins: by name of a buffer, or of an operation of the scheduler, the FX nodes that it computes.
    """

    nodes: Mapping[str, SourceNode]
    before: Mapping[str, tuple[SourceNode, ...]]
    origins: Mapping[str, tuple[str, ...]]
    refusals: tuple[Refusal, ...] = ()


@dataclass
class Texts:
    """The texts of one graph.

    before, after: the FX graph before and after Inductor's post-grad passes. handles: the FX nodes of a call in the
    code, by its handle, in Inductor's provenance mapping. stacks: the Python stacks of these nodes, by the handle.
    kernels, resources: the entries of the calls in our own kernels.json and resources.json.
    elsewhere: nodes of `before` that another graph has. compiled: Dynamo's numbers of the frame and of its compile.
    """

    source: str
    code: str
    before: str = ""
    after: str = ""
    ir: str = ""
    handles: Mapping[str, list[str]] = field(default_factory=dict)
    stacks: Mapping[str, list[str]] = field(default_factory=dict)
    kernels: list[dict[str, Any]] | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    compiled: tuple[int, int] = (0, 0)


class GraphReader:
    """Joins the texts of one graph. forward: for a backward graph, the FX node names of its forward graph."""

    def __init__(
        self, texts: Texts, code: EmittedCode, forward: Collection[str] = (), facts: Facts | None = None
    ) -> None:
        self.texts = texts
        self.code = code
        self.forward = forward
        self.facts = facts
        self.after = read_fx(texts.after)
        if facts is not None:
            self.after.nodes = dict(facts.nodes)
        self.before = read_fx(texts.before) if texts.before != texts.after else self.after
        ir, made = read_ir(texts.ir)
        self.scheduled = _scheduled(ir, code)
        self.memory = self.after.memory | made | code.memory
        self.replaced = replaced(self.before, self.after.nodes.keys() | texts.elsewhere)
        # Sums before a cast have another dtype than the result, so each has its own buffer.
        casts = [call for call in code.calls if call.sums_partials and call.name == "aten.to"]
        self.casts = {call.reads[0]: call.writes[0] for call in casts}
        self.named = self._named()
        self.shares = shares(code, self.named, self.after.nodes)
        self._describe_results()

    @property
    def node_names(self) -> set[str]:
        """The nodes before the passes, whose own names may be equal in two graphs; else those after them."""
        is_own = self.before.nodes and not self.texts.elsewhere  # else it is the joint graph, or unknown
        return set(self.before.nodes if is_own else self.after.nodes)

    def compiled(self, unit: int) -> CompiledGraph:
        """Return the graph, with its waits and views."""
        scratch = self._scratch()
        calls = [self._call(index, call, scratch) for index, call in enumerate(self.code.calls)]
        used = {buffer for call in self.code.calls for buffer in (*call.reads, *call.writes)}
        unknown = sorted(name for name in used if name not in self.memory)
        return CompiledGraph(
            part=self.code.part,
            unit=unit,
            calls=tuple(calls),
            memory=self.code.with_strides(
                {name: memory for name, memory in self.memory.items() if name in used or name in self.code.inputs}
                | {name: self.memory[name] for name in self.code.outputs if name in self.memory}
            ),
            inputs=tuple(name for name in self.code.inputs if name in self.memory),
            outputs=tuple(name if name in self.memory else None for name in self.code.outputs),
            refusals=() if self.facts is None else self.facts.refusals,
            traced=self.before,
            unparsed=(
                *self.code.unparsed,
                *self._unknown_effects(),
                *(f"{name}: its shape and dtype are not known" for name in unknown),
            ),
        )

    def _describe_results(self) -> None:
        """Add the memory of the results of library calls, by their FX nodes, and of sums before a cast."""
        for call, names in zip(self.code.calls, self.named, strict=True):
            results = [self.casts.get(buffer, buffer) for buffer in call.writes]
            unknown = [buffer for buffer in results if buffer not in self.memory]
            if len(unknown) == 1 and names and names[-1] in self.after.memory:
                self.memory[unknown[0]] = replace(self.after.memory[names[-1]], name=unknown[0])
            elif names:
                items = self._items(names[-1])
                self.memory |= {
                    name: replace(items[item], name=name)
                    for name, item in call.items.items() if name in unknown and item in items
                }
            if call.sums_partials and results != call.writes:
                result, workspace = self.memory.get(results[0]), self.memory.get(call.reads[0])
                if result is not None and workspace is not None:
                    own_dtype = (workspace.dtype, SIZES[workspace.dtype])
                    self.memory[call.writes[0]] = memory(call.writes[0], result.shape, own_dtype)

    def _items(self, name: str) -> dict[int, Memory]:
        """Return the memory of a node's results, by their numbers, as far as the graph takes them apart."""
        return {
            int(self.after.arguments[node.name].strip("[]")): self.after.memory[node.name]
            for node in self.after.nodes.values()
            if node.op == "getitem" and node.inputs[:1] == (name,) and node.name in self.after.memory
        }

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
            if self.facts is not None and self._is_library(call):
                names = self._exact(call, self.scheduled[index], names, self.facts.origins)
            named.append(sorted({name for name in names if self._is_operation(name)}, key=order.__getitem__))
        for index, names in self._unnamed(named).items():
            named[index] = sorted(names, key=order.__getitem__)
        return named

    def _is_operation(self, name: str) -> bool:
        return name in self.after.nodes and self.after.nodes[name].op != "get_attr"

    def _exact(
        self, call: EmittedCall, scheduled: IrNode | None, names: list[str], origins: Mapping[str, tuple[str, ...]]
    ) -> list[str]:
        """Return the FX nodes of a library call or a template, without operations before it that `names` also has."""
        if not call.is_extern or len(names) != 1:
            operations = () if call.is_extern or scheduled is None else scheduled.operations
            results = [self.casts.get(buffer, buffer) for buffer in call.writes]
            is_cast = not self.casts.keys().isdisjoint(call.reads)  # its sums have the node
            keys = () if is_cast else (*operations, *results)
            names = [name for key in keys for name in origins.get(key, ())] or names
        nodes = [(name, self.after.nodes.get(name)) for name in names]
        return [node.inputs[0] if node is not None and node.op == "getitem" else name for name, node in nodes]

    def _unnamed(self, named: list[list[str]]) -> dict[int, list[str]]:
        """Return the FX nodes of calls of which neither a comment nor a mapping names any.

        Inductor names no node of some calls of PyTorch, as those in place: the graph has as many such nodes as the code
        has calls, in the same order. It names none of a foreach kernel that changes its inputs either: these are the
        nodes that compute what it writes from the results of other kernels. An input's new value has a copy, a result
        is returned; of other arrays a compile alone knows the node.
        """
        found: dict[int, list[str]] = {}
        calls: dict[str, list[int]] = {}
        taken = {name for names in named for name in names}
        returned = zip(self.code.outputs, self.after.outputs, strict=False)
        values: dict[str, tuple[str, ...]] = {buffer: (name,) for buffer, name in returned if buffer}
        for name, node in self.after.nodes.items():
            if node.op == "aten.copy_" and node.inputs:
                values[node.inputs[0]] = (name,)
        values |= {} if self.facts is None else self.facts.origins
        for index, (call, names) in enumerate(zip(self.code.calls, named, strict=True)):
            if not names and call.is_extern and not call.sums_partials:
                calls.setdefault(operation_of(call.name), []).append(index)
            elif not names and self._heuristic(call) == "foreach":
                scheduled = self.scheduled[index]
                written = (*call.writes, *(() if scheduled is None else sorted(scheduled.operations)))
                found[index] = self._computing([name for key in written for name in values.get(key, ())], taken)
        for operation, indices in calls.items():
            alike = {"aten.scatter_add", operation} if operation == "aten.scatter_reduce" else {operation}
            left = (name for name in self.after.nodes if name not in taken)
            nodes = [name for name in left if self.after.nodes[name].op.removesuffix("_") in alike]
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
        return (operation_of(call.name),) if call.scatters or call.sums_partials else ()

    def _lines_of_partials(self, call: EmittedCall) -> set[tuple[str | None, str | None]]:
        """Return the lines and places of the reductions that a call may finish: those that made the partial sums."""
        pairs = zip(self.shares, self.code.calls, strict=True) if call.sums_partials else ()
        names = [name for share, other in pairs if set(other.writes) & set(call.reads) for name in share.computed]
        return {(node.line, node.place) for node in map(self._after, names) if node.op in TWO_STEPS}

    def _is_library(self, call: EmittedCall) -> bool:
        return call.is_extern or self._heuristic(call) == "template"

    def _heuristic(self, call: EmittedCall) -> str:
        definition = self.code.definitions.get(call.name)
        return definition.heuristic if definition is not None else ""

    def _unknown_effects(self) -> Iterator[str]:
        """Yield a sentence for each user's Triton kernel of which the dump does not say what it reads and writes."""
        if self.texts.kernels is None and self.facts is None:
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
        stacks = {stack_lines(stack) for stack in self.texts.stacks.get(call.handle, ())}
        if not nodes:  # use the call's comment; for a library call it also names the operations before it
            atens = (call.atens or self._of_name(call))[-1:] if call.is_extern else call.atens
            lines = {(line, place) for _, line, place in stacks} or self._lines_of_partials(call)
            line, place = next(iter(lines)) if len(lines) == 1 else (None, None)
            sources = tuple(
                SourceNode("", aten, None, line, (), self.code.part == "backward", place=place) for aten in atens
            )
        sources = tuple(_outside_libraries(source, stacks) for source in sources)
        targets = {node.op for node in nodes or sources}
        heuristic = self._heuristic(call)
        reduces = "reduction" in heuristic or (not heuristic and bool(targets & REDUCTIONS))
        definition = self.code.definitions.get(call.name)
        scheduled = self.scheduled[index]
        written = [name for name in call.writes if name not in scratch]
        listed = self.texts.kernels[index] if self.texts.kernels is not None else {}
        if listed.get("name") == call.name:
            sources = self._listed(index, listed) or sources
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
            inputs=tuple(Buffer(name, self._bytes(call, scheduled, name, reads=True)) for name in call.reads),
            outputs=tuple(Buffer(name, self._bytes(call, scheduled, name, reads=False)) for name in written),
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
            return replace(
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
        if self.facts is not None:
            return node
        return replace(node, backward=self.code.part == "backward" and name not in self.forward)

    def _after(self, name: str) -> SourceNode:
        return self._node(name, self.after)

    def _before(self, name: str) -> list[SourceNode]:
        """Return the nodes that a node replaced, or that it was, before the passes."""
        if self.facts is not None:
            return list(self.facts.before[name])
        if name in self.before.nodes:
            return [self._node(name, self.before)]
        node = self._after(name)
        names = self.replaced.get(frozenset(node.inputs), ())
        return [self._node(name, self.before) for name in names] or [node]

    def _listed(self, index: int, listed: Mapping[str, Any]) -> tuple[SourceNode, ...]:
        """Return the operations in kernels.json that the kernel computes."""
        share = self.shares[index]
        dropped = set(self.named[index]).difference(share.computed)
        finished = {source.name: buffer for name, buffer in share.finished.items() for source in self._before(name)}
        found: list[SourceNode] = []
        for source in _listed_sources(listed):
            if source.name in finished:
                found += second_step([source], self.memory.get(finished[source.name]))
            elif source.name not in dropped:
                found.append(source)
        return tuple(found)

    def _bytes(self, call: EmittedCall, scheduled: IrNode | None, buffer: str, *, reads: bool) -> int | None:
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
        elif scheduled is not None:
            elements = (scheduled.reads if reads else scheduled.stores).get(buffer, math.prod(memory.shape))
        return None if elements is None else min(memory.bytes, elements * SIZES[memory.dtype])


def _outside_libraries(node: SourceNode, stacks: Iterable[StackLines]) -> SourceNode:
    """Return a node with a place outside of libraries, by the stacks of its kernel that end in its own one.

    Without one such place, the node keeps that of a library which has the model.
    """
    if node.place is None or not is_library(node.place):
        return node
    places = {stack.place for stack in stacks if stack.innermost == node.place}
    kept = node.place if may_be_model(node.place) else None
    return replace(node, place=places.pop() if len(places) == 1 else kept)


def _listed_sources(listed: Mapping[str, Any]) -> list[SourceNode]:
    """Return the operations in kernels.json; [] where they are damaged."""
    try:
        return msgspec.convert(listed.get("sources"), list[SourceNode])
    except msgspec.ValidationError:
        return []


def _scheduled(nodes: Iterable[IrNode], code: EmittedCode) -> list[IrNode | None]:
    """Return the scheduler's node of each call. If several write one buffer, each is that of a later call.

    A C++ function has the loops of several nodes: one for each parameter that it writes. They count as one node.
    """
    writers: dict[str, list[IrNode]] = {}
    for node in nodes:
        for buffer in node.writes:
            writers.setdefault(buffer, []).append(node)
    found: list[IrNode | None] = []
    for call in code.calls:
        own: list[IrNode] = []
        for buffer in call.writes:
            waiting = writers.get(buffer, [])
            loops = list(call.arguments.values()).count(buffer) if code.on_cpu else 1
            taken = waiting[: max(loops, 1)]
            own += [node for node in taken if not any(node is other for other in own)]
            waiting[:] = waiting[len(taken) :] or taken[-1:]
        if code.on_cpu and len(own) > 1:
            found.append(IrNode(
                frozenset(name for node in own for name in node.operations),
                sum((node.reads for node in own), Counter[str]()),
                frozenset(name for node in own for name in node.writes),
                sum((node.stores for node in own), Counter[str]()),
            ))
        else:
            found.append(own[0] if own else None)
    return found
