"""A reader of HLO text: module -> computations -> instructions. No framework needed, any XLA version.

XLA's own parser fails a whole module on one unknown word and crashes on deep nesting. This one goes line by
line with explicit state: time and memory are linear in the text, hostile text included, nothing recurses, and
what it does not understand it keeps in `Module.unparsed`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xlafuse.hlo_shape import MAX_DIGITS, Element, Malformed, Shape, read_integer, read_shapes


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    shapes: the result's arrays, a tuple flattened; result: the same as a tree. operands: names of
        instructions (empty for parameters and constants).
    calls: computations it names, by attribute, in order. op_name: the framework's path ("" if XLA recorded
        none).
    source: "file:line" of the innermost recorded frame ("" if none); site: that frame's identity, finer than
        its line.
    backend_config: raw text. index: of a parameter or a get-tuple-element, else None.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    result: Element = field(compare=False, repr=False)
    operands: tuple[str, ...]
    calls: tuple[tuple[str, str], ...] = ()
    op_name: str = ""
    source: str = ""
    site: str = ""
    backend_config: str = ""
    custom_call_target: str = ""
    fusion_kind: str = ""
    index: int | None = None
    is_root: bool = False

    @property
    def bytes(self) -> int:
        return self.result.bytes

    @property
    def synchronous_opcode(self) -> str:
        """What it does, asynchronously or not: jax 0.11 writes `fusion-start` and `fusion-done`."""
        return self.opcode.removesuffix("-start")

    def called(self, *attributes: str) -> list[str]:
        return [name for attribute, name in self.calls if attribute in attributes]


@dataclass
class Computation:
    """A named list of instructions, in the order of the text (which is the schedule's where the module is
    scheduled)."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def operand_bytes(self, operand: str) -> int | None:
        """Bytes of what an operand names, `%a` or (in jax 0.11's dumps) an element `%a#1`; None if it is not
        here."""
        name, *path = operand.split("#")
        instruction = self.instructions.get(name)
        if instruction is None:
            return None
        element = instruction.result
        for index in path:
            if not index.isdecimal() or len(index) > MAX_DIGITS or int(index) >= len(element.elements):
                return None
            element = element.elements[int(index)]
        return element.bytes

    @property
    def root(self) -> Instruction | None:
        return next((instruction for instruction in self.instructions.values() if instruction.is_root), None)


@dataclass
class Module:
    """unparsed: (line number from 1, text) of every line that was not understood."""

    name: str = ""
    entry: str = ""
    is_scheduled: bool = False
    computations: dict[str, Computation] = field(default_factory=dict)
    unparsed: list[tuple[int, str]] = field(default_factory=list)


def parse(text: str | Iterable[str]) -> Module:
    """Read HLO text, given whole or as lines (an open file will do). Never raises on its contents."""
    reader = _Reader()
    lines = text.splitlines() if isinstance(text, str) else text
    for number, line in enumerate(lines, start=1):
        line = line.rstrip()
        if line and not reader.take(line):
            reader.module.unparsed.append((number, line))
    return reader.module


