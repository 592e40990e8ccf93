"""Protos against text for every captured module, and errors that only protos can have."""

import dataclasses
import gzip
import importlib.util
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xlafuse.hlo import proto_reader, text_reader
from xlafuse.hlo.proto_reader import ProtoError, parse_proto
from xlafuse.hlo.text_reader import Instruction, Module

pytest.importorskip("jaxlib", reason="jaxlib defines the protos")

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "data" / "hlo").glob("*/*.hlo.pb.gz"))


def _disagreements(text: Module, proto: Module) -> Iterator[str]:
    for field in ("name", "entry", "is_scheduled", "unparsed"):
        if getattr(text, field) != getattr(proto, field):
            yield f"{field}: {getattr(text, field)!r} in text, {getattr(proto, field)!r} in the proto"
    for name in text.computations.keys() ^ proto.computations.keys():
        yield f"only one reading has computation {name}"
    for name in text.computations.keys() & proto.computations.keys():
        written, binary = text.computations[name].instructions, proto.computations[name].instructions
        # Where jax 0.11's dumps write %pair#1, the proto has a get-tuple-element.
        unwritten = {
            f"{part.operands[0]}#{part.index}": part.name
            for part in binary.values()
            if part.opcode == "get-tuple-element" and part.name not in written
        }
        if list(written) != [part for part in binary if part not in unwritten.values()]:
            yield f"{name}: other instructions, or another order"
            continue
        for part in written.values():
            for field, (a, b) in _fields(part, binary[part.name], unwritten).items():
                if a != b:
                    yield f"{name}: {part.name}: {field} is {a!r} in text, {b!r} in the proto"


def _fields(text: Instruction, proto: Instruction, unwritten: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    compared = [field.name for field in dataclasses.fields(Instruction) if field.compare]
    pairs = {name: (getattr(text, name), getattr(proto, name)) for name in compared}
    pairs["result"] = (_tree(text.result), _tree(proto.result))
    pairs["operands"] = (tuple(unwritten.get(name, name) for name in text.operands), proto.operands)
    if text.opcode == "slice":
        pairs["detail"] = (text.detail, proto.detail[: len(text.detail)])
    if text.backend_config.startswith('{"'):  # the text's keys are sorted, the proto's are not
        pairs["backend_config"] = (json.loads(text.backend_config), json.loads(proto.backend_config))
    return pairs


def _tree(element: Any) -> Any:
    return element.bytes, element.shape, [_tree(part) for part in element.elements]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name.split('.')[0]}")
def test_text_and_proto_agree(path: Path) -> None:
    text = text_reader.parse(gzip.decompress(path.with_name(path.name.replace(".pb", ".txt")).read_bytes()).decode())
    proto = parse_proto(gzip.decompress(path.read_bytes()))
    assert proto.entry and not proto.unparsed
    assert not list(_disagreements(text, proto))


def test_text_and_proto_agree_on_modules_compiled_on_a_gpu(artifacts: Path) -> None:
    """Compare the optimized modules, and those around the fusion passes."""
    pairs = 0
    for path in sorted(artifacts.glob("*-xla.zip")):
        with zipfile.ZipFile(path) as archive:
            files = set(archive.namelist())
            for file in files:
                other = file.replace("optimized.hlo.pb", "optimized.hlo.txt").replace(".hlo.pb", ".txt")
                if not file.endswith(".hlo.pb") or other not in files:
                    continue
                text, proto = text_reader.parse(archive.read(other).decode()), parse_proto(archive.read(file))
                assert not list(_disagreements(text, proto)), f"{path.name}: {file}"
                pairs += 1
    assert pairs > 20


# Small modules, built field by field.


@pytest.fixture
def module() -> Any:
    """The proto of a module with two instructions: negate(x) and its source line."""
    module = proto_reader.message_type("xla.HloModuleProto")(
        name="m", entry_computation_name="main", entry_computation_id=7
    )
    module.stack_frame_index.file_names.append("model.py")
    module.stack_frame_index.file_locations.add(file_name_id=1, line=12)
    module.stack_frame_index.stack_frames.add(file_location_id=1, parent_frame_id=1)
    main = module.computations.add(name="main", id=7, root_id=2)
    x = main.instructions.add(name="x", opcode="parameter", id=1)
    y = main.instructions.add(name="y", opcode="negate", id=2, operand_ids=[1])
    for instruction in (x, y):
        instruction.shape.element_type = 16  # BF16
        instruction.shape.dimensions.extend([8, 4])
    y.metadata.op_name = "jit(f)/act/neg"
    y.metadata.stack_frame_id = 1
    return module


def _unparsed(module: Any) -> list[str]:
    return [text for _, text in parse_proto(module.SerializeToString()).unparsed]


def test_an_instruction(module: Any) -> None:
    read = parse_proto(module.SerializeToString())
    assert (read.name, read.entry, read.is_scheduled, read.unparsed) == ("m", "main", False, [])
    y = read.computations["main"].instructions["y"]
    assert (y.opcode, y.operands, y.op_name, y.source, y.site) == (
        "negate",
        ("x",),
        "jit(f)/act/neg",
        "model.py:12",
        "1",
    )
    assert (y.shapes[0].dtype, y.shapes[0].dims, y.bytes, y.is_root) == ("bf16", (8, 4), 64, True)


