"""The buffers that each kernel reads and writes, in small modules for one feature each and in random ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlafuse.hlo import gpu_program

HEAD = "HloModule m, is_scheduled=true"


def _program(body: str, *computations: str, complete: bool = True) -> gpu_program.Program:
    text = "\n".join([HEAD, *computations, "ENTRY %main () -> f32[] {", body, "}"])
    module = gpu_program.parse(text)
    assert not module.unparsed
    program = gpu_program.program(module)
    if complete:
        assert not program.unresolved
    return program


def _edges(program: gpu_program.Program) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    return [
        (launch.kernel.name, {a.buffer: a.bytes for a in launch.reads}, {a.buffer: a.bytes for a in launch.writes})
        for launch in program.launches
    ]


def _roles(program: gpu_program.Program) -> dict[str, str]:
    return {buffer.name: buffer.role for buffer in program.buffers}


# Values that are passed on.


def test_tuples_bitcasts_and_barriers_pass_values_on() -> None:
    program = _program(
        "  %x = f32[4]{0} parameter(0)\n  %y = f32[4]{0} parameter(1)\n"
        "  %both = (f32[4]{0}, f32[4]{0}) tuple(%x, %y)\n"
        "  %held = (f32[4]{0}, f32[4]{0}) opt-barrier(%both)\n"
        "  %second = f32[4]{0} get-tuple-element(%held), index=1\n"
        "  %seen = f32[2,2]{1,0} bitcast(%second)\n"
        "  ROOT %s = f32[2,2]{1,0} sine(%seen)"
    )
    assert _edges(program) == [("s", {"y": 16}, {"s": 16})]
    assert _roles(program) == {"x": "input", "y": "input", "s": "output"}
    assert (program.inputs, program.outputs) == (("x", "y"), ("s",))


def test_inputs_have_the_order_of_the_parameters_with_tuples_flattened() -> None:
    program = _program(
        "  %b = f32[2]{0} parameter(1)\n  %a = (f32[8]{0}, (f32[2]{0}, pred[])) parameter(0)\n"
        "  ROOT %y = f32[2]{0} multiply(%b, %a#1#0)"
    )
    assert program.inputs == ("a#0", "a#1#0", "a#1#1", "b")
    assert _edges(program) == [("y", {"b": 8, "a#1#0": 8}, {"y": 8})]


def test_two_views_of_one_buffer_are_read_once() -> None:
    program = _program(
        "  %x = f32[4]{0} parameter(0)\n  %v = f32[2,2]{1,0} bitcast(%x)\n  %w = f32[4]{0} bitcast(%v)\n"
        "  ROOT %y = f32[4]{0} multiply(%x, %w)"
    )
    assert _edges(program) == [("y", {"x": 16}, {"y": 16})]


def test_a_fusion_with_several_outputs_writes_several_buffers() -> None:
    body = """%body (p: f32[8]) -> (f32[8], f32[]) {
  %p = f32[8]{0} parameter(0)
  %n = f32[8]{0} negate(%p)
  %m = f32[] reduce(%n, %n), dimensions={0}, to_apply=%sum
  ROOT %t = (f32[8]{0}, f32[]) tuple(%n, %m)
}"""
    program = _program(
        "  %x = f32[8]{0} parameter(0)\n  %f = (f32[8]{0}, f32[]) fusion(%x), kind=kInput, calls=%body\n"
        "  %m = f32[] get-tuple-element(%f), index=1\n  %s = f32[] sqrt(%m)\n"
        "  ROOT %out = (f32[8]{0}, f32[], f32[8]{0}) tuple(%f#0, %s, %f#0)",
        body,
    )
    assert _edges(program) == [("f", {"x": 32}, {"f#0": 32, "f#1": 4}), ("s", {"f#1": 4}, {"s": 4})]
    assert _roles(program) == {"x": "input", "f#0": "output", "f#1": "intermediate", "s": "output"}
    assert program.outputs == ("f#0", "s", "f#0")


def test_a_returned_input_stays_an_input_and_its_copy_is_a_kernel() -> None:
    program = _program(
        "  %x = f32[4]{0} parameter(0)\n  %c = f32[4]{0} copy(%x)\n"
        "  ROOT %t = (f32[4]{0}, f32[4]{0}) tuple(%x, %c)"
    )
    assert _edges(program) == [("c", {"x": 16}, {"c": 16})]
    assert _roles(program) == {"x": "input", "c": "output"} and program.outputs == ("x", "c")


def test_constants_and_a_devices_number_are_not_kernels() -> None:
    program = _program(
        "  %x = f32[4]{0} parameter(0)\n  %c = f32[4]{0} constant({1, 2, 3, 4})\n  %d = u32[] partition-id()\n"
        "  ROOT %y = f32[4]{0} custom-call(%x, %c, %d), custom_call_target=\"mine\""
    )
    assert _edges(program) == [("y", {"x": 16, "c": 16, "d": 4}, {"y": 16})]
    assert _roles(program) == {"x": "input", "c": "constant", "d": "constant", "y": "output"}


def test_a_copy_of_an_empty_array_is_not_a_launch() -> None:
    program = _program("  %x = f32[0,3]{1,0} parameter(0)\n  ROOT %c = f32[0,3]{1,0} copy(%x)")
    assert program.launches == () and _roles(program) == {"x": "input", "c": "output"}


def test_tokens_are_not_buffers() -> None:
    program = _program(
        "  %t = token[] after-all()\n  %in = (f32[4]{0}, token[]) infeed(%t)\n"
        "  %x = f32[4]{0} get-tuple-element(%in), index=0\n  ROOT %y = f32[4]{0} sine(%x)"
    )
    assert _edges(program) == [("in", {}, {"in#0": 16}), ("y", {"in#0": 16}, {"y": 16})]


# In place.

UPDATE = """%update (p: f32[100], u: f32[4], i: s32[]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %u = f32[4]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[100]{0} dynamic-update-slice(%p, %u, %i)
}"""
OPERANDS = "  %t = f32[100]{0} parameter(0)\n  %u = f32[4]{0} parameter(1)\n  %i = s32[] parameter(2)\n"


def test_an_in_place_update_writes_into_its_operand() -> None:
    program = _program(
        OPERANDS + "  %c = f32[100]{0} copy(%t)\n"
        "  %f = f32[100]{0} fusion(%c, %u, %i), kind=kLoop, calls=%update\n  ROOT %s = f32[100]{0} sine(%f)",
        UPDATE,
    )
    assert _edges(program)[1:] == [("f", {"u": 16, "i": 4}, {"c": 16}), ("s", {"c": 400}, {"s": 400})]


def test_an_updated_input_becomes_a_separate_buffer() -> None:
    program = _program(
        OPERANDS + "  ROOT %f = f32[100]{0} fusion(%t, %u, %i), kind=kLoop, calls=%update", UPDATE
    )
    assert _edges(program) == [("f", {"u": 16, "i": 4}, {"f": 16})]
    assert _roles(program)["t"] == "input" and _roles(program)["f"] == "output"


def test_an_update_of_an_array_computed_in_the_fusion_writes_it_whole() -> None:
    computed = UPDATE.replace("slice(%p,", "slice(%n,").replace(
        "  %u =", "  %n = f32[100]{0} negate(%p)\n  %u ="
    )
    program = _program(
        OPERANDS + "  ROOT %f = f32[100]{0} fusion(%t, %u, %i), kind=kLoop, calls=%update", computed
    )
    assert _edges(program) == [("f", {"t": 400, "u": 16, "i": 4}, {"f": 400})]


def test_a_scatter_of_two_arrays_updates_both() -> None:
    program = _program(
        "  %x = f32[100]{0} parameter(0)\n  %a = f32[100]{0} copy(%x)\n  %b = f32[100]{0} sine(%x)\n"
        "  %i = s32[3,1]{1,0} parameter(1)\n  %u = f32[3]{0} parameter(2)\n  %v = f32[3]{0} parameter(3)\n"
        "  ROOT %s = (f32[100]{0}, f32[100]{0}) scatter(%a, %b, %i, %u, %v), to_apply=%two"
    )
    name, reads, writes = _edges(program)[2]
    assert reads == {"a": 12, "b": 12, "i": 12, "u": 12, "v": 12} and writes == {"a": 12, "b": 12}
    assert program.outputs == ("a", "b")


# Loops, branches, calls.

LOOP = """%cond (s: (s32[], f32[4], f32[4])) -> pred[] {
  %s = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %less = pred[] compare(%i, %i), direction=LT
}
%step (s: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {
  %s = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %h = f32[4]{0} get-tuple-element(%s), index=1
  %w = f32[4]{0} get-tuple-element(%s), index=2
  %j = s32[] add(%i, %i)
  %n = f32[4]{0} multiply(%h, %w)
  ROOT %t = (s32[], f32[4]{0}, f32[4]{0}) tuple(%j, %n, %w)
}"""
BEFORE = (
    "  %x = f32[4]{0} parameter(0)\n  %w = f32[4]{0} parameter(1)\n  %zero = s32[] constant(0)\n"
    "  %c0 = s32[] copy(%zero)\n  %c1 = f32[4]{0} copy(%x)\n"
)
STATE = "(s32[], f32[4]{0}, f32[4]{0})"
TRIPS = ', backend_config={"known_trip_count":{"n":"12"}}'


def _loop(init: str, trips: str = TRIPS) -> str:
    return (
        f"  %init = {STATE} tuple({init})\n"
        f"  %loop = {STATE} while(%init), condition=%cond, body=%step{trips}\n"
        "  %h = f32[4]{0} get-tuple-element(%loop), index=1\n  ROOT %r = f32[4]{0} sine(%h)"
    )


def test_a_loops_state_is_one_buffer_and_its_constants_are_inputs() -> None:
    program = _program(BEFORE + _loop("%c0, %c1, %w"), LOOP)
    assert _edges(program)[2:] == [
        ("j", {"c0": 4}, {"c0": 4}),
        ("n", {"c1": 16, "w": 16}, {"c1": 16}),
        ("r", {"c1": 16}, {"r": 16}),
    ]
    assert [launch.kernel.launches for launch in program.launches] == [1, 1, 12, 12, 1]
    assert _roles(program)["c1"] == "intermediate"


def test_a_loops_condition_reads_the_state() -> None:
    program = _program(BEFORE + _loop("%c0, %c1, %w", ""), LOOP)
    assert _edges(program)[2] == ("less", {"c0": 4}, {"less": 1})
    assert [launch.kernel.launches for launch in program.launches] == [1, 1, None, None, None, 1]


def test_a_loop_does_not_write_its_input() -> None:
    program = _program(BEFORE + _loop("%zero, %x, %w"), LOOP)
    assert _edges(program)[2:] == [
        ("j", {"loop#0": 4}, {"loop#0": 4}),
        ("n", {"loop#1": 16, "w": 16}, {"loop#1": 16}),
        ("r", {"loop#1": 16}, {"r": 16}),
    ]


def test_nested_loops_share_the_state() -> None:
    outer = f"""%outer (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  ROOT %inner = {STATE} while(%s), condition=%cond, body=%step{TRIPS}
}}"""
    program = _program(BEFORE + _loop("%c0, %c1, %w").replace("body=%step", "body=%outer"), LOOP, outer)
    assert _edges(program)[3] == ("n", {"c1": 16, "w": 16}, {"c1": 16})
    assert program.launches[3].kernel.launches == 144


def test_branches_write_the_results_buffer() -> None:
    branches = """%yes (a: f32[4]) -> (f32[4]) {
  %a = f32[4]{0} parameter(0)
  %s = f32[4]{0} sine(%a)
  ROOT %t = (f32[4]{0}) tuple(%s)
}
%no (b: (f32[4])) -> (f32[4]) {
  %b = (f32[4]{0}) parameter(0)
  %a = f32[4]{0} get-tuple-element(%b), index=0
  %c = f32[4]{0} cosine(%a)
  ROOT %t = (f32[4]{0}) tuple(%c)
}"""
    text = (
        "  %p = pred[] parameter(0)\n  %x = f32[4]{0} parameter(1)\n  %y = (f32[4]{0}) parameter(2)\n"
        "  %r = (f32[4]{0}) conditional(%p, %x, %y), "
    )
    for attributes in ("true_computation=%yes, false_computation=%no", "branch_computations={%yes, %no}"):
        program = _program(text + attributes + "\n  ROOT %o = f32[4]{0} get-tuple-element(%r), index=0", branches)
        assert _edges(program) == [("s", {"x": 16}, {"r#0": 16}), ("c", {"y#0": 16}, {"r#0": 16})]
        assert _roles(program)["r#0"] == "output"
        assert {launch.kernel.launches for launch in program.launches} == {None}


def test_each_call_of_a_computation_has_its_own_buffers() -> None:
    called = """%f (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %e = f32[4]{0} exponential(%p)
}"""
    program = _program(
        "  %x = f32[4]{0} parameter(0)\n  %a = f32[4]{0} call(%x), to_apply=%f\n"
        "  ROOT %b = f32[4]{0} call(%a), to_apply=%f",
        called,
    )
    assert _edges(program) == [("e", {"x": 16}, {"e": 16}), ("e", {"e": 16}, {"e~2": 16})]


@pytest.mark.parametrize("opcode", ["async", "call"])
def test_an_asynchronous_call_runs_its_computation(opcode: str) -> None:
    called = """%f (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %e = f32[4]{0} exponential(%p)
}"""
    program = _program(
        f"  %x = f32[4]{{0}} parameter(0)\n  %a = ((f32[4]{{0}}), f32[4]{{0}}, u32[]) {opcode}-start(%x), calls=%f\n"
        f"  %b = f32[4]{{0}} {opcode}-done(%a)\n  ROOT %y = f32[4]{{0}} sine(%b)",
        called,
    )
    assert _edges(program) == [("e", {"x": 16}, {"e": 16}), ("y", {"e": 16}, {"y": 16})]


def test_asynchronous_pairs_have_the_result_of_the_done() -> None:
    program = _program(
        """  %x = f32[4]{0:T(128)} parameter(0)
  %g = (f32[4]{0}, f32[16]{0:T(128)S(1)}) all-gather-start(%x), dimensions={0}
  %gathered = f32[16]{0:T(128)S(1)} all-gather-done(%g)
  %cs = (f32[16]{0:S(1)}, f32[16]{0}, u32[]) copy-start(%gathered)
  %c = f32[16]{0:S(1)} copy-done(%cs)
  %sl = ((f32[16]{0}), f32[2]{0}, s32[]) slice-start(%c), slice={[0:2]}
  %su = ((f32[16]{0}), f32[2]{0}, s32[]) slice-update(%sl)
  %s = f32[2]{0} slice-done(%su)
  %tok = token[] after-all()
  %send = (f32[2]{0}, u32[], token[]) send(%s, %tok), channel_id=1
  %sent = token[] send-done(%send), channel_id=1
  %recv = (f32[2]{0}, u32[], token[]) recv(%sent), channel_id=2
  %received = (f32[2]{0}, token[]) recv-done(%recv), channel_id=2
  ROOT %y = f32[2]{0} sine(%received#0)"""
    )
    assert _edges(program) == [
        ("g", {"x": 512}, {"g": 512}),
        ("cs", {"g": 512}, {"cs": 64}),
        ("sl", {"cs": 8}, {"sl": 8}),
        ("send", {"sl": 8}, {}),
        ("recv", {}, {"recv#0": 8}),
        ("y", {"recv#0": 8}, {"y": 8}),
    ]
    assert [launch.kernel.kind for launch in program.launches] == [
        "collective", "copy", "copy", "collective", "collective", "elementwise",
    ]


