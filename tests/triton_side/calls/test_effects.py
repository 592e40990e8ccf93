"""Finding the pointers that kernels read and write, in TTIR and PTX as Triton and NVRTC print them."""

from __future__ import annotations

import pytest

from xlafuse.triton_side.calls import effects


def of_body(parameters: str, body: str, more: str = "") -> tuple[list[int], list[int]]:
    head = f"tt.func public @kernel({parameters}) attributes {{noinline = false}} {{"
    text = f'#loc = loc("k.py":1:0)\nmodule {{\n  {head}\n{body}\n    tt.return loc(#loc)\n  }} loc(#loc)\n{more}}}\n'
    found = effects.of_ttir(text, "kernel")
    return sorted(found.reads), sorted(found.writes)


POINTERS = (
    '%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"(#loc)), %y: !tt.ptr<f32> loc("y"(#loc)), '
    '%n: i32 loc("n"(#loc)), %z: !tt.ptr<f32> loc("z"(#loc))'
)


def test_pointers_through_arithmetic() -> None:
    assert of_body(POINTERS, """
    %0 = tt.splat %x : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>> loc(#loc)
    %1 = tt.addptr %0, %i : tensor<8x!tt.ptr<f32>>, tensor<8xi32> loc(#loc)
    %2 = tt.load %1, %mask, %other : tensor<8x!tt.ptr<f32>> loc(callsite(#loc at #loc))
    %3 = tt.splat %z : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>> loc(#loc)
    tt.store %3, %2, %mask : tensor<8x!tt.ptr<f32>> loc(#loc)""") == ([0], [3])


def test_offsets_are_not_pointers() -> None:
    assert of_body(POINTERS, """
    %0 = tt.addptr %x, %n : !tt.ptr<f32>, i32
    %1 = tt.load %0 : !tt.ptr<f32>
    %2 = tt.load %y : !tt.ptr<i32>
    %3 = tt.addptr %z, %2 : !tt.ptr<f32>, i32
    tt.store %3, %1 : !tt.ptr<f32>""") == ([0, 1], [3])


def test_descriptors() -> None:
    assert of_body(POINTERS, """
    %a = tt.make_tensor_descriptor %x, [%n, %n], [%s, %c1] : <f32>, <tensor<8x8xf32>>
    %b = tt.make_tensor_descriptor %y, [%n, %n], [%s, %c1] : <f32>, <tensor<8x8xf32>>
    %t = tt.descriptor_load %a[%i, %j] : !tt.tensordesc<tensor<8x8xf32>> -> tensor<8x8xf32>
    tt.descriptor_store %b[%i, %j], %t : !tt.tensordesc<tensor<8x8xf32>>, tensor<8x8xf32>
    tt.descriptor_reduce add, %z[%i], %t : !tt.tensordesc<tensor<8xf32>>, f32""") == ([0], [1, 3])


def test_copies_to_shared_memory_read() -> None:
    assert of_body(POINTERS, """
    %0 = tt.splat %x : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>>
    %1 = ttg.async_copy_global_to_local %0, %s : tensor<8x!tt.ptr<f32>> -> !ttg.memdesc<8xf32>
    tt.store %z, %v : !tt.ptr<f32>""") == ([0], [3])


def test_atomics_read_and_write() -> None:
    assert of_body(POINTERS, """
    %0 = tt.atomic_rmw fadd, acq_rel, gpu, %y, %v, %true : (!tt.ptr<f32>, f32, i1) -> f32
    %1 = tt.atomic_cas acq_rel, gpu, %z, %n, %v : (!tt.ptr<i32>, i32, i32) -> i32""") == ([1, 3], [1, 3])


def test_a_loop_carries_pointers_in_their_places() -> None:
    # The two pointers swap in each iteration, so both are read and written.
    swapped = of_body(POINTERS, """
    %r:3 = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero, %p = %x, %q = %y) -> (f32, !ptr, !ptr)  : i32 {
      %v = tt.load %p : !tt.ptr<f32>
      tt.store %q, %v : !tt.ptr<f32>
      scf.yield %v, %q, %p : f32, !tt.ptr<f32>, !tt.ptr<f32>
    } {tt.num_stages = 2 : i32}""")
    assert swapped == ([0, 1], [0, 1])
    advanced = of_body(POINTERS, """
    %r:3 = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero, %p = %x, %q = %y) -> (f32, !ptr, !ptr)  : i32 {
      %v = tt.load %p : !tt.ptr<f32>
      %p2 = tt.addptr %p, %n : !tt.ptr<f32>, i32
      scf.yield %v, %p2, %q : f32, !tt.ptr<f32>, !tt.ptr<f32>
    }
    tt.store %r#2, %r#0 : !tt.ptr<f32>""")
    assert advanced == ([0], [1])


