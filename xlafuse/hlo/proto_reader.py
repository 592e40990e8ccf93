"""A reader of HLO protos, XLA's binary form; it returns the same `Module` that `text_reader` reads from text.

No package ships XLA's proto definitions. jaxlib's shared library holds the serialized FileDescriptorProto of every
.proto file that it was built from, so they are looked up there (0.1 s, without importing or running jaxlib). The
definitions are those of the installed version, and unknown fields are skipped, as protobuf does.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from xlafuse import versions
from xlafuse.hlo.exchange_groups import gpus_of_proto
from xlafuse.hlo.shape import Element, Malformed, Shape, read_shapes
from xlafuse.hlo.stack_frames import Frame, StackFrames
from xlafuse.hlo.text_reader import DECLARATION, Computation, Instruction, Module, WindowDimension

MAX_INSTRUCTIONS = 1_000_000

_LIBRARY = "libjax_common.so"
_FILES = ("xla/service/hlo.proto", "tsl/profiler/protobuf/xplane.proto")


class ProtoError(ValueError):
    """The bytes are no HLO proto, or protos cannot be read here; the message says which, and how to fix it."""


def parse_proto(data: bytes) -> Module:
    """Read a serialized HloModuleProto, HloProto (what XLA dumps) or HloSnapshot.

    Instructions come in the order of the module's schedule, if it has one. Opcodes that this jaxlib does not know are
    kept. Malformed instructions, and those that refer to missing ones, are in `Module.unparsed`, numbered from 1 in the
    order of reading.

    Raises ProtoError for other bytes, for messages nested deeper than protobuf accepts (100), for a module of more than
    MAX_INSTRUCTIONS, and if jaxlib or protobuf is not installed.
    """
    return _Reader(_module_proto(data)).module


def module_bytes(data: bytes) -> bytes:
    """Return the serialized HloModuleProto in an HloProto, HloSnapshot or HloModuleProto. Raises ProtoError as above.
    """
    found: bytes = _module_proto(data).SerializeToString()
    return found


def message_type(name: str) -> Any:
    """Return the class of a message of XLA ("xla.HloProto") or of its profiler ("tensorflow.profiler.XSpace").

    Raises ProtoError as `parse_proto` does.
    """
    return _message_types()(name)


def _module_proto(data: bytes) -> Any:
    get = _message_types()
    from google.protobuf.message import DecodeError

    problem = "its entry computation is not in it"
    # The right message type is the one in which the entry computation is found.
    for kind, path in (
        ("HloProto", ("hlo_module",)),
        ("HloSnapshot", ("hlo", "hlo_module")),
        ("HloModuleProto", ()),
    ):
        try:
            message = get(f"xla.{kind}").FromString(data)
        except DecodeError as error:
            problem = str(error)
            continue
        for field in path:
            message = getattr(message, field)
        if _entry(message) is not None:
            return message
    raise ProtoError(f"neither an HloModuleProto, nor an HloProto or HloSnapshot around one that is whole ({problem})")


def _entry(module: Any) -> Any:
    """Return the entry computation, None if it is missing. Old modules give its name instead of its id."""
    wanted = module.entry_computation_id
    for computation in module.computations:
        if computation.id == wanted if wanted else computation.name == module.entry_computation_name:
            return computation
    return None


class _Reader:
    """The state shared by a module's computations: source lines, shapes read before, the schedule."""

    def __init__(self, proto: Any) -> None:
        self._stack = _stack_frames(proto.stack_frame_index)
        self.module = Module(name=proto.name, is_scheduled=bool(proto.schedule.sequences), stack=self._stack)
        self.module.donated = frozenset(entry.parameter_number for entry in proto.input_output_alias.entries)
        self._schedule = proto.schedule.sequences
        self._shapes: dict[bytes, tuple[tuple[Shape, ...], Element]] = {}
        self._computations: dict[int, Any] = {}
        self._operations: dict[int, Any] = {}  # computation -> its only operation, None if it has several
        self._read = 0
        for computation in proto.computations:
            if computation.id in self._computations:
                self._unparsed(f"a second computation {computation.id}: {computation.name}")
            else:
                self._computations[computation.id] = computation
        # A wrapped computation is missing in text: its one operation is written on the line of the async-start.
        wrappers = {
            instruction.called_computation_ids[0]
            for computation in proto.computations
            for instruction in computation.instructions
            if instruction.opcode == "async-start" and self._wrapped(instruction) is not None
        }
        entry = _entry(proto)
        for id, computation in self._computations.items():
            if id not in wrappers or id == entry.id:
                self._take(computation)
        self.module.entry = entry.name

    def _unparsed(self, text: str) -> None:
        self.module.unparsed.append((self._read, text))

    def _take(self, proto: Any) -> None:
        computation = Computation(proto.name)
        if self.module.computations.setdefault(proto.name, computation) is not computation:
            self._unparsed(f"a second computation of the name {proto.name}")
            return
        by_id: dict[int, Any] = {}
        for instruction in proto.instructions:
            by_id.setdefault(instruction.id, instruction)
        starts: dict[int, Any] = {}
        for instruction in _in_order(proto, by_id, self._schedule):
            self._read += 1
            if self._read > MAX_INSTRUCTIONS:
                raise ProtoError(f"module {self.module.name!r} has more than {MAX_INSTRUCTIONS} instructions")
            try:
                read = self._instruction(instruction, by_id, _async_start(instruction, by_id, starts), proto.root_id)
                if read.name in computation.instructions:
                    raise Malformed("a second instruction of this name")
                computation.instructions[read.name] = read
            except Malformed as problem:
                self._unparsed(f"{proto.name}: {instruction.name} = {instruction.opcode}() {problem}".rstrip())

    def _instruction(self, proto: Any, by_id: Mapping[int, Any], start: Any, root_id: int) -> Instruction:
        wrapped = self._wrapped(start) if start is not None else None
        opcode, operation = proto.opcode, proto
        if wrapped is not None:
            opcode = wrapped.opcode + opcode.removeprefix("async")
            operation = wrapped if proto is start else proto
        if not proto.name or not opcode:
            raise Malformed("without name or opcode")
        index = None
        if opcode in ("parameter", "get-tuple-element"):
            index = proto.parameter_number if opcode == "parameter" else proto.tuple_index
            if index < 0:
                raise Malformed(f"of index {index}")
        shapes, result = self._shape(proto.shape)
        metadata = proto.metadata
        frame = metadata.stack_frame_id
        return Instruction(
            name=proto.name,
            opcode=opcode,
            shapes=shapes,
            result=result,
            operands=tuple(_found(by_id, id, "operand").name for id in proto.operand_ids),
            calls=() if proto.opcode in ("async-update", "async-done") else self._calls(operation, by_id),
            op_name=metadata.op_name,
            source=_source(metadata, self._stack),
            place=self._stack.place(frame),
            site=str(frame) if frame else "",
            backend_config=proto.backend_config.decode(errors="replace"),
            custom_call_target=operation.custom_call_target,
            declared=operation.frontend_attributes.map.get(DECLARATION, ""),
            fusion_kind=operation.fusion_kind,
            index=index,
            is_root=proto.id == root_id,
            contracting=_contracting(operation),
            window=tuple(map(_window_dimension, operation.window.dimensions)),
            dim_labels=_dim_labels(operation),
            feature_groups=operation.feature_group_count or 1,
            batch_groups=operation.batch_group_count or 1,
            detail=_detail(operation),
            dimensions=tuple(operation.dimensions),
            direction=operation.comparison_direction,
            gpus=gpus_of_proto(operation),
        )

    def _wrapped(self, start: Any) -> Any:
        """Return the only operation of an async-start's computation; None if it has several, each its own kernel."""
        id = next(iter(start.called_computation_ids), 0)
        if id not in self._operations:
            parts = self._computations[id].instructions if id in self._computations else ()
            operations = [part for part in parts if part.opcode != "parameter"]
            self._operations[id] = operations[0] if len(operations) == 1 else None
        return self._operations[id]

    def _calls(self, proto: Any, by_id: Mapping[int, Any]) -> tuple[tuple[str, str], ...]:
        """Return (attribute, computation) pairs, with attributes named as in text."""
        if not proto.called_computation_ids:
            return ()
        names = [_found(self._computations, id, "computation").name for id in proto.called_computation_ids]
        attributes: Iterable[str]
        match proto.opcode:
            case "while":
                attributes = ("body", "condition")
            case "select-and-scatter":
                attributes = ("select", "scatter")
            case "conditional" if _is_predicate(proto, by_id):
                attributes = ("true_computation", "false_computation")
            case opcode:
                attributes = [_CALL_ATTRIBUTES.get(opcode, "to_apply")] * len(names)
        return tuple(zip(attributes, names, strict=False))

    def _shape(self, proto: Any) -> tuple[tuple[Shape, ...], Element]:
        key = proto.SerializeToString()
        if key not in self._shapes:
            self._shapes[key] = read_shapes(_shape_text(proto))
        return self._shapes[key]