# Missing operands and computations.


def test_missing_parts_are_reported_and_the_rest_is_kept() -> None:
    program = _program(
        "  %x = f32[4]{0} parameter(0)\n  %g = f32[4]{0} get-tuple-element(%x), index=0\n"
        "  %c = f32[4]{0} call(%x), to_apply=%gone\n  ROOT %y = f32[4]{0} add(%g, %nowhere)",
        complete=False,
    )
    assert program.unresolved == (
        "g: operand does not fit get-tuple-element",
        "c: computation gone is not there",
        "y: operand nowhere is not there",
    )
    assert [(name, writes) for name, _, writes in _edges(program)] == [("c", {"c": 16}), ("y", {"y": 16})]


def test_a_librarys_scratch_space_is_separate() -> None:
    program = _program(
        "  %a = f32[8,4]{1,0} parameter(0)\n  %g = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%a, %a), "
        'custom_call_target="__cublas$lt$matmul"\n  ROOT %y = f32[8,8]{1,0} sine(%g#0)'
    )
    assert program.launches[0].workspace_bytes == 4096
    assert _edges(program)[0] == ("g", {"a": 128}, {"g#0": 256})


@pytest.mark.parametrize("name", ["flash_attention_fusion", "cudnn_fmha", "softmax_gemm_fusion"])
def test_a_kernels_kind_is_that_of_its_operations_not_of_its_names(name: str) -> None:
    scope = 'metadata={op_name="jit(f)/attention/dot_product_attention/mul"}'
    product = f"  ROOT %m = f32[8]{{0}} multiply(%p, %p), {scope}"
    body = f"%rope (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n{product}\n}}"
    fusion = f"  ROOT %{name} = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%rope, {scope}"
    program = _program(f"  %x = f32[8]{{0}} parameter(0)\n{fusion}", body)
    assert [launch.kernel.kind for launch in program.launches] == ["elementwise"]


