"""Findings: each sentence appears with its structure and not without it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from graph_builder import graph, kernel

from xlafuse.compare import targets
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.findings.collect import findings
from xlafuse.compare.graph.findings.finding import Finding
from xlafuse.compare.graph.model import Access, FusionGraph, Reason
from xlafuse.compile.environment import find_cuda_tools
from xlafuse.hlo import gpu_program

NORM = kernel("norm", "reduction", "norm:mul@1 norm:mean@1", "x", "h")
GATE = kernel("gate", "gemm", "gate:dot@2", "h wg", "g")
ACT = kernel("act", "elementwise", "act:exp@3 act:mul@3", "g", "a")
DOWN = kernel("down", "gemm", "down:dot@4", "a wd", "y")


def texts(found: list[Finding], kind: str) -> list[str]:
    return [one.text for one in found if one.kind == kind]


def one(graphs: FusionGraph, kind: str) -> list[str]:
    return texts(findings({"xla": graphs}), kind)


def test_a_copy_that_joins_two_arrays_for_a_product() -> None:
    joined = kernel("cat", "copy", ":concatenate", "inputs__wg__.1 inputs__wu__.1", "w")
    product = kernel("dot", "gemm", "gate:dot@2", "h w", "g")
    assert one(graph(NORM, joined, product, sizes="w=2000"), "copy") == [
        "XLA joins wg and wu into one operand for the product in gate; one copy kernel moves 16.0 kB."
    ]
    assert one(graph(NORM, GATE), "copy") == []


def test_a_lookup_joins_nothing() -> None:
    found = graph(kernel("gather", "copy", "e:gather", "ids table", "y"), sizes="ids=10")
    found = replace(found, buffers=tuple(replace(b, dtype="s32" if b.name == "ids" else "bf16") for b in found.buffers))
    assert one(found, "copy") == ["XLA looks up ids in table for an output; one copy kernel moves 8.04 kB."]


def _with_counter(found: FusionGraph) -> FusionGraph:
    """Make `i` a single number, as a loop's counter is."""
    buffers = (replace(b, shape=(), dtype="s32") if b.name == "i" else b for b in found.buffers)
    return replace(found, buffers=tuple(buffers))


def test_a_slice_by_the_loops_counter_joins_nothing() -> None:
    step = kernel("step", "elementwise", ":add", "j", "i")
    part = kernel("slice", "copy", "layer:dynamic_slice", "ws i", "w", launches=8)
    part = replace(part, inputs=(Access("ws", 4000), Access("i", 4)))
    product = kernel("dot", "gemm", "gate:dot@2", "h w", "g", launches=8)
    found = _with_counter(graph(step, part, product, sizes="ws=8000 i=1 j=1"))
    assert one(found, "copy") == ["XLA copies a part of ws for the product in gate; one copy kernel moves 64.0 kB."]


def test_a_store_at_the_loops_counter_joins_nothing() -> None:
    step = kernel("step", "elementwise", ":add", "j", "i")
    store = kernel("store", "copy", ":dynamic_update_slice", "h i", "", launches=8)
    store = replace(store, outputs=(Access("ys", 4000),))
    found = _with_counter(graph(step, NORM, store, sizes="ys=8000 i=1 j=1", output="ys"))
    assert one(found, "copy") == [
        "XLA stores the result of norm in a part of an array for an output; one copy kernel moves 64.0 kB."
    ]


def test_two_arrays_that_one_kernel_copies_are_not_joined() -> None:
    pair = graph(kernel("two", "copy", ":transpose :transpose", "a b", "c d"))
    assert one(pair, "copy") == ["XLA copies a and b for an output; one copy kernel moves 16.0 kB."]


def test_copies_are_named_by_what_they_copy_and_for_whom() -> None:
    copies = graph(
        NORM, kernel("t", "copy", "", "h", "t"), kernel("a", "elementwise", "act:exp@3", "t", "y"),
        kernel("o", "copy", "", "h", "out"), kernel("p", "copy", "", "h", "out2"),
    )
    assert one(copies, "copy") == [
        "XLA copies the result of norm for an output; two copy kernels move 16.0 kB.",
        "XLA copies the result of norm for act; one copy kernel moves 8.00 kB.",
    ]


