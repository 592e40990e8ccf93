"""Value numbering over a whole module: equal operations on equal operands get the same number, across kernels.

The numbers tell one operation that two fusions both compute from two operations of the same name: the layers of a
Python loop share op_names and stack frames. Copies, bitcasts, reshapes and transposes keep the number of their operand.
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
    """An instruction inside a kernel, its computation, and the number of its value."""

    instruction: Instruction
    computation: Computation
    expression: int


@dataclass
class _OpenFusion:
    """A fused computation that is being numbered."""

    caller: Instruction
    computation: Computation
    arguments: Sequence[int]
    rest: Iterator[Instruction]
    known: dict[str, int] = field(default_factory=dict)


class ValueNumbers:
    """The value numbers of one module."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._numbers: dict[tuple[str | int, ...], int] = {}
        self._elements: dict[int, tuple[int, ...]] = {}  # for the numbers of tuples
        self._count = 0

    def unique(self) -> int:
        """Return a number that no other value has: for an input, or a value that a loop carries."""
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
        """Return the numbered instruction; for a fusion, all instructions inside it and the fusion itself last.

        Instructions of a nested fusion come before it, and each computation is listed once. A fusion has the number of
        its result.
        """
        parts: list[NumberedInstruction] = []
        seen: set[str] = set()
        fusions: list[_OpenFusion] = []
        self._enter(fusions, seen, instruction, operands)
        if not fusions:
            return [NumberedInstruction(instruction, computation, self._computed_number(instruction, operands))]
        while fusions:
            fusion = fusions[-1]
            part = next(fusion.rest, None)
            if part is not None:
                inner = [self._operand_number(fusion.known, name) for name in part.operands]
                if not self._enter(fusions, seen, part, inner):
                    fusion.known[part.name] = self._number_inside(fusion, part, inner)
                    parts.append(NumberedInstruction(part, fusion.computation, fusion.known[part.name]))
                continue
            fusions.pop()
            root = fusion.computation.root
            result = self.unique() if root is None else fusion.known[root.name]
            around = fusions[-1] if fusions else None
            if around is not None:
                around.known[fusion.caller.name] = result
            parts.append(NumberedInstruction(fusion.caller, around.computation if around else computation, result))
        return parts

    def _enter(self, fusions: list[_OpenFusion], seen: set[str], part: Instruction, operands: Sequence[int]) -> bool:
        if part.synchronous_opcode != "fusion":
            return False
        name = next(iter(part.called("calls")), "")
        if name in seen or name not in self._module.computations:
            return False
        seen.add(name)
        called = self._module.computations[name]
        fusions.append(_OpenFusion(part, called, operands, iter(called.instructions.values())))
        return True

    def _number_inside(self, fusion: _OpenFusion, part: Instruction, operands: list[int]) -> int:
        index = part.index or 0
        if part.opcode == "parameter":
            return fusion.arguments[index] if index < len(fusion.arguments) else self.unique()
        if part.opcode == "get-tuple-element" and operands:
            return self.element(operands[0], index)
        return self._computed_number(part, operands)

    def _operand_number(self, known: dict[str, int], operand: str) -> int:
        name, *path = operand.split("#")
        if name not in known:
            return self.unique()
        number = known[name]
        for index in path:
            number = self.element(number, int(index) if index.isdecimal() and len(index) < 10 else 0)
        return number

    def _computed_number(self, instruction: Instruction, operands: Sequence[int]) -> int:
        if instruction.opcode in _SAME_VALUE and operands:
            return operands[0]
        if instruction.opcode == "tuple":
            return self.tuple_number(operands)
        dtype = instruction.shapes[0].dtype if instruction.shapes else ""
        detail = instruction.custom_call_target or instruction.detail
        return self._number((instruction.synchronous_opcode, dtype, detail, *operands))

    def _number(self, key: tuple[str | int, ...]) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