# The attribute that names a computation; to_apply for other opcodes.
_CALL_ATTRIBUTES = {
    **dict.fromkeys(("fusion", "async-start", "async-update", "async-done"), "calls"),
    "conditional": "branch_computations", "custom-call": "called_computations",
}


def _found(by_id: Mapping[int, Any], id: int, what: str) -> Any:
    found = by_id.get(id)
    if found is None:
        raise Malformed(f"whose {what} {id} is missing")
    return found


def _in_order(computation: Any, by_id: Mapping[int, Any], schedule: Any) -> list[Any]:
    """Return the instructions in scheduled order if the schedule lists them all, else in the order of the proto."""
    if computation.id in schedule:
        ids = schedule[computation.id].instruction_ids
        if len(ids) == len(computation.instructions) and len(set(ids) & by_id.keys()) == len(ids):
            return [by_id[id] for id in ids]
    return list(computation.instructions)


def _async_start(instruction: Any, by_id: Mapping[int, Any], starts: dict[int, Any]) -> Any:
    """Return the async-start of an asynchronous instruction, None for others. starts: results so far."""
    path = []
    while instruction.opcode in ("async-done", "async-update") and instruction.id not in starts:
        path.append(instruction.id)
        starts[instruction.id] = None  # stays None if the operands form a circle
        instruction = by_id.get(next(iter(instruction.operand_ids), 0), instruction)
    start = instruction if instruction.opcode == "async-start" else starts.get(instruction.id)
    starts.update(dict.fromkeys(path, start))
    return start


