"""One kernel of an optimized HLO module as a module of its own, in HLO text. Nothing is compiled or executed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..base.usage import UsageError

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{\s*$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)[^{}]*\})?")
_LAYOUT = re.compile(r"(?<=\])\{[^{}]*\}")
_CALLED = re.compile(r"\b(?:calls|to_apply|condition|body|select|scatter)=%?([\w.\-]+)")
_DROPPED = (
    "metadata", "backend_config", "frontend_attributes", "sharding", "output_to_operand_aliasing",
    "control-predecessors",
)
_ELEMENT = re.compile(r"%?([\w.\-]+)#(\d+)")
_DTYPES = {
    "pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "c64": "complex64",
    "c128": "complex128", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    **{f"{short}{bits}": f"{long}{bits}" for short, long in (("s", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)},
}
_COARSEST = ("f8e5m2", "f8e4m3fn", "bf16", "f16", "f32", "f64")
NO_HLO = ("custom-call", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "while")


@dataclass(frozen=True)
class ExtractedHlo:
    """A kernel's operations as a module, without the fusion: jax accepts no module that has one.

    dtype: the coarsest floating dtype, or "". inputs: (shape, dtype, None or how many values an integer may have).
    """

    operations: str
    inputs: tuple[tuple[tuple[int, ...], str, int | None], ...]
    dtype: str
    notes: tuple[str, ...]


@dataclass
class _Instruction:
    root: bool
    name: str
    type: str
    opcode: str
    operands: list[str]
    attributes: str
    literal: str = ""

    @property
    def synchronous(self) -> str:
        """The opcode without "-start", as jax 0.11 writes `fusion-start`."""
        return self.opcode.removesuffix("-start")

    def text(self) -> str:
        inside = self.literal or ", ".join(f"%{operand}" for operand in self.operands)
        plain = _LAYOUT.sub("", self.type)
        return f"  {'ROOT ' if self.root else ''}%{self.name} = {plain} {self.opcode}({inside}){self.attributes}"


def extract(text: str, kernel: str) -> ExtractedHlo:
    """Return a kernel by the name of its instruction. Raises UsageError where it has no operations in HLO."""
    read = _read(text)
    found = next(
        ((name, line) for name, lines in read.items() for line in lines if line.name == kernel and name), None
    )
    if found is None:
        raise UsageError(f"the HLO text has no instruction {kernel!r} that could be read")
    where, line = found
    opcode = line.synchronous
    if opcode.startswith(NO_HLO):
        raise UsageError(
            f"{kernel}: a {opcode}; it has no operations in HLO that one process could run. Choose a fusion"
        )
    if opcode == "fusion":
        body = read.get(_first_called(line), [])
        kind = (re.search(r"kind=(k\w+)", line.attributes) or ["", ""])[1]
    else:
        body, kind = _alone(line, read[where]), ""
    if not body:
        raise UsageError(f"{kernel}: its computation is missing in the HLO text; the file is cut off")
    if any(each.opcode == "constant" and "..." in each.literal for each in body):
        raise UsageError(
            f"{kernel}: the text leaves out a large constant; dump with --xla_dump_large_constants, or pass it as "
            "an argument"
        )
    helpers = _closure(body, read)
    clean = _cleaned(body)
    others = {name: _cleaned(read[name]) for name in helpers}
    types = [each.type for lines in (clean, *others.values()) for each in lines]
    dtypes = {match[1] for each in types for match in _ARRAY.finditer(each)}
    parameters = sorted((each for each in clean if each.opcode == "parameter"), key=lambda each: int(each.literal))
    inputs = tuple(_input(parameter, clean) for parameter in parameters)
    notes = []
    if any(_has_layout(each.type) for each in body):
        notes.append("some arrays have a layout other than row-major in the dump; here they are row-major")
    if kind == "kCustom":
        notes.append("the dump has a Triton fusion; XLA fuses its operations again, and may choose other tiles")
    return ExtractedHlo(
        _module(others, clean), inputs, next((_DTYPES[short] for short in _COARSEST if short in dtypes), ""),
        tuple(notes),
    )


def _read(text: str) -> dict[str, list[_Instruction]]:
    """Return each computation's instructions, in order."""
    found: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] | None = None
    for line in text.splitlines():
        if not line.startswith(" ") and (match := _HEADER.match(line)):
            current = found.setdefault(match[1], [])
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _LINE.match(re.sub(r"/\*.*?\*/", "", line))):
            current.append(_instruction(match))
    return found