def test_a_kernel_launched_twice_for_the_same_values() -> None:
    twice = graph(
        NORM, kernel("1", "elementwise", "act:mul@3", "h w", "a"), kernel("2", "elementwise", "act:mul@3", "h w", "b")
    )
    assert one(twice, "duplicate") == [
        "XLA launches mul in act twice, from the same arrays to the same values. One launch would move 12.0 kB less."
    ]
    assert one(twice, "recomputed") == []  # said already
    other = graph(
        NORM, kernel("1", "elementwise", "act:mul@3", "h w", "a"), kernel("2", "elementwise", "act:mul@3", "h v", "b")
    )
    assert one(other, "duplicate") == []


def test_kernels_that_read_other_elements_of_one_array_are_no_duplicates() -> None:
    def thirds(*codes: str, **facts: object) -> object:
        return graph(
            NORM, *(
                replace(made, facts={"call": code, **facts}, inputs=tuple(replace(a, bytes=1000) for a in made.inputs))
                for code, made in zip(
                    codes, (kernel(n, "elementwise", "act:mul@3", "h", f"o{n}") for n in "12"), strict=True
                )
            )
        )

    assert one(thirds("same", "same"), "duplicate")
    apart = thirds("first", "second")
    assert one(apart, "duplicate") == one(apart, "recomputed") == []


AGAIN = (
    kernel("1", "elementwise", "act:exp@3 act:mul@3 act:sub@4", "g", "a", phase="backward"),
    kernel("2", "elementwise", "act:exp@3 act:mul@3", "g d", "b", phase="backward"),
    kernel("3", "elementwise", "act:exp@3 act:add@5", "g e", "c", phase="backward"),
)


def test_a_chain_that_several_kernels_compute_again_and_another_compiler_once() -> None:
    once = kernel("0", "elementwise", "act:exp@3 act:mul@3 act:sub@4 act:add@5", "g d e", "a b", phase="backward")
    found = findings({"xla": graph(*AGAIN), "inductor": graph(once)})
    assert texts(found, "recomputed") == [
        "XLA computes act (exp) in three backward kernels. They read 8.00 kB more than once. Inductor uses one kernel.",
        "XLA computes act (mul) in two backward kernels. They read 4.00 kB more than once. Inductor uses one kernel.",
    ]
    assert one(graph(once), "recomputed") == []


def test_several_kernels_of_one_phase_are_never_on_purpose() -> None:
    marked = [replace(k, source_ops=tuple(replace(op, rematerialized=True) for op in k.source_ops)) for k in AGAIN]
    assert one(graph(*marked), "recomputed") == one(graph(*AGAIN), "recomputed")


def test_one_recomputation_in_backward_is_on_purpose() -> None:
    first = kernel("f", "elementwise", "act:exp@3 act:mul@3", "g", "a")
    second = kernel("b", "elementwise", "act:exp@3 act:mul@3", "g da", "dg", phase="backward")
    marked = replace(second, source_ops=tuple(replace(op, rematerialized=True) for op in second.source_ops))
    assert one(graph(first, marked), "recomputed") == [
        "XLA computes act (exp, mul) again in backward, on purpose: it keeps fewer residuals and reads 4.00 kB a "
        "second time."
    ]
    assert one(graph(first, second), "recomputed") == []
    twice = replace(marked, name="b2", outputs=first.outputs)
    assert not any("on purpose" in text for text in one(graph(first, marked, twice), "recomputed"))


def test_a_product_that_checkpointing_launches_again_is_on_purpose_alone() -> None:
    """The launches have equal code, inputs and results."""
    first = kernel("f", "gemm", "gate:mm@3", "g w", "a")
    again = kernel("b", "gemm", "gate:mm@3", "g w", "da", phase="backward")
    marked = replace(again, source_ops=tuple(replace(op, rematerialized=True) for op in again.source_ops))
    assert one(graph(first, marked), "duplicate") == []
    assert ["on purpose" in text for text in one(graph(first, marked), "recomputed")] == [True]
    assert one(graph(first, replace(again, phase="forward")), "duplicate") != []