def _is_predicate(conditional: Any, by_id: Mapping[int, Any]) -> bool:
    chosen = by_id.get(next(iter(conditional.operand_ids), 0))
    return chosen is not None and _dtype(chosen.shape) == "pred"


def _contracting(proto: Any) -> tuple[int, ...]:
    if proto.HasField("dot_dimension_numbers"):
        return tuple(proto.dot_dimension_numbers.lhs_contracting_dimensions)
    if proto.HasField("ragged_dot_dimension_numbers"):
        return tuple(proto.ragged_dot_dimension_numbers.dot_dimension_numbers.lhs_contracting_dimensions)
    return ()


def _detail(proto: Any) -> str:
    """Return a number as in text, a hash of another constant's literal, or a slice's bounds as in text."""
    if proto.opcode == "constant":
        if (number := _number(proto)) is not None:
            return number
        return hashlib.blake2b(proto.literal.SerializeToString(), digest_size=8).hexdigest()
    bounds = (f"{d.start}:{d.limit}" + (f":{d.stride}" if d.stride != 1 else "") for d in proto.slice_dimensions)
    return "{" + ", ".join(f"[{bound}]" for bound in bounds) + "}" if proto.slice_dimensions else ""


# Fields of LiteralProto by element type; 16-bit floats are bytes.
_LITERALS = {"f32": "f32s", "f64": "f64s", "s32": "s32s", "s64": "s64s", "u32": "u32s", "u64": "u64s", "pred": "preds"}


