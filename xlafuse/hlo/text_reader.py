"""A reader of HLO text of any XLA version: module -> computations -> instructions. It needs no framework.

XLA's own parser rejects a whole module for one unknown word and crashes on deep nesting. This reader works line by line
without recursion, so time and memory are linear in the text, hostile text included. Lines that it does not understand
are kept in `Module.unparsed`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xlafuse.hlo.gc_pause import collector_paused
from xlafuse.hlo.shape import MAX_DIGITS, Element, Malformed, Shape, read_integer, read_shapes


@dataclass(frozen=True)
class WindowDimension:
    """One dimension of a convolution's or a reduction's window; negative padding crops elements."""

    size: int
    stride: int = 1
    padding_low: int = 0
    padding_high: int = 0
    base_dilation: int = 1
    window_dilation: int = 1


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    shapes: the result's arrays, with tuples flattened. result: the same as a tree.
    operands: names of instructions (empty for parameters and constants).
    calls: (attribute, computation) pairs, in order.
    op_name: the framework's path, "" if XLA recorded none.
    source: "file:line" of the innermost recorded frame, "" if there is none. site: the id of that frame; one line can
        have several.
    backend_config: raw text. declared: the text of the frontend attribute that `custom_calls` reads.
    index: of a parameter or a get-tuple-element, else None.

    FLOPs depend on these; an operation without such an attribute has the default:
    contracting: the left operand's contracting dimensions (lhs_contracting_dims).
    window: of convolutions and windowed reductions, one entry for each window dimension.
    dim_labels: of a convolution, as in the text ("b01f_01io->b01f").
    feature_groups, batch_groups: feature_group_count and batch_group_count.
    detail: a constant's literal or a slice's bounds, shortened. It tells instructions with equal opcodes and operands
        apart, and equality ignores it.
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
    declared: str = ""
    fusion_kind: str = ""
    index: int | None = None
    is_root: bool = False
    contracting: tuple[int, ...] = ()
    window: tuple[WindowDimension, ...] = ()
    dim_labels: str = ""
    feature_groups: int = 1
    batch_groups: int = 1
    detail: str = field(default="", compare=False, repr=False)

    @property
    def bytes(self) -> int:
        return self.result.bytes

    @property
    def synchronous_opcode(self) -> str:
        """The opcode without "-start": jax 0.11 writes `fusion-start` and `fusion-done`."""
        return self.opcode.removesuffix("-start")

    def called(self, *attributes: str) -> list[str]:
        """Return the computations that these attributes name."""
        return [name for attribute, name in self.calls if attribute in attributes]


@dataclass
class Computation:
    """A named list of instructions in the order of the text, which is the schedule of a scheduled module."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def operand(self, name: str) -> Element | None:
        """Return the shape of operand `a`, or of element `a#1` in jax 0.11's dumps; None if it is not here."""
        name, *path = name.split("#")
        instruction = self.instructions.get(name)
        if instruction is None:
            return None
        element = instruction.result
        for index in path:
            if not index.isdecimal() or len(index) > MAX_DIGITS or int(index) >= len(element.elements):
                return None
            element = element.elements[int(index)]
        return element

    def operand_bytes(self, name: str) -> int | None:
        element = self.operand(name)
        return None if element is None else element.bytes

    def operand_shape(self, name: str) -> Shape | None:
        """Return the shape of an operand that is an array, else None."""
        element = self.operand(name)
        return None if element is None else element.shape

    @property
    def root(self) -> Instruction | None:
        return next((instruction for instruction in self.instructions.values() if instruction.is_root), None)


@dataclass
class Module:
    """An HLO module.

    unparsed: (line number from 1, text) of every line that the reader did not understand. If the text ends inside a
    computation, one more entry says so.
    """

    name: str = ""
    entry: str = ""
    is_scheduled: bool = False
    computations: dict[str, Computation] = field(default_factory=dict)
    unparsed: list[tuple[int, str]] = field(default_factory=list)


def parse(text: str | Iterable[str]) -> Module:
    """Read HLO text, given as a string or as lines, such as an open file. No content makes it raise."""
    reader = _Reader()
    lines = text.splitlines() if isinstance(text, str) else text
    number = 0
    with collector_paused():
        for number, line in enumerate(lines, start=1):
            line = line.rstrip()
            if line and not reader.take(line):
                reader.module.unparsed.append((number, line))
    if reader.open_computation is not None:
        reader.module.unparsed.append((number + 1, f"the text ends inside computation {reader.open_computation}"))
    return reader.module


# HloModule jit_mlp, is_scheduled=true, entry_computation_layout={...}
_MODULE = re.compile(r"HloModule ([^\s,]+)")
# ENTRY %main.3 (x.1: bf16[8192,4096]) -> bf16[8192,4096] {      or, in the short form:  region_0.4 {
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
# Brackets, commas and complete strings. A single quote is a string that never ends.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[(){}\[\],"]')
_COMMENT = re.compile(r"/\*[^*]*\*/")
_NAME = re.compile(r"[^\s%{},()=]+$")
_ATTRIBUTE = re.compile(r"\s*([a-zA-Z_0-9.-]+)=")  # control-predecessors={%a}
_METADATA = re.compile(r'(?<![a-z_])([a-z_]++)=("[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\s"{}]+)')
_ESCAPE = re.compile(r"\\(.)")
DECLARATION = "xlafuse_declared"  # the one frontend attribute that is kept