def test_the_sums_of_a_product_in_parts_are_no_recomputation() -> None:
    split = graph(
        kernel("dot", "gemm", "down:dot@4", "a w", "parts"), kernel("s1", "reduction", "down:dot@4", "parts", "p"),
        kernel("s2", "reduction", "down:dot@4 act:mul@3", "parts", "q"),
    )
    assert one(split, "recomputed") == []


def test_work_inside_a_product_and_where_it_is_not() -> None:
    fused = kernel("down", "gemm", "down:dot@4 residual:add@5", "a wd x", "y")
    apart = (DOWN, kernel("add", "elementwise", "residual:add@5", "y x", "z"))
    graphs = {"inductor": graph(NORM, GATE, ACT, fused), "xla": graph(NORM, GATE, ACT, *apart)}
    assert texts(findings(graphs), "inside a product") == [
        "Inductor computes residual (add) inside the product of down. This saves writing its result and reading it "
        "again: 8.00 kB. XLA uses separate kernels."
    ]
    assert texts(findings(graphs | {"triton": graphs["inductor"]}), "inside a product")[0].startswith(
        "Inductor and Triton compute residual (add)"
    )
    assert one(graph(NORM, GATE, ACT, DOWN), "inside a product") == []


def test_the_stage_of_a_product_may_contain_that_of_its_epilogue() -> None:
    fused = kernel("up", "gemm", "up_proj:dot@4 up:add@5", "a wd x", "y")
    (text,) = one(graph(NORM, GATE, ACT, fused), "inside a product")
    assert text.startswith("XLA computes up (add) inside the product of up_proj.")


def test_a_prologue_saves_the_operand() -> None:
    prologue = kernel("gate", "gemm", "norm:mul@1 gate:dot@2", "h s wg", "g")
    (text,) = one(graph(NORM, prologue, sizes="h=700 s=500 wg=9000 g=5000"), "inside a product")
    assert text == (
        "XLA computes norm (mul) inside the product of gate. This saves writing its operand and reading it again: "
        "4.00 kB."
    )


def test_a_result_that_is_also_written_saves_only_its_read() -> None:
    both = kernel("gate", "gemm", "gate:dot@2 act:gelu@3 :aux", "h wg", "g a")
    (text,) = one(graph(NORM, both), "inside a product")
    assert text == "XLA computes act (gelu) inside the product of gate. This saves reading its result again: 4.00 kB."


def test_an_epilogue_of_two_products_saves_both_results() -> None:
    both = kernel("mlp", "gemm", "gate:dot@2 up:dot@2 act:mul@3", "h wg wu", "a")
    (text,) = one(graph(NORM, both), "inside a product")
    assert text == (
        "XLA computes act (mul) inside the product of gate and up. This saves writing its two results and reading "
        "them again: 16.0 kB."
    )
    kept = kernel("mlp", "gemm", "gate:dot@2 up:dot@2 act:mul@3", "h wg wu", "g u a")
    (text,) = one(graph(NORM, kept), "inside a product")
    assert text.endswith("This saves reading its two results again: 8.00 kB.")


def test_an_array_that_another_graph_keeps_on_chip() -> None:
    scores = kernel("qk", "gemm", "scores:dot@1", "q k", "s")
    softmax = kernel("softmax", "reduction", "softmax:exp@2 softmax:sum@2", "s", "p")
    values = kernel("pv", "gemm", "values:dot@3", "p v", "o")
    flash = kernel("flash", "attention", "scores:dot@1 softmax:exp@2 values:dot@3", "q k v", "o")
    sizes = "s=90000 p=90000"
    found = findings({"eager": graph(scores, softmax, values, sizes=sizes), "triton": graph(flash)})
    assert texts(found, "kept on chip") == [
        "Eager PyTorch moves 1.44 MB between three kernels of scores, softmax and values (f32[90000], 360 kB, written "
        "by scores (model.py:1) and one more). Triton keeps them on chip in one kernel."
    ]
    assert not texts(
        findings({"eager": graph(scores, softmax, values), "xla": graph(scores, softmax, values)}), "kept on chip"
    )