def _number(proto: Any) -> str | None:
    """Return the literal of a scalar constant: "0.125", "-inf", "true"; None for an array or another element type."""
    dtype = _dtype(proto.shape)
    if proto.shape.dimensions:
        return None
    if dtype in ("bf16", "f16"):
        packed = getattr(proto.literal, f"{dtype}s")
        if len(packed) != 2:
            return None
        (value,) = struct.unpack("<e", packed) if dtype == "f16" else struct.unpack("<f", bytes(2) + packed)
        return f"{value:g}"
    values: Any = getattr(proto.literal, _LITERALS[dtype]) if dtype in _LITERALS else ()
    if len(values) != 1:
        return None
    return str(values[0]).lower() if dtype == "pred" else f"{values[0]:.9g}" if dtype[0] == "f" else str(values[0])


def _window_dimension(proto: Any) -> WindowDimension:
    return WindowDimension(*(getattr(proto, field.name) for field in dataclasses.fields(WindowDimension)))


def _dim_labels(proto: Any) -> str:
    """Return a convolution's dimensions as in text: b01f_01io->b01f."""
    if not proto.HasField("convolution_dimension_numbers"):
        return ""
    numbers = proto.convolution_dimension_numbers
    left = {numbers.input_batch_dimension: "b", numbers.input_feature_dimension: "f"}
    right = {numbers.kernel_input_feature_dimension: "i", numbers.kernel_output_feature_dimension: "o"}
    result = {numbers.output_batch_dimension: "b", numbers.output_feature_dimension: "f"}
    spatial = (numbers.input_spatial_dimensions, numbers.kernel_spatial_dimensions, numbers.output_spatial_dimensions)
    for labels, dimensions in zip((left, right, result), spatial, strict=True):
        labels.update((dimension, str(number)) for number, dimension in enumerate(dimensions))
    names = ["".join(labels[dimension] for dimension in sorted(labels)) for labels in (left, right, result)]
    return f"{names[0]}_{names[1]}->{names[2]}"


def _stack_frames(index: Any) -> StackFrames:
    """Return a module's frames. Ids count from 1; 0 means none."""

    def frame(row: Any) -> Frame | None:
        location = _row(index.file_locations, row.file_location_id)
        file = _row(index.file_names, location.file_name_id) if location else None
        if location is None or not file:
            return None
        return Frame(
            file, location.line, _row(index.function_names, location.function_name_id) or "", location.end_line,
            location.column, location.end_column, row.parent_frame_id,
        )

    found = ((number, frame(row)) for number, row in enumerate(index.stack_frames, 1))
    return StackFrames({number: frame for number, frame in found if frame is not None})


def _row(table: Any, id: int) -> Any:
    return table[id - 1] if 0 < id <= len(table) else None


def _source(metadata: Any, stack: StackFrames) -> str:
    if metadata.stack_frame_id:
        return stack.line(metadata.stack_frame_id)
    return f"{metadata.source_file}:{metadata.source_line or '?'}" if metadata.source_file else ""


_UNBOUNDED = _MERGED = -(1 << 63)


