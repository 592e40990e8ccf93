"""What FlexAttention refuses of packed sequences is said before anything is started; that it does refuse it, and no
more, is shown by compiling in tests/triton_side/test_deviceless.py."""

import pytest

from compare.blocks import BLOCKS, attention_packed
from compare.spec import Case

FLEX = BLOCKS["attention_packed"].implementation("flex")


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