def test_a_kernel_that_multiplies_nothing_keeps_no_product_on_chip() -> None:
    # "gate" names an addition of gradients there, not the product.
    add = kernel("add", "reduction", "gate:add@2 norm:mul@1", "p q", "dx")
    found = findings({"xla": graph(add), "inductor": graph(GATE, kernel("n", "reduction", "norm:mul@1", "g", "dx"))})
    assert texts(found, "kept on chip") == []


def test_the_largest_intermediate_with_its_line() -> None:
    assert one(graph(NORM, GATE, ACT, DOWN, sizes="g=9000"), "largest") == [
        "XLA's largest intermediate is f32[9000], 36.0 kB, written by gate (model.py:2), read by act. Writing and "
        "reading it moves 72.0 kB."
    ]
    assert one(graph(NORM), "largest") == []


def test_operations_tell_the_ends_of_one_line_apart() -> None:
    shifted, scaled = kernel("a", "elementwise", ":exp@15", "x", "e"), kernel("b", "elementwise", ":div@15", "e", "y")
    (found,) = one(graph(shifted, scaled), "largest")
    assert "written by exp (model.py:15), read by div (model.py:15)." in found
    scaled = kernel("b", "elementwise", ":div@15", "e x", "y")  # it reads x again, so the pair costs more than e
    missed = replace(graph(shifted, scaled), reasons=(Reason("a", "b", "shape", "no", "xla", 8000),))
    (found,) = one(missed, "missed")
    assert "exp (model.py:15)" in found and "div (model.py:15)" in found


def test_the_missed_fusion_with_the_largest_saving() -> None:
    residual = kernel("act", "elementwise", "act:exp@3 act:mul@3", "g h", "a")
    plain = graph(NORM, GATE, residual, DOWN)
    reasons = (
        Reason("gate", "act", "gemm", "the producer is a product", "inferred", 8000),
        Reason("norm", "gate", "gemm", "no", "inferred", 4000), Reason("gone", "act", "layout", "no", "xla", 10**9),
    )
    assert one(replace(plain, reasons=reasons), "missed") == [
        "XLA does not fuse the product of gate with the elementwise kernel of act: one side is a matrix product, and "
        "this compiler fuses little or nothing into one. Fusing them would save at most 12.0 kB."
    ]
    assert one(plain, "missed") == []


def test_the_kernels_of_an_rmsnorm_read_their_input_twice() -> None:
    """The row sums alone are too small for a finding."""
    sums = kernel("sums", "reduction", "norm:mean@1", "x", "s")
    scale = kernel("scale", "elementwise", "norm:mul@2", "x s", "y")
    apart = replace(graph(sums, scale, sizes="s=1"), reasons=(Reason("sums", "scale", "reduction", "no", "xla", 8),))
    (found,) = [each for each in findings({"xla": apart}) if each.kind == "missed"]
    assert "Fusing them would save at most 4.01 kB." in found.text
    assert found.buffers == {("xla", "x")} and found.bytes == 4008


def test_a_missed_fusion_about_an_array_that_a_larger_finding_names_is_left_out() -> None:
    """Three kernels read h, and the largest intermediate says so; two of them read x again, too."""
    readers = (kernel(name, "elementwise", f"act:exp@{name}", reads, f"y{name}") for name, reads in (
        ("3", "h x"), ("4", "h"), ("5", "h")
    ))
    apart = replace(
        graph(NORM, *readers, sizes="h=2000"), reasons=(Reason("norm", "3", "reduction", "no", "xla", 8000),)
    )
    kinds = [each.kind for each in findings({"xla": apart}) if ("xla", "h") in each.buffers]
    assert kinds == ["largest"] and one(apart, "missed") == []