# Sizes that depend on layouts.


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f4e2m1fn[8]{0:E(4)}", 4), ("u2[9]{0:E(2)}", 3), ("s2[9]{0}", 9), ("pred[16]{0:E(1)}", 2),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048), ("f32[<=8,2]{1,0}", 64), ("f8e8m0fnu[3]", 3), ("c128[2]", 32),
        ("f32[10,10]{1,0:D(D,C)#(u32)}", 400),
        # A tile rounds the dimensions that vary fastest up.
        ("f32[3,100]{1,0:T(8,128)}", 8 * 128 * 4), ("f32[3,100]{0,1:T(8,128)}", 104 * 128 * 4),
        ("f32[5,9,129]{2,1,0:T(8,128)S(1)}", 5 * 16 * 256 * 4), ("f32[100]{0:T(1024)}", 4096),
        ("bf16[9,100]{1,0:T(8,128)(2,1)}", 16 * 128 * 2), ("bf16[1,100]{1,0:T(1,128)(2,1)}", 2 * 128 * 2),
        ("f32[100]{0:T(8,128)}", 8 * 128 * 4), ("s4[9,128]{1,0:T(8,128)(8,1)E(4)}", 16 * 128 // 2),
        ("f32[3,5,100]{2,1,0:T(*,128)}", 3 * 512 * 4), ("f32[3,100]{1,0:T(*,8,128)}", 8 * 128 * 4),
        ("f32[]{:T(128)}", 4), ("f32[<=3,100]{1,0:T(8,128)}", 8 * 128 * 4),
    ],
)
def test_bytes_by_layout(shape: str, size: int) -> None:
    program = _program(f"  %x = {shape} parameter(0)\n  ROOT %y = {shape} custom-call(%x), custom_call_target=\"f\"")
    assert _edges(program) == [("y", {"x": size}, {"y": size})]


