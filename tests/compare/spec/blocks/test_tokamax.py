"""Sizes that tokamax's kernels do not take on an H200 are skipped with the reason."""

import pytest

from xlafuse.compare.spec.blocks import BLOCKS, moe
from xlafuse.compare.spec.case import Case


@pytest.mark.parametrize(
    ("block", "dtype", "direction", "sizes", "reason"),
    [
        ("moe", "bfloat16", "train", moe.sizes(16, 2048, 3584, 8, 2), None),
        ("moe", "float32", "fwd", moe.sizes(16, 2048, 3584, 8, 2), "float32"),
        ("moe", "float16", "fwd", moe.sizes(17, 37, 29, 5, 2), "16 bytes"),
        ("moe", "float16", "fwd", moe.sizes(64, 72, 64, 5, 2), "64 columns"),
        ("moe", "bfloat16", "fwd", moe.sizes(200, 128, 192, 5, 2), None),
        ("moe", "bfloat16", "train", moe.sizes(200, 128, 192, 5, 2), "64 rows"),
        ("moe", "bfloat16", "train", moe.sizes(7, 16, 24, 3, 1), "64 rows"),
        ("swiglu_mlp", "float16", "fwd", {"tokens": 8192, "width": 768, "hidden": 2048}, None),
        ("swiglu_mlp", "bfloat16", "fwd", {"tokens": 1, "width": 4096, "hidden": 14336}, "128 tokens"),
    ],
)
def test_refused_cases_have_a_reason(
    block: str, dtype: str, direction: str, sizes: dict[str, int], reason: str | None
) -> None:
    said = BLOCKS[block].implementation("tokamax").unsupported(Case(block, "any", sizes, dtype, direction))
    assert said is None if reason is None else said and reason in said


def test_the_gated_linear_unit_is_forward_only() -> None:
    assert BLOCKS["swiglu_mlp"].implementation("tokamax").directions == ("fwd",)
