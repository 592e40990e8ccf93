"""The reader of HLO text against XLA's own parser: random modules in all forms of the grammar, and single forms."""

from collections.abc import Iterator
from random import Random

import pytest
from hlo_grammar import Grammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xla_parser import Content, XlaParser, content_of, content_of_print, disagreements

from xlafuse.hlo import text_reader

pytest.importorskip("jaxlib", reason="jaxlib has XLA's parser")


@pytest.fixture(scope="module")
def xla() -> Iterator[XlaParser]:
    with XlaParser() as parser:
        yield parser


def _read(text: str) -> Content:
    module = text_reader.parse(text)
    assert not module.unparsed
    return content_of(module)


def _same(xla: XlaParser, text: str) -> Content:
    """Return what both parsers read."""
    printed = xla.print_again(text)
    assert printed is not None, "XLA refuses this text"
    read = _read(text)
    assert not disagreements(read, content_of_print(printed))
    return read


@settings(max_examples=1500, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_random_modules(xla: XlaParser, seed: int) -> None:
    _same(xla, Grammar(Random(seed)).text())


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
    "colons after names": "HloModule m:\nENTRY main: {\n  x = f32[2] parameter(0)\n}\n",
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
    "one line": (
        "HloModule m main { x = f32[2] parameter(0) y = f32[2] negate(x), metadata={op_name='a'} ROOT z = abs(y) }"
    ),
    "a percent sign directly before =": "HloModule m\nmain {\n  %x= f32[2] parameter(0)\n  %y=f32[2] negate(x)\n}",
    "literals on several lines": "HloModule m\nmain {\n  c = f32[2,2] constant({\n    { 1, 2 },\n    { 3, 4 }\n  })\n}",
    "escapes": r"""HloModule m
main {
  x = f32[2] parameter(0), metadata={op_name="tab\t quote\" back\\ \303\251 \x41"}, backend_config="{\"n\": \"}\"}"
}""",
    "a string on two lines": (
        'HloModule m\nmain {\n  x = f32[2] parameter(0), metadata={op_name="a\n b"}\n  y = negate(x)\n}'
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
    "sharding": "HloModule m\nmain {\n  x = f32[4,8] parameter(0), sharding={devices=[2,1]<=[2]}\n  y = negate(x)\n}",
    "an asynchronous operation": (
        f"HloModule m\n{_MAIN}  s = ((f32[4,8]), f32[4,8], u32[]) negate-start(x)\n"
        "  ROOT d = f32[4,8] negate-done(s)\n}"
    ),
    "carriage returns": "HloModule m\r\nmain {\r\n  x = f32[2] parameter(0) // a\r\n  y = f32[2] negate(x)\r\n}\r\n",
    "execution threads": f'HloModule m\nadd {{\n  a = f32[] parameter(0)\n}}, execution_thread="host"\n{_MAIN}}}',
    "a literal in an attribute": (
        f'HloModule m\n{_MAIN}  c = f32[2] custom-call(x), custom_call_target="f", literal=f32[] 0.1\n'
        '  d = f32[2] custom-call(c), literal=(s32[2]{0} {4, 128}, pred[1]{0} {1}), custom_call_target="f"\n'
        '  e = f32[2] custom-call(d), custom_call_target="f", literal=pred[] true\n  g = negate(e)\n}'
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
    "one instruction": "f = f32[4] add(f32[4] %a, negate(f32[4] b)), metadata={op_name=\"add\"}",
    "one instruction without names": "(f32[4], s32[]) tuple(f32[4], s32[])\n",
    "one fusion": "f32[4] fusion(f32[4] a), kind=kLoop, calls={\n  p = f32[4] parameter(0)\n  ROOT n = negate(p)\n}",
    "a tuple as a literal": "HloModule m\nmain {\n  c = (f32[2], (s32[], pred[])) constant(({1, 2}, (3, true)))\n}",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form(xla: XlaParser, form: str) -> None:
    _same(xla, FORMS[form])


# Instructions without a shape, in the computation _MAIN. XLA renames an instruction whose name another computation has.
INFERRED = [
    "  y = is-finite(x)",
    "  y = clamp(z, x, z)",
    "  y = complex(x, x)\n  r = real(y)\n  m = imag(y)\n  n = abs(y)",
    "  y = add(x, x)\n  d = compare(y, x), direction=LT\n  e = select(d, x, y)",
    "  y = after-all()\n  q = add-dependency(x, y)",
    "  y = partition-id()\n  q = replica-id()",
    "  y = get-dimension-size(x), dimensions={1}",
    "  y = concatenate(x, x, x), dimensions={1}",
    "  y = transpose(x), dimensions={1,0}",
    "  y = reverse(x), dimensions={1,0}",
    "  y = pad(x, z), padding=1_2_3x-1_0",
    "  y = dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
    "  y = dot(x, x), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_contracting_dims={1}",
    "  y = dot(x, x), lhs_contracting_dims={}, rhs_contracting_dims={}",
    "  y = reduce(x, z), dimensions={0}, to_apply=add",
    "  y = reduce(x, z), dimensions={0,1}, to_apply=add",
    "  y = map(x, x), dimensions={0,1}, to_apply=add",
    "  y = reduce-window(x, z), window={size=2x3 stride=1x2 pad=0_1x1_1 rhs_dilate=1x2}, to_apply=add",
    "  y = select-and-scatter(x, x, z), window={size=1x1}, select=less, scatter=add",
    "  y = sort(x), dimensions={1}, to_apply=less",
    "  y = sort(x, x), dimensions={1}, to_apply={\n    e = f32[] parameter(0)\n    f = f32[] parameter(1)\n"
    "    g = f32[] parameter(2)\n    h = f32[] parameter(3)\n    ROOT l = compare(e, f), direction=LT\n  }",
    "  y = gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, "
    "slice_sizes={1,8}",
    "  u = f32[6,8] parameter(2)\n  y = scatter(x, i, u), update_window_dims={1}, inserted_window_dims={0}, "
    "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add",
    "  l = f32[2,5,7,3] parameter(2)\n  k = f32[3,3,3,16] parameter(3)\n"
    "  y = convolution(l, k), window={size=3x3 stride=2x1 pad=1_1x0_0 lhs_dilate=1x2}, dim_labels=b01f_01io->bf01",
    "  y = fft(q), fft_type=FFT, fft_length={8}\n".replace("q", "complex(x, x)"),
    "  y = fft(x), fft_type=RFFT, fft_length={8}\n  w = fft(y), fft_type=IRFFT, fft_length={8}",
    "  m = f32[4,4] parameter(2)\n  c = cholesky(m), lower=true\n"
    "  y = triangular-solve(c, x), left_side=true, lower=true, transpose_a=NO_TRANSPOSE",
    "  v = f32[8] parameter(2)\n  y = batch-norm-training(x, v, v), epsilon=0.001, feature_index=1",
    "  v = f32[8] parameter(2)\n  y = batch-norm-inference(x, v, v, v, v), epsilon=0.001, feature_index=1",
    "  v = f32[8] parameter(2)\n  y = batch-norm-grad(x, v, v, v, x), epsilon=0.001, feature_index=1",
    "  y = topk(x), k=3, largest=true",
    "  t = tuple(x, z)\n  y = while(t), condition={\n    p = (f32[4,8], f32[]) parameter(0)\n"
    "    ROOT c = pred[] constant(false)\n"
    "  }, body={\n    q = (f32[4,8], f32[]) parameter(0)\n  }\n  g = get-tuple-element(y), index=0",
    "  y = call(z, z), to_apply=add",
]
_LESS = "less {\n  a1 = f32[] parameter(0)\n  b1 = f32[] parameter(1)\n  l1 = compare(a1, b1), direction=LT\n}\n"


@pytest.mark.parametrize("body", INFERRED, ids=lambda body: body.split("(")[0].strip().replace("\n", " ")[-30:])
def test_shapes_are_inferred_as_by_xla(xla: XlaParser, body: str) -> None:
    _same(xla, f"{_ADD}{_LESS}{_MAIN}{body}\n}}\n")