def test_a_tile_of_no_size_or_of_too_much_memory_and_too_many_tiles_are_not_read() -> None:
    for tile in ("(0,128)", "(999999999999999999,999999999999999999)", "(8,*)", "(,)", "(2)" * 9):
        body = f"  ROOT %x = f32[3,9]{{1,0:T{tile}}} iota()"
        assert gpu_program.parse(f"{HEAD}\nENTRY %main () -> f32[] {{\n{body}\n}}").unparsed


@pytest.mark.parametrize(
    ("mark", "space", "memory"),
    [
        ('custom_call_target="tpu_custom_call"', 1, "VMEM"), ('custom_call_target="tpu_custom_call"', 5, "host"),
        ('custom_call_target="__cublas$gemm"', 1, ""), ('custom_call_target="__cublas$gemm"', 5, "host"),
        ('custom_call_target="f"', 1, "S(1)"), ('custom_call_target="f"', 0, ""),
    ],
)
def test_the_platform_gives_a_memory_space_its_meaning(mark: str, space: int, memory: str) -> None:
    program = _program(
        f"  %x = f32[8]{{0:S({space})}} parameter(0)\n  ROOT %y = f32[8]{{0}} custom-call(%x), {mark}"
    )
    assert [buffer.space for buffer in program.buffers] == [memory, ""]


