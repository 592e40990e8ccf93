"""Bytes that one HLO instruction reads and writes when it runs as a kernel, as its shapes declare them."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from xlafuse.hlo.shape import Element
from xlafuse.hlo.text_reader import Computation, Instruction, Module

_LOOKUPS = {(opcode, 0) for opcode in ("slice", "dynamic-slice", "gather")}  # with the operand's position
LIBRARIES = ("__cudnn", "__cub", "cusolver", "cusparse", "cufft", "__gpu$TopK")


def calls_library(instruction: Instruction) -> bool:
    """A custom call whose kernel a library chooses: cuBLAS, cuDNN, CUB, cuSOLVER, ..."""
    return instruction.custom_call_target.startswith(LIBRARIES)


@dataclass(frozen=True)
class Write:
    """What is written of a result, or of one element of a tuple.

    bytes: None for all of it. updates: position of the operand whose memory the result lives in, None for memory of
    its own.
    """

    bytes: int | None = None
    updates: int | None = None


_ALL = Write()


class DeclaredBytes:
    """Reads and writes in one module; what a fusion's body does with its parameters is worked out once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._bodies: dict[str, _Body] = {}
        self._done: dict[str, dict[str, Element]] = {}

    def reads(self, computation: Computation, instruction: Instruction) -> list[int | None]:
        """Bytes used of each operand, None for all of it: a slice or gather reads what it yields."""
        body = self._body(instruction)
        if body is not None:
            return [body.uses.get(position, 0) for position in range(len(instruction.operands))]
        yields = self.result(computation, instruction).bytes
        return [_used(instruction, position, computation, yields) for position in range(len(instruction.operands))]

    def writes(self, computation: Computation, instruction: Instruction) -> list[Write]:
        """One for each element of a tuple where elements differ, else one for all."""
        if body := self._body(instruction):
            return body.writes
        elements = len(instruction.result.elements)
        if instruction.opcode == "scatter" and elements:
            return [_written(computation, instruction, position) for position in range(elements)]
        return [_written(computation, instruction, 0)]

    def result(self, computation: Computation, instruction: Instruction) -> Element:
        """What an instruction yields. An asynchronous one's own shape also lists operands and handles; its result is
        that of the -done."""
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
            first: dict[str, str] = {}  # of each update, the -start before it
            results: dict[str, Element] = {}
            for instruction in computation.instructions.values():
                if instruction.opcode.endswith("-update"):
                    first.update((instruction.name, first.get(name, name)) for name in instruction.operands)
                elif instruction.opcode.endswith("-done"):
                    results.update((first.get(name, name), instruction.result) for name in instruction.operands)
            self._done[computation.name] = results
        return self._done[computation.name]


class _Body:
    """A fused computation."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        parts = computation.instructions.values()
        self._parameters = {part.name: part.index for part in parts if part.opcode == "parameter"}
        # What each bitcast shows; text lists operands before their users.
        self._shown: dict[str, str] = {}
        for part in parts:
            if part.opcode == "bitcast" and len(part.operands) == 1:
                self._shown[part.name] = self._shown.get(part.operands[0], part.operands[0])
        users: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        for part in parts:
            for position, operand in enumerate(part.operands):
                users[operand].add((part.opcode, position))
        # Conversions of which only slices and what is looked up are used: a fusion computes no more of them.
        self._looked_up = {
            part.name: part.operands[0] for part in parts
            if part.opcode == "convert" and users[part.name] and users[part.name] <= _LOOKUPS and not part.is_root
        }

    @cached_property
    def uses(self) -> dict[int, int | None]:
        """Bytes read of each parameter, None for all; a parameter that nothing uses is not in it."""
        uses: dict[int, int | None] = {}
        for part in self._computation.instructions.values():
            if part.name in self._shown or part.name in self._looked_up:
                continue
            for position, operand in enumerate(part.operands):
                unconverted = self._looked_up.get(operand, operand)
                parameter = self._parameter(unconverted)
                if parameter is None:
                    continue
                used = _used(part, position, self._computation, part.bytes)
                if used is not None and unconverted != operand:
                    used = used * self._bytes(unconverted) // max(self._bytes(operand), 1)
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
        # What the fusion computed itself, and updates then, it has to write out whole.
        operand = self._parameter(result.operands[write.updates])
        return _ALL if operand is None else Write(write.bytes, operand)

    def _bytes(self, operand: str) -> int:
        return self._computation.instructions[operand].bytes

    def _parameter(self, operand: str) -> int | None:
        return self._parameters.get(self._shown.get(operand, operand))


def _used(user: Instruction, position: int, computation: Computation, yields: int) -> int | None:
    """Bytes that `user`, which yields so many, reads of its operand at `position`; None for all of it."""
    match user.synchronous_opcode:
        case opcode if (opcode, position) in _LOOKUPS:
            return yields
        case "dynamic-update-slice" if position == 0:
            return 0
        case "scatter" if position < len(user.operands) // 2:
            return _operand_bytes(computation, user, len(user.operands) // 2 + 1 + position)
        case _:
            return None


def _written(computation: Computation, result: Instruction, element: int) -> Write:
    """An in-place update writes its update only."""
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
