"""The reader of HLO text against XLA's own parser: random modules in all forms of the grammar, and single forms.

Text in the short form is read as XLA prints it.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from full_marks import examples
from hlo_grammar import Grammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xla_parser import XlaParser, disagreements

from xlafuse.hlo import file_reader, text_reader, xla_printer
from xlafuse.hlo.file_reader import UnreadableHlo, read
from xlafuse.hlo.text_reader import Module

pytest.importorskip("jaxlib", reason="jaxlib has XLA's parser")

DATA = Path(__file__).parents[2] / "data/hlo/jax-0.11.2"


@pytest.fixture(scope="module")
def xla() -> Iterator[XlaParser]:
    with XlaParser() as parser:
        yield parser


def _read(text: str) -> Module:
    module = text_reader.parse(text)
    assert not module.unparsed
    return module


def _same(xla: XlaParser, text: str) -> Module:
    """Return what both parsers read."""
    theirs = xla.parse(text)
    assert theirs is not None, "XLA refuses this text"
    read = _read(text)
    assert not disagreements(read, theirs)
    return read


@settings(max_examples=examples(100, 800), derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_random_modules(xla: XlaParser, seed: int) -> None:
    text = Grammar(Random(seed)).text()
    _same(xla, text)
    printed, theirs = xla.print(text), xla.parse(text)
    assert printed is not None and theirs is not None
    assert _read(printed).computations == theirs.computations


_ADD = "HloModule m\nadd {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n"
_PARAMETERS = "  x = f32[4,8] parameter(0)\n  i = s32[6,1] parameter(1)\n  z = f32[] constant(0)\n"
_MAIN = "main {\n" + _PARAMETERS

# Form -> text. XLA's parser accepts each.
FORMS = {
    "a footer": "HloModule m\nmain {\n  x = f32[2] parameter(0)\n} // main\n",
    "indented text": (
        "    HloModule m\n\n    ENTRY %main (x: f32[2]) -> f32[2] {\n      ROOT %x = f32[2] parameter(0)\n    }"
    ),
    "no entry": "HloModule m\nfirst {\n  x = f32[2] parameter(0)\n}\nlast {\n  y = f32[2] parameter(0)\n}\n",
    "no header": "first {\n  x = f32[2] parameter(0)\n}\nENTRY second {\n  y = f32[2] parameter(0)\n}\n",
    "no root": _ADD.replace("ROOT ", ""),
    "attributes on the next line": (
        f"{_ADD}{_MAIN}  r = f32[4] reduce(x, z),\n    dimensions={{1}},\n to_apply=\n  add\n}}"
    ),
    "operands on several lines": f"HloModule m\n{_MAIN}  y = f32[4,8] add(\n    x,\n    x\n  )\n}}",
    "comments": (
        "// RUN: a {\nHloModule m // b\n/* c = f32[2] d(\n } */ main { /**/\n"
        "  x /* f */ = f32[2 /*g*/] parameter(/*h*/ 0) // i\n}"
    ),
    "comment marks in strings": (
        'HloModule m\nmain {\n  x = f32[2] parameter(0), metadata={op_name="a//b/*c" source_file="*/"}\n}'
    ),
    "spaces in shapes": "HloModule m\nmain {\n  x = f32 [ 8, 64 ] { 1 , 0 : T(8, 128) } parameter(0)\n}",
    "dynamic dimensions": "HloModule m\nmain {\n  x = (f32[?,8], f32[<=8, 2]) parameter(0)\n}",
    "one line": (
        "HloModule m main { x = f32[2] parameter(0) y = f32[2] negate(x), metadata={op_name='a'} "
        "ROOT z = f32[2] abs(y) }"
    ),
    "a percent sign directly before =": "HloModule m\nmain {\n  %x= f32[2] parameter(0)\n  %y=f32[2] negate(x)\n}",
    "literals on several lines": "HloModule m\nmain {\n  c = f32[2,2] constant({\n    { 1, 2 },\n    { 3, 4 }\n  })\n}",
    "escapes": r"""HloModule m
