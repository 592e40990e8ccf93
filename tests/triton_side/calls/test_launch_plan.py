"""A kernel's IR for another runtime: only buffers are parameters, numbers are constants."""

import struct

import pytest

from xlafuse.triton_side.calls.effects import of_ttir
from xlafuse.triton_side.calls.launch_plan import NotPlain, bound

TTIR = """#loc = loc("kernel.py":3:0)
#loc1 = loc(unknown)
module {
  tt.func public @scale(%out_ptr: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("out_ptr"(#loc)), %n: i32 \
{tt.divisibility = 16 : i32} loc("n"(#loc)), %x_ptr: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("x_ptr"(#loc)), \
%step: i64 loc("step"(#loc)), %factor: f32 loc("factor"(#loc))) attributes {noinline = false} {
    %0 = tt.splat %x_ptr : !tt.ptr<bf16> -> tensor<8x!tt.ptr<bf16>> loc(#loc1)
    %1 = tt.load %0 : tensor<8x!tt.ptr<bf16>> loc(#loc1)
    %2 = tt.splat %out_ptr : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>> loc(#loc1)
    tt.store %2, %1 : tensor<8x!tt.ptr<f32>> loc(#loc1)
    tt.return loc(#loc1)
  } loc(#loc)
} loc(#loc)
"""
PARAMETERS, BUFFERS = ["out_ptr", "n", "x_ptr", "step", "factor"], ["x_ptr", "out_ptr"]
SCALARS = {"n": 4096, "step": -(2**40), "factor": 0.1}


def test_parameters_are_the_buffers_in_the_given_order() -> None:
    text = bound(TTIR, "scale", PARAMETERS, BUFFERS, SCALARS)
    assert (
        "tt.func public @scale(%x_ptr: !tt.ptr<bf16> {tt.divisibility = 16 : i32}, "
        "%out_ptr: !tt.ptr<f32> {tt.divisibility = 16 : i32}) attributes {noinline = false} {\n"
    ) in text
    effects = of_ttir(text, "scale")
    assert effects.reads == {0} and effects.writes == {1}
    assert "loc" not in text


def test_numbers_become_exact_constants() -> None:
    text = bound(TTIR, "scale", PARAMETERS, BUFFERS, SCALARS)
    assert "%n = arith.constant 4096 : i32\n" in text
    assert f"%step = arith.constant -{2**40} : i64\n" in text
    (bits,) = struct.unpack("<I", struct.pack("<f", 0.1))
    assert f"%factor = arith.constant 0x{bits:08X} : f32\n" in text


@pytest.mark.parametrize(("function", "scalars"), [("other", SCALARS), ("scale", {"n": 4096, "step": 1})])
def test_an_argument_that_is_no_number_is_refused(function: str, scalars: dict[str, float]) -> None:
    with pytest.raises(NotPlain):
        bound(TTIR, function, PARAMETERS, BUFFERS, scalars)
