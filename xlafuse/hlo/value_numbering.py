"""Numbers for what instructions compute: equal for equal operations on equal operands, across kernels.

Value numbering over the whole module, buffers between kernels included, so that an operation that two fusions both hold
is told from two operations of one name (a Python loop's layers have the same op_names and frames). Where the data lies
and how it is laid out does not matter: copies, bitcasts, reshapes and transposes compute nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xlafuse.hlo.text_reader import Computation, Instruction, Module

MOVES = frozenset(
    "copy transpose reshape slice dynamic-slice dynamic-update-slice concatenate pad reverse broadcast "
    "gather".split()
)
_SAME_VALUE = frozenset(("bitcast", "copy", "reshape", "transpose", "opt-barrier", "add-dependency", "domain"))


class NumberedInstruction(NamedTuple):
    """An instruction inside a kernel, the computation it stands in, and the number of what it computes."""

    instruction: Instruction
    computation: Computation
    expression: int


@dataclass
class _Level:
    """A fused computation while it is read."""

    caller: Instruction
    computation: Computation
    arguments: Sequence[int]
    rest: Iterator[Instruction]
    known: dict[str, int] = field(default_factory=dict)


class ValueNumbers:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._numbers: dict[tuple[str | int, ...], int] = {}
        self._elements: dict[int, tuple[int, ...]] = {}  # of numbers that stand for tuples
        self._count = 0

    def unique(self) -> int:
        """Equal to no other: an input, or what a loop carries."""
        self._count += 1
        return self._number(("unique", self._count))

    def tuple_number(self, numbers: Sequence[int]) -> int:
        number = self._number(("tuple", *numbers))
        self._elements[number] = tuple(numbers)
        return number

    def element(self, number: int, index: int) -> int:
        elements = self._elements.get(number, ())
        return elements[index] if index < len(elements) else self._number(("element", number, index))

    def instructions(
        self, computation: Computation, instruction: Instruction, operands: Sequence[int]
    ) -> list[NumberedInstruction]:
        """The instruction itself; of a fusion all instructions, those of nested fusions before the nested fusion,
        each computation once, and the fusion itself last. Its number is that of the result."""
        parts: list[NumberedInstruction] = []
        seen: set[str] = set()
        levels: list[_Level] = []
        self._enter(levels, seen, instruction, operands)
        if not levels:
            return [NumberedInstruction(instruction, computation, self._of(instruction, operands))]
        while levels:
            level = levels[-1]
            part = next(level.rest, None)
            if part is not None:
                inner = [self._operand(level.known, name) for name in part.operands]
                if not self._enter(levels, seen, part, inner):
                    level.known[part.name] = self._inside(level, part, inner)
                    parts.append(NumberedInstruction(part, level.computation, level.known[part.name]))
                continue
            levels.pop()
            root = level.computation.root
            result = self.unique() if root is None else level.known[root.name]
            around = levels[-1] if levels else None
            if around is not None:
                around.known[level.caller.name] = result
            parts.append(NumberedInstruction(level.caller, around.computation if around else computation, result))
        return parts

    def _enter(self, levels: list[_Level], seen: set[str], part: Instruction, operands: Sequence[int]) -> bool:
        if part.synchronous_opcode != "fusion":
            return False
        name = next(iter(part.called("calls")), "")
        if name in seen or name not in self._module.computations:
            return False
        seen.add(name)
        called = self._module.computations[name]
        levels.append(_Level(part, called, operands, iter(called.instructions.values())))
        return True

    def _inside(self, level: _Level, part: Instruction, operands: list[int]) -> int:
        index = part.index or 0
        if part.opcode == "parameter":
            return level.arguments[index] if index < len(level.arguments) else self.unique()
        if part.opcode == "get-tuple-element" and operands:
            return self.element(operands[0], index)
        return self._of(part, operands)

    def _operand(self, known: dict[str, int], operand: str) -> int:
        name, *path = operand.split("#")
        if name not in known:
            return self.unique()
        number = known[name]
        for index in path:
            number = self.element(number, int(index) if index.isdecimal() and len(index) < 10 else 0)
        return number

    def _of(self, instruction: Instruction, operands: Sequence[int]) -> int:
        if instruction.opcode in _SAME_VALUE and operands:
            return operands[0]
        if instruction.opcode == "tuple":
            return self.tuple_number(operands)
        dtype = instruction.shapes[0].dtype if instruction.shapes else ""
        detail = instruction.custom_call_target or instruction.detail
        return self._number((instruction.synchronous_opcode, dtype, detail, *operands))

    def _number(self, key: tuple[str | int, ...]) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
