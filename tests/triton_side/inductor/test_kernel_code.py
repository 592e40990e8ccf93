"""A kernel's work by its Triton source: the shapes of code that Inductor 2.13 generates, shortened."""

import pytest

from xlafuse.triton_side.inductor.graph import kind_of
from xlafuse.triton_side.inductor.kernel_code import work_of
from xlafuse.triton_side.inductor.output_code import read_code

TYPES = "'in_ptr0': '*bf16', 'in_ptr1': '*i64', 'out_ptr0': '*bf16', 'out_ptr1': '*fp32'"
SIGNATURE = f"@heuristics({{'signature': {{{TYPES}}}}})"
VALUE = "tmp0 = tl.load(in_ptr0 + (x0), xmask).to(tl.float32)"
INDEX = "tmp1 = tl.load(in_ptr1 + (x0), xmask)"


def work(*lines: str, heuristic: str = "pointwise") -> str | None:
    body = ["x0 = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)", "xmask = x0 < xnumel", *lines]
    source = "\n    ".join([f"{SIGNATURE}\ndef k(in_ptr0, in_ptr1, out_ptr0, out_ptr1, xnumel, XBLOCK):", *body])
    return work_of(source, "k", heuristic)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([VALUE, "tl.store(out_ptr0 + (x0), tmp0, xmask)"], "copy"),
        (  # a concatenation, or a pad
            [VALUE, "tmp2 = tl.full([XBLOCK], 0.0, tl.float32)", "tmp3 = x0 < 8", "tmp4 = tl.where(tmp3, tmp0, tmp2)",
             "tl.store(out_ptr0 + (x0), tmp4, xmask)"], "copy",
        ),
        ([VALUE, "tl.store(out_ptr1 + (x0), tmp0, xmask)"], "elementwise"),  # converts to float32
        ([VALUE, INDEX, "tmp2 = tl.where(tmp1 > 0, tmp0, 0.0)", "tl.store(out_ptr0 + (x0), tmp2)"], "elementwise"),
        ([VALUE, "tmp2 = tl_math.sin(tmp0)", "tl.store(out_ptr0 + (x0), tmp2, xmask)"], "elementwise"),
        (["tmp0 = tl.full([1], 0.0, tl.float32)", "tl.store(out_ptr0 + (x0), tmp0, xmask)"], "elementwise"),
        ([INDEX, "tmp2 = tl.load(in_ptr0 + (tmp1 + 8*x0))", "tl.store(out_ptr0 + (x0), tmp2, xmask)"], "elementwise"),
        ([VALUE, INDEX, "tl.atomic_add(out_ptr0 + (x0 + 8*tmp1), tmp0, xmask, sem='relaxed')"], "scatter"),
        ([VALUE, INDEX, "tmp2 = tmp1 + 4", "tl.store(out_ptr0 + (x0 + 8*tmp2), tmp0, xmask)"], "scatter"),
        (["return"], None),
    ],
    ids=["copy", "concatenation", "conversion", "mask", "sine", "fill", "gather", "atomic", "indirect", "nothing"],
)
def test_the_work_of_generated_code(lines, expected):
    assert work(*lines) == expected


def test_a_reduction_and_code_that_is_no_python():
    lines = [VALUE, "tmp2 = tl.sum(tmp0, 1)[:, None]", "tl.store(out_ptr1 + (x0), tmp2, xmask)"]
    assert work(*lines, heuristic="persistent_reduction") == "reduction"
    assert work_of("def k(:", "k", "pointwise") is None


def test_inductors_kernels_beside_a_users_are_not_custom():
    """Inductor's names for the copy of an argument include the user's kernel."""
    operations = {"aten.clone", "triton_kernel_wrapper_mutation"}

    def kind(by_code):
        return kind_of("k", operations, operations, by_code, is_template=False, is_extern=False, is_reduction=False)

    code = (
        "k = async_compile.triton('k', '''\n"
        "@triton_heuristics.{}(triton_meta={{'signature': {{'in_ptr0': '*fp32', 'out_ptr0': '*fp32'}}}})\n"
        "def k(in_ptr0, out_ptr0, xnumel):\n    tl.store(out_ptr0 + x0, tl.load(in_ptr0 + x0))\n''')"
    )
    copied, own = (code.format(heuristic) for heuristic in ("pointwise", "user_autotune"))
    assert [kind(read_code(text).definitions["k"].kind) for text in (copied, own)] == ["copy", "custom"]
