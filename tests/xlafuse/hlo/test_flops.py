"""FLOPs against counts by hand; test_cost_analysis.py compares them with XLA's own."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlafuse.hlo import gpu_program


def _flops(shape: str, call: str, *operands: str, functions: str = "") -> int | None:
    names = [f"%x{index}" for index in range(len(operands))]
    parameters = [f"  {name} = {op} parameter({i})" for i, (name, op) in enumerate(zip(names, operands, strict=True))]
    opcode, _, attributes = call.partition(", ")
    body = f"  ROOT %y = {shape} {opcode}({', '.join(names)})" + (f", {attributes}" if attributes else "")
    text = "\n".join(["HloModule m", functions, "ENTRY %main () -> f32[] {", *parameters, body, "}"])
    module = gpu_program.parse(text)
    assert not module.unparsed
    (launch,) = gpu_program.program(module).launches
    return launch.flops


SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
%more (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  %c = f32[] maximum(%a, %b)
  ROOT %d = f32[] multiply(%c, %b)
}"""


@pytest.mark.parametrize(
    ("shape", "call", "operands", "expected"),
    [
        ("f32[3,5]", "exponential", ["f32[3,5]"], 15),
        ("bf16[3,5]", "convert", ["f32[3,5]"], 15),
        ("f32[3,5]", "copy", ["f32[3,5]"], 0),
        ("f32[3]", "reduce, dimensions={1}, to_apply=%sum", ["f32[3,5]", "f32[]"], 12),
        ("f32[3]", "reduce, dimensions={1}, to_apply=%more", ["f32[3,5]", "f32[]"], 24),
        ("f32[3]", "reduce, dimensions={1}, to_apply=%unknown", ["f32[3,5]", "f32[]"], None),
        ("f32[6]", "reduce-window, window={size=3 stride=1}, to_apply=%sum", ["f32[8]", "f32[]"], 12),
        ("f32[9]", "scatter, to_apply=%sum", ["f32[9]", "s32[4,1]", "f32[4]"], 4),
        ("f32[1000]", "sort, dimensions={0}, to_apply=%sum", ["f32[1000]"], 10_000),
        ("f32[4,6]", "dot, lhs_contracting_dims={1}, rhs_contracting_dims={0}", ["f32[4,5]", "f32[5,6]"], 240),
        ("f32[7,4,6]", "dot, lhs_batch_dims={0}, lhs_contracting_dims={2}", ["f32[7,4,5]", "f32[7,5,6]"], 7 * 240),
        ("f32[4,6]", "dot, lhs_contracting_dims={}, rhs_contracting_dims={}", ["f32[4]", "f32[6]"], 48),
        ("f32[4,6]", "dot, lhs_contracting_dims={2}", ["f32[4,5]", "f32[5,6]"], None),
        (
            "bf16[4,6]", "scaled-dot, lhs_contracting_dims={1}",
            ["f8e4m3fn[4,64]", "f8e4m3fn[64,6]", "f8e8m0fnu[4,2]", "f8e8m0fnu[2,6]"], 4 * 6 * 64 * 2,
        ),
        ("f32[10,6]", "ragged-dot, lhs_contracting_dims={1}", ["f32[10,5]", "f32[3,5,6]", "s32[3]"], 600),
        ("f32[3,5,6]", "ragged-dot, lhs_contracting_dims={0}", ["f32[10,5]", "f32[10,6]", "s32[3]"], 600),
        ("f32[3]", "mystery", ["f32[3]"], None),
        ("c64[8]", "fft, fft_type=FFT, fft_length={8}", ["c64[8]"], None),
    ],
)
def test_instructions_against_counts_by_hand(shape: str, call: str, operands: list[str], expected: int | None) -> None:
    assert _flops(shape, call, *operands, functions=SUM) == expected


def _custom_call(target: str, config: object) -> str:
    return f'custom-call, custom_call_target="{target}", backend_config={json.dumps(config, separators=(",", ":"))}'


def _contracting(*dimensions: int) -> dict[str, object]:
    return {"lhs_batch_dimensions": [], "lhs_contracting_dimensions": [str(d) for d in dimensions]}


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_cublas(target: str) -> None:
    call = _custom_call(target, {"gemm_backend_config": {"dot_dimension_numbers": _contracting(0), "beta": 1}})
    shapes = ["f8e4m3fn[64,16]", "f8e4m3fn[64,8]", "bf16[16,8]"]
    assert _flops("(bf16[16,8], s8[4096])", call, *shapes) == 2 * 64 * 16 * 8
    assert _flops("bf16[16,8]", _custom_call(target, {}), *shapes) is None