def test_residuals_are_compared() -> None:
    backward = kernel("b", "elementwise", "act:mul@3!", "dy g h", "dx", phase="backward")
    much = graph(NORM, GATE, ACT, backward, saved="g h", sizes="g=9000")
    little = graph(NORM, GATE, ACT, backward, saved="h", sizes="g=9000")
    assert texts(findings({"xla": much, "inductor": little}), "saved") == [
        "XLA keeps 40.0 kB for the backward pass (Inductor: 4.00 kB). Writing and reading them moves 72.0 kB more than "
        "Inductor's."
    ]
    assert one(much, "saved") == ["XLA keeps 40.0 kB for the backward pass. Writing and reading them moves 80.0 kB."]
    assert one(graph(NORM, GATE), "saved") == []


def test_intermediates_are_compared_where_there_are_several_graphs() -> None:
    whole = kernel("all", "reduction", ":mul@1 :exp@3 :sub@4", "x", "y")
    apart = graph(
        NORM, kernel("exp", "elementwise", "act:exp@3", "h", "e"), kernel("s", "elementwise", "act:sub@4", "e", "y")
    )
    assert texts(findings({"triton": graph(whole), "xla": apart}), "intermediates") == [
        "XLA writes 8.00 kB of intermediates to memory (Triton: 0 B). Writing and reading them moves 16.0 kB more than "
        "Triton's."
    ]
    assert texts(findings({"xla": apart, "inductor": apart}), "intermediates") == []


def test_a_broadcast_and_a_fill_are_no_copies_of_anything() -> None:
    wide = graph(kernel("b", "copy", "", "w", "wide"), kernel("f", "copy", "", "c", "z"), sizes="w=10", constant="c")
    assert one(wide, "copy") == [
        "XLA fills an array for an output; one copy kernel moves 8.00 kB.",
        "XLA broadcasts w for an output; one copy kernel moves 4.04 kB.",
    ]


def test_constants_are_no_operands_and_conversions_no_copies() -> None:
    pad = graph(kernel("p", "copy", ":pad", "w zero", "wide"), sizes="w=1000 zero=1 wide=1100", constant="zero")
    assert one(pad, "copy") == ["XLA pads w for an output; one copy kernel moves 8.40 kB."]
    cast = graph(kernel("c", "copy", ":_to_copy", "w", "h"))
    narrow = tuple(replace(b, dtype="bf16", bytes=2000) if b.name == "h" else b for b in cast.buffers)
    assert one(replace(cast, buffers=narrow), "copy")[0].startswith("XLA converts w for an output")
    wider = tuple(replace(b, dtype="f64", bytes=8000) if b.name == "h" else b for b in cast.buffers)
    kernels = tuple(replace(each, outputs=(Access("h", 8000),)) for each in cast.kernels or ())
    assert one(replace(cast, kernels=kernels, buffers=wider), "copy")[0].startswith("XLA converts w for an output")


def test_a_copy_that_is_saved_and_never_read() -> None:
    backward = kernel("b", "elementwise", "act:mul@3!", "dy x", "dx", phase="backward")
    (text,) = one(graph(kernel("c", "copy", ":copy", "x", "lost"), backward, saved="lost"), "copy")
    assert text.startswith("XLA copies x for backward, which never reads it; one copy kernel")


def test_the_compilers_own_words_for_an_unknown_reason() -> None:
    reasons = (Reason("gate", "act", "other", "too many users.", "xla", 9000),)
    (text,) = one(replace(graph(NORM, GATE, ACT, DOWN), reasons=reasons), "missed")
    assert "of act: too many users. Fusing" in text
    found = findings({"xla-unfused": replace(graph(NORM, GATE, ACT, DOWN), reasons=reasons)})
    assert "of act: its fusion passes are off. Fusing" in texts(found, "missed")[0]


def test_the_kernel_furthest_above_its_roofline_time_comes_first() -> None:
    slow = replace(ACT, device_time_us=30.0)
    fast = replace(NORM, device_time_us=9.0)
    found = findings({"xla": graph(fast, GATE, slow, DOWN, sizes="g=90000")}, Ceilings({0.5: 1e9}, {}))
    assert [each.kind for each in found].count("above roofline") == 0  # below it
    found = findings({"xla": graph(fast, GATE, slow, DOWN)}, Ceilings({0.5: 1e9}, {}))
    assert found[0].text == (
        "XLA's act takes 30.0 µs; moving its 8.00 kB needs 8.00 µs."
    )
    assert found[0].us == pytest.approx(22.0) and str(found[0]).endswith("8.00 µs. (22.0 µs)")


