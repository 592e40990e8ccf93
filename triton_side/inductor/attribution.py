"""Decide which of the FX nodes that Inductor gives to a kernel are computed there.

Inductor gives everything that it makes for one operation the origins of the operation's operands, too. So a kernel that
lays out a weight for a convolution has the activation before the convolution among its origins. The comment of a
kernel's definition lists the values that the kernel loads and stores; it computes what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from xlafuse.triton_side.inductor.graph import (
    MAKES_OR_MOVES,
    SCATTER,
    TWO_STEPS,
    VIEWS,
    Memory,
    SourceNode,
    helper_node,
    second_step,
)
from xlafuse.triton_side.inductor.kernel_code import Work
from xlafuse.triton_side.inductor.output_code import USERS_OWN, Definition, EmittedCall, EmittedCode, Fragment

_MOVES = (MAKES_OR_MOVES | VIEWS) - SCATTER
_HELPS = {"fills": "aten.full", "copies": "aten.clone"}
_NO_DEFINITION = Definition(None, (), "")


@dataclass(frozen=True)
class Share:
    """The FX nodes that a call computes, by name.

    finished: reductions among them of which an earlier kernel made partial results -> the buffer with those.
    does: where it computes none of these itself: it fills a buffer for them, copies an operand or a result, or finishes
        a result, as by adding a bias.
    """

    computed: tuple[str, ...]
    finished: Mapping[str, str] = field(default_factory=dict)
    does: Literal["computes", "fills", "copies", "finishes"] = "computes"

    def operations(
        self, node: Callable[[str], SourceNode], before: Callable[[str], Iterable[SourceNode]],
        memory: Mapping[str, Memory],
    ) -> tuple[tuple[SourceNode, ...], tuple[SourceNode, ...]]:
        """Return the nodes as the call computes them, and those before Inductor's pattern matchers.

        node, before: the node of a name, and the nodes that it replaced or was.
        """
        nodes: list[SourceNode] = []
        sources: list[SourceNode] = []
        for name in self.computed:
            if self.does != "computes":
                nodes.append(helper_node(node(name), _HELPS.get(self.does)))
                sources.append(nodes[-1])
            elif name in self.finished:
                partial = memory.get(self.finished[name])
                nodes += second_step([node(name)], partial)
                sources += second_step(before(name), partial)
            else:
                nodes.append(node(name))
                sources += before(name)
        return tuple(nodes), tuple(dict.fromkeys(sources))


def shares(code: EmittedCode, given: Sequence[Sequence[str]], graph: Mapping[str, SourceNode]) -> list[Share]:
    """Return what each call in the code computes.

    given: the FX nodes that Inductor names for each, in the graph's order. graph: all FX nodes after Inductor's passes,
    without placeholders.
    """
    return _Attribution(code, given, graph).shares()


@dataclass(frozen=True)
class _Written:
    """A call's buffers hold these nodes' values.

    named: those that a comment names. unnamed: those of which a buffer without a node may hold the values.
    partial: the unnamed reductions may be partial results.
    """

    computed: tuple[str, ...]
    named: Collection[str]
    unnamed: Collection[str]
    partial: bool


class _Attribution:
    def __init__(self, code: EmittedCode, given: Sequence[Sequence[str]], graph: Mapping[str, SourceNode]) -> None:
        self.graph = graph
        definitions = [code.definitions.get(call.name, _NO_DEFINITION) for call in code.calls]
        self.calls = [
            (call, own, self._launches(names) if own.heuristic == USERS_OWN else tuple(names))
            for call, own, names in zip(code.calls, definitions, given, strict=True)
        ]
        # Library calls, templates and users' kernels compute all their nodes, and no other kernel computes these.
        self.called = {name for call, own, names in self.calls if self._is_called(call, own) for name in names}
        self.scattered = {
            name for _, own, _ in self.calls if own.work == "scatter"
            for name in own.fragment.loads if name in own.fragment.nodes and name not in own.fragment.stores
        }
        self.written: dict[str, _Written] = {}  # by buffer
        self.first: dict[str, tuple[tuple[str, ...], Share]] = {}  # by definition, what its first call computes

    def _launches(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes that launch a user's kernel. Inductor also names those that make its arguments."""
        return tuple(name for name in names if "triton_kernel_wrapper" in self.graph[name].op) or tuple(names)

    @staticmethod
    def _is_called(call: EmittedCall, definition: Definition) -> bool:
        if definition.heuristic in ("template", USERS_OWN):
            return True
        return call.is_extern and not call.sums_partials

    def shares(self) -> list[Share]:
        found = []
        for call, definition, names in self.calls:
            share = self._share(call, definition, names)
            found.append(share)
            self._note_written(call, definition, share)
        return found

    def _share(self, call: EmittedCall, definition: Definition, names: tuple[str, ...]) -> Share:
        if self._is_called(call, definition):
            return Share(names)
        # Inductor lists no values for a foreach kernel that changes its inputs, and names its own nodes only.
        if definition.heuristic == "foreach" and not definition.fragment.nodes:
            return Share(tuple(name for name in names if name not in self.called))
        if call.sums_partials:
            writers = [(buffer, self.written[buffer].computed) for buffer in call.reads if buffer in self.written]
            return Share(names, {name: buffer for buffer, computed in writers for name in names if name in computed})
        if call.name not in self.first and set(names) <= definition.fragment.nodes.keys():
            share = self._between(definition.fragment, definition.work, names)
        else:
            share = self._like_first(call, definition.work, names)
        if definition.work == "copy":
            share = Share(tuple(name for name in share.computed if self.graph[name].op in _MOVES))
        if names and not share.computed:
            mine = tuple(n for n in names if n in self.called) or self._last(names)
            loaded = {name for b in call.reads if b in self.written for name in self.written[b].computed}
            before = loaded.isdisjoint(mine)
            copies = (before and call.reads) or definition.work == "copy"
            share = Share(mine, does="copies" if copies else "fills" if before else "finishes")
        self.first.setdefault(call.name, (names, share))
        return share

    def _like_first(self, call: EmittedCall, work: Work | None, names: tuple[str, ...]) -> Share:
        """Return the share of a later call of the same code, which has no comment of its own.

        It computes the nodes at the same positions as the first call. Where Inductor names other operations, which
        must be foreign, it may have loaded all that the writers of its arguments computed.
        """
        given, first = self.first.get(call.name, ((), Share(())))
        for known in (given, first.computed):
            if [self.graph[name].op for name in known] == [self.graph[name].op for name in names]:
                here = dict(zip(known, names, strict=True))
                finished = {here[name]: buffer for name, buffer in first.finished.items()}
                return Share(tuple(here[name] for name in first.computed), finished, first.does)
        written = (self.written[buffer] for buffer in call.reads if buffer in self.written)
        loads = [*call.reads, *(name for each in written for name in each.named)]
        return self._between(Fragment({}, loads, call.writes), work, names)

    def _note_written(self, call: EmittedCall, definition: Definition, share: Share) -> None:
        is_first = self.first.get(call.name, (None, None))[1] is share
        named = set(definition.fragment.stores) if is_first else set()
        helps = share.does in ("fills", "copies")
        unnamed = () if helps else tuple(dict.fromkeys((
            *(name for name in share.computed if self.graph[name].op in TWO_STEPS), *self._last(share.computed),
        )))
        computed = () if helps else share.computed
        noted = _Written(computed, named, [n for n in unnamed if n not in named], partial=not call.is_extern)
        # Comments give a buffer that was changed in place a new name, such as "buf0" for arg0_1.
        self.written |= dict.fromkeys((*call.writes, *named.difference(self.graph)), noted)

    def _last(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes that no other of these nodes takes."""
        taken = {operand for name in names for operand in self.graph[name].inputs}
        return tuple(name for name in names if name not in taken)

    def _between(self, fragment: Fragment, work: Work | None, names: tuple[str, ...]) -> Share:
        """Return the nodes on the paths from the values that the kernel loads to those that it stores."""
        own, stores = frozenset(names), set(fragment.stores)
        loads = {name for name in fragment.loads if name not in stores}
        # Code that changes a buffer in place finds it named after the change. A scatter's other kernel has filled it.
        changed = {n for n in loads & own if work == "scatter" or self.graph[n].op.endswith("_")}
        elsewhere = self.called | (stores & self.scattered if work != "scatter" else set())
        loads = (loads - changed) | {self.graph[name].inputs[0] for name in changed if self.graph[name].inputs}
        loads |= {base for name in loads for base in self._bases(name)}
        finished: dict[str, str] = {}
        for buffer in fragment.loads:
            if (written := self.written.get(buffer)) is not None:
                partial = {name for name in written.unnamed if written.partial and self.graph[name].op in TWO_STEPS}
                finished |= dict.fromkeys(partial & own, buffer)
                loads.update(name for name in written.unnamed if name not in partial)
        stored = [self._behind(store, own) & own for store in fragment.stores]
        roots = [name for found in stored for name in found]
        for enough in (all, any):  # some operations need only the shape of an operand
            available = self._available(names, loads, finished, elsewhere, enough)
            if all(name in available or name in elsewhere for name in roots):
                break
        else:
            return Share(tuple(name for name in names if name not in self.called))
        if not all(stored):  # a buffer that is no node's value, or is named after a later change
            roots += self._last(names)
        computed: set[str] = set()
        seen: set[str] = set()
        while roots:
            name = roots.pop()
            if name in seen or name in loads:
                continue
            seen.add(name)
            if name in own and name in available:
                computed.add(name)
            if name not in finished and name in self.graph and (name in own or self._moves(name)):
                roots += self.graph[name].inputs
        kept = tuple(name for name in names if name in computed)
        return Share(kept, {name: buffer for name, buffer in finished.items() if name in computed})

    def _available(
        self, names: Sequence[str], loads: set[str], finished: Mapping[str, str], elsewhere: set[str],
        enough: Callable[[Iterable[bool]], bool],
    ) -> set[str]:
        """Return those of the nodes that can be computed from loaded values. enough: of the operands' availability."""
        available, known = set(finished), loads.union(names)
        for name in names:
            if name not in elsewhere:
                operands = {each for operand in self.graph[name].inputs for each in self._behind(operand, known)}
                if not operands or enough(each in loads or each in available for each in operands):
                    available.add(name)
        return available

    def _behind(self, name: str, known: Collection[str]) -> set[str]:
        """Return the value itself, or those of which it is a view, a part or a copy, until the `known` ones.

        Inductor does not always name the nodes between them. A constant has none.
        """
        found: set[str] = set()
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in known or not self._moves(name):
                found.add(name)
            elif name not in seen:
                seen.add(name)
                waiting += self.graph[name].inputs
        return found

    def _bases(self, name: str) -> list[str]:
        """Return the values of which this one is a view or a later state."""
        found = []
        while (node := self.graph.get(name)) and node.inputs and (node.op in VIEWS or node.op.endswith("_")):
            name = node.inputs[0]
            found.append(name)
        return found

    def _moves(self, name: str) -> bool:
        """Return whether the node is no arithmetic."""
        return name in self.graph and self.graph[name].op in _MOVES
