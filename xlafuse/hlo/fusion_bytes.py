"""The declared bytes of a kernel: how much one HLO instruction, a fusion included, reads and writes by its shapes."""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from xlafuse.hlo.shape import Element
from xlafuse.hlo.text_reader import Computation, Instruction, Module

# (opcode, position of the operand of which only the result's size is read)
_PARTIAL_READS = {(opcode, 0) for opcode in ("slice", "dynamic-slice", "gather")}
_READ_THROUGH = ("convert", "slice", "dynamic-slice", "reduce")
LIBRARIES = ("__cudnn", "__cub", "cusolver", "cusparse", "cufft", "__gpu$TopK")


def calls_library(instruction: Instruction) -> bool:
    """Return whether a library chooses the kernel of a custom call: cuBLAS, cuDNN, CUB, cuSOLVER, ..."""
    return instruction.custom_call_target.startswith(LIBRARIES)


@dataclass(frozen=True)
class Write:
    """A write of a result, or of one element of a tuple.

    bytes: None for the whole result. updates: the position of the operand that is updated in place; None if the result
    has its own memory.
    """

    bytes: int | None = None
    updates: int | None = None


_ALL = Write()


class DeclaredBytes:
    """The declared reads and writes of a module's instructions; each fusion's body is analysed once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._bodies: dict[str, _Body] = {}
        self._done: dict[str, dict[str, Element]] = {}

    def reads(self, computation: Computation, instruction: Instruction) -> list[int | None]:
        """Return the bytes read of each operand, None for all of it. A slice or gather reads as much as it returns."""
        body = self._body(instruction)
        if body is not None:
            return [body.uses.get(position, 0) for position in range(len(instruction.operands))]
        size = self.result(computation, instruction).bytes
        return [_used(instruction, position, computation, size) for position in range(len(instruction.operands))]

    def writes(self, computation: Computation, instruction: Instruction) -> list[Write]:
        """Return one write for each element of a tuple if the elements differ, else one for all."""
        if body := self._body(instruction):
            return body.writes
        elements = len(instruction.result.elements)
        if instruction.opcode == "scatter" and elements:
            return [_written(computation, instruction, position) for position in range(elements)]
        return [_written(computation, instruction, 0)]

    def result(self, computation: Computation, instruction: Instruction) -> Element:
        """Return the shape of an instruction's result; for a -start, that of its -done.

        A -start's own shape also lists operands and handles.
        """
        if instruction.opcode.endswith("-start") or instruction.opcode in ("send", "recv"):
            return self._results_by_start(computation).get(instruction.name, instruction.result)
        return instruction.result

    def _body(self, instruction: Instruction) -> "_Body | None":
        if instruction.synchronous_opcode != "fusion":
            return None
        name = next(iter(instruction.called("calls")), "")
        if name not in self._bodies and name in self._module.computations:
            self._bodies[name] = _Body(self._module.computations[name])
        return self._bodies.get(name)

    def _results_by_start(self, computation: Computation) -> dict[str, Element]:
        if computation.name not in self._done:
            first: dict[str, str] = {}  # -update -> its -start
            results: dict[str, Element] = {}
            for instruction in computation.instructions.values():
                if instruction.opcode.endswith("-update"):
                    first.update((instruction.name, first.get(name, name)) for name in instruction.operands)
                elif instruction.opcode.endswith("-done"):
                    results.update((first.get(name, name), instruction.result) for name in instruction.operands)
            self._done[computation.name] = results
        return self._done[computation.name]


class _Body:
    """The body of a fusion."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        parts = tuple(computation.instructions.values())
        self._parameters = {part.name: part.index for part in parts if part.opcode == "parameter"}
        # Bitcast -> the instruction whose data it shows; text lists operands before their users.
        self._shown: dict[str, str] = {}
        for part in parts:
            if part.opcode == "bitcast" and len(part.operands) == 1:
                self._shown[part.name] = self._shown.get(part.operands[0], part.operands[0])
        users: defaultdict[str, set[tuple[str, int, str]]] = defaultdict(set)
        for part in parts:
            if part.name in self._shown:
                if part.is_root:
                    users[self._shown[part.name]].add(("root", 0, ""))
                continue
            for position, operand in enumerate(part.operands):
                users[self._shown.get(operand, operand)].add((part.opcode, position, part.name))
        # Conversions, slices and sums of which slices or gathers take a part: the fusion computes only this part.
        taken: set[str] = set()
        for part in reversed(parts):
            one_array = part.operands and (part.opcode != "reduce" or len(part.operands) == 2)
            if part.opcode in _READ_THROUGH and one_array and not part.is_root and users[part.name] and all(
                (opcode, position) in _PARTIAL_READS or (position == 0 and user in taken)
                for opcode, position, user in users[part.name]
            ):
                taken.add(part.name)
        # One of them -> the instruction that its users read through it, and that one's elements for each of its own.
        self._read_through: dict[str, tuple[str, int]] = {}
        for part in parts:
            if part.name in taken:
                source, elements = self._source(part.operands[0])
                if part.opcode == "reduce":
                    elements *= self._elements(part.operands[0]) // max(self._elements(part.name), 1)
                self._read_through[part.name] = source, elements

    @cached_property
    def uses(self) -> dict[int, int | None]:
        """Bytes read of each parameter, None for all of it; unused parameters are missing."""
        uses: dict[int, int | None] = {}
        for part in self._computation.instructions.values():
            if part.name in self._shown:
                continue
            for position, operand in enumerate(part.operands):
                if position == 0 and part.name in self._read_through:
                    continue
                source, elements = self._source(operand)
                parameter = self._parameters.get(source)
                if parameter is None:
                    continue
                used = _used(part, position, self._computation, part.bytes)
                if used is not None and source != operand:
                    used = used * elements * self._element_bits(source) // max(self._element_bits(operand), 1)
                sofar = uses.get(parameter, 0)
                uses[parameter] = None if used is None or sofar is None else sofar + used
        return uses

    @cached_property
    def writes(self) -> list[Write]:
        root = self._computation.root
        if root is None:
            return [_ALL]
        if root.opcode == "scatter" and root.result.elements:
            return [self._written(root, element) for element in range(len(root.result.elements))]
        names = root.operands if root.opcode == "tuple" else (root.name,)
        return [self._written(self._computation.instructions.get(self._shown.get(name, name)), 0) for name in names]

    def _written(self, result: Instruction | None, element: int) -> Write:
        write = _ALL if result is None else _written(self._computation, result, element)
        if result is None or write.updates is None or write.updates >= len(result.operands):
            return _ALL
        # A fusion that updates an array which it computed itself writes the whole array.
        operand = self._parameter(result.operands[write.updates])
        return _ALL if operand is None else Write(write.bytes, operand)

    def _source(self, operand: str) -> tuple[str, int]:
        """Return the instruction whose data a use of `operand` reads, and its elements for each of the operand's."""
        shown = self._shown.get(operand, operand)
        return self._read_through.get(shown, (shown, 1))

    def _elements(self, name: str) -> int:
        return sum(math.prod(shape.dims) for shape in self._computation.instructions[name].shapes)

    def _element_bits(self, name: str) -> int:
        return sum(shape.bits for shape in self._computation.instructions[name].shapes)

    def _parameter(self, operand: str) -> int | None:
        return self._parameters.get(self._shown.get(operand, operand))


def _used(user: Instruction, position: int, computation: Computation, result_bytes: int) -> int | None:
    """Return the bytes that `user` reads of its operand at `position`; None for all of it."""
    match user.synchronous_opcode:
        case opcode if (opcode, position) in _PARTIAL_READS:
            return result_bytes
        case "dynamic-update-slice" if position == 0:
            return 0
        case "scatter" if position < len(user.operands) // 2:
            return _operand_bytes(computation, user, len(user.operands) // 2 + 1 + position)
        case _:
            return None


def _written(computation: Computation, result: Instruction, element: int) -> Write:
    """Return what `result` writes; an in-place update writes only the update."""
    if result.opcode == "dynamic-update-slice":
        return Write(_operand_bytes(computation, result, 1), 0)
    if result.opcode == "scatter":
        return Write(_operand_bytes(computation, result, len(result.operands) // 2 + 1 + element), element)
    return _ALL


def _operand_bytes(computation: Computation, instruction: Instruction, position: int) -> int:
    known = None
    if position < len(instruction.operands):
        known = computation.operand_bytes(instruction.operands[position])
    return instruction.bytes if known is None else known
