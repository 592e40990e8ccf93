"""A walk through a module in execution order: each instruction that runs as a kernel, and its reads and writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from xlafuse.hlo import custom_calls
from xlafuse.hlo.buffers import Role, Tree, Values, element, leaves
from xlafuse.hlo.flops import Flops
from xlafuse.hlo.fusion_bytes import DeclaredBytes, calls_library
from xlafuse.hlo.kernel_kind import Kind, kind_of
from xlafuse.hlo.shape import UNBOUNDED, Element
from xlafuse.hlo.shape import arrays as arrays_of
from xlafuse.hlo.source_lines import SourceOp, SourceOpFinder, library_epilogue
from xlafuse.hlo.text_reader import Computation, Instruction, Module, Shape
from xlafuse.hlo.value_numbering import NumberedInstruction, ValueNumbers

# Instructions that launch nothing and take no time.
NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id replica-id "
    "opt-barrier domain".split()
)
# Instructions whose result is their first operand.
_SAME_VALUE = frozenset(("bitcast", "add-dependency", "opt-barrier", "domain"))
# XLA for TPUs: custom calls that launch nothing. ConcatBitcast names adjacent slices, which it prefetched one by one,
# as one array; AllocateBuffer is memory that later instructions fill.
_CONCAT_BITCAST, _ALLOCATE_BUFFER = "ConcatBitcast", "AllocateBuffer"
# Instructions that are no work inside a kernel. A fusion's work is that of its body.
_NO_WORK = NO_KERNEL | {"fusion", "fusion-start"}
_MAX_NAME = 200  # characters of a name in a message
# The loops and branches around a kernel, outermost first: a name that no other one has, and the iterations of one entry
# (None: data decides).
Around: TypeAlias = "tuple[tuple[str, int | None], ...]"
_TRIPS = re.compile(r'"known_trip_count\\?":\s?\{\\?"n\\?":\s?(?:\\?")?(\d{1,18})(?:\\?")?\}')
Use: TypeAlias = tuple[int, int, Shape | None]  # of a value in one launch: the value, bytes, the operand's array


class Branch(NamedTuple):
    """A branch of a conditional: the conditional's name, the branch's index, and the number of branches."""

    conditional: str
    number: int
    branches: int


@dataclass
class KernelSite:
    """An instruction that runs as a kernel, at one place of the program.

    work: the instructions inside that compute or move data.
    launches: in one call of the module, None if that depends on data.
    least: the fewest launches, if `branches` are taken.
    branches: those around it, outermost first.
    around: the loops and branches that hold it.
    sums: the elements that each element of a reduction adds up, by the reduction's name in the program (`named`).
    reads, writes: (value, bytes, array) of one launch; the array is that of the operand, of which the value may be a
        bitcast. Only the finished walk knows which values share a buffer.
    flops: of one launch, None if unknown. FLOPs and source operations of a custom call are those that its author
        declares (see `custom_calls`).
    """

    instruction: Instruction
    work: list[Instruction]
    kind: Kind
    launches: int | None
    least: int
    branches: tuple[Branch, ...]
    around: Around
    sums: dict[str, int]
    reads: list[Use]
    writes: list[Use]
    source_ops: tuple[SourceOp, ...]
    flops: float | None
    workspace_bytes: int


@dataclass
class _Frame:
    """A running computation: the entry (entered_by is None), or that of a call, a loop or a branch."""

    computation: Computation
    launches: int | None
    least: int
    branches: tuple[Branch, ...]
    around: Around
    arguments: Sequence[Tree | None]
    entered_by: _Caller | None
    rest: Iterator[Instruction]
    known: dict[str, Tree] = field(default_factory=dict)


# A computation to run, its arguments, how often it runs (None: data decides), how often at least, if its branch is
# taken, and this branch.
_Run: TypeAlias = "tuple[str, list[Tree | None], int | None, int, tuple[Branch, ...]]"
_MOST_BRANCHES = 8  # of nested conditionals, the outer ones that are named; computations in deeper ones run 0 times


@dataclass
class _Caller:
    """An instruction that runs computations, its operands, and the runs that are left (the next one last).

    shared: a loop's state or a conditional's result, which all runs share; None for a call. name: that of the loop or
    conditional; "~2" ends that of its second entry from elsewhere.
    """

    frame: _Frame
    instruction: Instruction
    operands: list[Tree | None]
    runs: list[_Run]
    shared: Tree | None
    name: str


class ModuleWalk:
    """The walk through one module. It enters each loop's body once and does not recurse.

    deciding: by value, the conditional or loop that reads it to choose a branch, or to end.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._bytes, self._flops, self._numbers = DeclaredBytes(module), Flops(module), ValueNumbers(module)
        self.values = Values()
        self.sites: list[KernelSite] = []
        self.deciding: dict[int, str] = {}
        self.unresolved: list[str] = []
        self._stack: list[_Frame] = []
        self._open: set[str] = set()
        self._entered: dict[str, int] = {}  # how often each loop or branch was
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self._sources = SourceOpFinder(frozenset())

    def run(self) -> None:
        """Fill `sites`, `values`, `inputs`, `outputs` and `unresolved`."""
        entry = self._module.computations.get(self._module.entry)
        if entry is None:
            return
        parameters = sorted(
            (part for part in entry.instructions.values() if part.opcode == "parameter"),
            key=lambda part: part.index or 0,
        )
        self._sources = SourceOpFinder(frozenset(part.op_name for part in parameters if part.op_name))
        self._push(entry, 1, 1, (), (), (), None)
        for part in parameters:
            self._note_unbounded(part)
            value = self._new(part.result, part.name, "input", part.op_name)
            self._stack[-1].known[part.name] = value
            self.inputs += leaves(value)
        while self._stack:
            frame = self._stack[-1]
            instruction = next(frame.rest, None)
            if instruction is None:
                self._stack.pop()
                self._open.discard(frame.computation.name)
                root = frame.computation.root
                self._leave(frame, None if root is None else frame.known.get(root.name))
            else:
                self._execute(frame, instruction)

    def _push(
        self, computation: Computation, launches: int | None, least: int, branches: tuple[Branch, ...], around: Around,
        arguments: Sequence[Tree | None], caller: _Caller | None,
    ) -> None:
        self._open.add(computation.name)
        rest = iter(computation.instructions.values())
        self._stack.append(_Frame(computation, launches, least, branches, around, arguments, caller, rest))

    def _execute(self, frame: _Frame, instruction: Instruction) -> None:
        operands = [self._operand(frame, instruction, name) for name in instruction.operands]
        opcode = instruction.opcode
        if opcode == "parameter":
            if instruction.name in frame.known:  # the entry's
                return
            index = instruction.index or 0
            value = frame.arguments[index] if index < len(frame.arguments) else None
        elif opcode == "tuple":
            value = tuple(() if operand is None else operand for operand in operands)
        elif opcode == "get-tuple-element":
            value = element(operands[0], [instruction.index or 0]) if operands else None
        elif opcode in _SAME_VALUE or opcode.endswith(("-done", "-update")):
            value = operands[0] if operands else None
        elif instruction.custom_call_target == _CONCAT_BITCAST:
            value = tuple(() if operand is None else operand for operand in operands)
        elif instruction.custom_call_target == _ALLOCATE_BUFFER:
            value = self._new(instruction.result, instruction.name)
        elif opcode in NO_KERNEL:  # constants, tokens and a device's number
            value = self._new(instruction.result, instruction.name, "constant")
            (part,) = self._numbers.instructions(frame.computation, instruction, ())
            self._set_number(value, part.expression)
        elif not self._enter(frame, instruction, operands):
            value = self._launch(frame, instruction, operands)
        else:
            return
        self._record(frame, instruction, value)

    def _record(self, frame: _Frame, instruction: Instruction, value: Tree | None) -> None:
        if value is None:
            self.unresolved.append(f"{instruction.name[:_MAX_NAME]}: operand does not fit {instruction.opcode}")
            value = self._new(instruction.result, instruction.name)
        frame.known[instruction.name] = value

    def _operand(self, frame: _Frame, instruction: Instruction, operand: str) -> Tree | None:
        name, *path = operand.split("#")
        value = element(frame.known.get(name), path)
        if value is None:
            self.unresolved.append(f"{instruction.name[:_MAX_NAME]}: operand {operand[:_MAX_NAME]} is not there")
        return value

    def _new(self, result: Element, name: str, role: Role = "intermediate", label: str = "") -> Tree:
        """Return new values, each with a value number of its own."""
        value = self.values.new(result, name, role, label)
        for leaf in leaves(value):
            self.values.numbers[leaf] = self._numbers.unique()
        return value

    def _set_number(self, value: Tree, number: int) -> None:
        if isinstance(value, int):
            self.values.numbers[value] = number
            return
        for position, leaf in enumerate(leaves(value)):
            self.values.numbers[leaf] = self._numbers.element(number, position)

    def _number(self, value: Tree | None) -> int:
        if isinstance(value, int):
            return self.values.numbers[value]
        return self._numbers.tuple_number([self.values.numbers[leaf] for leaf in leaves(value)])

    def _enter(self, frame: _Frame, instruction: Instruction, operands: list[Tree | None]) -> bool:
        """Enter the computations whose instructions run as separate kernels; return False if there are none."""
        runs: list[_Run]
        match instruction.synchronous_opcode:
            case "call" | "async":
                names = instruction.called("to_apply", "calls")[:1]
                runs = [(name, operands, 1, 1, ()) for name in names]
            case "while":
                trips = _TRIPS.search(instruction.backend_config)
                if trips:  # the condition is never evaluated
                    runs = [(name, [], int(trips[1]), int(trips[1]), ()) for name in instruction.called("body")]
                else:  # the condition runs once more often than the body
                    runs = [(name, [], None, 1, ()) for name in instruction.called("condition")]
                    runs += [(name, [], None, 0, ()) for name in instruction.called("body")]
            case "conditional":
                names = instruction.called("branch_computations") or instruction.called(
                    "true_computation", "false_computation"
                )
                numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
                runs = []
                for place, name in enumerate(names, start=1):
                    branch = (Branch(instruction.name[:_MAX_NAME], numbers[name], len(numbers)),)
                    given = operands[place : place + 1]
                    if len(numbers) == 1:
                        runs.append((name, given, 1, 1, ()))
                    elif len(frame.branches) < _MOST_BRANCHES:
                        runs.append((name, given, None, 1, branch))
                    else:
                        runs.append((name, given, None, 0, ()))
                self._decides(operands[0] if operands else None, instruction)
            case _:
                return False
        missing = [name for name, *_ in runs if name not in self._module.computations]
        for name in missing:
            self.unresolved.append(f"{instruction.name[:_MAX_NAME]}: computation {name[:_MAX_NAME]} is not there")
        distinct = {name: run for run in reversed(runs) if (name := run[0]) not in missing and name not in self._open}
        if not distinct:
            return False
        called = instruction.synchronous_opcode in ("call", "async")
        result = self._bytes.result(frame.computation, instruction)
        shared = None if called else self._new(result, instruction.name)
        entered = self._entered[instruction.name] = self._entered.get(instruction.name, 0) + 1
        name = instruction.name[:_MAX_NAME] + (f"~{entered}" if entered > 1 else "")
        self._run_next(_Caller(frame, instruction, operands, list(distinct.values()), shared, name))
        return True

    def _run_next(self, caller: _Caller) -> None:
        name, arguments, times, least, branches = caller.runs.pop()
        outside, opcode, around = caller.frame.launches, caller.instruction.synchronous_opcode, caller.frame.around
        given = [caller.shared] if opcode == "while" else arguments
        launches = None if outside is None or times is None else outside * times
        if opcode == "while":
            around = (*around, (caller.name, times))
        elif opcode == "conditional":
            around = (*around, (f"{caller.name}#{len(caller.runs)}", times))
        least, branches = least * caller.frame.least, caller.frame.branches + branches
        self._push(self._module.computations[name], launches, least, branches, around, given, caller)

    def _leave(self, frame: _Frame, root: Tree | None) -> None:
        caller = frame.entered_by
        if caller is None:
            self.outputs = leaves(root)
            return
        instruction, shared = caller.instruction, caller.shared
        if instruction.synchronous_opcode == "conditional" and shared is not None:
            self.values.join_branch(shared, root)
        elif shared is not None and frame.computation.name in instruction.called("body"):
            self.values.join_loop(shared, next(iter(caller.operands), None), root)
        elif shared is not None:
            self._decides(root, instruction)
        if caller.runs:
            self._run_next(caller)
        else:
            self._record(caller.frame, instruction, root if shared is None else shared)

    def _decides(self, value: Tree | None, instruction: Instruction) -> None:
        """Record that a conditional or a loop reads a value to choose a branch or to end."""
        for array in leaves(value):
            self.deciding[array] = f"{instruction.opcode} {instruction.name[:_MAX_NAME]}"

    def _launch(self, frame: _Frame, instruction: Instruction, operands: list[Tree | None]) -> Tree:
        computation, values = frame.computation, self.values
        self._note_unbounded(instruction)
        numbers = [self._number(value) for value in operands]
        parts = self._numbers.instructions(computation, instruction, numbers)
        result = self._bytes.result(computation, instruction)
        value = values.new(result, instruction.name)
        self._set_number(value, parts[-1].expression)
        if instruction.synchronous_opcode == "copy" and all(0 in shape.dims for shape in instruction.shapes[:1]):
            return value
        reads: list[Use] = []
        used_bytes = self._bytes.reads(computation, instruction)
        for name, operand, used in zip(instruction.operands, operands, used_bytes, strict=True):
            given, found = computation.operand(name), leaves(operand)
            shapes: Sequence[Shape | None] = () if given is None else arrays_of(given)
            if len(shapes) != len(found):
                shapes = [None] * len(found)
            arrays = [(array, shape) for array, shape in zip(found, shapes, strict=True) if values.is_array(array)]
            if used is None or len(arrays) != 1:
                reads += [(array, values.bytes(array), shape) for array, shape in arrays]
            elif used:
                reads.append((arrays[0][0], used, arrays[0][1]))
        writes, workspace = self._writes(computation, instruction, operands, value)
        work = [part for part in parts if part.instruction.opcode not in _NO_WORK] or parts[-1:]
        counts = [self._flops.of(part.computation, part.instruction) for part in work]
        flops: float | None = None if None in counts else sum([count for count in counts if count is not None])
        source_ops = self._sources.find(work) + library_epilogue(instruction)
        if declared := self._declaration(instruction):
            flops, source_ops = declared.flops, declared.source_ops
        inside = [part.instruction for part in work]
        fused = instruction.called("calls")[:1] if instruction.synchronous_opcode == "fusion" else []
        kind = kind_of(instruction, inside, self._module.computations.get(fused[0]) if fused else None)
        self.sites.append(
            KernelSite(
                instruction, inside, kind, frame.launches, frame.least, frame.branches, frame.around, _sums(work),
                reads, writes, source_ops, flops, workspace,
            )
        )
        return value

    def _note_unbounded(self, instruction: Instruction) -> None:
        if any(UNBOUNDED in shape.dims for shape in instruction.shapes):
            self.unresolved.append(f"{instruction.name[:_MAX_NAME]}: an array of unknown size (?) counts as 0 bytes")

    def _declaration(self, instruction: Instruction) -> custom_calls.Declaration | None:
        try:
            return custom_calls.read(instruction)
        except ValueError as problem:
            self.unresolved.append(f"{instruction.name[:_MAX_NAME]}: its declaration cannot be read: {problem}")
            return None

    def _writes(
        self, computation: Computation, instruction: Instruction, operands: list[Tree | None], value: Tree
    ) -> tuple[list[Use], int]:
        """Return the use of each array written, and the bytes of scratch space."""
        values = self.values
        written = self._bytes.writes(computation, instruction)
        apart = isinstance(value, tuple) and len(written) == len(value)
        accesses: list[Use] = []
        for write, part in zip(written, value if apart and isinstance(value, tuple) else (value,), strict=False):
            arrays = [array for array in leaves(part) if values.is_array(array)]
            if write.bytes is None or len(arrays) != 1:
                accesses += [(array, values.bytes(array), values.shape(array)) for array in arrays]
            else:
                accesses.append((arrays[0], write.bytes, values.shape(arrays[0])))
                if write.updates is not None and write.updates < len(operands):
                    values.update(arrays[0], operands[write.updates])
            values.mark_written(part)
        workspace = 0
        shapes = instruction.shapes
        if calls_library(instruction) and len(shapes) > 1 and _is_scratch(shapes[-1]) and accesses:
            workspace = accesses.pop()[1]
        return accesses, workspace


def _sums(work: list[NumberedInstruction]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for instruction, computation, _ in work:
        if instruction.opcode == "reduce" and (name := named(instruction)):
            added = computation.instructions.get(instruction.operands[0]) if instruction.operands else None
            made = math.prod(instruction.shapes[0].dims) if instruction.shapes else 0
            if added is not None and added.shapes and made > 0:
                sums[name] = math.prod(added.shapes[0].dims) // made
    return sums


def named(instruction: Instruction) -> str:
    """Return the name and place of the program's operation that XLA made the instruction for; "" if unknown."""
    return f"{instruction.op_name}@{instruction.source}#{instruction.site}" if instruction.op_name else ""


def _is_scratch(shape: Shape) -> bool:
    return shape.dtype in ("s8", "u8") and len(shape.dims) == 1