def _instruction(match: re.Match[str]) -> _Instruction:
    inside, rest = _until_close(match[5])
    opcode = match[4]
    attributes = "".join(f", {each}" for each in _split(rest.lstrip(", ")) if not each.startswith(_DROPPED))
    if opcode in ("constant", "parameter", "iota"):
        return _Instruction(bool(match[1]), match[2], match[3], opcode, [], attributes, inside)
    operands = [each.split()[-1].lstrip("%") for each in _split(inside) if each]
    return _Instruction(bool(match[1]), match[2], match[3], opcode, operands, attributes)


def _until_close(text: str) -> tuple[str, str]:
    depth = 1
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return text[:position], text[position + 1 :]
    return text, ""


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and strings."""
    pieces, depth, quoted = [""], 0, False
    for position, letter in enumerate(text):
        if letter == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        if not quoted:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 0:
                pieces.append("")
                continue
        pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]


def _first_called(line: _Instruction) -> str:
    called = _CALLED.search(line.attributes)
    return called[1] if called else ""


def _closure(body: list[_Instruction], read: Mapping[str, list[_Instruction]]) -> list[str]:
    """Return the computations that a body calls, callees first."""
    ordered: dict[str, None] = {}

    def visit(lines: list[_Instruction], depth: int) -> None:
        for line in lines:
            for name in _CALLED.findall(line.attributes):
                if name in read and name not in ordered and depth < 50:
                    visit(read[name], depth + 1)
                    ordered[name] = None

    visit(body, 0)
    return list(ordered)


def _alone(line: _Instruction, around: list[_Instruction]) -> list[_Instruction]:
    """Return one instruction as a body with its operands as parameters."""
    types = {each.name: each.type for each in around}
    parameters, names = [], []
    for number, operand in enumerate(line.operands):
        base, _, element = operand.partition("#")
        kind = types.get(base, "")
        if element:
            kind = _split(kind[1:-1])[int(element)]
        names.append(f"input_{number}")
        parameters.append(_Instruction(False, names[-1], kind, "parameter", [], "", str(number)))
    return [*parameters, _Instruction(True, line.name, line.type, line.opcode, names, line.attributes, line.literal)]


def _cleaned(body: list[_Instruction]) -> list[_Instruction]:
    """Return a body without layouts: nested fusions become calls, bitcasts become reshapes."""
    types = {each.name: each.type for each in body}
    found: list[_Instruction] = []
    for line in body:
        operands = []
        for operand in line.operands:
            if match := _ELEMENT.fullmatch(operand):
                name = f"{match[1]}.element.{match[2]}"
                if all(each.name != name for each in found):
                    element = _split(types[match[1]][1:-1])[int(match[2])]
                    attribute = f", index={match[2]}"
                    found.append(_Instruction(False, name, element, "get-tuple-element", [match[1]], attribute))
                    types[name] = element
                operand = name
            operands.append(operand)
        changed = _Instruction(line.root, line.name, line.type, line.opcode, operands, line.attributes, line.literal)
        if line.opcode == "fusion":
            changed.opcode, changed.attributes = "call", f", to_apply=%{_first_called(line)}"
        if line.opcode == "bitcast":
            found += _as_reshape(changed, types.get(operands[0], ""))
        else:
            found.append(changed)
    return found


def _as_reshape(line: _Instruction, source: str) -> Iterator[_Instruction]:
    """Yield a bitcast as operations on logical shapes: transposes to memory order around a reshape."""
    old, new = _ARRAY.match(source), _ARRAY.match(line.type)
    if old is None or new is None or old[1] != new[1]:
        yield _Instruction(line.root, line.name, line.type, "bitcast-convert", line.operands, "")
        return
    value = line.operands[0]
    old_order, new_order = _memory_order(old), _memory_order(new)
    if old_order != sorted(old_order):
        dims = [_dims(old)[dim] for dim in old_order]
        name = f"{line.name}.memory"
        attribute = f", dimensions={{{','.join(map(str, old_order))}}}"
        yield _Instruction(False, name, _type(old[1], dims), "transpose", [value], attribute)
        value = name
    if new_order == sorted(new_order):
        yield _Instruction(line.root, line.name, line.type, "reshape", [value], "")
        return
    name = f"{line.name}.reshaped"
    yield _Instruction(False, name, _type(new[1], [_dims(new)[dim] for dim in new_order]), "reshape", [value], "")
    back = [new_order.index(dim) for dim in range(len(new_order))]
    attribute = f", dimensions={{{','.join(map(str, back))}}}"
    yield _Instruction(line.root, line.name, line.type, "transpose", [name], attribute)


def _dims(array: re.Match[str]) -> list[int]:
    return [int(size) for size in array[2].split(",") if size]


def _memory_order(array: re.Match[str]) -> list[int]:
    """Return dimensions from the slowest to the fastest in memory."""
    rank = len(_dims(array))
    minor_first = [int(dim) for dim in (array[3] or "").split(",") if dim]
    return minor_first[::-1] if len(minor_first) == rank else list(range(rank))


def _type(dtype: str, dims: list[int]) -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


def _has_layout(kind: str) -> bool:
    return any(_memory_order(array) != sorted(_memory_order(array)) for array in _ARRAY.finditer(kind))


def _module(helpers: Mapping[str, list[_Instruction]], body: list[_Instruction]) -> str:
    lines = ["HloModule extracted", ""]
    for name, each in helpers.items():
        lines += [f"%{name} {{", *(line.text() for line in each), "}", ""]
    return "\n".join([*lines, "ENTRY %main {", *(line.text() for line in body), "}", ""])


# Integers that are indices


def _input(parameter: _Instruction, body: list[_Instruction]) -> tuple[tuple[int, ...], str, int | None]:
    array = _ARRAY.fullmatch(parameter.type)
    if array is None or array[1] not in _DTYPES:
        raise UsageError(f"an input has the type {parameter.type[:60]}; expected an array of one of {sorted(_DTYPES)}")
    dtype = _DTYPES[array[1]]
    return tuple(_dims(array)), dtype, _values(parameter, body) if "int" in dtype else None


def _values(parameter: _Instruction, body: list[_Instruction]) -> int | None:
    """Return how many values from 0 on the uses of an integer as an index allow; None without such a use."""
    types = {each.name: each.type for each in body}
    derived, bounds = {parameter.name}, []
    for line in body:
        if derived & set(line.operands):
            derived.add(line.name)
        if not line.operands or (array := _ARRAY.match(types.get(line.operands[0], ""))) is None:
            continue
        dims = _dims(array)
        if line.opcode in ("gather", "scatter") and line.operands[1] in derived:
            mapped = re.search(r"(?:start_index_map|scatter_dims_to_operand_dims)=\{([\d,]+)\}", line.attributes)
            bounds += [dims[int(dim)] for dim in mapped[1].split(",")] if mapped else []
        if line.opcode in ("dynamic-slice", "dynamic-update-slice"):
            first = 1 if line.opcode == "dynamic-slice" else 2
            bounds += [dims[at] for at, name in enumerate(line.operands[first:]) if name in derived]
        if line.opcode == "compare" and derived & set(line.operands):  # a one-hot compares with an iota
            for other in body:
                if other.name in line.operands and "iota" in (other.opcode, *_opcodes(other, body)):
                    bounds += [max(_dims(match)) for match in [_ARRAY.match(other.type)] if match and _dims(match)]
    return min(bounds) if bounds else None


def _opcodes(line: _Instruction, body: list[_Instruction]) -> list[str]:
    return [each.opcode for each in body if each.name in line.operands]