def test_baselines_and_teaching_kernels_never_lead() -> None:
    slow = graph(replace(NORM, device_time_us=90.0), GATE, replace(ACT, device_time_us=900.0), DOWN, sizes="g=90000")
    fast = graph(replace(NORM, device_time_us=9.0), GATE, ACT, DOWN)
    graphs = {"cuda": slow, "eager": slow, "xla-unfused": slow, "xla": fast}
    for ceilings in (None, Ceilings({0.5: 1e9}, {})):
        about = [each.graphs[0] for each in findings(graphs, ceilings)]
        assert about[0] == "xla" and "xla" not in about[about.count("xla") :]
        assert "cuda" in about


def test_an_operation_of_pytorch_is_named_in_words() -> None:
    softmax = kernel("aten._softmax_backward_data", "library", ":x", "dy y", "dx")
    softmax = replace(softmax, device_time_us=168.0, runtime_name="softmax_warp_backward")
    found = findings({"library": graph(softmax)}, Ceilings({0.5: 1e9}, {}))
    assert found[0].text == "PyTorch's softmax backward takes 168 µs; moving its 12.0 kB needs 12.0 µs."


def test_a_buffer_has_one_finding() -> None:
    reasons = (Reason("gate", "act", "gemm", "no", "inferred", 9000),)
    made = replace(graph(NORM, GATE, ACT, DOWN, sizes="g=9000"), reasons=reasons)
    found = findings({"xla": made})
    assert [each.kind for each in found if ("xla", "g") in each.buffers] == ["largest"]


def test_a_fusion_that_was_made_is_a_fact_without_a_price_after_all_costs() -> None:
    inside = kernel("mlp", "gemm", "gate:dot@2 up:dot@2 act:mul@3", "h wg wu", "a")
    up = kernel("up", "gemm", "up:dot@2", "h wu", "u")
    apart = (NORM, GATE, up, kernel("act", "elementwise", "act:mul@3", "g u", "a"))
    graphs = {"triton": graph(NORM, inside), "xla": graph(*apart), "inductor": graph(*apart)}
    found = findings(graphs, Ceilings({0.5: 1e12}, {}))
    *costs, fact = found
    assert "XLA and Inductor use separate kernels." in str(fact) and str(fact).endswith(".")
    assert not any("inside the product" in str(each) for each in costs) and all(each.us for each in costs)
    assert {each.graphs for each in costs if each.kind == "kept on chip"} == {("xla", "triton"), ("inductor", "triton")}


def test_the_only_intermediate_has_one_finding() -> None:
    whole = graph(kernel("mlp", "gemm", ":dot@2 :max@3", "h w", "y"))
    apart = graph(kernel("dot", "gemm", ":dot@2", "h w", "g"), kernel("max", "elementwise", ":max@3", "g", "y"))
    found = findings({"jax": whole, "torch": apart})
    assert [each.kind for each in found if each.graphs[0] == "torch"] == ["largest"]


def test_equal_layers_make_one_sentence_with_the_sum() -> None:
    layers = [
        kernel(f"{name}{layer}", "elementwise", f"act:exp@{layer}{extra}", f"g{layer}", f"{name}{layer}")
        for layer in (3, 4) for name, extra in (("a", " act:mul@5"), ("b", " act:add@6"))
    ]
    found = findings({"xla": graph(*layers)}, Ceilings({0.5: 1e12}, {}))
    assert [(each.text, each.bytes, each.us) for each in found if each.kind == "recomputed"] == [(
        "XLA computes act (exp) in two kernels. They read 4.00 kB more than once. "
        "There are two such groups of kernels: 8.00 kB in all.", 8000, 0.008,
    )]


