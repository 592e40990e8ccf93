"""Reading HLO text: modules from an H200, small modules for one feature each, and hostile text."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xlafuse.hlo import gpu_program

if TYPE_CHECKING:
    from xlafuse.compile import compiler

MB = 1e6


def _module(body: str, *computations: str) -> gpu_program.Module:
    return gpu_program.parse(
        "\n".join(["HloModule m, is_scheduled=true", *computations, "ENTRY %main () -> f32[] {", body, "}"])
    )


def _only(body: str, *computations: str) -> gpu_program.Kernel:
    module = _module(body, *computations)
    assert not module.unparsed
    (kernel,) = gpu_program.kernels(module)
    return kernel


# The H200's own modules.


def test_softmax_on_an_h200(data: Path) -> None:
    module = gpu_program.parse((data / "softmax.hlo.txt").read_text())
    assert (module.name, module.entry, module.is_scheduled) == ("jit__lambda", "main.3", True)
    assert len(module.computations) == 4 and not module.unparsed
    (kernel,) = gpu_program.kernels(module)
    assert (kernel.name, kernel.runtime_name, kernel.kind) == (
        "triton_softmax.2",
        "triton_softmax_2",
        "reduction",
    )
    assert kernel.bytes_read == kernel.bytes_written == 8192 * 4096 * 2
    assert kernel.ops == ("reduce_max", "sub", "exp", "convert", "reduce_sum", "convert_element_type", "div")
    assert kernel.lines == ("blocks.py:24",)
    assert (kernel.launches, kernel.tunable) == (1, False)


def test_mlp_on_an_h200(data: Path) -> None:
    module = gpu_program.parse((data / "mlp_fwd.hlo.txt").read_text())
    assert not module.unparsed
    assert [(k.name, k.kind, k.runtime_name, k.tunable) for k in gpu_program.kernels(module)] == [
        ("fusion.11", "reduction", "fusion_11", False),
        ("fusion.12", "elementwise", "fusion_12", False),
        ("fusion.13", "elementwise", "fusion_13", False),
        ("custom-call.0", "gemm", None, True),
        ("custom-call.1", "gemm", None, True),
        ("loop_multiply_fusion", "elementwise", "loop_multiply_fusion", True),
        ("gemm_fusion_dot_general.5", "gemm", "gemm_fusion_dot_general_5", True),
    ]
    tokens, width, hidden = 4096 * 2, 2048, 5632
    up = gpu_program.kernels(module)[3]
    assert up.bytes_read == tokens * width + width * hidden * 2
    assert up.bytes_written == tokens * hidden  # without cuBLAS's 33,554,432 bytes of scratch
    down = gpu_program.kernels(module)[6]
    assert down.ops == ("dot_general", "add")
    assert down.bytes_read == tokens * hidden + hidden * width * 2 + tokens * width


def test_decoder_block_on_an_h200(data: Path) -> None:
    module = gpu_program.parse((data / "block_fwd.hlo.txt").read_text())
    kernels = gpu_program.kernels(module)
    assert not module.unparsed
    fusions = sum("fusion" in k.name or k.name.startswith("wrapped") for k in kernels)
    assert (fusions, len(kernels)) == (15, 20)
    assert sum(k.runtime_name is None for k in kernels) == 5  # cuBLASLt
    scores = next(k for k in kernels if "reduce_max" in k.ops)
    assert scores.bytes_read == scores.bytes_written == 2 * 32 * 2048 * 2048 * 2
    concatenated = next(k for k in kernels if k.name == "wrapped_concatenate")
    assert concatenated.kind == "copy"


def test_reading_agrees_with_xla(h200: "compiler.Target") -> None:
    import jax
    import jax.numpy as jnp

    from xlafuse.blocks import swiglu_mlp
    from xlafuse.compile import compiler, directions

    inputs = {
        "x": (256, 128), "norm_weight": (128,), "gate_weight": (128, 384), "up_weight": (128, 384),
        "down_weight": (384, 128),
    }
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in inputs.items()}
    compiled = compiler.compile(directions.forward(swiglu_mlp.apply, {"eps": 1e-6}), (structs,), target=h200)
    assert not compiled.unparsed
    ours = gpu_program.parse(compiled.hlo_text)
    theirs = _xla_module(compiled.hlo_proto)
    assert ours.computations.keys() == theirs.keys()
    for name, computation in ours.computations.items():
        read = {i.name: (i.opcode, list(i.operands)) for i in computation.instructions.values()}
        assert read == theirs[name]


def _xla_module(proto: bytes) -> dict[str, dict[str, tuple[str, list[str]]]]:
    from jaxlib import _hlo

    module = _hlo.HloModule.from_serialized_hlo_module_proto(proto)
    result = {}
    for computation in module.computations():
        instructions = {}
        for instruction in computation.instructions():
            opcode = instruction.opcode.name.removeprefix("k")
            opcode = "".join(f"-{c.lower()}" if c.isupper() else c for c in opcode).lstrip("-")
            opcode = {"exp": "exponential"}.get(opcode, opcode)
            instructions[instruction.name] = (opcode, [operand.name for operand in instruction.operands()])
        result[computation.name] = instructions
    return result


# One thing each.


def test_names_scopes_and_lines() -> None:
    # As jax 0.11 writes it: sources in tables, names escaped, scopes inside the transforms.
    text = """HloModule jit_f, is_scheduled=true

