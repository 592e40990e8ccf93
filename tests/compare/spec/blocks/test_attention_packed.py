"""Packed sequences that FlexAttention and jax's cuDNN attention refuse are refused before a run.

tests/triton_side/deviceless/test_for_target.py compiles, and tests/xlafuse/test_blocks.py lowers, to show that they
refuse exactly these.
"""

import pytest

from xlafuse.compare.spec.blocks import BLOCKS, attention_packed
from xlafuse.compare.spec.case import Case

FLEX = BLOCKS["attention_packed"].implementation("flex")
CUDNN = BLOCKS["attention_packed"].implementation("xla-cudnn")


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "refused"),
    [
        (67, 4, 2, True),
        (65, 4, 2, True),
        (64, 4, 2, False),
        (67, 6, 2, False),
        (127, 4, 4, False),
        (128, 4, 2, False),
        (33, 8, 2, True),
    ],
)
def test_flex_refuses_a_group_of_over_128_queries_below_128_tokens(
    tokens: int, heads: int, kv_heads: int, refused: bool
) -> None:
    sizes = attention_packed.sizes(tokens, 2, heads, kv_heads, 16)
    for direction in ("fwd", "train"):
        said = FLEX.unsupported(Case("attention_packed", "any", sizes, "bfloat16", direction))
        assert (said is not None) == refused
        assert said is None or f"no {tokens} queries of {heads // kv_heads} heads" in said


@pytest.mark.parametrize(
    ("dtype", "direction", "tokens", "reason"),
    [
        ("bfloat16", "train", 66, None),
        ("float16", "fwd", 67, None),
        ("float16", "train", 67, "even numbers of tokens only, not 67"),
        ("float32", "fwd", 66, "not float32"),
    ],
)
def test_cudnn_refuses_odd_training_and_float32(dtype: str, direction: str, tokens: int, reason: str | None) -> None:
    case = Case("attention_packed", "any", attention_packed.sizes(tokens, 5, 4, 2, 16), dtype, direction)
    said = CUDNN.unsupported(case)
    assert said is None if reason is None else reason in str(said)
