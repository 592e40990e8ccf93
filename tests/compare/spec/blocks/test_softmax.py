"""Masked rows of softmax: which implementations take them."""

from __future__ import annotations

import pytest

from xlafuse.compare.spec.blocks import BLOCKS

SOFTMAX = BLOCKS["softmax"]


@pytest.mark.parametrize("implementation", ["library", "liger", "quack"])
def test_libraries_refuse_masked_rows(implementation: str) -> None:
    said = {
        case.id: SOFTMAX.implementation(implementation).unsupported(case)
        for suite in ("check", "full")
        for case in SOFTMAX.cases(suite)
        if case.sizes["columns"] % 8 == 0 or "masked" in case.sizes
    }
    reason = "gives NaN, not zeros, for a row of only -inf"
    masked = {name for name, found in said.items() if found and found.endswith(reason)}
    assert masked == {name for name, found in said.items() if found}
    assert {name.split("/")[1] for name in masked} == {"odd-masked", "even-masked", "tiles-masked", "gpt2-padded"}


def test_all_other_implementations_take_masked_rows() -> None:
    (case,) = [case for case in SOFTMAX.cases("full") if case.name == "gpt2-padded" and case.direction == "train"]
    left_out = {each.name for each in SOFTMAX.implementations if each.unsupported(case)}
    assert left_out == {"library", "liger", "quack"}