FileNames
1 "/home/a \\"b\\"/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="inputs[\\'x\\']"}
  ROOT %s = f32[4]{0} sine(%x), metadata={op_name="jit(f)/transpose(jvp(norm))/scale/sin" stack_frame_id=1}
}
"""
    module = gpu_program.parse(text)
    assert not module.unparsed
    assert module.computations["main"].instructions["x"].op_name == "inputs['x']"
    (kernel,) = gpu_program.kernels(module)
    assert kernel.lines == ('/home/a "b"/model.py:9',)
    assert kernel.ops == ("sin",) and kernel.stages == ("norm/scale",)


def test_sources_of_older_jax() -> None:
    kernel = _only(
        '  ROOT %a = f32[4] sine(%b), metadata={op_name="jit(f)/sin" source_file="model.py" source_line=12}'
    )
    assert kernel.lines == ("model.py:12",)


@pytest.mark.parametrize(
    ("op_name", "stage"),
    [
        ("jit(f)/mul", ""),
        ("jit(f)/norm/mul", "norm"),
        ("jit(f)/jvp(norm)/mul", "norm"),
        ("jit(f)/transpose(jvp())/while/body/closed_call/gate/dot_general", "gate"),
        ("jit(f)/checkpoint/rematted_computation/norm/mean_square/mul", "norm/mean_square"),
        ("jit(f)/scores/bhqd,bhkd->bhqk/dot_general", "scores"),
        ("jit(f)/act/jit(silu)/exp", "act"),
        ("x", ""),
    ],
)
def test_stage_of(op_name: str, stage: str) -> None:
    assert gpu_program.stage_of(op_name) == stage


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[3,5]{1,0}", 30),
        ("pred[7]", 7),
        ("f8e4m3fn[16]{0}", 16),
        ("c64[2]", 16),
        ("s4[9]{0}", 9),
        ("s4[9]{0:E(4)}", 5),
        ("f32[<=10]{0}", 40),
        ("f32[8,128]{1,0:T(8,128)}", 4096),
        ("f32[0,5]", 0),
        ("token[]", 0),
        ("()", 0),
        ("(f32[2]{0}, (s8[3]{0}, /*index=1*/pred[]))", 12),
    ],
)
def test_bytes_of_a_shape(shape: str, size: int) -> None:
    module = _module(f'  ROOT %a = {shape} custom-call(%b), custom_call_target="f"')
    assert not module.unparsed
    assert module.computations["main"].instructions["a"].bytes == size


_SLICED = """%body (p: f32[1000,64], i: s32[]) -> f32[10,64] {
  %p = f32[1000,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %seen = f32[1000,64]{1,0} bitcast(%p)
  ROOT %slice = f32[10,64]{1,0} dynamic-slice(%seen, %i, %zero), dynamic_slice_sizes={10,64}
}"""
_UPDATED = """%body (p: f32[1000,64], u: f32[10,64], i: s32[]) -> f32[1000,64] {
  %p = f32[1000,64]{1,0} parameter(0)
  %u = f32[10,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %updated = f32[1000,64]{1,0} dynamic-update-slice(%p, %u, %i, %zero)
  ROOT %shown = f32[64000]{0} bitcast(%updated)
}"""
_TABLE = (
    "  %t = f32[1000,64]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n  %u = f32[10,64]{1,0} parameter(2)\n"
)


def test_a_slice_reads_as_much_as_it_returns() -> None:
    kernel = _only(_TABLE + "  ROOT %f = f32[10,64]{1,0} fusion(%t, %i), kind=kLoop, calls=%body", _SLICED)
    assert (kernel.kind, kernel.bytes_read, kernel.bytes_written) == ("copy", 2560 + 4, 2560)


@pytest.mark.parametrize(
    ("users", "read"),
    [
        ("  ROOT %slice = f32[10,64]{1,0} dynamic-slice(%wide, %i, %i), dynamic_slice_sizes={10,64}", 1280),
        ("  ROOT %both = f32[1000,64]{1,0} multiply(%wide, %wide)", 128000 - 4),  # and no index
        (
            "  %slice = f32[10,64]{1,0} dynamic-slice(%wide, %i, %i), dynamic_slice_sizes={10,64}\n"
            "  ROOT %all = (f32[10,64]{1,0}, f32[1000,64]{1,0}) tuple(%slice, %wide)", 128000,
        ),
        ("  ROOT %updated = f32[1000,64]{1,0} dynamic-update-slice(%wide, %wide, %i, %i)", 128000),
    ],
)
def test_a_conversion_reads_the_part_that_is_used(users: str, read: int) -> None:
    body = (
        "%body (p: bf16[1000,64], i: s32[]) -> f32[10,64] {\n  %p = bf16[1000,64]{1,0} parameter(0)\n"
        f"  %i = s32[] parameter(1)\n  %wide = f32[1000,64]{{1,0}} convert(%p)\n{users}\n}}"
    )
    table = _TABLE.replace("f32[1000,64]", "bf16[1000,64]")
    kernel = _only(table + "  ROOT %f = f32[10,64]{1,0} fusion(%t, %i), kind=kLoop, calls=%body", body)
    assert kernel.bytes_read == read + 4


@pytest.mark.parametrize(
    ("between", "read"),
    [
        ("  %half = bf16[500,64]{1,0} slice(%p), slice={[0:500], [0:64]}\n", 1280),
        (
            "  %wide = f32[1000,64]{1,0} convert(%p)\n"
            "  %third = f32[333,64]{1,0} slice(%wide), slice={[0:333], [0:64]}\n"
            "  %seen = f32[333,8,8]{2,1,0} bitcast(%third)\n"
            "  %half = f32[300,8,8]{2,1,0} slice(%seen), slice={[0:300], [0:8], [0:8]}\n", 1280,
        ),
        (  # the second slice's source is also used whole
            "  %half = bf16[500,64]{1,0} slice(%p), slice={[0:500], [0:64]}\n"
            "  %whole = bf16[500,64]{1,0} negate(%half)\n", 64000,
        ),
    ],
)
def test_a_slice_of_a_slice_reads_as_much_as_it_returns(between: str, read: int) -> None:
    dtype = "f32" if "f32" in between else "bf16"
    body = (
        "%body (p: bf16[1000,64]) -> f32[640] {\n  %p = bf16[1000,64]{1,0} parameter(0)\n" + between +
        f"  ROOT %s = {dtype}[640]{{0}} slice(%half), slice={{[0:640]}}\n}}"
    )
    kernel = _only(
        "  %t = bf16[1000,64]{1,0} parameter(0)\n  ROOT %f = f32[640]{0} fusion(%t), kind=kLoop, calls=%body", body
    )
    assert kernel.bytes_read == read


def test_an_in_place_update_writes_its_update() -> None:
    kernel = _only(_TABLE + "  ROOT %f = f32[64000]{0} fusion(%t, %u, %i), kind=kLoop, calls=%body", _UPDATED)
    assert (kernel.bytes_read, kernel.bytes_written) == (2560 + 4, 2560)


def test_an_operand_named_twice_is_read_once() -> None:
    kernel = _only("  %x = f32[100]{0} parameter(0)\n  ROOT %y = f32[100]{0} multiply(%x, %x)")
    assert (kernel.bytes_read, kernel.bytes_written) == (400, 400)


def test_an_element_of_a_tuple_as_operand() -> None:
    # jax 0.11's dumps write %pair#1 where compiled.as_text() has a get-tuple-element.
    kernel = _only(
        "  %pair = (f32[8]{0}, (f32[2]{0}, f32[3]{0})) parameter(0)\n  ROOT %y = f32[3]{0} sine(%pair#1#1)"
    )
    assert (kernel.bytes_read, kernel.bytes_written) == (12, 12)


def test_cublas_without_its_scratch_and_with_its_epilogue() -> None:
    config = (
        'backend_config={"gemm_backend_config":{"alpha_real":1,"beta":1,"epilogue":"BIAS","dot":{"a":["1"]}}}'
    )
    kernel = _only(
        "  %a = f32[8,4]{1,0} parameter(0)\n  %c = f32[8,8]{1,0} parameter(1)\n"
        "  ROOT %g = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%a, %a, %c), "
        f'custom_call_target="__cublas$lt$matmul", metadata={{op_name="jit(f)/dot_general"}}, {config}'
    )
    assert kernel.kind == "gemm" and kernel.runtime_name is None and kernel.tunable
    assert kernel.ops == ("dot_general", "add", "bias")
    assert (kernel.bytes_read, kernel.bytes_written) == (128 + 256, 256)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("jit(f)/transpose(jvp(matmul_kernel))/mpmd_map", "matmul_kernel_mosaic_gpu_kernel"),
        ("jit(f)/attention/scale/pallas_call", "scale_mosaic_gpu_kernel"),
        ("jit(f)/custom", None),
    ],
    ids=["kernel", "pallas_call", "unknown"],
)
def test_the_name_of_a_mosaic_kernel(path: str, name: str | None) -> None:
    kernel = _only(
        "  %a = f32[8,4]{1,0} parameter(0)\n  ROOT %g = f32[8,4]{1,0} custom-call(%a), "
        f'custom_call_target="mosaic_gpu_v2", metadata={{op_name="{path}"}}'
    )
    assert (kernel.kind, kernel.runtime_name) == ("custom", name)


_LOOP = """%cond (s: f32[4]) -> pred[] {
  %s = f32[4]{0} parameter(0)
  ROOT %c = pred[] compare(%s, %s), direction=LT
}
%step (s: f32[4]) -> f32[4] {
  %s = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%s)
}"""


def test_a_loop_of_known_length_counts_its_launches() -> None:
    known = ', backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}'
    kernel = _only(
        "  %x = f32[4]{0} parameter(0)\n"
        f"  ROOT %w = f32[4]{{0}} while(%x), condition=%cond, body=%step, control-predecessors={{%x}}{known}",
        _LOOP,
    )
    assert (kernel.name, kernel.launches) == ("n", 12)


def test_a_loop_of_unknown_length() -> None:
    module = _module(
        "  %x = f32[4]{0} parameter(0)\n  ROOT %w = f32[4]{0} while(%x), condition=%cond, body=%step", _LOOP
    )
    assert [(k.name, k.launches) for k in gpu_program.kernels(module)] == [("c", None), ("n", None)]


_ASYNCHRONOUS = """  %x = f32[4]{0} parameter(0)
  %call = f32[4]{0} call(%x), to_apply=%command_buffer
  %g = (f32[4]{0}, f32[16]{0}) all-gather-start(%call), dimensions={0}
  %gathered = f32[16]{0} all-gather-done(%g)
  %a = ((f32[16]{0}), f32[16]{0}, u32[]) async-start(%gathered), calls=%wrapped
  %waited = f32[16]{0} async-done(%a)
  %f = ((f32[16]{0}), f32[2]{0}, u32[]) fusion-start(%waited), kind=kLoop, calls=%sliced
  ROOT %done = f32[2]{0} fusion-done(%f)"""
_CALLED = """%command_buffer (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %e = f32[4]{0} exponential(%p)
}
%wrapped (q: f32[16]) -> f32[16] {
  %q = f32[16]{0} parameter(0)
  ROOT %s = f32[16]{0} sine(%q)
}, execution_thread="x"
%sliced (r: f32[16]) -> f32[2] {
  %r = f32[16]{0} parameter(0)
  ROOT %s = f32[2]{0} slice(%r), slice={[0:2]}
}"""


def test_calls_are_entered_and_async_pairs_counted_once() -> None:
    module = _module(_ASYNCHRONOUS, _CALLED)
    assert not module.unparsed
    assert [(k.name, k.kind, k.bytes_read, k.bytes_written) for k in gpu_program.kernels(module)] == [
        ("e", "elementwise", 16, 16),
        ("g", "collective", 16, 64),
        ("s", "elementwise", 64, 64),
        ("f", "copy", 8, 8),
    ]


_BRIEF = "HloModule m\nmain {\n  x = f32[8, 64] parameter(0)\n  y = f32[8,64] negate(x)\n}\n"


def test_dynamic_dimensions() -> None:
    module = _module("  %a = (f32[<=8,2], f32[?,4]) parameter(0)\n  ROOT %b = f32[?,4] get-tuple-element(%a), index=1")
    bounded, unbounded = module.computations["main"].instructions["a"].shapes
    assert (bounded.dims, bounded.bytes) == ((8, 2), 64)
    assert (unbounded.dims, unbounded.bytes) == ((-1, 4), 0)
    assert gpu_program.program(module).unresolved == ("a: an array of unknown size (?) counts as 0 bytes",)


def test_quoted_configurations_are_unescaped() -> None:
    module = _module(
        "  %x = f32[4]{0} parameter(0)\n  ROOT %w = f32[4]{0} while(%x), condition=%cond, body=%step, "
        r'backend_config="{\"known_trip_count\":{\"n\":\"12\"}}"',
        _LOOP,
    )
    assert [kernel.launches for kernel in gpu_program.kernels(module)] == [12]


def test_a_text_without_its_end_has_no_entry() -> None:
    assert gpu_program.parse(_BRIEF).entry == "main"
    assert gpu_program.parse(_BRIEF + "rest {\n  x = f32[] parameter(0)\n").entry == ""


def test_two_modules_in_one_text() -> None:
    text = "HloModule a\nENTRY x {\n  p = f32[] parameter(0)\n}\nHloModule b\nENTRY y {\n  p = f32[] parameter(0)\n}\n"
    module = gpu_program.parse(text)
    assert (module.name, module.entry) == ("a", "x") and [number for number, _ in module.unparsed] == [5, 6]


def test_an_open_bracket_does_not_hide_the_next_instructions() -> None:
    lines = [
        '  %a = f32[4] sine(%x), metadata={op_name="a"', "  %b = f32[4] sine(%x", '  %c = f32[4] sine(%x), calls="',
        "  %d = f32[4] mystery[(%x)", "  %e = mystery[4] fusion(%x), kind=kLoop, calls=%f",
    ]
    module = _module("\n".join(["  %x = f32[4] parameter(0)", *lines, "  ROOT %y = f32[4] sine(%x)"]))
    assert list(module.computations["main"].instructions) == ["x", "y"]
    assert [number for number, _ in module.unparsed] == [4, 5, 6, 7, 8]


def test_lines_that_are_not_understood_are_listed() -> None:
    strange = ["  what is this", "  ROOT %y = mystery[4] sine(%x)", "  %x = f32[4]{0} parameter(1)"]
    module = _module("\n".join(["  %x = f32[4]{0} parameter(0)", *strange]))
    assert module.unparsed == list(enumerate(strange, start=4))


# Hostile text.

_LONG = 200_000


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        "  %a = " + "(" * _LONG + "f32[2]" + ")" * _LONG + " parameter(0)",
        "  %a = " + "(" * _LONG,
        "  %a = f32[2]) parameter(0)",
        "  %a = f32[" + "9" * _LONG + "] parameter(0)",
        "  %a = f32[" + ",".join(["2"] * _LONG) + "] parameter(0)",
        "  %a = " + "f" * _LONG + "[2] parameter(0)",
        "  %a = f32[2] parameter(" + "9" * _LONG + ")",
        '  %a = f32[2] sine(%b), metadata={op_name="' + '\\"' * _LONG,
        "  %a = f32[2] sine(%b), metadata={" + "a" * _LONG + "}",
        "  %a = f32[2] sine(%b), metadata={" + 'k="\\"' * _LONG + "}",
        "  %a = f32[2] sine(%b), " + "/*" * _LONG,
        "  %a = f32[2] sine(" + "%b, " * _LONG + ")",
        "  %a = f32[2] constant({" + "1, " * _LONG + "1})",
        "  %a = f32[2] sine(%b), backend_config={" + '{"a":' * _LONG,
        "%c " + "( -> ) " * _LONG + "{",
        '1 "' + '"' * _LONG,
        "a" * _LONG + " = ",
        "%" * _LONG,
        "  %a = f32[2] sine(" + "sine(" * _LONG,
        "  %a = f32[2] sine(" + "sine(" * _LONG + ")" * _LONG + ")",
        "  %a = f32[2] call(), to_apply=" + "{ b = f32[2] call(), to_apply=" * _LONG,
        "  %a = f32[2] call(), to_apply={" + "{" * _LONG,
        ("  %a = f32[2] sine(\n" * (_LONG // 4)),
        ("  %a = f32[2] call(), to_apply={\n" * (_LONG // 4)),
        ('  %a = f32[2] sine(%b), metadata={\\"\n' * (_LONG // 4)),
        "x (\n" * _LONG,
        "x (y: f32[2]) -> (\n" * (_LONG // 4),
        "/*\n" * _LONG,
        "'\n\"\n" * (_LONG // 2),
        "\n" * _LONG + "x" + "\n" * _LONG,
        "FileNames " * _LONG,
        "HloModule m, a=\n" * (_LONG // 4),
        "HloModule m, a={\n" * (_LONG // 4),
        'HloModule m, origin_recovery_table={"\n' * (_LONG // 4),
        "/**/ backend_config={\n" * (_LONG // 4),
        "  %a = f32[2] sine(%b), backend_config={ //\n" * (_LONG // 8),
        "  a:= f32[2] sine(b:)\n" * (_LONG // 8),
        "  %a = " + "b(" * _LONG + "f32[2]" + ")" * _LONG + " parameter(0)",
    ],
    ids=range(38),
)
def test_hostile_lines_take_linear_time(line: str) -> None:
    started = time.process_time()
    for text in ("HloModule m\n" + line, "HloModule m\nENTRY %e () -> f32[] {\n" + line + "\n}"):
        gpu_program.kernels(gpu_program.parse(text))
    assert time.process_time() - started < 5


def test_multiplying_and_circular_calls_terminate() -> None:
    doubling = "\n".join(
        f"%c{n} () -> f32[] {{\n  %a = f32[] call(), to_apply=%c{n + 1}\n"
        f"  %b = f32[] call(), to_apply=%c{n + 1}\n}}"
        for n in range(60)
    )
    circle = "%c0 () -> f32[] {\n  ROOT %a = f32[] call(), to_apply=%c0\n}"
    for called in (doubling, circle):
        with pytest.raises(ValueError, match="no module XLA wrote"):
            gpu_program.kernels(_module("  ROOT %r = f32[] call(), to_apply=%c0", called))
