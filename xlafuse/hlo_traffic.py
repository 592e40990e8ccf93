"""Bytes that one HLO instruction reads and writes when it runs as a kernel, as its shapes declare them."""

from functools import cached_property

from xlafuse.hlo_text import Computation, Instruction, Module

LIBRARIES = ("__cudnn", "__cub", "cusolver", "cusparse", "cufft", "__gpu$TopK")


def calls_library(instruction: Instruction) -> bool:
    """A custom call whose kernel a library chooses: cuBLAS, cuDNN, CUB, cuSOLVER, ..."""
    return instruction.custom_call_target.startswith(LIBRARIES)


class Traffic:
    """Reads and writes in one module; what a fusion's body does with its parameters is worked out once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._bodies: dict[str, _Body] = {}
        self._done: dict[str, dict[str, int]] = {}

    def read(self, computation: Computation, instruction: Instruction) -> int:
        """Each distinct operand once, and of each only what is used."""
        body = self._body(instruction)
        read: dict[str, int] = {}
        size: dict[str, int] = {}
        for position, name in enumerate(instruction.operands):
            size[name] = computation.operand_bytes(name) or 0
            used = body.uses.get(position, 0) if body else _used(instruction, position, computation)
            read[name] = read.get(name, 0) + (size[name] if used is None else used)
        return sum(min(used, size[name]) for name, used in read.items())

    def written(self, computation: Computation, instruction: Instruction) -> int:
        """Each result once; a library's scratch space is no result."""
        if body := self._body(instruction):
            return body.written
        if instruction.opcode.endswith("-start"):
            # Its own shape also lists operands and handles; the result's is that of the -done.
            return self._done_bytes(computation).get(instruction.name, instruction.bytes)
        if calls_library(instruction):
            last = instruction.shapes[-1:]
            scratch = len(instruction.shapes) > 1 and last[0].dtype in ("s8", "u8") and len(last[0].dims) == 1
            return instruction.bytes - (last[0].bytes if scratch else 0)
        return _result_bytes(computation, instruction)

    def _body(self, instruction: Instruction) -> "_Body | None":
        if instruction.synchronous_opcode != "fusion":
            return None
        name = next(iter(instruction.called("calls")), "")
        if name not in self._bodies and name in self._module.computations:
            self._bodies[name] = _Body(self._module.computations[name])
        return self._bodies.get(name)

    def _done_bytes(self, computation: Computation) -> dict[str, int]:
        if computation.name not in self._done:
            self._done[computation.name] = {
                operand: instruction.bytes
                for instruction in computation.instructions.values()
                if instruction.opcode.endswith("-done")
                for operand in instruction.operands
            }
        return self._done[computation.name]


class _Body:
    """A fused computation."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        # What each bitcast shows; text lists operands before their users.
        self._shown: dict[str, str] = {}
        for part in computation.instructions.values():
            if part.opcode == "bitcast" and len(part.operands) == 1:
                self._shown[part.name] = self._shown.get(part.operands[0], part.operands[0])

    @cached_property
    def uses(self) -> dict[int, int | None]:
        """Bytes read of each parameter, None for all; a parameter that nothing uses is not in it."""
        parts = self._computation.instructions
        parameters = {part.name: part.index for part in parts.values() if part.opcode == "parameter"}
        uses: dict[int, int | None] = {}
        for part in parts.values():
            if part.name in self._shown:
                continue
            for position, operand in enumerate(part.operands):
                parameter = parameters.get(self._shown.get(operand, operand))
                if parameter is None:
                    continue
                used = _used(part, position, self._computation)
                sofar = uses.get(parameter, 0)
                uses[parameter] = None if used is None or sofar is None else sofar + used
        return uses

    @cached_property
    def written(self) -> int:
        root = self._computation.root
        if root is None:
            return 0
        parts = self._computation.instructions
        total = 0
        for name in root.operands if root.opcode == "tuple" else (root.name,):
            shown = parts.get(self._shown.get(name, name))
            if shown is not None:
                total += _result_bytes(self._computation, shown)
            else:
                total += self._computation.operand_bytes(name) or 0
        return total


def _used(user: Instruction, position: int, computation: Computation) -> int | None:
    """Bytes that `user` reads of its operand at `position`; None for all of it."""
    if position != 0:
        return None
    match user.opcode:
        case "slice" | "dynamic-slice" | "gather":
            return user.bytes
        case "dynamic-update-slice":
            return 0
        case "scatter":
            return _operand_bytes(computation, user, len(user.operands) - 1)
        case _:
            return None


def _result_bytes(computation: Computation, result: Instruction) -> int:
    """Bytes that producing `result` writes: an in-place update writes its update only."""
    if result.opcode == "dynamic-update-slice":
        return _operand_bytes(computation, result, 1)
    if result.opcode == "scatter":
        return _operand_bytes(computation, result, len(result.operands) - 1)
    return result.bytes


def _operand_bytes(computation: Computation, instruction: Instruction, position: int) -> int:
    known = None
    if position < len(instruction.operands):
        known = computation.operand_bytes(instruction.operands[position])
    return instruction.bytes if known is None else known
