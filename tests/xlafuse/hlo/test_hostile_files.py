"""Hostile and damaged files: reading one gives a one-line error with its name, or a graph with a count of unread lines.

Each file is read in a new process, limited to ten seconds of CPU time and 1.5 GiB.
"""

import gzip
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from full_marks import first_of_each
from hypothesis import given
from hypothesis import strategies as st

from xlafuse.hlo import file_reader, gpu_program, proto_reader, text_reader
from xlafuse.hlo.file_reader import UnreadableHlo, read

pytest.importorskip("jaxlib", reason="jaxlib defines the protos")

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "data" / "hlo" / "jax-0.11.2"
SECONDS, MEMORY = 10, 3 << 29

DRIVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
from xlafuse.hlo import gpu_program
from xlafuse.hlo.file_reader import read
try:
    module = read(sys.argv[1])
    program = gpu_program.program(module)
except ValueError as problem:
    print("refused:", problem)
else:
    print("read:", len(program.launches), "unparsed:", len(module.unparsed), "unresolved:", len(program.unresolved))
"""


def _outcome(path: Path) -> str:
    """Return the driver's line; a traceback, a second line or an exceeded limit fails the test."""
    process = subprocess.run([sys.executable, "-c", DRIVER, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    (line,) = process.stdout.splitlines()
    assert len(line) < 500
    return line


def _module(*lines: str) -> str:
    return "\n".join(("HloModule m, is_scheduled=true", "ENTRY %main () -> f32[] {", *lines, "}")) + "\n"


def _deep_shape(depth: int) -> str:
    return _module("  %x = " + "(" * depth + "f32[2]" + ")" * depth + " parameter(0)", "  ROOT %y = f32[2] sine(%x)")


def _doubling(levels: int) -> str:
    """Each computation calls the next one twice: 2^levels instructions."""
    called = "\n".join(
        f"%c{n} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n  %a = f32[] call(%p), to_apply=%c{n + 1}\n"
        f"  ROOT %b = f32[] call(%a), to_apply=%c{n + 1}\n}}"
        for n in range(levels)
    )
    last = f"%c{levels} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n  ROOT %s = f32[] sine(%p)\n}}"
    main = _module("  %x = f32[] parameter(0)", "  ROOT %y = f32[] call(%x), to_apply=%c0")
    return f"{called}\n{last}\n{main}"


def _chain(length: int) -> str:
    """Each computation calls the next one, `length` deep."""
    called = "\n".join(
        f"%c{n} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n  ROOT %a = f32[] call(%p), to_apply=%c{n + 1}\n}}"
        for n in range(length)
    )
    main = _module("  %x = f32[] parameter(0)", "  ROOT %y = f32[] call(%x), to_apply=%c0")
    last = f"%c{length} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n  ROOT %s = f32[] sine(%p)\n}}"
    return f"{called}\n{last}\n{main}"


def _nested_fusions(levels: int) -> str:
    return _doubling(levels).replace("call(", "fusion(").replace("to_apply=", "kind=kLoop, calls=")


TEXTS: dict[str, tuple[Callable[[], str], str]] = {
    # name: (the file, the beginning of the outcome)
    "nothing": (lambda: "", "refused"),
    "blank lines": (lambda: "\n" * 1000, "refused"),
    "prose": (lambda: "Dear reader,\n" * 1000, "refused"),
    "StableHLO": (lambda: "module @jit_f attributes {} {\n  func.func public @main() {\n  }\n}\n", "refused"),
    "a header alone": (lambda: "HloModule m, is_scheduled=true\n", "refused"),
    "no entry, and a line of garbage": (
        lambda: "HloModule m\n%c () -> f32[] {\n  ROOT %x = f32[] constant(1)\n  ?\n}\n",
        "refused",
    ),
    "20,000 brackets": (lambda: _deep_shape(20_000), "read: 1 unparsed: "),
    "20,000 brackets, open": (lambda: _module("  %x = " + "(" * 20_000), "read: 0 unparsed: 1"),
    "20,000 brackets among operands": (
        lambda: _module("  %x = f32[] sine(" + "(" * 20_000 + ")" * 20_000 + ")"),
        "read: ",
    ),
    "20,000 braces in a configuration": (
        lambda: _module("  %x = f32[] sine(%x), backend_config=" + '{"a":' * 20_000 + "}" * 20_000),
        "read: ",
    ),
    "parameter(99999999999)": (lambda: _module("  ROOT %x = f32[2] parameter(99999999999)"), "read: 0 "),
    "parameter(-1)": (lambda: _module("  ROOT %x = f32[2] parameter(-1)"), "read: 0 unparsed: 1"),
    "index=-1": (
        lambda: _module("  %t = (f32[2]) tuple()", "  %x = f32[2] get-tuple-element(%t), index=-1"),
        "read: 0 unparsed: 1",
    ),
    "index=10^17": (
        lambda: _module(
            "  %t = (f32[2]) parameter(0)",
            f"  %x = f32[2] get-tuple-element(%t), index={10**17}",
            "  ROOT %y = f32[2] sine(%x)",
        ),
        "read: 1 ",
    ),
    "f32[999999999999999999999]": (
        lambda: _module("  ROOT %x = f32[999999999999999999999] parameter(0)"),
        "read: 0 unparsed: 1",
    ),
    "f32[-4]": (lambda: _module("  ROOT %x = f32[-4] parameter(0)"), "read: 0 unparsed: 1"),
    "a shape of 100,000 dimensions": (
        lambda: _module(f"  %x = f32[{'2,' * 100_000}2] parameter(0)"),
        "read: 0 unparsed: 1",
    ),
    "a product of 10^17 x 10^17": (
        lambda: _module(
            "  %a = f32[100000000000000000,1] parameter(0)",
            "  %b = f32[1,100000000000000000] parameter(1)",
            "  %c = f32[1000000000,1000000000] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        ),
        "read: ",
    ),
    "a window of 10^17": (
        lambda: _module(
            "  %x = f32[1,99,1] parameter(0)",
            "  %k = f32[99,1,1] parameter(1)",
            "  %c = f32[1,99,1] convolution(%x, %k), window={size=100000000000000000 pad=9999999_9999999}, "
            "dim_labels=b0f_0io->b0f",
        ),
        "read: ",
    ),
    "dim_labels of nonsense": (
        lambda: _module(
            "  %x = f32[1,9,1] parameter(0)",
            "  %k = f32[3,1,1] parameter(1)",
            "  %c = f32[1,9,1] convolution(%x, %k), window={size=3}, dim_labels=zzzzz_0->->____f",
        ),
        "read: ",
    ),
    "one name 100,000 times": (lambda: _module(*["  %x = f32[] constant(1)"] * 100_000), "read: 0 unparsed: 99999"),
    "one computation 10,000 times": (
        lambda: (
            "%c () -> f32[] {\n  ROOT %x = f32[] constant(1)\n}\n" * 10_000 + _module("  ROOT %x = f32[] constant(1)")
        ),
        "read: 0 unparsed: ",
    ),
    "two entries": (lambda: _module("  ROOT %x = f32[] sine(%y)") * 2, "read: "),
    "an operand that is not there": (
        lambda: _module("  ROOT %x = f32[] sine(%y)"),
        "read: 1 unparsed: 0 unresolved: 1",
    ),
    "an operand that is itself": (lambda: _module("  ROOT %x = f32[] sine(%x)"), "read: 1 "),
    "operands in a circle": (
        lambda: _module("  %x = f32[] bitcast(%y)", "  %y = f32[] bitcast(%x)", "  ROOT %z = f32[] sine(%x)"),
        "read: 1 ",
    ),
    "a computation that is not there": (
        lambda: _module("  ROOT %x = f32[] fusion(), kind=kLoop, calls=%c"),
        "read: 1 ",
    ),
    "an entry that calls itself": (lambda: _module("  ROOT %x = f32[] call(), to_apply=%main"), "refused"),
    "a fusion that contains itself": (
        lambda: (
            "%c () -> f32[] {\n  ROOT %a = f32[] fusion(), kind=kLoop, calls=%c\n}\n"
            + _module("  ROOT %x = f32[] fusion(), kind=kLoop, calls=%c")
        ),
        "refused",
    ),
    "calls that double 200 times": (lambda: _doubling(200), "refused"),
    "fusions that double 200 times": (lambda: _nested_fusions(200), "re"),
    "calls 30,000 deep": (lambda: _chain(30_000), "read: 1 "),
    "loops in loops": (
        lambda: _doubling(60).replace("call(", "while(").replace("to_apply=%c", "condition=%c60, body=%c"),
        "re",
    ),
    "a trip count of 10^17": (
        lambda: (
            "%c (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n  ROOT %s = f32[] sine(%p)\n}\n"
            + _module(
                "  %x = f32[] parameter(0)",
                "  ROOT %y = f32[] while(%x), condition=%c, body=%c, "
                f'backend_config={{"known_trip_count":{{"n":"{10**17}"}}}}',
            )
        ),
        "read: 1 ",
    ),
    "300,000 operands": (
        lambda: _module("  %p = f32[] parameter(0)", f"  ROOT %x = f32[] sine({'%p, ' * 300_000})"),
        "read: 1 ",
    ),
    "a tuple of 200,000": (
        lambda: _module(f"  %p = ({'f32[], ' * 200_000}f32[]) parameter(0)", "  ROOT %x = f32[] sine(%p#7)"),
        "read: 1 ",
    ),
    "a million open quotes": (
        lambda: _module("  %x = f32[] sine(%y), metadata={op_name=" + '"\\' * 1_000_000),
        "read: 0 unparsed: 1",
    ),
    "an op_name of a million scopes": (
        lambda: _module(
            "  %y = f32[] parameter(0)",
            f'  %x = f32[] sine(%y), metadata={{op_name="{"jvp(" * 500_000 + "a/" * 500_000}"}}',
        ),
        "read: 1 ",
    ),
    "stack frames in a circle": (
        lambda: (
            "StackFrames\n1 {file_location_id=1 parent_frame_id=2}\n2 {file_location_id=1 parent_frame_id=1}\n\n"
            + _module("  %y = f32[] parameter(0)", "  %x = f32[] sine(%y), metadata={stack_frame_id=1}")
        ),
        "read: 1 ",
    ),
    "control characters": (lambda: _module("  %x\x1b[31m = f32[] parameter(0)", "  %y = f32[] sine(%x\x1b[31m)"), "re"),
    "3 million lines": (lambda: _module(*["  %x = f32[] constant(1)"] * 3_000_000), "refused"),
    "200,000 open brackets": (lambda: _module(*["  %x = f32[] sine("] * 200_000), "read: 0 unparsed: "),
    "200,000 headers of computations": (lambda: "x (y: f32[]) -> (\n" * 200_000, "refused"),
    "200,000 open comments": (lambda: _module(*["  /*"] * 200_000), "read: 0 unparsed: "),
    "200,000 nested computations": (lambda: _module(*["  %x = call(), to_apply={"] * 200_000), "re"),
    "300,000 lines of garbage": (lambda: _module(*["  %%%%"] * 300_000), "read: 0 unparsed: 300000"),
    "cut off": (lambda: _module("  %x = f32[] constant(1)", "  %y = f32[] sine(%x)")[:-2], "read: 1 unparsed: 1"),
}


# Hundreds of megabytes, or hundreds of thousands of lines, which take seconds. `make test` reads one of each kind.
SLOW = {
    "one name 100,000 times", "calls 30,000 deep", "300,000 operands", "a tuple of 200,000", "200,000 open brackets",
    "200,000 headers of computations", "200,000 nested computations", "300,000 lines of garbage",
    "asynchronous operations without end", "a bomb that begins as a proto", "a bomb that begins as text",
}


def of_slow_ones(name: str) -> str:
    return "slow" if name in SLOW else name


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of_each(TEXTS, of_slow_ones))
def test_hostile_text(name: str, tmp_path: Path) -> None:
    make, outcome = TEXTS[name]
    path = tmp_path / "hostile.txt"
    path.write_text(make())
    line = _outcome(path)
    assert line.startswith(outcome), line
    if line.startswith("refused") and "this is no module XLA wrote" not in line:
        assert str(path) in line


def _golden(kind: str) -> bytes:
    return gzip.decompress((GOLDEN / f"h200-swiglu_mlp-fwd.hlo.{kind}.gz").read_bytes())


def _bomb(beginning: bytes, piece: bytes) -> bytes:
    """4 GiB in 4 MiB."""
    return gzip.compress(beginning) + gzip.compress(piece * (64 << 20)) * 64


def _nested_proto() -> bytes:
    """A shape that holds a shape, 10,000 deep."""
    data = b"\x10\x0d"
    for _ in range(10_000):
        data = b"\x22" + _length(len(data)) + data
    instruction = b"\x0a\x01x\x12\x09parameter\x1a" + _length(len(data)) + data
    computation = b"\x0a\x04main\x28\x07\x12" + _length(len(instruction)) + instruction
    return b"\x0a\x01m\x30\x07\x1a" + _length(len(computation)) + computation


def _asynchronous_proto(count: int) -> bytes:
    """Return `count` async-starts of one computation of `count` instructions, and `count` async-updates in a row."""
    module = proto_reader.message_type("xla.HloModuleProto")(
        name="m", entry_computation_name="main", entry_computation_id=1
    )
    main, wrapped = module.computations.add(name="main", id=1), module.computations.add(name="wrapped", id=2)
    for number in range(1, count + 1):
        wrapped.instructions.add(name=f"w{number}", opcode="constant", id=number).shape.element_type = 11
        start = main.instructions.add(name=f"s{number}", opcode="async-start", id=number, called_computation_ids=[2])
        start.shape.element_type = 11
    for number in range(2 * count, count, -1):
        update = main.instructions.add(name=f"u{number}", opcode="async-update", id=number, operand_ids=[number - 1])
        update.shape.element_type = 11
    return module.SerializeToString()


def _length(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


BYTES: dict[str, tuple[Callable[[], bytes], str]] = {
    "zeros": (lambda: bytes(1 << 20), "neither HLO text nor an HLO proto"),
    "noise": (lambda: random.Random(0).randbytes(1 << 20), "neither HLO text nor an HLO proto"),
    "noise after a proto's first byte": (
        lambda: b"\n" + random.Random(0).randbytes(1 << 20),
        "neither an HloModuleProto",
    ),
    "half a proto": (lambda: (data := _golden("pb"))[: len(data) // 2], "neither an HloModuleProto"),
    "a proto nested 10,000 deep": (_nested_proto, "neither an HloModuleProto"),
    "asynchronous operations without end": (lambda: _asynchronous_proto(15_000), "this is no module XLA wrote"),
    "half a gzip file": (lambda: (data := gzip.compress(_golden("txt")))[: len(data) // 2], "damaged gzip"),
    "gzip with a wrong checksum": (lambda: gzip.compress(_golden("txt"))[:-8] + bytes(8), "damaged gzip"),
    "a gzip header alone": (lambda: b"\x1f\x8b", "damaged gzip"),
    "a bomb of zeros": (lambda: _bomb(b"", b"\0"), "neither HLO text nor an HLO proto"),
    "a bomb that begins as a proto": (lambda: _bomb(b"\n\x05jit_f\x12", b"\0"), "more than 512 MiB"),
    "a bomb that begins as text": (lambda: _bomb(b"HloModule m\n", b" "), "more than 1536 MiB"),
    "text with a beginning of text and then noise": (
        lambda: _golden("txt")[:9000] + random.Random(0).randbytes(1 << 20),
        "no ENTRY",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of_each(BYTES, of_slow_ones))
def test_hostile_bytes(name: str, tmp_path: Path) -> None:
    make, said = BYTES[name]
    path = tmp_path / "hostile.pb"
    path.write_bytes(make())
    line = _outcome(path)
    assert said in line and ("refused" not in line or str(path) in line or "this is no module XLA wrote" in line)


@pytest.mark.full
@pytest.mark.slow
def test_a_literal_of_a_gigabyte(tmp_path: Path) -> None:
    path = tmp_path / "literal.txt"
    piece = b"1, " * (1 << 20)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"HloModule m\nENTRY %main () -> f32[] {\n  %c = f32[350000000]{0} constant({")
        for _ in range(340):
            file.write(piece)
        file.write(b'1}), metadata={op_name="jit(f)/c"}\n  ROOT %y = f32[350000000]{0} negate(%c)\n}\n')
    assert _outcome(path) == "read: 1 unparsed: 0 unresolved: 0"


# In this process: intact files of each form, and small damage.


@pytest.mark.parametrize("version", ["jax-0.10.2", "jax-0.11.2"])
def test_a_compilers_text_starts_no_process(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(text: str) -> str:
        raise AssertionError(text[:100])

    monkeypatch.setattr(file_reader, "printed", printed)
    for path in sorted((GOLDEN.parent / version).glob("*.txt.gz")):
        assert not read(path).unparsed


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "module"
    path.write_bytes(_golden("txt").decode().encode(encoding))
    assert read(path) == text_reader.parse(_golden("txt").decode())


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_protos_are_recognized(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "module.txt"  # the name does not matter
    path.write_bytes(pack(_golden("pb")))
    assert read(path) == proto_reader.parse_proto(_golden("pb"))


def test_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "module"
    path.write_bytes(_golden("txt").replace(b"\n", b"\r\n"))
    assert read(path) == text_reader.parse(_golden("txt").decode())


def test_long_lines_other_than_literals_are_unparsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "MAX_LINE", 1000)
    path = tmp_path / "module"
    path.write_text(
        _module("  %x = f32[] parameter(0)", f"  ROOT %y = f32[] sine(%x), backend_config={{{'a' * 5000}}}")
    )
    ((number, text),) = read(path).unparsed
    assert (number, len(text) < 300, text.endswith("characters)")) == (4, True, True)


def test_more_text_than_fits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "MAX_KEPT", 1000)
    path = tmp_path / "module"
    path.write_text(_module(*[f"  %x{n} = f32[] constant(1)" for n in range(100)]))
    with pytest.raises(UnreadableHlo, match="besides long literals"):
        read(path)


@pytest.mark.parametrize("path", ["/dev/zero", "."])
def test_only_regular_files(path: str) -> None:
    with pytest.raises(UnreadableHlo, match=f"^{path}: an HLO module is a regular file"):
        read(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")


TEXT, PROTO = _golden("txt"), _golden("pb")
_CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["cut", "drop", "repeat", "overwrite", "insert"]),
        st.floats(0, 1),
        st.binary(max_size=24)
        | st.sampled_from([b"(" * 500, b"9" * 40, b"%", b'"', b"{", b"}\n", b"-1", b"\x80" * 12]),
    ),
    min_size=1,
    max_size=6,
)


def _changed(data: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, place, piece in changes:
        at = int(place * len(data))
        match kind:
            case "cut":
                data = data[:at]
            case "drop":
                data = data[:at] + data[at + len(piece) :]
            case "repeat":
                data = data[:at] + data[max(at - 200, 0) :]
            case "overwrite":
                data = data[:at] + piece + data[at + len(piece) :]
            case "insert":
                data = data[:at] + piece + data[at:]
    return data


@given(st.sampled_from([TEXT, PROTO, gzip.compress(TEXT)]), _CHANGES)
def test_damage_raises_only_errors_of_one_line(data: bytes, changes: list[tuple[str, float, bytes]]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(_changed(data, changes))
        file.flush()
        try:
            module = read(file.name)
        except UnreadableHlo as problem:
            assert file.name in str(problem) and "\n" not in str(problem)
            return
    try:
        gpu_program.program(module)
    except ValueError as problem:  # as of a computation that calls itself
        assert "no module XLA wrote" in str(problem) and "\n" not in str(problem)
