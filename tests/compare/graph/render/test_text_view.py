"""A graph in a terminal: complete, within its columns, and safe with any names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from examples import EAGER, INDUCTOR, STRANGE, XLA
from graph_builder import graph as made
from graph_builder import kernel

from xlafuse.compare.graph import formats
from xlafuse.compare.graph.analyse.align import align
from xlafuse.compare.graph.analyse.diff import diff
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Reason
from xlafuse.compare.graph.render import align_view, diff_view, missed_view, text_view

CEILINGS = Ceilings({0.5: 1e12}, {}, launch_us=1.0)


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").replace("├──", " ").replace("└──", " ").split())


@pytest.mark.parametrize("graph", [XLA, INDUCTOR, EAGER, STRANGE], ids=["xla", "inductor", "eager", "strange"])
@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_line_is_wider_than_the_terminal_nor_moves_its_cursor(graph: FusionGraph, width: int) -> None:
    text = text_view.text(graph, width)
    assert max(map(len, text.splitlines())) <= width
    assert not [c for c in text if ord(c) < 32 and c != "\n" or c in "\x7f\x9b\u202e"]


@pytest.mark.parametrize("width", [40, 80])
def test_every_other_view_is_as_safe(width: int) -> None:
    graphs = [STRANGE, XLA]
    views = [
        text_view.kernel(STRANGE, 0, width=width), text_view.stage(STRANGE, "st<i>age", [0], width=width),
        missed_view.tree(STRANGE, CEILINGS, "h200"), diff_view.tree("a\x1b[2J", diff(*graphs), *graphs),
        align_view.table(["a\x1b[2J", "b"], graphs, align(graphs)),
    ]
    for view in views:
        text = text_view.render(view, width)
        assert max(map(len, text.splitlines())) <= width
        assert not [c for c in text if ord(c) < 32 and c != "\n" or c in "\x7f\x9b\u202e"]


def test_kernels_operations_lines_and_costs() -> None:
    text = flat(text_view.text(XLA))
    for part in (
        "swiglu_mlp/llama-8b/bf16/train/xla", "xla for h200, jax 0.11.2", "forward: 6 kernels bytes share µs share",
        "1. input_convert_reduce_fusion 50.3 MB 4% 11.4 1%", "reduction · reads 16.8 MB, writes 33.6 MB · device",
        "norm/mean_square convert_element_type xlafuse/blocks/rmsnorm.py:10",
        "mul, reduce_sum xlafuse/blocks/rmsnorm.py:11", "3. custom-call.1 193 MB 14% 304 22%", "backward: 2 kernels",
        "not autotuned", "saved for backward: 2 buffers, 117 MB", "silu bf16[2048,14336] 58.7 MB",
    ):
        assert part in text, part


def test_markup_in_names_is_text() -> None:
    assert "[bold]x[/bold]" in text_view.text(STRANGE)


def test_unknown_values_are_shown_as_unknown() -> None:
    text = flat(text_view.text(STRANGE))
    assert "reads ?, writes ?" in text
    assert "launches depend on data" in text
    assert "1 thing could not be read" in text
    assert "µs" not in text


def test_operations_without_kernels() -> None:
    text = flat(text_view.text(EAGER))
    assert "2 operations" in text
    assert "cube aten.mul gelu.py:3" in text
    assert "kernel" in text and "forward" not in text


def test_a_large_graph_shows_its_costly_kernels_and_counts_the_others() -> None:
    many = 500
    kernels = tuple(
        Kernel(f"k{i}", "elementwise", inputs=(Access("x", 1000 if i == 250 else 1),)) for i in range(many)
    )
    graph = FusionGraph("large", "xla", kernels, (Buffer("x", (1000,), "s8", 1000, "input"),))
    text = flat(text_view.text(graph))
    assert "251. k250" in text
    hidden = sum(int(words.split()[-1]) for words in text.split(" cheaper kernels; --all shows them")[:-1])
    assert hidden == many - text_view.MOST_KERNELS
    assert "500. k499" in flat(text_view.render(text_view.overview(graph, every=True)))


def test_one_kernel() -> None:
    text = flat(text_view.render(text_view.kernel(XLA, 1)))
    for part in (
        "2. loop_convert_multiply_fusion", "profilers call it loop_convert_multiply_fusion",
        "x_f32 f32[2048,4096] 33.6 MB intermediate, from 1", "h bf16[2048,4096] 16.8 MB intermediate, to 3, 4",
        "input_convert_reduce_fusion (producer): reduction: not fusing a reduction into its consumer",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("abc", 3, "abc"), ("abcdefgh", 5, "ab…gh"), ("abcdefgh", 4, "ab…h"), ("", 9, "unnamed"), ("a\x1bb", 9, "a b")],
)
def test_names_are_shortened_in_the_middle(text: str, width: int, short: str) -> None:
    assert formats.name(text, width) == short


@pytest.mark.parametrize(
    ("line", "short"), [("a.py:1", "a.py:1"), ("/home/someone/project/mlp.py:26", "…/project/mlp.py:26"),
                        ("averylongfilename_without_folders.py:7", "…me_without_folders.py:7")],
)
def test_places_keep_their_end(line: str, short: str) -> None:
    assert formats.place(line, 24) == short


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (8192, "8.19 kB"), (999_999, "1.00 MB"), (58720256, "58.7 MB"), (None, "?"),
     (117440512, "117 MB"), (1.5e12, "1.50 TB")],
)
def test_sizes(count: float | None, text: str) -> None:
    assert formats.size(count) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(1, 2, "50%"), (1, 1000, "<1%"), (0, 9, "0%"), (1, 0, ""), (None, 9, "")]
)
def test_shares(part: float | None, whole: float, text: str) -> None:
    assert formats.share(part, whole) == text


@pytest.mark.parametrize(("count", "text"), [(2.406e11, "241 GFLOP"), (12, "12 FLOP"), (1e15, "1.00 PFLOP")])
def test_flops(count: float, text: str) -> None:
    assert formats.flops(count) == text


@pytest.mark.parametrize(
    ("mangled", "text"),
    [
        ("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorIfffNS0_15binary_internal10MulFunctorI"
         "fEEEESt5arrayIPcLm2EEEEviT0_T1_", "vectorized_elementwise_kernel MulFunctor"),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_15exp_kernel_cudaERNS_18TensorIteratorBaseEENKUlvE0_"
         "clEvENKUlvE0_clEvEUlfE_St5arrayIPcLm2EEEEviT0_T1_", "vectorized_elementwise_kernel exp_kernel_cuda"),
        ("_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_7MeanOpsIffffEEjfLi4ELi4EEEEEvT1_",
         "reduce_kernel MeanOps"),
        ("_ZN7cutlass7Kernel2I49cutlass_75_tensorop_s1688gemm_f16_64x64_nn_align1EEvNT_6ParamsE",
         "cutlass_75_tensorop_s1688gemm_f16_64x64_nn_align1"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >()",
         "multi_tensor_apply_kernel FusedAdamMathFunctor"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", "convert_dq_to_16bits"),
        ("_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE", "ncclDevKernel_AllGather_RING_LL"),
        ("nvjet_tst_128x256", "nvjet_tst_128x256"), ("_Z9999999999", "_Z9999999999"), ("_Z", "_Z"),
    ],
)
def test_runtime_names_are_shortened_to_their_telling_words(mangled: str, text: str) -> None:
    assert formats.runtime(mangled) == text


def test_an_unknown_total_has_no_shares() -> None:
    known = kernel("k", "elementwise", "s:mul", "x", "y")
    unknown = Kernel("u", "custom", inputs=None, outputs=())
    assert "100%" in flat(text_view.text(made(known)))
    text = flat(text_view.text(made(known, unknown)))
    assert "%" not in text and "at least 8.00 kB (1 unknown)" in text


def test_unread_buffers_are_listed_separately() -> None:
    forward = kernel("f", "elementwise", "s:exp", "x", "m dead r lost")
    then = kernel("g", "elementwise", "s:mul", "m", "y")
    backward = kernel("b", "elementwise", "s:mul!", "dy r", "dx", phase="backward")
    graph = made(forward, then, backward, saved="r lost", intermediate="m dead", output="y dx")
    kept = dict(text_view.buffer_lists(graph))
    assert {title: [buffer.name for buffer in buffers] for title, buffers in kept.items()} == {
        "saved for backward": ["r"], "saved for backward, but never read": ["lost"],
        "written by one kernel for another": ["m"], "written and never read": ["dead"],
    }


def test_kernels_of_one_operation_show_their_runtime_names() -> None:
    made_of = [Kernel("aten.sum", "reduction", runtime_name=name, inputs=(), outputs=()) for name in ("first", "rest")]
    text = flat(text_view.text(made(*made_of)))
    assert "reduction · reads 0 B, writes 0 B · first" in text and "· rest" in text


def test_a_long_sentence_is_not_cut() -> None:
    sentence = "moves 12.5 MB " * 40
    assert flat(text_view.render(text_view.overview(XLA, remarks=[sentence]))).count("moves 12.5 MB") == 40


def test_a_kernel_faster_than_its_roofline_time_says_so() -> None:
    slow = kernel("exp", "elementwise", "s:exp", "x", "m", device_time_us=9.0)
    fast = kernel("mul", "elementwise", "s:mul", "m", "y", device_time_us=4.0)
    ceilings = Ceilings({0.5: 1e9}, {})
    lines = text_view.totals_lines(made(slow, fast), ceilings)
    assert any(line.startswith("kernel 2 is faster than its roofline time: part of the data") for line in lines)
    assert not any("faster" in line for line in text_view.totals_lines(made(slow), ceilings))
    both = text_view.totals_lines(made(fast, fast), ceilings)
    assert any("kernels 1, 2 are faster than their roofline times" in line for line in both)
    views = [flat(text_view.render(text_view.kernel(made(slow, fast), i, ceilings=ceilings))) for i in (0, 1)]
    assert "roofline time 8.00 µs" in views[0] and "faster" not in views[0]
    assert "roofline time 8.00 µs; the kernel is faster: part of the data came from L2" in views[1]


def test_names_are_not_cut_where_there_is_room() -> None:
    long = "a_buffer_of_thirty_characters_"
    graph = made(kernel("k", "elementwise", "s:mul@1", "x", long), kernel("l", "copy", "", long, "y"))
    assert long in text_view.text(graph)


def test_lists_of_facts_are_words() -> None:
    fused = kernel("k", "elementwise", "s:mul", "x", "y", facts={"opcodes": ["multiply", "add"], "grid": [8, 1, 1]})
    text = flat(text_view.render(text_view.kernel(made(fused), 0)))
    assert "opcodes: multiply, add" in text and "grid: 8, 1, 1" in text


def test_why_says_where_kernels_come_from_without_stages() -> None:
    pair = kernel("k", "elementwise", ":mul@1", "x", "m"), kernel("l", "elementwise", ":exp@2", "m", "y")
    reasons = (Reason("k", "l", "shape", "no", "xla", 8000),)
    view = missed_view.tree(replace(made(*pair), reasons=reasons), CEILINGS, "h200")
    assert "model.py:1 → model.py:2" in flat(text_view.render(view))


def test_a_changed_buffer_has_the_place_that_every_view_gives_it() -> None:
    one = made(kernel("k", "elementwise", "s:mul@1 s:exp@2 s:reshape@3", "x", "y"))
    first = kernel("k", "elementwise", "s:mul@1 s:reshape@3", "x", "m")
    two = made(first, kernel("l", "elementwise", "s:exp@2", "m", "y"))
    text = flat(text_view.render(diff_view.tree("t", diff(one, two), one, two)))
    assert "written to memory now: 1 buffer, 4.00 kB m f32[1000] +4.00 kB model.py:1" in text


def test_a_count_of_what_a_list_hides_says_of_what() -> None:
    many = made(*[kernel(f"k{i}", "elementwise", f"s{i}:mul@{i}", f"x{i}", f"y{i}") for i in range(43)])
    few = made(kernel("other", "copy", "", "x0", "y0"))
    legend = text_view.render(align_view.table(["a", "b"], [many, few], align([many, few])))
    changes = text_view.render(diff_view.tree("t", diff(few, many), few, many))
    for text in (legend, changes):
        (counted,) = re.findall(r"… and [\d,]+ more (.*)", text)
        assert "kernels" in counted
