"""The values that a module's instructions produce, and the buffers that hold them.

A value is an array or a tuple of values; in this file, an array is a number. Tuples, get-tuple-element, bitcasts, calls
and asynchronous start/done pairs create no arrays: they pass values on. Values share one buffer if XLA keeps them at
one address:

- the result of an in-place update and the array that it updates;
- a loop's state, from its initial value through every iteration to its result;
- a conditional's result and the results of its branches.

An entry parameter or a constant shares its buffer only if nothing writes to it. Before a write, XLA copies it, unless
it was donated. In both cases the written value counts as a separate buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from xlafuse.hlo.platform import Platform, memory_space
from xlafuse.hlo.shape import MAX_DIGITS, Element, Shape

Tree: TypeAlias = "int | tuple[Tree, ...]"
Role = Literal["input", "output", "intermediate", "constant"]

# Bounds on a name's length and on a tuple path's depth. No real module reaches them.
_MAX_NAME, _MAX_DEPTH = 500, 64


@dataclass(frozen=True)
class Buffer:
    """Memory that holds one array.

    name: the instruction that produces it, with "#1" for element 1 of a tuple. If several calls run one computation,
        the names of the later ones end in "~2", "~3".
    role: "input" for an entry parameter, even if the module returns it unchanged.
    label: an input's path in the arguments of the traced function ("inputs['x']"), if known.
    space: a memory other than the device's main memory ("host", "VMEM"; see `platform.memory_space`).
    padding: the part of `bytes` that a tiled layout adds to the array's elements.
    decides: the conditional or loop that reads it to choose a branch or to end ("while while.3"), or "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    role: Role
    label: str = ""
    space: str = ""
    padding: int = 0
    decides: str = ""