# Random modules.


@st.composite
def _modules(draw: st.DrawFn) -> tuple[str, int]:
    """Draw the text of an entry computation, and its number of kernels."""
    lines, arrays, tuples, kernels = [], [], [], 0
    for index in range(draw(st.integers(1, 3))):
        lines.append(f"%x{index} = f32[4]{{0}} parameter({index})")
        arrays.append(f"%x{index}")
    choices = st.sampled_from(("kernel", "pair", "bitcast", "tuple", "element", "constant"))
    for index, choice in enumerate([*draw(st.lists(choices, max_size=20)), "end"]):
        name = f"%v{index}"
        operands = draw(st.lists(st.sampled_from(arrays), min_size=1, max_size=3))
        if choice == "end":
            lines.append(f"ROOT %r = ({', '.join(['f32[4]{0}'] * len(operands))}) tuple({', '.join(operands)})")
        if choice == "tuple":
            lines.append(f"{name} = ({', '.join(['f32[4]{0}'] * len(operands))}) tuple({', '.join(operands)})")
            tuples.append((name, len(operands)))
        elif choice == "pair":
            lines.append(f"{name} = (f32[4]{{0}}, f32[4]{{0}}) custom-call({', '.join(operands)})")
            tuples.append((name, 2))
            kernels += 1
        elif choice == "element" and tuples:
            whole, count = draw(st.sampled_from(tuples))
            lines.append(f"{name} = f32[4]{{0}} get-tuple-element({whole}), index={draw(st.integers(0, count - 1))}")
            arrays.append(name)
        elif choice == "constant":
            lines.append(f"{name} = f32[4]{{0}} constant({{1, 2, 3, 4}})")
            arrays.append(name)
        elif choice == "bitcast":
            lines.append(f"{name} = f32[4]{{0}} bitcast({operands[0]})")
            arrays.append(name)
        elif choice == "kernel":
            lines.append(f"{name} = f32[4]{{0}} map({', '.join(operands)})")
            arrays.append(name)
            kernels += 1
    return "\n".join("  " + line for line in lines), kernels