main {
  x = f32[2] parameter(0), metadata={op_name="tab\t quote\" back\\ \303\251 \x41"}, backend_config="{\"n\": \"}\"}"
}""",
    "a string on two lines": (
        'HloModule m\nmain {\n  x = f32[2] parameter(0), metadata={op_name="a\n b"}\n  y = f32[2] negate(x)\n}'
    ),
    "tables of sources": (
        'HloModule m\n\nFileNames 1 "a.py"\nFunctionNames\n1 "f"\n\nFileLocations\n'
        "1 {file_name_id=1, function_name_id=1 line=9\n end_line=9 column=4 end_column=9}\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n"
        "main {\n  x = f32[2] parameter(0), metadata={stack_frame_id=1}\n}"
    ),
    "replica groups": (
        f"{_ADD}{_MAIN}  y = f32[4,8] all-reduce(x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=add\n"
        "  w = f32[4,8] all-reduce(x), replica_groups=[2,2] <= [2,2] T(1,0), to_apply=add\n}"
    ),
    "sharding": (
        "HloModule m\nmain {\n  x = f32[4,8] parameter(0), sharding={devices=[2,1]<=[2]}\n"
        "  y = f32[4,8] negate(x)\n}"
    ),
    "an asynchronous operation": (
        f"HloModule m\n{_MAIN}  s = ((f32[4,8]), f32[4,8], u32[]) negate-start(x)\n"
        "  ROOT d = f32[4,8] negate-done(s)\n}"
    ),
    "carriage returns": "HloModule m\r\nmain {\r\n  x = f32[2] parameter(0) // a\r\n  y = f32[2] negate(x)\r\n}\r\n",
    "execution threads": f'HloModule m\nadd {{\n  a = f32[] parameter(0)\n}}, execution_thread="host"\n{_MAIN}}}',
    "a literal in an attribute": (
        f'HloModule m\n{_MAIN}  c = f32[2] custom-call(x), custom_call_target="f", literal=f32[] 0.1\n'
        '  d = f32[2] custom-call(c), literal=(s32[2]{0} {4, 128}, pred[1]{0} {1}), custom_call_target="f"\n'
        '  e = f32[2] custom-call(d), custom_call_target="f", literal=pred[] true\n  g = f32[2] negate(e)\n}'
    ),
    "a composite call": (
        f"{_ADD}{_MAIN}  c = f32[] call(z, z), to_apply=add, is_composite=true, "
        "frontend_attributes={composite.attributes={n = 1 : i32, t = dense<1> : tensor<i32>},composite.name=\"f\"}\n}"
    ),
    "a configuration that is no JSON": (
        f'HloModule m\n{_MAIN}  c = f32[2] custom-call(x), custom_call_target="f", backend_config={{key: "v}}"}}\n}}'
    ),
    "a layout without an order": (
        "HloModule m\nmain {\n  x = (u32[]{:S(2)}, f32[2]{0:T(2,128)(2,1)S(1)}) parameter(0)\n}"
    ),
    "a domain": (
        f"HloModule m\n{_MAIN}  d = f32[4,8] domain(x), "
        'domain={kind="sharding", entry={maximal device=0}, exit={maximal device=1}}\n}'
    ),
    "old ends of lines": "HloModule m\r// a {\rENTRY main {\r// b\r  x = f32[2] parameter(0) // c\r}",
    "a test's checks in comments": (
        '// RUN: opt %s | FileCheck %s\n// CHECK: %{{.*}} = "a\n// CHECK-SAME: it\'s {{[0-9]+}} ({\nHloModule m\n\n'
        "// CHECK-NOT: /*\nmain {\n  // CHECK: }\n  x = f32[2] parameter(0)\n}\n"
    ),
    "brackets in a configuration": (
        "HloModule m\nmain {\n  x = f32[2] parameter(0), backend_config={a: (, b: ]] ' }, metadata={op_name=\"n\"}\n"
        "  y = f32[2] negate(x)\n}"
    ),
    "comment marks in a configuration": (
        'HloModule m /* c */\nmain {\n  x = f32[2] parameter(0), backend_config={"a": "http://b/*", c: // d\n 1}\n'
        "  y = f32[2] negate(x) // e\n}"
    ),
    "a configuration on several lines": (
        f"HloModule m\n{_MAIN}  f = f32[4,8] custom-call(x),\n    custom_call_target=\"f\", backend_config={{\n"
        "      fusion_backend_config:{\n        kind:\"__triton\",\n        output_tiles:[{sizes:[64,32]}],\n"
        "        num_warps:8\n      }\n    }\n  y = f32[4,8] negate(f)\n}"
    ),
    "attributes of a frontend on several lines": (
        "HloModule m\nmain {\n  a = token[] after-all()\n  r = (u32[2], u32[], token[]) recv(a), channel_id=1,\n"
        "    frontend_attributes={\n      _pairs=\"{{1,0}}\",\n      _pipeline=\"0\"\n    }\n\n\n"
        "  d = (u32[2], token[]) recv-done(r), channel_id=1\n}"
    ),
    "a module in a string": """HloModule m, num_partitions=2, origin_recovery_table={
  {"c"} : {"c__ovp0"},
  "
    HloModule recovery_module

    ENTRY %recovery (p: s32[2]) -> s32[2] {
      %p = s32[2]{0} parameter(0), metadata={op_name=\\"a/*b\\"}
      ROOT %n = s32[2]{0} negate(%p)
    }


  "
}

