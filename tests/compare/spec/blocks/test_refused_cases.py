"""Cases that libraries refuse are refused before a run, with a reason; every attention block has a cuDNN row.

tests/triton_side/deviceless/test_for_target.py compiles, and tests/xlafuse/test_blocks.py lowers, to show that they
refuse exactly these packed sequences.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import xlafuse
from xlafuse.compare.spec.blocks import BLOCKS, attention, attention_packed, moe
from xlafuse.compare.spec.case import Case
from xlafuse.compare.spec.own_size import own_shape


def plain(dtype: str, direction: str, sequence: int, window: int = 0) -> Case:
    return Case("attention", "any", attention.sizes(1, 2, sequence, 64, window=window), dtype, direction)


def packed(dtype: str, direction: str, tokens: int, heads: int = 4, kv_heads: int = 2) -> Case:
    sizes = attention_packed.sizes(tokens, 2, heads, kv_heads, 16)
    return Case("attention_packed", "any", sizes, dtype, direction)


def cached(suite: str, name: str) -> Case:
    return next(case for case in BLOCKS["decode_attention"].cases(suite) if case.name == name)


def queries(count: int) -> Case:
    shape = own_shape(BLOCKS["decode_attention"], {"queries": count})
    return BLOCKS["decode_attention"].cases("full", [shape])[0]


def experts(dtype: str, direction: str, *sizes: int) -> Case:
    return Case("moe", "any", moe.sizes(*sizes), dtype, direction)


def mlp(dtype: str, tokens: int, width: int, hidden: int) -> Case:
    return Case("swiglu_mlp", "any", {"tokens": tokens, "width": width, "hidden": hidden}, dtype, "fwd")


@pytest.mark.parametrize(
    ("implementation", "case", "reason"),
    [
        ("sdpa-flash", plain("bfloat16", "train", 67), None),
        ("sdpa-flash", plain("float32", "fwd", 67), "float32"),
        ("sdpa-flash", plain("bfloat16", "train", 66, window=7), "window only as a mask"),
        ("sdpa-cudnn", plain("float16", "train", 67), None),
        ("sdpa-cudnn", plain("bfloat16", "fwd", 1), "length 1"),
        ("sdpa-cudnn", plain("bfloat16", "train", 66, window=7), "window only as a mask"),
        ("xla-cudnn", plain("bfloat16", "fwd", 67), None),
        ("xla-cudnn", plain("bfloat16", "train", 67), "even sequence lengths only, not 67"),
        ("xla-cudnn", plain("bfloat16", "fwd", 1), "length 1"),
        ("xla-cudnn", plain("bfloat16", "train", 66, window=7), None),
        ("xla-cudnn", packed("bfloat16", "train", 66), None),
        ("xla-cudnn", packed("float16", "fwd", 67), None),
        ("xla-cudnn", packed("float16", "train", 67), "even numbers of tokens only, not 67"),
        ("xla-cudnn", packed("float32", "fwd", 66), "not float32"),
        ("flex", plain("float32", "train", 67, window=7), None),
        # A group of over 128 queries, of fewer than 128 tokens.
        ("flex", packed("bfloat16", "fwd", 65), "no 65 queries of 2 heads"),
        ("flex", packed("bfloat16", "train", 65), "no 65 queries of 2 heads"),
        ("flex", packed("bfloat16", "train", 64), None),
        ("flex", packed("bfloat16", "train", 67, heads=6), None),
        ("flex", packed("bfloat16", "train", 127, kv_heads=4), None),
        ("flex", packed("bfloat16", "train", 128), None),
        ("flex", packed("bfloat16", "train", 33, heads=8), "no 33 queries of 4 heads"),
        ("flex", cached("full", "llama-8b-8k-batch128"), None),
        ("flex", cached("full", "llama-8b-64k-batch32"), "keys of 2^31 numbers or more, here 2147483648"),
        ("flex", cached("check", "odd-lengths"), "3 heads share keys"),
        ("flex", cached("full", "llama-8b-8k-16-queries"), None),
        ("flex", queries(33), "no 33 queries of 4 heads"),
        ("sdpa-flash", queries(33), None),
        ("sdpa-flash", cached("full", "llama-8b-8k-batch128"), "some sequences do not fill their cache"),
        ("sdpa-flash", cached("full", "gpt2-fp32"), "float32"),
        ("tokamax", experts("bfloat16", "train", 16, 2048, 3584, 8, 2), None),
        ("tokamax", experts("float32", "fwd", 16, 2048, 3584, 8, 2), "float32"),
        ("tokamax", experts("float16", "fwd", 17, 37, 29, 5, 2), "16 bytes"),
        ("tokamax", experts("float16", "fwd", 64, 72, 64, 5, 2), "64 columns"),
        ("tokamax", experts("bfloat16", "fwd", 200, 128, 192, 5, 2), None),
        ("tokamax", experts("bfloat16", "train", 200, 128, 192, 5, 2), "64 rows"),
        ("tokamax", mlp("float16", 8192, 768, 2048), None),
        ("tokamax", mlp("bfloat16", 1, 4096, 14336), "128 tokens"),
    ],
)
def test_refused_cases_have_a_reason(implementation: str, case: Case, reason: str | None) -> None:
    refusal = BLOCKS[case.block].implementation(implementation).unsupported(case)
    assert refusal is None if reason is None else reason in str(refusal)


def test_the_gated_linear_unit_of_tokamax_is_forward_only() -> None:
    assert BLOCKS["swiglu_mlp"].implementation("tokamax").directions == ("fwd",)


@pytest.mark.parametrize("implementation", [i.name for i in BLOCKS["softmax"].implementations])
def test_three_libraries_refuse_masked_rows_of_softmax(implementation: str) -> None:
    cases = [case for suite in ("check", "full") for case in BLOCKS["softmax"].cases(suite)]
    whole = [case for case in cases if case.sizes["columns"] % 8 == 0 or "masked" in case.sizes]
    row = BLOCKS["softmax"].implementation(implementation)
    refused = [(case.name, reason) for case in whole if (reason := row.unsupported(case))]
    if implementation in ("library", "liger", "quack"):
        assert {name for name, _ in refused} == {"odd-masked", "even-masked", "tiles-masked", "gpt2-padded"}
        assert all(reason.endswith("gives NaN, not zeros, for a row of only -inf") for _, reason in refused)
    else:
        assert "gpt2-padded" not in {name for name, _ in refused}


@pytest.mark.parametrize(
    ("block", "implementation"),
    [("attention", "fa4"), ("attention", "sdpa-flash"), ("attention", "sdpa-cudnn"), ("rmsnorm", "quack")],
)
def test_libraries_without_strides_refuse_transposed_inputs(block: str, implementation: str) -> None:
    cases = [case for case in BLOCKS[block].cases("check") if case.dtype != "float32"]
    reasons = {case.name: BLOCKS[block].implementation(implementation).unsupported(case) for case in cases}
    assert [name for name, reason in reasons.items() if "not transposed" in str(reason)] == ["transposed"]


def test_every_block_with_attention_has_a_cudnn_implementation() -> None:
    """A block has attention if its plain JAX program mentions it."""
    programs = {name: (Path(xlafuse.__file__).parent / f"blocks/{name}.py").read_text() for name in BLOCKS}
    attending = {name for name, program in programs.items() if "attention" in program}
    assert {"attention_packed", "decode_attention_paged", "gpt2_block", "lm_step"} <= attending
    rows = {name: {i.name for i in block.implementations} for name, block in BLOCKS.items()}
    assert attending == {name for name, found in rows.items() if "xla-cudnn" in found}
