"""What the instructions of a module yield, and which memory it lives in: values -> buffers.

A value is an array (a number here) or a tuple of values. Tuples, their elements, bitcasts, calls and asynchronous pairs
hand values on. Values share one buffer where XLA keeps them in one place: the result of an update in place and what it
updates; what a loop carries, from its initial value through every iteration to its result; a conditional's result and
those of its branches. An entry parameter or a constant shares its buffer only while nothing writes there; XLA copies it
first, or was given it (donated), and then the written value counts as a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from xlafuse.hlo.shape import MAX_DIGITS, Element, Shape

Tree: TypeAlias = "int | tuple[Tree, ...]"
Role = Literal["input", "output", "intermediate", "constant"]

# Names grow with what they are made of; beyond what any compiler's have, they stop.
_MAX_NAME, _MAX_DEPTH = 500, 64


@dataclass(frozen=True)
class Buffer:
    """Device memory that holds one array.

    name: of the instruction whose result it is, `name#1` for an element of a tuple, with "~2", "~3" appended where a
    computation runs at several places. role: an entry parameter's is "input" even if it is returned as it is. label:
    of an input, the framework's path to it ("inputs['x']"), where known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    role: Role
    label: str = ""


class Values:
    """Arrays by number, in the order in which they appear."""

    def __init__(self) -> None:
        self._names: list[tuple[str, str]] = []  # an instruction's, and the path into its tuple
        self._shapes: list[Shape] = []
        self._roles: list[Role] = []
        self._labels: dict[int, str] = {}
        self._parents: list[int] = []
        self._written: list[bool] = []
        # Equal numbers are equal expressions of the same inputs: what tells one operation from another of its name.
        self.numbers: list[int] = []

    def new(self, element: Element, name: str, role: Role = "intermediate", label: str = "") -> Tree:
        """Values of an instruction's result."""
        if element.shape is not None:
            return self._array(element.shape, name, "", role, label)
        # Each level: the parts made so far, those to come, and the path to them.
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
        """The value whose buffer this one lives in: the first of all that share it."""
        parents = self._parents
        while parents[value] != value:
            parents[value] = parents[parents[value]]
            value = parents[value]
        return value

    def bytes(self, value: int) -> int:
        return self._shapes[value].bytes

    def is_array(self, value: int) -> bool:
        return self._shapes[value].dtype not in ("token", "opaque")

    def write(self, tree: Tree) -> None:
        for value in leaves(tree):
            self._written[self.find(value)] = True

    def update(self, value: int, updated: Tree | None) -> None:
        """`value` is what became of `updated`, in its memory if that may be written."""
        self.write(value)
        if isinstance(updated, int):
            self._join(self.find(updated), self.find(value))

    def carry(self, state: Tree, initial: Tree | None, next_: Tree | None) -> None:
        """A loop's state, what it starts from, and what an iteration leaves."""
        # As one place where an iteration writes it; as where it started from if none does.
        for value, start, left in zip(leaves(state), _like(state, initial), _like(state, next_), strict=True):
            if left is not None:
                self._join(self.find(value), self.find(left))
            if start is not None:
                self._join(self.find(value), self.find(start))

    def choose(self, result: Tree, branch: Tree | None) -> None:
        """A conditional's result, and that of a branch."""
        for value, chosen in zip(leaves(result), _like(result, branch), strict=True):
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

    def buffers(self, used: set[int], outputs: set[int]) -> dict[int, Buffer]:
        """One for each number in `used` or `outputs` (as `find` gives them) and each input; of unique names."""
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
            found[value] = Buffer(name, shape.dims, shape.dtype, shape.bytes, role, label)
        return found


def leaves(tree: Tree | None) -> list[int]:
    """All arrays of a value, in order."""
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
    """An element of an element of a tuple; None if it has no such."""
    for index in path:
        if isinstance(index, str):
            if not index.isdecimal() or len(index) > MAX_DIGITS:
                return None
            index = int(index)
        if not isinstance(tree, tuple) or index >= len(tree):
            return None
        tree = tree[index]
    return tree


def _like(pattern: Tree, tree: Tree | None) -> list[int | None]:
    """The arrays of `tree` at the places of those of `pattern`; None where there is none."""
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
