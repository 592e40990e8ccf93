"""A reader of HLO text of any XLA version: module -> computations -> instructions. It needs no framework.

XLA's own parser rejects a whole module for one unknown word and crashes on deep nesting. This reader accepts what XLA
prints. It keeps what it does not understand in `Module.unparsed` and goes on. Time and memory are linear in the text,
hostile text included.

People also write HLO in a short form: an instruction without a shape, an operation in the place of an operand, a
computation in the place of its name. `xla_printer` writes such text in full, as it does for an attribute's string with
a line that begins like an instruction.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from xlafuse.hlo.exchange_groups import gpus_of_text
from xlafuse.hlo.gc_pause import collector_paused
from xlafuse.hlo.shape import MAX_DIGITS, Element, Malformed, Shape, read_integer, read_shapes
from xlafuse.hlo.stack_frames import Frame, StackFrames
from xlafuse.hlo.text_scanner import (
    INSTRUCTION,
    NAME,
    STRING,
    skip_brackets,
    skip_json,
    skip_modules,
    skip_space,
    skip_value,
    split_brackets,
    string,
    without_comments,
)
from xlafuse.hlo.window import WindowDimension, read_dimensions, read_window

DECLARATION = "xlafuse_declared"  # the one frontend attribute that is kept


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    shapes: the result's arrays, with tuples flattened. result: the same as a tree.
    operands: names of instructions (empty for parameters and constants).
    calls: (attribute, computation) pairs, in order.
    op_name: the framework's path, "" if XLA recorded none.
    source: "file:line" of the innermost recorded frame, "" if there is none. site: the id of that frame; one line can
        have several. place: the innermost frame outside libraries (`stack_frames.place_of`).
    backend_config: raw text. declared: the text of the frontend attribute that `custom_calls` reads.
    index: of a parameter or a get-tuple-element, else None.

    FLOPs depend on these; an operation without such an attribute has the default:
    contracting: the left operand's contracting dimensions (lhs_contracting_dims).
    window: of convolutions and windowed reductions, one entry for each window dimension.
    dim_labels: of a convolution, as in the text ("b01f_01io->b01f").
    feature_groups, batch_groups: feature_group_count and batch_group_count.
    detail: a constant's literal or a slice's bounds, shortened. It tells instructions with equal opcodes and operands
        apart, and equality ignores it.
    dimensions: of a broadcast, reduction, transpose, concatenation or iota. direction: of a comparison ("LT").
    gpus: of a collective, how many exchange with each other; 0 where that is not known.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    result: Element = field(compare=False, repr=False)
    operands: tuple[str, ...]
    calls: tuple[tuple[str, str], ...] = ()
    op_name: str = ""
    source: str = ""
    place: str = field(default="", compare=False)
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
    dimensions: tuple[int, ...] = field(default=(), compare=False, repr=False)
    direction: str = field(default="", compare=False, repr=False)
    gpus: int = 0

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
class Statement:
    """The text of one instruction, in pieces.

    literal: what a parameter, a constant or an iota has in its brackets. calls: the computations that attributes name;
    they are not among the other `attributes`.
    """

    name: str
    is_root: bool
    shape: str
    opcode: str
    literal: str
    operands: tuple[str, ...]
    attributes: dict[str, str]
    calls: dict[str, list[str]]


@dataclass
class Computation:
    """A named list of instructions in the order of the text, which is the schedule of a scheduled module.

    statements: the same as text, if `parse` was asked to keep it.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    statements: dict[str, Statement] = field(default_factory=dict, compare=False, repr=False)

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
    is_short: one of these lines is in the short form that no compiler prints.
    stack: the frames that `Instruction.site` refers to. donated: parameters of the entry whose memory a result takes.
    """

    name: str = ""
    entry: str = ""
    is_scheduled: bool = False
    computations: dict[str, Computation] = field(default_factory=dict)
    unparsed: list[tuple[int, str]] = field(default_factory=list)
    is_short: bool = False
    stack: StackFrames = field(default_factory=StackFrames, compare=False, repr=False)
    donated: frozenset[int] = frozenset()

    def bytes_donated(self) -> int:
        """Return the bytes of the donated parameters."""
        entry = self.computations.get(self.entry)
        own = entry.instructions.values() if entry is not None else ()
        return sum(each.bytes for each in own if each.opcode == "parameter" and each.index in self.donated)


def parse(text: str | Iterable[str], *, statements: bool = False) -> Module:
    """Read HLO text, given as a string or as lines, such as an open file. No content makes it raise.

    statements: keep the text of each instruction, which takes more memory than the rest.
    """
    with collector_paused():
        return _Reader(text if isinstance(text, str) else "".join(text), statements).read()


# {0}: (3, {}, may-alias): result 0 takes the memory of parameter 3
_ALIAS = re.compile(r"\}\s*:\s*\(\s*(\d{1,9})\s*,")
# HloModule jit_mlp, is_scheduled=true, entry_computation_layout={...}
_MODULE = re.compile(rf"HloModule\s+%?({NAME})")
# ENTRY %main.3 (x.1: bf16[8192,4096]) -> bf16[8192,4096] {      or, in the short form:  region_0.4 {
_COMPUTATION = re.compile(rf"(ENTRY\s+)?%?({NAME})\s*(?=[({{])")
_ARROW = re.compile(r"\s*->\s*")
_BODY = re.compile(r"\s*\{(?!\s*[\d:])")
_TABLE = re.compile(r"(?:FileNames|FunctionNames|FileLocations|StackFrames)\b")
# 2 "blocks.py"    or    3 {file_name_id=1 function_name_id=3 line=9 end_line=9 column=55 end_column=92}
_ROW = re.compile(rf"""\s*(\d{{1,18}})\s*({STRING}|\{{[a-z_0-9=,\s]*+\}})""")
_ROW_FIELD = re.compile(r"([a-z_]+)=(\d{1,18})(?!\d)")

_INSTRUCTION = re.compile(rf"(?={INSTRUCTION})(ROOT\s+)?+%?({NAME})\s*=\s*")
_ARRAY = re.compile(r"[a-z][a-z0-9]*+\s*+\[[^\[\]]*+\](?:\s*+\{(?:\s*+[\d:][^{}]*+)?\})?+")
_BUFFER = re.compile(r"b(?=\()")  # b(f32[2]), an array in memory that a program sees
_OPCODE = re.compile(r"\s*+([a-z][a-zA-Z0-9_-]*+)\s*+(?=\()")
_NAMES = re.compile(r"""\(([^(){}\[\]"']*+)\)""")  # operands without shapes
_REFERENCE = re.compile(rf"%?({NAME})")
_ATTRIBUTE = re.compile(r"\s*,\s*([a-zA-Z_0-9.-]+)=\s*")  # control-predecessors={%a}
_METADATA = re.compile(rf"""(?<![a-z_])([a-z_]++)=\s*+({STRING}|[^\s"'{{}},]+)""")

# The attributes that name computations.
_CALLS = (
    "calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation",
    "called_computations", "select", "scatter",
)
_SKIPPED = {"backend_config": skip_json, "origin_recovery_table": skip_modules}  # values in braces
_NO_OPERANDS = frozenset(("parameter", "constant", "iota"))
_MAX_LITERAL = 64  # characters that are kept
_MAX_BROKEN_HEADERS = 4  # that may be looked for beyond their line


class _ShortForm(Malformed):
    """A line leaves out what every compiler prints."""


class _Reader:
    """The text, the tables read so far, and the places that were not understood."""

    def __init__(self, text: str, statements: bool) -> None:
        self._frames: dict[int, Frame] = {}
        self._stack = StackFrames(self._frames)
        self.module = Module(stack=self._stack)
        self._keeps_statements = statements
        self._original = text
        self._text = without_comments(text)
        self._names: dict[str, dict[str, str]] = {"FileNames": {}, "FunctionNames": {}}
        self._locations: dict[str, Frame] = {}
        self._shapes: dict[str, tuple[tuple[Shape, ...], Element]] = {}
        self._unparsed: list[int] = []
        self._cut_off = ""  # the computation in which the text ends
        self._last = ""
        self._broken_headers = 0

    def read(self) -> Module:
        text, at = self._text, 0
        while (at := skip_space(text, at)) < len(text):
            if module := _MODULE.match(text, at):
                start = at
                attributes, at = self._trailing_attributes(module.end())
                if self.module.name:
                    self._unparsed.append(start)  # two modules in one text
                else:
                    self.module.name = module[1]
                    self.module.is_scheduled = attributes.get("is_scheduled") == "true"
                    aliases = _ALIAS.finditer(attributes.get("input_output_alias", ""))
                    self.module.donated = frozenset(int(alias[1]) for alias in aliases)
            elif table := _TABLE.match(text, at):
                at = self._table(table[0], table.end())
            else:
                try:
                    at = self._computation(at)
                except Malformed:
                    at = self._skip_line(at)
        self._finish()
        return self.module

    def _finish(self) -> None:
        module = self.module
        lines, number, at = self._original, 1, 0
        for place in sorted(self._unparsed):
            number += lines.count("\n", at, place)
            at = place
            begin, end = lines.rfind("\n", 0, at) + 1, lines.find("\n", at)
            module.unparsed.append((number, lines[begin : end if end >= 0 else None].rstrip().replace("\0", "")))
        if self._cut_off:
            number += lines.count("\n", at) + (not lines.endswith("\n"))
            module.unparsed.append((number, f"the text ends inside computation {self._cut_off}"))
        if not module.entry and not module.unparsed:  # as XLA does
            module.entry = self._last
        if not module.name and module.entry:  # as XLA does
            module.name = f"module_{module.entry}"

    def _skip_line(self, at: int) -> int:
        """Note that the line at `at` is not understood; return where the next one begins."""
        self._unparsed.append(at)
        end = self._text.find("\n", at)
        return end + 1 if end >= 0 else len(self._text)

    def _table(self, table: str, at: int) -> int:
        while row := _ROW.match(self._text, at):
            key, value = row.groups()
            if value.startswith('"') != table.endswith("Names"):
                break
            if table in self._names:
                self._names[table][key] = string(value)
            else:
                self._row(table, key, {name: int(number) for name, number in _ROW_FIELD.findall(value)})
            at = row.end()
        return at

    def _row(self, table: str, key: str, fields: Mapping[str, int]) -> None:
        if table == "FileLocations":
            file = self._names["FileNames"].get(str(fields.get("file_name_id")))
            function = self._names["FunctionNames"].get(str(fields.get("function_name_id")), "")
            if file:
                span = (fields.get(name, 0) for name in ("end_line", "column", "end_column"))
                self._locations[key] = Frame(file, fields.get("line", 0), function, *span)
        elif location := self._locations.get(str(fields.get("file_location_id"))):
            # The text has 1 for no parent, and 1 more than a parent's number.
            self._frames[int(key)] = replace(location, parent=fields.get("parent_frame_id", 1) - 1)

    def _computation(self, at: int) -> int:
        text, start = self._text, at
        header = _COMPUTATION.match(text, at)
        if not header:
            raise Malformed
        at = header.end()
        if text[at] == "(":
            at = self._signature(at)
        body = _BODY.match(text, at)
        if not body:
            raise Malformed
        computation = Computation(header[2])
        if header[2] in self.module.computations:
            self._unparsed.append(start)  # its instructions go into a computation that nothing refers to
        else:
            self.module.computations[header[2]] = computation
            self._last = header[2]
            if header[1] and self.module.entry:
                self._unparsed.append(start)  # a second entry
            elif header[1]:
                self.module.entry = header[2]
        at = self._instructions(body.end(), computation)
        return self._trailing_attributes(at)[1]

    def _trailing_attributes(self, at: int) -> tuple[dict[str, str], int]:
        """Return the attributes of the module or of a computation, and where they end."""
        try:
            attributes, _, end = self._attributes(at, self._header_limit(at))
        except Malformed:
            self._broken_headers += 1
            return {}, self._skip_line(at)
        return attributes, end

    def _header_limit(self, at: int) -> int:
        """Return where a bracket of a header must be closed: at the end of the line after too many broken ones."""
        end = self._text.find("\n", at)
        return len(self._text) if self._broken_headers < _MAX_BROKEN_HEADERS or end < 0 else end

    def _signature(self, at: int) -> int:
        """Return where (x: f32[2]) -> f32[2] ends."""
        text = self._text
        limit = self._header_limit(at)
        if limit < len(text) and text.count("(", at, limit) != text.count(")", at, limit):
            raise Malformed
        try:
            arrow = _ARROW.match(text, skip_brackets(text, at, limit))
            shape = arrow and self._shape_end(arrow.end(), limit)
        except Malformed:
            shape = None
        if shape is None:
            self._broken_headers += 1
            raise Malformed
        return shape

    def _instructions(self, at: int, computation: Computation) -> int:
        """Read instructions up to the closing brace; return the position after it."""
        text, understood, last = self._text, True, ""
        while True:
            at = start = skip_space(text, at)
            if at >= len(text):
                self._cut_off = computation.name
                return at
            if text[at] == "}":
                break
            try:
                statement, at = self._statement(at)
            except Malformed as problem:
                self.module.is_short |= isinstance(problem, _ShortForm)
                understood, at = False, self._skip_line(at)
                continue
            try:
                last = self._add(statement, computation)
            except Malformed:
                understood = False
                self._unparsed.append(start)
        if understood and last and computation.root is None:
            computation.instructions[last] = replace(computation.instructions[last], is_root=True)
        return at + 1

    def _statement(self, at: int) -> tuple[Statement, int]:
        """Read a name, a shape, an opcode, operands and attributes."""
        text = self._text
        head = _INSTRUCTION.match(text, at)
        if not head:
            raise Malformed
        shape_at = head.end()
        end = self._shape_end(shape_at)
        opcode = _OPCODE.match(text, shape_at if end is None else end)
        if not opcode:
            raise Malformed
        if end is None:
            raise _ShortForm
        literal, operands, at = self._operands(opcode[1], opcode.end())
        attributes, calls, at = self._attributes(at)
        return Statement(
            head[2], bool(head[1]), text[shape_at:end], opcode[1], literal, operands, attributes, calls
        ), at

    def _operands(self, opcode: str, at: int) -> tuple[str, tuple[str, ...], int]:
        """Return a literal or the names of operands, and the position after their bracket."""
        text = self._text
        if opcode in _NO_OPERANDS:
            end = skip_brackets(text, at)
            return text[at + 1 : end - 1], (), end
        if names := _NAMES.match(text, at):
            words = [word for piece in names[1].split(",") if (word := piece.strip())]
            if all(_REFERENCE.fullmatch(word) for word in words):
                return "", tuple([word.removeprefix("%") for word in words]), names.end()
        operands = []
        at = skip_space(text, at + 1)
        while not text.startswith(")", at):
            operand, at = self._operand(at)
            operands.append(operand)
            at = skip_space(text, at + 1) if text.startswith(",", at) else at
        return "", tuple(operands), at + 1

    def _operand(self, at: int) -> tuple[str, int]:
        """Return the name in `%name` or `f32[2]{0} %name`, and the position of the comma or bracket after it."""
        text = self._text
        shape_end = self._shape_end(at)
        at = at if shape_end is None else skip_space(text, shape_end)
        if name := _REFERENCE.match(text, at):
            end = skip_space(text, name.end())
            if text.startswith((",", ")"), end):
                return name[1], end
        raise _ShortForm if _OPCODE.match(text, at) else Malformed

    def _shape_end(self, at: int, limit: int = sys.maxsize) -> int | None:
        """Return where the shape at `at` ends, None if there is none."""
        if array := _ARRAY.match(self._text, at):
            return array.end()
        if buffer := _BUFFER.match(self._text, at):
            at = buffer.end()
        return skip_brackets(self._text, at, limit) if self._text.startswith("(", at) else None

    def _attributes(self, at: int, limit: int = sys.maxsize) -> tuple[dict[str, str], dict[str, list[str]], int]:
        """Return attributes as text, the computations that they name, and where they end."""
        attributes: dict[str, str] = {}
        calls: dict[str, list[str]] = {}
        while found := _ATTRIBUTE.match(self._text, at):
            key = found[1]
            if key in _CALLS:
                calls[key], at = self._called(found.end())
            else:
                at = self._value_end(key, found.end(), limit)
                attributes[key] = self._text[found.end() : at]
        return attributes, calls, at

    def _value_end(self, key: str, at: int, limit: int) -> int:
        skip = _SKIPPED.get(key, skip_value) if self._text.startswith("{", at) else skip_value
        return skip(self._text, at, limit)

    def _called(self, at: int) -> tuple[list[str], int]:
        """Return the computations in %name or {%name, name}."""
        text = self._text
        if not text.startswith("{", at):
            name, at = self._called_computation(at)
            return [name], at
        names = []
        at = skip_space(text, at + 1)
        while not text.startswith("}", at):
            name, at = self._called_computation(at)
            names.append(name)
            at = skip_space(text, at)
            if text.startswith(",", at):
                at = skip_space(text, at + 1)
        return names, at + 1

    def _called_computation(self, at: int) -> tuple[str, int]:
        if self._text.startswith("{", at) or _INSTRUCTION.match(self._text, at):
            raise _ShortForm
        reference = _REFERENCE.match(self._text, at)
        if not reference:
            raise Malformed
        return reference[1], reference.end()

    def _add(self, statement: Statement, computation: Computation) -> str:
        if statement.name in computation.instructions:
            raise Malformed
        computation.instructions[statement.name] = self._instruction(statement)
        if self._keeps_statements:
            computation.statements[statement.name] = statement
        return statement.name

    def _instruction(self, statement: Statement) -> Instruction:
        attributes, opcode = statement.attributes, statement.opcode
        metadata = {key: string(value) for key, value in _METADATA.findall(attributes.get("metadata", ""))}
        index = None
        if opcode == "parameter":
            index = read_integer(statement.literal)
        elif opcode == "get-tuple-element":
            index = read_integer(attributes.get("index", ""))
        shapes, element = self._shape(statement.shape)
        calls = statement.calls
        if opcode in ("async-update", "async-done"):  # they repeat the calls of their async-start
            calls = {}
        elif opcode == "custom-call" and "to_apply" in calls:
            calls = {"called_computations": calls["to_apply"]}
        return Instruction(
            name=statement.name,
            opcode=opcode,
            shapes=shapes,
            result=element,
            operands=statement.operands,
            calls=tuple([(key, name) for key in _CALLS if key in calls for name in calls[key]]),
            op_name=metadata.get("op_name", ""),
            source=self._source(metadata),
            place=self._stack.place(_frame_number(metadata)),
            site=metadata.get("stack_frame_id", ""),
            backend_config=string(attributes.get("backend_config", "")),
            custom_call_target=string(attributes.get("custom_call_target", "")),
            declared=_declared(attributes.get("frontend_attributes", "")),
            fusion_kind=attributes.get("kind", ""),
            index=index,
            is_root=statement.is_root,
            contracting=read_dimensions(attributes.get("lhs_contracting_dims", "")),
            window=read_window(attributes["window"]) if "window" in attributes else (),
            dim_labels=attributes.get("dim_labels", ""),
            feature_groups=read_integer(attributes.get("feature_group_count", "1")),
            batch_groups=read_integer(attributes.get("batch_group_count", "1")),
            detail=(statement.literal if opcode == "constant" else attributes.get("slice", ""))[:_MAX_LITERAL],
            dimensions=read_dimensions(attributes.get("dimensions", "") or attributes.get("iota_dimension", "")),
            direction=attributes.get("direction", ""),
            gpus=gpus_of_text(attributes),
        )

    def _shape(self, text: str) -> tuple[tuple[Shape, ...], Element]:
        """Read a shape once; a module repeats few different shapes many times."""
        if text not in self._shapes:
            self._shapes[text] = read_shapes(text)
        return self._shapes[text]

    def _source(self, metadata: Mapping[str, str]) -> str:
        if "stack_frame_id" in metadata:
            return self._stack.line(_frame_number(metadata))
        file = metadata.get("source_file", "")
        return f"{file}:{metadata.get('source_line', '?')}" if file else ""


def _frame_number(metadata: Mapping[str, str]) -> int:
    """Return the number of an instruction's stack frame; 0 where it has none, or one that no compiler prints."""
    number = metadata.get("stack_frame_id", "")
    return int(number) if re.fullmatch(r"[0-9]{1,18}", number) else 0


def _declared(text: str) -> str:
    """Return the declaration in {some="thing",xlafuse_declared={"flops": 1.0}}; XLA quotes values other than JSON."""
    if DECLARATION not in text:
        return ""
    for begin, end in split_brackets(text, 0)[0]:
        name, _, value = text[begin:end].partition("=")
        if name.strip() == DECLARATION:
            return string(value.strip())
    return ""
