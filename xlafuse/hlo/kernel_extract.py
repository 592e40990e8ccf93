"""One kernel of an optimized HLO module as a module of its own, in HLO text. Nothing is compiled or executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xlafuse.hlo.shape import LONG_NAMES, Element, Malformed, Shape, arrays
from xlafuse.hlo.text_reader import Computation, Instruction, Module, Statement
from xlafuse.hlo.window import read_dimensions

_DROPPED = {
    "metadata", "backend_config", "frontend_attributes", "sharding", "output_to_operand_aliasing",
    "control-predecessors",
}
_LISTS = ("branch_computations", "called_computations")  # attributes with several computations in braces
_COARSEST = ("f8e5m2", "f8e4m3fn", "bf16", "f16", "f32", "f64")
_NO_HLO = ("custom-call", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "while")


class NotExtracted(ValueError):
    """A kernel cannot be extracted; the message says why."""


@dataclass(frozen=True)
class ExtractedHlo:
    """A kernel's operations as a module, without the fusion: jax accepts no module that has one.

    dtype: the coarsest floating dtype, or "". inputs: (shape, dtype, None or how many values an integer may have).
    """

    operations: str
    inputs: tuple[tuple[tuple[int, ...], str, int | None], ...]
    dtype: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Line:
    """An instruction of the extracted module. literal: in the place of operands."""

    name: str
    result: Element
    opcode: str
    operands: tuple[str, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    literal: str = ""
    is_root: bool = False

    def text(self) -> str:
        inside = self.literal or ", ".join(f"%{operand}" for operand in self.operands)
        attributes = "".join(f", {name}={value}" for name, value in self.attributes.items())
        root = "ROOT " if self.is_root else ""
        return f"  {root}%{self.name} = {_written(self.result)} {self.opcode}({inside}){attributes}"

    @property
    def dims(self) -> tuple[int, ...] | None:
        return None if self.result.shape is None else self.result.shape.dims


def extract(module: Module, kernel: str) -> ExtractedHlo:
    """Return a kernel by the name of its instruction. Raises NotExtracted where it has no operations in HLO.

    module: read from text with its statements.
    """
    around = next((each for each in module.computations.values() if kernel in each.statements), None)
    if around is None:
        raise NotExtracted(f"the HLO text has no instruction {kernel!r} that could be read")
    instruction = around.instructions[kernel]
    opcode = instruction.synchronous_opcode
    if opcode.startswith(_NO_HLO):
        raise NotExtracted(
            f"{kernel}: a {opcode}; it has no operations in HLO that one process could run. Choose a fusion"
        )
    if opcode == "fusion":
        fused = module.computations.get(next(iter(instruction.called("calls")), ""))
        body, called = _lines(fused), [] if fused is None else list(fused.instructions.values())
    else:
        body, called = _alone(around, instruction), [instruction]
    if not body:
        raise NotExtracted(f"{kernel}: its computation is missing in the HLO text; the file is cut off")
    if any(line.opcode == "constant" and "..." in line.literal for line in body):
        raise NotExtracted(
            f"{kernel}: the text leaves out a large constant; dump with --xla_dump_large_constants, or pass it as "
            "an argument"
        )
    lines = _cleaned(body)
    helpers = {name: _cleaned(_lines(module.computations[name])) for name in _helpers(called, module)}
    shapes = [shape for each in (lines, *helpers.values()) for line in each for shape in arrays(line.result)]
    dtypes = {shape.dtype for shape in shapes}
    parameters = sorted((line for line in lines if line.opcode == "parameter"), key=lambda line: int(line.literal))
    notes = []
    if any(not _is_row_major(shape) for line in body for shape in arrays(line.result)):
        notes.append("some arrays have a layout other than row-major in the dump; here they are row-major")
    if instruction.fusion_kind == "kCustom":
        notes.append("the dump has a Triton fusion; XLA fuses its operations again, and may choose other tiles")
    return ExtractedHlo(
        _module(helpers, lines), tuple(_input(parameter, lines) for parameter in parameters),
        next((LONG_NAMES[short] for short in _COARSEST if short in dtypes), ""), tuple(notes),
    )


def _lines(computation: Computation | None) -> list[_Line]:
    if computation is None:
        return []
    return [
        _line(computation.instructions[name], statement) for name, statement in computation.statements.items()
    ]


def _line(instruction: Instruction, statement: Statement) -> _Line:
    _require_static(statement)
    attributes = {name: text for name, text in statement.attributes.items() if name not in _DROPPED}
    for name, called in statement.calls.items():
        listed = ", ".join(f"%{computation}" for computation in called)
        attributes[name] = f"{{{listed}}}" if name in _LISTS else listed
    return _Line(
        instruction.name, instruction.result, instruction.opcode, instruction.operands, attributes, statement.literal,
        instruction.is_root,
    )


def _require_static(statement: Statement) -> None:
    if "?" in statement.shape or "<=" in statement.shape:
        raise NotExtracted(f"{statement.name}: an array of dynamic size; only static shapes are extracted")


def _alone(around: Computation, instruction: Instruction) -> list[_Line]:
    """Return one instruction as a body with its operands as parameters."""
    parameters = []
    for number, operand in enumerate(instruction.operands):
        element = around.operand(operand)
        if element is None:
            raise NotExtracted(f"{instruction.name}: its operand {operand} is missing in the HLO text")
        _require_static(around.statements[operand.partition("#")[0]])
        parameters.append(_Line(f"input_{number}", element, "parameter", literal=str(number)))
    line = _line(instruction, around.statements[instruction.name])
    return [*parameters, replace(line, operands=tuple(each.name for each in parameters), is_root=True)]


def _helpers(instructions: Iterable[Instruction], module: Module) -> list[str]:
    """Return the computations that instructions call, callees first."""
    ordered: dict[str, None] = {}

    def visit(instructions: Iterable[Instruction], depth: int) -> None:
        for instruction in instructions:
            for _, name in instruction.calls:
                if name in module.computations and name not in ordered and depth < 50:
                    visit(module.computations[name].instructions.values(), depth + 1)
                    ordered[name] = None

    visit(instructions, 0)
    return list(ordered)


def _cleaned(body: Sequence[_Line]) -> list[_Line]:
    """Return a body without layouts: nested fusions become calls, bitcasts become reshapes."""
    results = {line.name: line.result for line in body}
    lines: list[_Line] = []
    for line in body:
        operands = []
        for operand in line.operands:
            whole, *path = operand.split("#")
            for index in path:  # jax 0.11 writes %pair#1
                name = f"{whole}.element.{index}"
                if name not in results:
                    results[name] = _element(results.get(whole), index)
                    lines.append(_Line(name, results[name], "get-tuple-element", (whole,), {"index": index}))
                whole = name
            operands.append(whole)
        line = replace(line, operands=tuple(operands))
        if line.opcode == "fusion":
            line = replace(line, opcode="call", attributes={"to_apply": line.attributes.get("calls", "")})
        lines += _as_reshape(line, results.get(operands[0])) if line.opcode == "bitcast" and operands else [line]
    return lines


def _element(result: Element | None, index: str) -> Element:
    if result is None or not index.isdecimal() or int(index) >= len(result.elements):
        raise NotExtracted(f"the HLO text has no element #{index[:20]} of an operand")
    return result.elements[int(index)]


def _as_reshape(line: _Line, source: Element | None) -> Iterator[_Line]:
    """Yield a bitcast as operations on logical shapes: transposes to memory order around a reshape."""
    old, new = None if source is None else source.shape, line.result.shape
    if old is None or new is None or old.dtype != new.dtype:
        yield replace(line, opcode="bitcast-convert", attributes={})
        return
    old_order, new_order = _memory_order(old), _memory_order(new)
    operands = line.operands
    if old_order != sorted(old_order):
        name = f"{line.name}.memory"
        result = _array(old, [old.dims[dim] for dim in old_order])
        yield _Line(name, result, "transpose", operands, {"dimensions": _listed(old_order)})
        operands = (name,)
    if new_order == sorted(new_order):
        yield replace(line, opcode="reshape", operands=operands, attributes={})
        return
    name = f"{line.name}.reshaped"
    yield _Line(name, _array(new, [new.dims[dim] for dim in new_order]), "reshape", operands)
    back = [new_order.index(dim) for dim in range(len(new_order))]
    yield replace(line, opcode="transpose", operands=(name,), attributes={"dimensions": _listed(back)})


def _array(shape: Shape, dims: Sequence[int]) -> Element:
    return Element(shape.bytes, shape=Shape(shape.dtype, tuple(dims), shape.bytes))


def _listed(dims: Sequence[int]) -> str:
    return f"{{{','.join(map(str, dims))}}}"


def _memory_order(shape: Shape) -> list[int]:
    """Return dimensions from the slowest to the fastest in memory."""
    return list(range(len(shape.dims))) if shape.order is None else list(reversed(shape.order))


def _is_row_major(shape: Shape) -> bool:
    return _memory_order(shape) == sorted(_memory_order(shape))


def _written(result: Element) -> str:
    """Return a shape in HLO without layouts."""
    if result.shape is None:
        return f"({', '.join(map(_written, result.elements))})"
    return f"{result.shape.dtype}[{','.join(map(str, result.shape.dims))}]"


def _module(helpers: Mapping[str, list[_Line]], body: list[_Line]) -> str:
    lines = ["HloModule extracted", ""]
    for name, each in helpers.items():
        lines += [f"%{name} {{", *(line.text() for line in each), "}", ""]
    return "\n".join([*lines, "ENTRY %main {", *(line.text() for line in body), "}", ""])


# Integers that are indices


def _input(parameter: _Line, body: list[_Line]) -> tuple[tuple[int, ...], str, int | None]:
    shape = parameter.result.shape
    if shape is None or shape.dtype not in LONG_NAMES:
        type_of = _written(parameter.result)[:60]
        raise NotExtracted(f"an input has the type {type_of}; expected an array of one of {sorted(LONG_NAMES)}")
    dtype = LONG_NAMES[shape.dtype]
    return shape.dims, dtype, _values(parameter, body) if "int" in dtype else None


def _values(parameter: _Line, body: list[_Line]) -> int | None:
    """Return how many values from 0 on the uses of an integer as an index allow; None without such a use."""
    by_name = {line.name: line for line in body}
    derived, bounds = {parameter.name}, []
    for line in body:
        if derived & set(line.operands):
            derived.add(line.name)
        indexed = by_name.get(line.operands[0]) if line.operands else None
        if indexed is None or (dims := indexed.dims) is None:
            continue
        if line.opcode in ("gather", "scatter") and derived & set(line.operands[1:2]):
            named = "start_index_map" if line.opcode == "gather" else "scatter_dims_to_operand_dims"
            bounds += [dims[dim] for dim in _dimensions(line, named) if dim < len(dims)]
        if line.opcode in ("dynamic-slice", "dynamic-update-slice"):
            first = 1 if line.opcode == "dynamic-slice" else 2
            bounds += [size for size, name in zip(dims, line.operands[first:], strict=False) if name in derived]
        if line.opcode == "compare" and derived & set(line.operands):  # a one-hot compares with an iota
            operands = [by_name[name] for name in line.operands if name in by_name]
            bounds += [max(other.dims) for other in operands if other.dims and _counts(other, by_name)]
    return min(bounds) if bounds else None


def _dimensions(line: _Line, attribute: str) -> tuple[int, ...]:
    try:
        return read_dimensions(line.attributes.get(attribute, ""))
    except Malformed:
        return ()


def _counts(line: _Line, by_name: Mapping[str, _Line]) -> bool:
    """Return whether a line is an iota, or computed from one directly."""
    operands = [by_name[name].opcode for name in line.operands if name in by_name]
    return "iota" in (line.opcode, *operands)