class Values:
    """The arrays of a module, numbered in the order of their appearance."""

    def __init__(self) -> None:
        self._names: list[tuple[str, str]] = []  # instruction, and path into its result
        self._shapes: list[Shape] = []
        self._roles: list[Role] = []
        self._labels: dict[int, str] = {}
        self._parents: list[int] = []
        self._written: list[bool] = []
        # The value number of each array, equal for equal contents (see value_numbering).
        self.numbers: list[int] = []

    def new(self, element: Element, name: str, role: Role = "intermediate", label: str = "") -> Tree:
        """Return new values for an instruction's result."""
        if element.shape is not None:
            return self._array(element.shape, name, "", role, label)
        # Each level: the values made so far, the elements left, and the path to them.
        levels: list[tuple[list[Tree], Iterator[Element], str]] = [([], iter(element.elements), "")]
        while True:
            done, rest, path = levels[-1]
            part = next(rest, None)
            if part is None:
                levels.pop()
                if not levels:
                    return tuple(done)
                levels[-1][0].append(tuple(done))
                continue
            path = f"{path}#{len(done)}" if len(levels) < _MAX_DEPTH else path
            if part.shape is None:
                levels.append(([], iter(part.elements), path))
            else:
                done.append(self._array(part.shape, name, path, role, label))

    def _array(self, shape: Shape, name: str, path: str, role: Role, label: str) -> int:
        value = len(self._parents)
        self._names.append((name[:_MAX_NAME], path))
        self._shapes.append(shape)
        self._roles.append(role)
        self._parents.append(value)
        self._written.append(False)
        self.numbers.append(-1)
        if label:
            self._labels[value] = label
        return value

    def find(self, value: int) -> int:
        """Return the representative of all values that share the buffer of `value`."""
        parents = self._parents
        while parents[value] != value:
            parents[value] = parents[parents[value]]
            value = parents[value]
        return value

    def bytes(self, value: int) -> int:
        return self._shapes[value].bytes

    def shape(self, value: int) -> Shape:
        return self._shapes[value]

    def is_array(self, value: int) -> bool:
        return self._shapes[value].dtype not in ("token", "opaque")

    def mark_written(self, tree: Tree) -> None:
        for value in leaves(tree):
            self._written[self.find(value)] = True

    def update(self, value: int, updated: Tree | None) -> None:
        """Record `value` as the result of an in-place update of `updated`. They share a buffer if it is writable."""
        self.mark_written(value)
        if isinstance(updated, int):
            self._join(self.find(updated), self.find(value))

    def join_loop(self, state: Tree, initial: Tree | None, next_: Tree | None) -> None:
        """Join a loop's state with its initial value and with the result of an iteration."""
        matched = zip(leaves(state), _matching_leaves(state, initial), _matching_leaves(state, next_), strict=True)
        for value, start, result in matched:
            # The iteration's result comes first: if it was written, the state does not share an initial input's buffer.
            if result is not None:
                self._join(self.find(value), self.find(result))
            if start is not None:
                self._join(self.find(value), self.find(start))

    def join_branch(self, result: Tree, branch: Tree | None) -> None:
        """Join a conditional's result with the result of one branch."""
        for value, chosen in zip(leaves(result), _matching_leaves(result, branch), strict=True):
            if chosen is not None and self._written[self.find(chosen)]:
                self._join(self.find(value), self.find(chosen))

    def _join(self, a: int, b: int) -> None:
        first, second = min(a, b), max(a, b)
        fixed = [root for root in (first, second) if self._roles[root] in ("input", "constant")]
        if first == second or len(fixed) == 2 or (fixed and (self._written[first] or self._written[second])):
            return
        if fixed:
            first, second = fixed[0], first + second - fixed[0]
        self._parents[second] = first
        self._written[first] = self._written[first] or self._written[second]

    def in_other_memory(self) -> bool:
        return any(shape.space for shape in self._shapes)

    def buffers(
        self, used: set[int], outputs: set[int], platform: Platform | None, deciding: Mapping[int, str]
    ) -> dict[int, Buffer]:
        """Return the buffer of each input and of each value in `used` and `outputs`, under unique names.

        The values are representatives, as `find` returns them. platform: that of the module, which gives memory spaces
        their meaning. deciding: by value, `Buffer.decides`.
        """
        inputs = {value for value, role in enumerate(self._roles) if role == "input" and self.is_array(value)}
        counts: dict[str, int] = {}
        taken: set[str] = set()
        found = {}
        for value in sorted(used | outputs | inputs):
            name = base = "".join(self._names[value])
            while name in taken:
                counts[base] = counts.get(base, 1) + 1
                name = f"{base}~{counts[base]}"
            taken.add(name)
            role, shape = self._roles[value], self._shapes[value]
            if value in outputs and role == "intermediate":
                role = "output"
            label = self._labels.get(value, "")
            space = memory_space(shape.space, platform)
            found[value] = Buffer(
                name, shape.dims, shape.dtype, shape.bytes, role, label, space, shape.padding, deciding.get(value, "")
            )
        return found


def leaves(tree: Tree | None) -> list[int]:
    """Return the arrays of a value, depth first."""
    if isinstance(tree, int):
        return [tree]
    found: list[int] = []
    pending: list[Tree | None] = [tree]
    while pending:
        part = pending.pop()
        if isinstance(part, int):
            found.append(part)
        elif part is not None:
            pending.extend(reversed(part))
    return found


def element(tree: Tree | None, path: list[str] | list[int]) -> Tree | None:
    """Return the value at a path of indices into nested tuples, or None if the path leads nowhere."""
    for index in path:
        if isinstance(index, str):
            if not index.isdecimal() or len(index) > MAX_DIGITS:
                return None
            index = int(index)
        if not isinstance(tree, tuple) or index >= len(tree):
            return None
        tree = tree[index]
    return tree


def _matching_leaves(pattern: Tree, tree: Tree | None) -> list[int | None]:
    """Return, for each array of `pattern`, the array of `tree` at the same path, or None."""
    found: list[int | None] = []
    pending: list[tuple[Tree, Tree | None]] = [(pattern, tree)]
    while pending:
        like, part = pending.pop()
        if isinstance(like, int):
            found.append(part if isinstance(part, int) else None)
        else:
            same = part if isinstance(part, tuple) and len(part) == len(like) else (None,) * len(like)
            pending.extend(zip(reversed(like), reversed(same), strict=True))
    return found