def test_branches_and_while() -> None:
    assert of_body(POINTERS, """
    %p = scf.if %c -> (!tt.ptr<f32>) {
      scf.yield %x : !tt.ptr<f32>
    } else {
      scf.yield %y : !tt.ptr<f32>
    }
    %v = tt.load %p : !tt.ptr<f32>
    scf.if %c {
      tt.store %z, %v : !tt.ptr<f32>
    }""") == ([0, 1], [3])
    assert of_body(POINTERS, """
    %w = scf.while (%a = %x) : (!tt.ptr<f32>) -> !tt.ptr<f32> {
      %v = tt.load %a : !tt.ptr<f32>
      scf.condition(%c) %a : !tt.ptr<f32>
    } do {
    ^bb0(%b: !tt.ptr<f32>):
      tt.store %b, %v : !tt.ptr<f32>
      scf.yield %y : !tt.ptr<f32>
    }""") == ([0, 1], [0, 1])


def test_blocks_and_calls() -> None:
    assert of_body(POINTERS, """
    cf.cond_br %c, ^bb1(%x : !tt.ptr<f32>), ^bb2
  ^bb1(%p: !tt.ptr<f32>):
    tt.store %p, %v : !tt.ptr<f32>
    tt.return
  ^bb2:
    %u = tt.load %y : !tt.ptr<f32>""") == ([1], [0])
    callee = """  tt.func private @helper(%a: !tt.ptr<f32>, %b: !tt.ptr<f32>) -> !tt.ptr<f32> {
    %v = tt.load %b : !tt.ptr<f32>
    tt.return %a : !tt.ptr<f32>
  }
"""
    assert of_body(POINTERS, """
    %p = tt.call @helper(%z, %x) : (!tt.ptr<f32>, !tt.ptr<f32>) -> !tt.ptr<f32>
    tt.store %p, %v : !tt.ptr<f32>""", callee) == ([0], [3])


def test_an_unknown_function_is_an_error() -> None:
    with pytest.raises(ValueError, match="must hold the function 'other'"):
        effects.of_ttir("module {\n}\n", "other")
    with pytest.raises(ValueError, match="must hold the entry"):
        effects.of_ptx("", "other")


PTX = """
.visible .entry _Z1kPKfPfi(
\t.param .u64 .ptr .align 1 _Z1kPKfPfi_param_0,
\t.param .u64 .ptr .align 1 _Z1kPKfPfi_param_1,
\t.param .u32 _Z1kPKfPfi_param_2,
\t.param .u64 _Z1kPKfPfi_param_3
)
{
\tld.param.b64 \t%rd1, [_Z1kPKfPfi_param_0];
\tld.param.b64 \t%rd2, [_Z1kPKfPfi_param_1];
\tld.param.b32 \t%r1, [_Z1kPKfPfi_param_2];
\tld.param.b64 \t%rd9, [_Z1kPKfPfi_param_3];
\tcvta.to.global.u64 \t%rd3, %rd1;
\tcvta.to.global.u64 \t%rd4, %rd2;
\tmad.wide.s32 \t%rd5, %r1, 4, %rd3;
$L__BB0_1:
\tld.global.nc.v4.f32 \t{%f1, %f2, %f3, %f4}, [%rd5+16];
\tadd.s64 \t%rd6, %rd4, %rd8;
\tst.shared.f32 \t[%r4], %f1;
@%p1 st.global.v2.f32 \t[%rd6], {%f1, %f2};
\tred.global.add.f32 \t[%rd9], %f3;
@%p2 bra \t$L__BB0_1;
\tret;
}
"""


def test_ptx() -> None:
    found = effects.of_ptx(PTX, "_Z1kPKfPfi")
    assert (sorted(found.reads), sorted(found.writes)) == ([0, 3], [1, 3])