def test_the_comparison_stays_of_two_findings_about_one_buffer() -> None:
    apart = graph(NORM, kernel("act", "elementwise", "act:exp@3", "h", "y"))
    whole = graph(kernel("all", "reduction", "norm:mul@1 act:exp@3", "x", "y"))
    found = findings({"plain": whole, "barrier": apart})
    assert [each.kind for each in found if ("barrier", "h") in each.buffers] == ["kept on chip"]


def test_an_unread_buffer_is_not_the_largest() -> None:
    dead = graph(NORM, kernel("act", "elementwise", "act:exp@3", "h", "a big"), sizes="big=90000", intermediate="h big")
    assert "f32[1000], 4.00 kB, written by norm" in one(dead, "largest")[0]


def test_findings_are_ranked_and_have_costs() -> None:
    joined = kernel("cat", "copy", ":concatenate", "wg wu", "w", device_time_us=5.0)
    product = kernel("dot", "gemm", "gate:dot@2", "h w", "g")
    made = graph(NORM, joined, product, ACT, sizes="w=2000 g=9000")
    found = findings({"xla": made})
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)
    assert {one.us for one in found if one.kind != "copy"} == {None}
    slowest, *priced = findings({"xla": made}, Ceilings({0.5: 1e12}, {}))
    assert slowest.kind == "above roofline"
    assert [one.bytes for one in priced] == [one.bytes for one in found]  # traffic, whatever was measured
    for each in priced:
        assert each.us == pytest.approx(5.0 if each.kind == "copy" else each.bytes / 1e6)


def test_small_findings_are_left_out() -> None:
    tiny = kernel("t", "copy", "", "s", "t")
    assert one(graph(NORM, tiny, sizes="x=1000000 h=1000000 s=10 t=10"), "copy") == []


def test_graphs_without_kernels_have_no_findings() -> None:
    assert findings({"eager": FusionGraph("f", "eager", None)}) == []


# Compilers' own output.


def _archived(path: Path) -> FusionGraph:
    with zipfile.ZipFile(path) as archive:
        return from_hlo(gpu_program.parse(archive.read("forward/optimized.hlo.txt").decode()))


def test_the_mlp_that_an_h200_ran(artifacts: Path) -> None:
    found = findings({
        "xla": _archived(artifacts / "swiglu_mlp-llama-8b-bf16-fwd-xla.zip"),
        "xla-unfused": _archived(artifacts / "swiglu_mlp-llama-8b-bf16-fwd-xla-unfused.zip"),
    })
    assert any(
        "XLA launches mul in norm/weight twice" in text and "33.6 MB less" in text for text in texts(found, "duplicate")
    )
    assert any("XLA" in text and "add" in text and "of down" in text for text in texts(found, "inside a product"))
    chip = texts(found, "kept on chip")
    assert any(text.startswith("xla-unfused moves 352 MB between five kernels of act") for text in chip)


_COMPILE = """
import sys
from pathlib import Path
from xlafuse.compile.environment import configure_environment
configure_environment(deviceless=True)
import jax, jax.numpy as jnp
from xlafuse.compile import compiler, variants
from xlafuse.blocks import swiglu_mlp
from xlafuse.blocks.rmsnorm import rmsnorm

config, folder, library = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "library"
if library:  # cuBLAS for every product, as where tuning prefers it
    variants.compiler_options = lambda *_: {"xla_gpu_enable_triton_gemm": False}

def mlp(inputs, act, residual, up):
    with jax.named_scope("norm"):
        h = rmsnorm(inputs["x"], inputs["norm_weight"], 1e-5)
    with jax.named_scope("gate"):
        gate = h @ inputs["gate_weight"]
    with jax.named_scope("act"):
        activated = act(gate)
    if up:
        with jax.named_scope("up"):
            wide = h @ inputs["up_weight"]
        with jax.named_scope("act"):
            activated = activated * wide
    with jax.named_scope("down"):
        y = activated @ inputs["down_weight"]
    with jax.named_scope("residual"):
        return inputs["x"] + y if residual else y

shapes = {"x": (2048, 1024), "norm_weight": (1024,), "gate_weight": (1024, 4096), "up_weight": (1024, 4096),
          "down_weight": (4096, 1024)}
structs = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
silu = lambda z: z * jax.nn.sigmoid(z)
programs = {
    "swiglu": (silu, True, True), "no-residual": (silu, False, True), "one-projection": (silu, True, False),
    "geglu": (jax.nn.gelu, True, True),
}
target = compiler.Target(config.read_text())
for name, (act, residual, up) in programs.items():
    given = structs if up else {key: value for key, value in structs.items() if key != "up_weight"}
    def forward(inputs):
        return mlp(inputs, act, residual, up)
    def step(inputs):
        return jax.value_and_grad(lambda inputs: forward(inputs).astype(jnp.float32).sum())(inputs)
    function = forward if library else step
    (folder / name).write_text(compiler.compile(function, (given,), target=target).hlo_text)
"""