@pytest.mark.parametrize("kind", ["HloProto", "HloSnapshot"])
def test_messages_around_a_module(module: Any, kind: str) -> None:
    message = proto_reader.message_type(f"xla.{kind}")()
    (message.hlo_module if kind == "HloProto" else message.hlo.hlo_module).CopyFrom(module)
    assert parse_proto(message.SerializeToString()) == parse_proto(module.SerializeToString())


def test_opcodes_of_another_version_are_kept(module: Any) -> None:
    module.computations[0].instructions[1].opcode = "quantum-dot"
    read = parse_proto(module.SerializeToString())
    assert read.computations["main"].instructions["y"].opcode == "quantum-dot" and not read.unparsed


def test_fields_of_another_version_are_skipped(module: Any) -> None:
    unknown = b"\xfa\x3e\x03abc"  # field 1007
    assert parse_proto(module.SerializeToString() + unknown) == parse_proto(module.SerializeToString())


def test_the_schedule_is_the_order(module: Any) -> None:
    main = module.computations[0]
    z = main.instructions.add(name="z", opcode="sine", id=3, operand_ids=[1])
    z.shape.CopyFrom(main.instructions[0].shape)
    module.schedule.sequences[7].instruction_ids.extend([1, 3, 2])
    read = parse_proto(module.SerializeToString())
    assert list(read.computations["main"].instructions) == ["x", "z", "y"] and read.is_scheduled
    module.schedule.sequences[7].instruction_ids[1] = 99
    assert list(parse_proto(module.SerializeToString()).computations["main"].instructions) == ["x", "y", "z"]


def test_old_protos_carry_lines_themselves(module: Any) -> None:
    metadata = module.computations[0].instructions[1].metadata
    metadata.stack_frame_id = 0
    metadata.source_file, metadata.source_line = "old.py", 3
    assert parse_proto(module.SerializeToString()).computations["main"].instructions["y"].source == "old.py:3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda main: main.instructions[1].operand_ids.append(99), "operand 99"),
        (lambda main: main.instructions[1].called_computation_ids.append(99), "computation 99"),
        (lambda main: setattr(main.instructions[0], "parameter_number", -1), "index -1"),
        (lambda main: setattr(main.instructions[0], "name", ""), "without name"),
        (lambda main: setattr(main.instructions[1], "name", "x"), "second instruction of this name"),
        (lambda main: setattr(main.instructions[1].shape, "element_type", 9999), "element type 9999"),
        (lambda main: main.instructions[1].shape.dimensions.append(-5), "negate"),
        (lambda main: main.instructions[1].shape.dimensions.extend([1 << 60] * 9), "negate"),
        (lambda main: main.instructions[1].metadata.ClearField("stack_frame_id"), ""),
        (lambda main: setattr(main.instructions[1].metadata, "stack_frame_id", 99), ""),
        (lambda main: setattr(main.instructions[1].metadata, "stack_frame_id", -1), ""),
    ],
    ids=range(11),
)
def test_malformed_instructions_are_listed(module: Any, change: Any, said: str) -> None:
    change(module.computations[0])
    found = _unparsed(module)
    assert [said in text for text in found] == ([True] if said else [])


def test_computations_and_instructions_of_one_id(module: Any) -> None:
    module.computations.add().CopyFrom(module.computations[0])
    assert "second computation 7" in _unparsed(module)[0]
    module.computations[1].id = 8
    assert "name main" in _unparsed(module)[0]


def test_an_asynchronous_operation_that_awaits_itself(module: Any) -> None:
    y = module.computations[0].instructions[1]
    y.opcode, y.operand_ids[0] = "async-done", 2
    assert parse_proto(module.SerializeToString()).computations["main"].instructions["y"].opcode == "async-done"


def test_an_asynchronous_operation_that_wraps_the_entry(module: Any) -> None:
    y = module.computations[0].instructions[1]
    y.opcode, y.called_computation_ids[:] = "async-start", [7]
    assert "main" in parse_proto(module.SerializeToString()).computations


def test_shapes_nested_deeper_than_protobuf_accepts(module: Any) -> None:
    shape = module.computations[0].instructions[1].shape
    for depth in range(300):
        shape.element_type = 13  # TUPLE
        if depth == 60:
            assert parse_proto(module.SerializeToString()).computations["main"].instructions["y"].shapes == ()
        shape = shape.tuple_shapes.add()
    with pytest.raises(ProtoError, match="neither an HloModuleProto"):
        parse_proto(module.SerializeToString())


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"\n\x05hello", b"\x00" * 100, bytes(range(256)), b"\n\xff\xff\xff\xff\x7f"]
)
def test_other_bytes(data: bytes) -> None:
    with pytest.raises(ProtoError, match="neither an HloModuleProto"):
        parse_proto(data)


def test_too_many_instructions(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proto_reader, "MAX_INSTRUCTIONS", 1)
    with pytest.raises(ProtoError, match="more than 1 instructions"):
        parse_proto(module.SerializeToString())


def test_without_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proto_reader, "_message_types", proto_reader._message_types.__wrapped__)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jaxlib" else find(name))
    with pytest.raises(ProtoError, match="pip install jaxlib"):
        parse_proto(b"\n\x01m")


def test_a_library_that_describes_no_protos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proto_reader, "_message_types", proto_reader._message_types.__wrapped__)
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF" + b"\n\x15xla/service/hlo.proto" + b"\xff" * 30)
    monkeypatch.setattr(proto_reader, "_library", lambda: library)
    with pytest.raises(ProtoError, match="0.10 and 0.11"):
        parse_proto(b"\n\x01m")
