"""One kernel of emitted code: the layouts of its arguments, the operations above it, and what is refused."""

import pytest

from xlafuse.triton_side.inductor import kernel_extract

CODE = """# AOT ID: ['0_forward']
# Topologically Sorted Source Nodes: [mul], Original ATen: [aten.mul]
# Graph fragment:
#   %arg0_1 : Tensor "bf16[8, 4][4, 1]cuda:0" = PlaceHolder[target=arg0_1]
#   %mul : Tensor "bf16[8, 4][4, 1]cuda:0"[num_users=1] = call_function[target=OPERATION](OPERANDS)
#   return %mul
triton_poi_fused_mul_0 = async_compile.triton('triton_poi_fused_mul_0', '''
import triton

@triton_heuristics.pointwise(
    size_hints={'x': 32},
    triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*bf16', 'scale': 'fp32', 'xnumel': 'i32'}},
)
@triton.jit
def triton_poi_fused_mul_0(in_ptr0, out_ptr0, scale, xnumel, XBLOCK : tl.constexpr):
    xnumel = 32
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), tmp0, xmask)
''', device_str='cuda')

def call(args):
    arg0_1, = args
    args.clear()
    assert_size_stride(arg0_1, (2, 4, 8), (64, 8, 1))
    buf0 = empty_strided_cuda((8, 4), (4, 1), torch.bfloat16)
    buf1 = buf0; del buf0  # reuse
    triton_poi_fused_mul_0.run(reinterpret_tensor(arg0_1, (8, 4), (8, 1), 4), buf1, -0.5, 32, stream=stream0)
    extern_kernels.mm(buf1, buf1, out=buf1)
    return (buf1, )
""".replace("OPERATION", "torch.ops.aten.mul.Tensor").replace("OPERANDS", "args = (%arg0_1, 2), kwargs = {}")
KERNEL = "triton_poi_fused_mul_0"


def test_views_new_names_and_numbers_among_the_arguments() -> None:
    extracted = kernel_extract.extract(CODE, KERNEL)
    assert extracted.arguments == (
        ("in_ptr0", "read", (8, 4), (8, 1), "bfloat16"), ("out_ptr0", "write", (8, 4), (4, 1), "bfloat16"),
        ("scale", "size", -0.5), ("xnumel", "size", 32),
    )
    assert extracted.operations == (
        "def operations(arg0_1):\n    mul = torch.ops.aten.mul.Tensor(arg0_1, 2)\n    return {'mul': mul}\n"
    )
    assert (extracted.reads, extracted.writes) == ({"arg0_1": "in_ptr0"}, {"mul": "out_ptr0"})
    assert extracted.source.startswith("import triton\n") and extracted.source.endswith("tmp0, xmask)\n")
    assert (extracted.dtype, extracted.notes) == ("bfloat16", ())


@pytest.mark.parametrize("call", ["os.system", "torch.ops.aten.mul.Tensor(os.system('true'))"])
def test_a_fragment_with_other_calls_is_no_check(call: str) -> None:
    extracted = kernel_extract.extract(CODE.replace("torch.ops.aten.mul.Tensor", call), KERNEL)
    assert extracted.operations == "" and "do not say" in extracted.notes[0]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("-0.5, 32", "-0.5, s0", "xnumel is no number"),
        ("'*bf16', 'out", "'*fp4', 'out", "shape or dtype of its argument in_ptr0"),
        (f"    {KERNEL}.run", "    other.run", "does not launch it"),
        (f"{KERNEL} = async_compile.triton(", "other = async_compile.triton(", "a call of a library"),
    ],
)
def test_a_kernel_that_cannot_be_extracted(old: str, new: str, problem: str) -> None:
    assert old in CODE
    with pytest.raises(kernel_extract.NotExtracted, match=problem):
        kernel_extract.extract(CODE.replace(old, new), KERNEL)