@pytest.mark.parametrize(("target", "products"), [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)])
def test_cudnn_attention(target: str, products: int) -> None:
    batch, heads, rows, columns, size = 2, 3, 16, 32, 8
    config = {
        "cudnn_fmha_backend_config": {
            "bmm1_dot_dimension_numbers": _contracting(3),
            "intermediate_tensor_shape": {"dimensions": [str(d) for d in (batch, heads, rows, columns)]},
            "mask_type": "CAUSAL",
        }
    }
    query, key = f"bf16[{batch},{rows},{heads},{size}]", f"bf16[{batch},{columns},{heads},{size}]"
    flops = _flops(f"({query}, u8[256])", _custom_call(target, config), query, key, key)
    assert flops == products * batch * heads * rows * columns * size  # half of the scores
    inner = config["cudnn_fmha_backend_config"]
    for mask, window, halves in (("NO_MASK", 0, 2), ("PADDING_CAUSAL", 0, None), ("CAUSAL", 8, None)):
        changed = {"cudnn_fmha_backend_config": inner | {"mask_type": mask, "sliding_window_length": window}}
        flops = _flops(f"({query}, u8[256])", _custom_call(target, changed), query, key, key)
        assert flops == (halves and halves * products * batch * heads * rows * columns * size)


@pytest.mark.parametrize("window", [1, 8, 16, 64])
def test_cudnn_attention_in_a_window_counts_the_scores_that_it_keeps(window: int) -> None:
    config = {"cudnn_fmha_backend_config": {
        "intermediate_tensor_shape": {"dimensions": ["2", "3", "16", "16"]}, "mask_type": "CAUSAL",
        "sliding_window_length": window,
    }}
    query = "bf16[2,16,3,8]"
    flops = _flops(f"({query}, u8[256])", _custom_call("__cudnn$fmhaSoftmax", config), query, query, query)
    kept = sum(row + 0.5 if row < window else window for row in range(16))  # the diagonal counts half
    assert flops == pytest.approx(4 * 2 * 3 * 8 * kept)


WINDOW = "window={{size={kernel} stride={stride} pad={low}_{high} lhs_dilate={base} rhs_dilate={dilation}}}"


@given(
    st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.integers(-1, 3), st.integers(0, 3), st.integers(1, 3),
    st.integers(1, 3),
)
def test_convolutions_count_only_elements_of_the_input(
    inputs: int, kernel: int, stride: int, low: int, high: int, base: int, dilation: int
) -> None:
    padded = (inputs - 1) * base + 1 + low + high
    outputs = max(0, (padded - ((kernel - 1) * dilation + 1)) // stride + 1)
    reads = sum(
        (at := o * stride - low + k * dilation) % base == 0 and 0 <= at // base < inputs
        for o, k in itertools.product(range(outputs), range(kernel))
    )
    window = WINDOW.format(kernel=kernel, stride=stride, low=low, high=high, base=base, dilation=dilation)
    left, right, result = f"f32[2,{inputs},6]", f"f32[{kernel},3,8]", f"f32[2,{outputs},8]"
    call = f"convolution, {window}, dim_labels=b0f_0io->b0f, feature_group_count=2"
    assert _flops(result, call, left, right) == 2 * 2 * 3 * 8 * reads
    attributes = f"{window}, dim_labels=b0f_0io->b0f, feature_group_count=2"
    forward = f'custom-call, custom_call_target="__cudnn$convForward", {attributes}'
    backward = f'custom-call, custom_call_target="__cudnn$convBackwardInput", {attributes}'
    weights = f'custom-call, custom_call_target="__cudnn$convBackwardFilter", {attributes}'
    assert _flops(f"({result}, u8[64])", forward, left, right) == 2 * 2 * 3 * 8 * reads
    assert _flops(f"({left}, u8[64])", backward, result, right) == 2 * 2 * 3 * 8 * reads
    assert _flops(f"({right}, u8[64])", weights, left, result) == 2 * 2 * 3 * 8 * reads


def test_a_convolution_without_window_dimensions_is_a_product() -> None:
    assert _flops("f32[4,6]", "convolution, dim_labels=bf_io->bf", "f32[4,5]", "f32[5,6]") == 240


def test_a_fusion_is_the_sum_of_its_parts_or_unknown() -> None:
    body = """%body (p: f32[4,5], q: f32[5,6]) -> f32[4,6] {
  %p = f32[4,5]{1,0} parameter(0)
  %q = f32[5,6]{1,0} parameter(1)
  %n = f32[4,5]{1,0} negate(%p)
  %d = f32[4,6]{1,0} dot(%n, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = f32[4,6]{1,0} tanh(%d)
}"""
    call = "fusion, kind=kCustom, calls=%body"
    assert _flops("f32[4,6]", call, "f32[4,5]", "f32[5,6]", functions=body) == 20 + 240 + 24
    unknown = body.replace("tanh(%d)", "mystery(%d)")
    assert _flops("f32[4,6]", call, "f32[4,5]", "f32[5,6]", functions=unknown) is None