@given(_modules())
def test_a_random_module_is_a_consistent_graph(made: tuple[str, int]) -> None:
    body, kernels = made
    program = _program(body)
    buffers = {buffer.name: buffer for buffer in program.buffers}
    assert len(program.launches) == kernels and len(buffers) == len(program.buffers)
    written: dict[str, Any] = {}
    for launch in program.launches:
        for access in launch.reads:
            assert buffers[access.buffer].role in ("input", "constant") or access.buffer in written
            assert access.bytes == 16
        for access in launch.writes:
            assert access.buffer not in written and buffers[access.buffer].role in ("intermediate", "output")
            written[access.buffer] = launch
        assert launch.kernel.bytes_read == 16 * len(launch.reads)
        assert launch.kernel.bytes_written == 16 * len(launch.writes)
    returned = {name for name in program.outputs if buffers[name].role not in ("input", "constant")}
    assert returned == {buffer.name for buffer in program.buffers if buffer.role == "output"}
    assert _edges(_program(body.replace("%", ""))) == _edges(program)


_CALLS = {
    "fusion": "fusion(%p), kind=kLoop, calls=%{}",
    "call": "call(%p), to_apply=%{}",
    "body": "while(%p), condition=%c, body=%{}",
    "condition": "while(%p), condition=%{}, body=%c",
    "branch": "conditional(%p, %p, %p), true_computation=%c, false_computation=%{}",
    "branches": "conditional(%p, %p, %p), branch_computations={{%c, %{}}}",
    "reduce": "reduce(%p, %p), dimensions={{}}, to_apply=%{}",
    "sort": "sort(%p), dimensions={{}}, to_apply=%{}",
}


@pytest.mark.parametrize("way", _CALLS)
@pytest.mark.parametrize("between", [0, 1, 3])
@pytest.mark.parametrize("reached", [True, False])
def test_computations_that_call_each_other_are_refused(way: str, between: int, reached: bool) -> None:
    names = ["a", *(f"b{number}" for number in range(between))]
    text = "HloModule m\n\n%c (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n\n"
    for name, called in zip(names, [*names[1:], "a"], strict=True):
        call = (_CALLS[way] if called == "a" else _CALLS["call"]).format(called)
        text += f"%{name} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n  ROOT %r = f32[] {call}\n}}\n\n"
    text += "ENTRY %main (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n"
    text += f"  ROOT %r = f32[] call(%p), to_apply=%{'a' if reached else 'c'}\n}}\n"
    with pytest.raises(ValueError, match=r"'(a|b\d)' of module 'm' calls itself"):
        gpu_program.program(gpu_program.parse(text))


def test_a_computation_that_several_call_is_no_recursion() -> None:
    text = "HloModule m\n\n%c (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n  ROOT %s = f32[] sine(%p)\n}\n\n"
    text += "%d (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n  ROOT %r = f32[] call(%p), to_apply=%c\n}\n\n"
    text += "ENTRY %main (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n  %q = f32[] call(%p), to_apply=%d\n"
    text += "  %w = f32[] while(%q), condition=%c, body=%d\n  ROOT %r = f32[] call(%w), to_apply=%c\n}\n"
    assert len(gpu_program.program(gpu_program.parse(text)).launches) >= 3