ENTRY %main () -> s32[2] {
  ROOT %c = s32[2]{0} constant({1, 2}), origin={{"c__ovp0"}}
}
""",
    "origins": (
        "HloModule m\nmain {\n  x = f32[] parameter(0), origin={[synthetic_call]}\n"
        '  y = f32[3] parameter(1), origin={{"y"}}\n  t = (f32[], f32[3]) tuple(x, y), origin={({}, {"y" {0}})}\n}'
    ),
    "accuracies and statistics": (
        "HloModule m\nmain {\n  x = f32[] parameter(0), statistics={visualizing_index=1,stat-1=33,stat-2=44}\n"
        "  y = f32[] exponential(x), result_accuracy={tolerance={rtol=0.5, atol=1.0, ulps=2}}\n}"
    ),
    "literals that are no numbers": (
        "HloModule m\nmain {\n  a = bf16[2] constant({-nan(0x7f), -nan(0x3f)})\n"
        "  b = c64[2] constant({(1, 2), (-inf, nan)})\n  d = f32[2,0,3] constant({ { /*i0=0*/ }, { /*i0=1*/ } })\n"
        "  e = f32[67,89] constant({...})\n}"
    ),
    "all parts of a layout": (
        "HloModule m\nmain {\n  a = f32[12,45]{1,0:T(2, * , 128)} parameter(0)\n"
        "  b = s4[12,45]{1,0:T(8,128)L(1024)E(4)S(3)SC(0:10)(1:4,5)M(1024)} parameter(1)\n"
        "  c = bf16[12,45,7]{2,1,0:T(2,*,128)(2,1)} parameter(2)\n  d = u32[]{:T(128)} replica-id()\n}"
    ),
    "a buffer": "HloModule m\nmain {\n  x = b(f32[8,16]{1,0}) parameter(0)\n  y = f32[] parameter(1)\n}",
    "names of axes": (
        f"{_ADD}{_MAIN}  y = f32[4,8] all-reduce(x), replica_groups=mesh['a'=2,'b'=2] {{'b'}}, to_apply=add\n"
        "  w = f32[4,8] negate(y), sharding={mesh['a'=2,'b'=4], [{'a'}, {'b':(2)2}]}, metadata={op_name=\"w\"}\n}"
    ),
    "a device for each tile": (
        f"HloModule m\n{_MAIN}  y = f32[4,8] negate(x), sharding={{devices=[2,2]0,1,2,3 last_tile_dim_replicate}}\n"
        "  w = f32[4,8] negate(y), sharding={devices=[2,1,2]<=[2,2]T(1,0) last_tile_dims={manual} shard_like 1}\n}"
    ),
    "the function of a custom call": (
        f'{_ADD}{_MAIN}  c = f32[] custom-call(z, z), to_apply=add, custom_call_target="f"\n}}'
    ),
    "an asynchronous computation": (
        "HloModule m\nwrapped {\n  q = f32[4,8] parameter(0)\n  n = f32[4,8] negate(q)\n"
        "  ROOT e = f32[4,8] exponential(n)\n}\n" + _MAIN +
        "  s = ((f32[4,8]), f32[4,8], u32[]) async-start(x), calls=wrapped\n"
        "  u = ((f32[4,8]), f32[4,8], u32[]) async-update(s), calls=wrapped\n"
        "  ROOT d = f32[4,8] async-done(u), calls=wrapped\n}"
    ),
    "aliases of a result": (
        f"HloModule m, input_output_alias={{ {{}}: (0, {{}}, must-alias) }}, buffer_donor={{ (1, {{}}) }}\n{_MAIN}"
        '  ROOT c = f32[4,8] custom-call(x), custom_call_target="f", output_to_operand_aliasing={{}: (0, {})}\n}'
    ),
    "a tuple as a literal": "HloModule m\nmain {\n  c = (f32[2], (s32[], pred[])) constant(({1, 2}, (3, true)))\n}",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form(xla: XlaParser, form: str) -> None:
    _same(xla, FORMS[form])


# The short form, which the reader leaves to XLA's printer.
SHORT_FORMS = {
    "colons after names": "HloModule m:\nENTRY main: {\n  x = f32[2] parameter(0)\n}\n",
    "no shape": f"HloModule m\n{_MAIN}  y = add(x, x)\n  t = tuple(y, z)\n  ROOT g = get-tuple-element(t), index=1\n}}",
    "an operation as an operand": f"HloModule m\n{_MAIN}  y = add(negate(x), f32[4,8] add(x, negate(x)))\n}}",
    "a computation in an attribute": (
        f"HloModule m\n{_MAIN}  f = f32[4,8] fusion(x), kind=kLoop, calls={{\n"
        "    q = f32[4,8] parameter(0)\n    ROOT n = f32[4,8] negate(q)\n  }\n}"
    ),
    "computations in a list": (
        f"HloModule m\n{_MAIN}  k = s32[] constant(1)\n  c = f32[4,8] conditional(k, x, x), branch_computations={{\n"
        "    { p = f32[4,8] parameter(0) }, { q = f32[4,8] parameter(0) ROOT n = f32[4,8] negate(q) } }\n}"
    ),
    "one instruction": "f = f32[4] add(f32[4] %a, negate(f32[4] b)), metadata={op_name=\"add\"}",
    "one instruction without names": "(f32[4], s32[]) tuple(f32[4], s32[])\n",
    "one fusion": "f32[4] fusion(f32[4] a), kind=kLoop, calls={\n  p = f32[4] parameter(0)\n  ROOT n = negate(p)\n}",
    "colons after names of instructions": "HloModule m\nmain {\n  x: = f32[2] parameter(0)\n  y:= negate(x:)\n}",
    "a line of a string that begins like an instruction": (
        'HloModule m\nmain {\n  x = f32[2] parameter(0), metadata={op_name="a\n  y = f32[2] negate(x)"}\n}'
    ),
    "shapes of many operations": (
        f"{_ADD}{_MAIN}  l = f32[2,5,7,3] parameter(2)\n  k = f32[3,3,3,16] parameter(3)\n"
        "  c = convolution(l, k), window={size=3x3 stride=2x1 pad=1_1x0_0 lhs_dilate=1x2}, dim_labels=b01f_01io->bf01\n"
        "  g = gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, "
        "slice_sizes={1,8}\n  d = dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
        "  r = reduce(d, z), dimensions={0}, to_apply=add\n  t = tuple(c, g, r)\n}"
    ),
}


@pytest.mark.parametrize("form", SHORT_FORMS)
def test_a_short_form(xla: XlaParser, form: str, tmp_path: Path) -> None:
    assert text_reader.parse(SHORT_FORMS[form]).unparsed
    file = tmp_path / "short.txt"
    file.write_text(SHORT_FORMS[form])
    module, theirs = read(file), xla.parse(SHORT_FORMS[form])
    assert theirs is not None and not module.unparsed
    assert (module.entry, module.computations) == (theirs.entry, theirs.computations)


def test_a_module_that_xla_refuses_is_read_in_part(tmp_path: Path) -> None:
    file = tmp_path / "module.txt"
    file.write_text("HloModule m\nENTRY main {\n  x = f32[2] parameter(0)\n  y = f32[2] from-the-future[(x)\n}\n")
    assert [number for number, _ in read(file).unparsed] == [4]


_REFUSED = "HloModule m\nENTRY main {\n  x = f32[2] parameter(0)\n  y = unknown(x)\n}\n"


def test_a_short_form_that_xla_refuses(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(_REFUSED)
    with pytest.raises(UnreadableHlo, match=r"short form .* refuses it at 4:7: ") as raised:
        read(tmp_path / "short.txt")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("form", SHORT_FORMS)
def test_a_short_form_without_jaxlib(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (xla_printer, file_reader):
        monkeypatch.setattr(module, "has_xla", lambda: False)
    (tmp_path / "short.txt").write_text(SHORT_FORMS[form])
    with pytest.raises(UnreadableHlo, match="jaxlib|no ENTRY computation"):
        read(tmp_path / "short.txt")


@pytest.mark.parametrize("name", ["h200-softmax-fwd", "h200x8-collectives", "tpu-swiglu_mlp-fwd"])
def test_a_proto_has_the_statements_of_its_text(name: str) -> None:
    proto, text = (read(DATA / f"{name}.hlo.{ending}.gz", statements=True) for ending in ("pb", "txt"))
    assert any(each.statements for each in proto.computations.values())
    found, expected = ({name: each.statements for name, each in m.computations.items()} for m in (proto, text))
    assert found == expected


def test_statements_of_a_proto_that_xla_cannot_print(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(xla_printer.NotPrinted, match="XLA's printer fails on it"):
        xla_printer.printed_proto(b"\n\x01m")
    monkeypatch.setattr(xla_printer, "has_xla", lambda: False)
    with pytest.raises(UnreadableHlo, match=r"\.pb\.gz: .*jaxlib, which has XLA's printer, is not installed") as raised:
        read(DATA / "h200-softmax-fwd.hlo.pb.gz", statements=True)
    assert "\n" not in str(raised.value)


def test_a_module_of_this_name_in_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jaxlib.py").write_text("open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    assert "negate" in xla_printer.printed("f32[4] negate(f32[4] a)")
    assert not (tmp_path / "ran").exists()


@pytest.mark.full
def test_nesting_that_crashes_xla_and_text_that_is_too_long() -> None:
    deep = "f32[] " + "negate(" * 200_000 + "f32[] a" + ")" * 200_000
    with pytest.raises(xla_printer.NotPrinted, match="fails|takes more than"):  # more, on a busy machine
        xla_printer.printed(deep)
    with pytest.raises(xla_printer.NotPrinted, match="too long"):
        xla_printer.printed(" " * (xla_printer.MAX_CHARACTERS + 1))