def _compile(products: str, folder: Path) -> dict[str, list[Finding]]:
    """Findings on the MLP and on what is left of it without a part, compiled for an H200."""
    pytest.importorskip("jax")
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None or find_cuda_tools() is None:
        pytest.skip("compiling for a GPU needs the jax-cuda13-pjrt package, ptxas and libdevice.10.bc")
    series = ".".join(importlib.metadata.version("jax").split(".")[:2])
    config = targets.FOLDER / "h200" / "xla" / f"gpu_target_config-{series}.pbtxt"
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(config), str(folder), products], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    graphs = {path.name: from_hlo(gpu_program.parse(path.read_text())) for path in folder.iterdir()}
    return {name: findings({"xla": found}) for name, found in graphs.items()}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """Forward, every product cuBLAS's."""
    return _compile("library", tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """Value and gradient in one, products XLA's own."""
    return _compile("step", tmp_path_factory.mktemp("step"))


JOINED = (
    "XLA joins gate_weight and up_weight into one operand for the product in gate; one copy kernel moves 33.6 MB."
)


@pytest.mark.slow
def test_the_dot_mergers_copy_goes_with_the_second_projection(library: dict[str, list[Finding]]) -> None:
    assert texts(library["swiglu"], "copy") == texts(library["no-residual"], "copy") == [JOINED]
    assert texts(library["geglu"], "copy") == [JOINED]
    assert texts(library["one-projection"], "copy") == []


@pytest.mark.slow
def test_the_addition_in_the_product_goes_with_the_residual(library: dict[str, list[Finding]]) -> None:
    added = re.compile(r"computes (residual \(add\)|add) inside the product of down")
    for name in ("swiglu", "geglu", "one-projection"):
        assert any(map(added.search, texts(library[name], "inside a product"))), name
    assert not any(map(added.search, texts(library["no-residual"], "inside a product")))


@pytest.mark.slow
def test_a_geglu_has_its_activation_inside_the_product(library: dict[str, list[Finding]]) -> None:
    assert any("gelu inside the product of gate" in text for text in texts(library["geglu"], "inside a product"))
    assert not any("product of gate" in text for text in texts(library["swiglu"], "inside a product"))


@pytest.mark.slow
def test_the_silu_chain_is_computed_again_and_without_the_second_projection_less(
    step: dict[str, list[Finding]],
) -> None:
    chain = "XLA computes act (neg, exp, add, div) in three kernels. They read 67.1 MB more than once."
    assert chain in texts(step["swiglu"], "recomputed")
    assert chain not in texts(step["one-projection"], "recomputed")
    assert not any("exp" in text for text in texts(step["geglu"], "recomputed"))


@pytest.mark.parametrize(("shared", "told"), [("mask:ge", False), ("mask:ge mask:exp", True)])
def test_a_mask_that_two_kernels_compute_is_no_repeated_work(shared: str, told: bool) -> None:
    step = graph(
        kernel("first", "reduction", f"{shared} soft:sum", "scores", "sums"),
        kernel("second", "elementwise", f"{shared} soft:div", "scores sums", "y"),
        sizes="scores=1000000 sums=1000 y=1000000",
    )
    assert any(each.kind == "recomputed" for each in findings({"xla": step})) is told