def _shape_text(proto: Any) -> str:
    """Return a shape as text, with its layout's tiles, bits of an element and memory: (s4[4096,<=2048]{1,0:E(4)})."""
    dtype = _dtype(proto)
    if dtype == "buffer":  # an array in memory that a program sees
        return _shape_text(proto.tuple_shapes[0]) if proto.tuple_shapes else "()"
    if dtype == "tuple":
        return f"({', '.join(_shape_text(element) for element in proto.tuple_shapes)})"
    dynamic = proto.is_dynamic_dimension
    dims = ",".join(
        "?" if size == _UNBOUNDED else f"<={size}" if at < len(dynamic) and dynamic[at] else str(size)
        for at, size in enumerate(proto.dimensions)
    )
    layout = proto.layout
    bits, space = layout.element_size_in_bits, layout.memory_space
    tiles = "".join(f"({','.join('*' if d == _MERGED else str(d) for d in tile.dimensions)})" for tile in layout.tiles)
    attributes = (tiles and f"T{tiles}") + (f"E({bits})" if bits else "") + (f"S({space})" if space else "")
    order = ",".join(map(str, layout.minor_to_major))
    return f"{dtype}[{dims}]" + (f"{{{order}{attributes and f':{attributes}'}}}" if order or attributes else "")


def _dtype(shape: Any) -> str:
    values = shape.DESCRIPTOR.fields_by_name["element_type"].enum_type.values_by_number
    known = values.get(shape.element_type)
    if known is None:
        raise Malformed(f"of an element type {shape.element_type} that this jaxlib does not know")
    return known.name.lower().removesuffix("_type")


@functools.cache
def _message_types() -> Callable[[str], Any]:
    """Return a function from a message's full name to its class."""
    try:
        from google.protobuf import descriptor_pool, message_factory
    except ImportError as error:
        raise ProtoError("reading HLO protos needs the protobuf package: pip install protobuf") from error
    pool = descriptor_pool.DescriptorPool()
    with _library().open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        added: set[str] = set()
        for file_name in _FILES:
            _add(pool, library, file_name, added)

    @functools.cache
    def get(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))

    return get


def _library() -> Path:
    """Return the path of jaxlib's shared library without importing jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / _LIBRARY).is_file():
            return path
    raise ProtoError(
        "reading HLO protos takes XLA's definitions from jaxlib (0.5 or newer), which is not installed: "
        "pip install jaxlib; or give the module as text (xla_dump_hlo_as_text)"
    )


def _add(pool: Any, library: mmap.mmap, name: str, added: set[str]) -> None:
    """Add the .proto file `name` and its imports to the pool."""
    if name in added:
        return
    added.add(name)
    file = _file_descriptor(library, name)
    for dependency in file.dependency:
        _add(pool, library, dependency, added)
    pool.Add(file)


def _file_descriptor(library: mmap.mmap, name: str) -> Any:
    """Return the FileDescriptorProto of `name`; its first field is the name."""
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    beginning = b"\n" + bytes([len(name)]) + name.encode()
    at = library.find(beginning)
    while at >= 0:
        try:
            file = descriptor_pb2.FileDescriptorProto.FromString(library[at : _message_end(library, at)])
        except (DecodeError, IndexError):  # not a descriptor, or the file ends inside one
            file = None
        if file is not None and (file.message_type or file.enum_type):
            return file
        at = library.find(beginning, at + 1)
    raise ProtoError(
        f"this jaxlib's {_LIBRARY} does not describe {name}; versions {' and '.join(versions.JAX)} do. "
        "Install one of those, or give the module as text"
    )


# In a FileDescriptorProto, dependencies by index (10, 11) and edition (14) are varints; other fields have a length.
_VARINT_FIELDS = frozenset((10, 11, 14))
_LENGTH_FIELDS = frozenset((*range(1, 10), 12, 15))


def _message_end(library: mmap.mmap, start: int) -> int:
    """Return where a FileDescriptorProto ends: at the first byte that cannot begin another of its fields.

    Its length is stored nowhere; compilers put a zero after it.
    """
    at = start
    while at < len(library):
        tag, value_at = _varint(library, at)
        field, wire_type = tag >> 3, tag & 7
        if wire_type == 0 and field in _VARINT_FIELDS:
            _, at = _varint(library, value_at)
        elif wire_type == 2 and field in _LENGTH_FIELDS and (field != 1 or at == start):
            length, value_at = _varint(library, value_at)
            at = value_at + length
        else:
            break
    return at


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """Return (value, position after it)."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