# HloModule jit_mlp, is_scheduled=true, entry_computation_layout={...}
_MODULE = re.compile(r"HloModule ([^\s,]+)")
# ENTRY %main.3 (x.1: bf16[8192,4096]) -> bf16[8192,4096] {      or, in the short flavour:  region_0.4 {
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(){}=,]+) (\{$|\()")
# }      or  }, execution_thread="host"
_END = re.compile(r"\}(?:, .*)?$")
# 2 "blocks.py"
_TABLE_STRING = re.compile(r'(\d{1,18}) "(.*)"$')
# 3 {file_name_id=1 function_name_id=3 line=9 end_line=9 column=55 end_column=92}
_TABLE_FIELDS = re.compile(r"(\d{1,18}) \{([a-z_0-9= ]*)\}$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

# ROOT %name =
_RESULT = re.compile(r"\s*+(ROOT )?%?([^\s=(),]+) = ")
_OPCODE = re.compile(r" ([a-z][a-zA-Z0-9_-]*)\(")
# Brackets, commas and whole strings; a lone quote means that the string never ends.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[(){}\[\],"]')
_COMMENT = re.compile(r"/\*[^*]*\*/")
_NAME = re.compile(r"[^\s%{},()=]+$")
_ATTRIBUTE = re.compile(r"\s*([a-zA-Z_0-9.-]+)=")  # control-predecessors={%a}
_METADATA = re.compile(r'(?<![a-z_])([a-z_]++)=("[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\s"{}]+)')
_ESCAPE = re.compile(r"\\(.)")

# Attributes that name computations; any other attribute's text is not searched for names.
_CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
    "select",
    "scatter",
)


class _Reader:
    """The state between lines: which table or computation is open, and the source tables read so far."""

    def __init__(self) -> None:
        self.module = Module()
        self._computation: Computation | None = None
        self._table = ""
        self._files: dict[str, str] = {}
        self._locations: dict[str, dict[str, str]] = {}
        self._frames: dict[str, str] = {}  # stack frame id -> file location id

    def take(self, line: str) -> bool:
        """Whether the line was understood."""
        if self._computation is not None:
            if _END.match(line):
                self._computation = None
                return True
            return self._take_instruction(line)
        if line in _TABLES:
            self._table = line
            return True
        if self._table and self._take_row(line):
            return True
        if module := _MODULE.match(line):
            self.module.name = module[1]
            self.module.is_scheduled = "is_scheduled=true" in line
            return True
        if (
            line.endswith(" {")
            and (header := _COMPUTATION.match(line))
            and (header[3] == "{" or ") -> " in line)
        ):
            return self._open(header)
        return False

    def _open(self, header: re.Match[str]) -> bool:
        self._table = ""
        self._computation = Computation(header[2])
        if header[2] in self.module.computations:
            return False  # its instructions are read into a computation that nothing refers to
        self.module.computations[header[2]] = self._computation
        if header[1]:
            self.module.entry = header[2]
        return True

    def _take_row(self, line: str) -> bool:
        if row := _TABLE_STRING.match(line):
            if self._table == "FileNames":
                self._files[row[1]] = _unescape(row[2])
            return self._table in ("FileNames", "FunctionNames")
        if row := _TABLE_FIELDS.match(line):
            fields = dict(pair.split("=", 1) for pair in row[2].split() if "=" in pair)
            if self._table == "FileLocations":
                self._locations[row[1]] = fields
            elif self._table == "StackFrames":
                self._frames[row[1]] = fields.get("file_location_id", "")
            return self._table in ("FileLocations", "StackFrames")
        return False

    def _take_instruction(self, line: str) -> bool:
        assert self._computation is not None
        try:
            instruction = self._instruction(line)
        except Malformed:
            return False
        if instruction.name in self._computation.instructions:
            return False
        self._computation.instructions[instruction.name] = instruction
        return True

    def _instruction(self, line: str) -> Instruction:
        result = _RESULT.match(line)
        if not result:
            raise Malformed
        shape_end = _shape_end(line, result.end())
        opcode = _OPCODE.match(line, shape_end)
        if not opcode:
            raise Malformed
        operands, close = _split(line, opcode.end())
        pieces, _ = _split(line, close + 1) if line.startswith(",", close + 1) else ([], close)
        attributes: dict[str, str] = {}
        for piece in pieces:
            if not (key := _ATTRIBUTE.match(piece)):
                if not piece.strip():
                    continue
                raise Malformed
            attributes[key[1]] = piece[key.end() :]
        metadata = {key: value.strip('"') for key, value in _METADATA.findall(attributes.get("metadata", ""))}
        index = None
        if opcode[1] == "parameter":
            index = read_integer(operands[0] if operands else "")
        elif opcode[1] == "get-tuple-element":
            index = read_integer(attributes.get("index", ""))
        shapes, element = read_shapes(line[result.end() : shape_end])
        return Instruction(
            name=result[2],
            opcode=opcode[1],
            shapes=shapes,
            result=element,
            operands=() if opcode[1] in ("parameter", "constant", "iota") else tuple(map(_operand, operands)),
            calls=tuple(
                (key, name)
                for key in _CALLS
                if key in attributes
                for name in _computation_names(attributes[key])
            ),
            op_name=_unescape(metadata.get("op_name", "")),
            source=self._source(metadata),
            site=metadata.get("stack_frame_id", ""),
            backend_config=attributes.get("backend_config", ""),
            custom_call_target=attributes.get("custom_call_target", "").strip('"'),
            fusion_kind=attributes.get("kind", ""),
            index=index,
            is_root=bool(result[1]),
        )

    def _source(self, metadata: dict[str, str]) -> str:
        if frame := metadata.get("stack_frame_id"):
            location = self._locations.get(self._frames.get(frame, ""), {})
            file = self._files.get(location.get("file_name_id", ""), "")
            return f"{file}:{location.get('line', '?')}" if file else ""
        file = _unescape(metadata.get("source_file", ""))
        return f"{file}:{metadata.get('source_line', '?')}" if file else ""


def _shape_end(line: str, start: int) -> int:
    """Where the result's shape ends: a tuple at its closing bracket, an array at the first blank outside
    brackets."""
    if line.startswith("(", start):
        return _split(line, start + 1)[1] + 1
    end = line.find(" ", start)
    if end < 0:
        raise Malformed
    return end


def _split(line: str, start: int) -> tuple[list[str], int]:
    """The comma-separated pieces from start to the bracket that closes what was open there (or the line's
    end), and its place."""
    pieces, depth, begin = [], 0, start
    end = len(line)
    for token in _TOKEN.finditer(line, start):
        mark = token[0]
        if mark == '"':
            raise Malformed
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            if depth == 0:
                end = token.start()
                break
            depth -= 1
        elif mark == "," and depth == 0:
            pieces.append(line[begin : token.start()])
            begin = token.end()
    if depth:
        raise Malformed
    if begin < end and line[begin:end].strip():
        pieces.append(line[begin:end])
    return pieces, end


def _operand(text: str) -> str:
    """`%name`, `name`, or the long flavour's `f32[2]{0} %name`."""
    words = _COMMENT.sub("", text).split()
    name = words[-1].removeprefix("%") if words else ""
    if not _NAME.match(name):
        raise Malformed
    return name


def _computation_names(text: str) -> list[str]:
    return [name.strip().removeprefix("%") for name in text.strip("{}").split(",") if name.strip()]


def _unescape(text: str) -> str:
    return _ESCAPE.sub(r"\1", text)