# The attributes that name computations.
_CALLS = (
    "calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation",
    "called_computations", "select", "scatter",
)


class _Reader:
    """The state between lines: the open table or computation, and the source tables read so far."""

    def __init__(self) -> None:
        self.module = Module()
        self._computation: Computation | None = None
        self._table = ""
        self._files: dict[str, str] = {}
        self._locations: dict[str, dict[str, str]] = {}
        self._shapes: dict[str, tuple[tuple[Shape, ...], Element]] = {}
        self._frames: dict[str, str] = {}  # stack frame id -> file location id

    @property
    def open_computation(self) -> str | None:
        return None if self._computation is None else self._computation.name

    def take(self, line: str) -> bool:
        """Read one line; return whether it was understood."""
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
            return False  # a duplicate: its instructions go into a computation that nothing refers to
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
        shapes, element = self._shape(line[result.end() : shape_end])
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
            declared=_declared(attributes.get("frontend_attributes", "")),
            fusion_kind=attributes.get("kind", ""),
            index=index,
            is_root=bool(result[1]),
            contracting=_dimensions(attributes.get("lhs_contracting_dims", "")),
            window=_window(attributes["window"]) if "window" in attributes else (),
            dim_labels=attributes.get("dim_labels", ""),
            feature_groups=read_integer(attributes.get("feature_group_count", "1")),
            batch_groups=read_integer(attributes.get("batch_group_count", "1")),
            detail=(",".join(operands[:4]) if opcode[1] == "constant" else attributes.get("slice", ""))[:64],
        )

    def _shape(self, text: str) -> tuple[tuple[Shape, ...], Element]:
        """Read a shape once; a module repeats few different shapes many times."""
        if text not in self._shapes:
            self._shapes[text] = read_shapes(text)
        return self._shapes[text]

    def _source(self, metadata: dict[str, str]) -> str:
        if frame := metadata.get("stack_frame_id"):
            location = self._locations.get(self._frames.get(frame, ""), {})
            file = self._files.get(location.get("file_name_id", ""), "")
            return f"{file}:{location.get('line', '?')}" if file else ""
        file = _unescape(metadata.get("source_file", ""))
        return f"{file}:{metadata.get('source_line', '?')}" if file else ""


def _shape_end(line: str, start: int) -> int:
    """Return where the result's shape ends: a tuple at its closing bracket, an array at the first space."""
    if line.startswith("(", start):
        return _split(line, start + 1)[1] + 1
    end = line.find(" ", start)
    if end < 0:
        raise Malformed
    return end


def _split(line: str, start: int) -> tuple[list[str], int]:
    """Return the comma-separated pieces from `start` to the closing bracket or the line's end, and that position."""
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
    """Return the name in `%name`, `name`, or the long form `f32[2]{0} %name`."""
    words = _COMMENT.sub("", text).split()
    name = words[-1].removeprefix("%") if words else ""
    if not _NAME.match(name):
        raise Malformed
    return name


def _computation_names(text: str) -> list[str]:
    return [name.strip().removeprefix("%") for name in text.strip("{}").split(",") if name.strip()]


def _declared(text: str) -> str:
    """Return the declaration in {some="thing",xlafuse_declared={"flops": 1.0}}; XLA quotes values other than JSON."""
    if DECLARATION not in text:
        return ""
    for piece in _split(text, 1)[0]:
        name, _, value = piece.partition("=")
        if name.strip() == DECLARATION:
            return _unescape(value[1:-1]) if value.startswith('"') else value
    return ""


def _dimensions(text: str) -> tuple[int, ...]:
    """Read {0,2} or {}."""
    return tuple(read_integer(dimension) for dimension in text.strip("{}").split(",") if dimension.strip())


def _window(text: str) -> tuple[WindowDimension, ...]:
    """Read {size=3x3 stride=2x2 pad=0_1x0_1 lhs_dilate=1x1 rhs_dilate=1x1 rhs_reversal=0x0}."""
    fields = {}
    for piece in text.strip("{}").split():
        key, _, value = piece.partition("=")
        fields[key] = value.split("x")
    sizes = [read_integer(size) for size in fields.get("size", ())]

    def numbers(key: str) -> list[int]:
        values = [read_integer(value) for value in fields.get(key, ["1"] * len(sizes))]
        if len(values) != len(sizes):
            raise Malformed
        return values

    padding = fields.get("pad", ["0_0"] * len(sizes))
    if len(padding) != len(sizes):
        raise Malformed
    low, high = zip(*map(_padding, padding), strict=True) if padding else ((), ())
    rows = zip(sizes, numbers("stride"), low, high, numbers("lhs_dilate"), numbers("rhs_dilate"), strict=True)
    return tuple(WindowDimension(*row) for row in rows)


def _padding(text: str) -> tuple[int, int]:
    low, _, high = text.partition("_")
    return _signed(low), _signed(high)


def _signed(text: str) -> int:
    return -read_integer(text[1:]) if text.startswith("-") else read_integer(text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(r"\1", text)
