"""What attention's fused backends refuse is said before anything is started."""

import pytest

from compare.blocks import BLOCKS, attention
from compare.spec import Case

ATTENTION = BLOCKS["attention"]


@pytest.mark.parametrize(
    ("implementation", "dtype", "direction", "sequence", "window", "reason"),
    [
        ("sdpa-flash", "bfloat16", "train", 67, 0, None),
        ("sdpa-flash", "float32", "fwd", 67, 0, "float32"),
        ("sdpa-cudnn", "float16", "train", 67, 0, None),
        ("sdpa-cudnn", "bfloat16", "fwd", 1, 0, "length 1"),
        ("xla-cudnn", "bfloat16", "fwd", 67, 0, None),
        ("xla-cudnn", "bfloat16", "train", 66, 0, None),
        ("xla-cudnn", "bfloat16", "train", 67, 0, "even sequence lengths only, not 67"),
        ("xla-cudnn", "bfloat16", "fwd", 1, 0, "length 1"),
        ("xla-cudnn", "bfloat16", "train", 66, 7, None),
        ("sdpa-flash", "bfloat16", "train", 66, 7, "no window"),
        ("sdpa-cudnn", "bfloat16", "train", 66, 7, "no window"),
        ("flex", "float32", "train", 67, 7, None),
    ],
)
def test_attention_says_what_it_refuses(
    implementation: str, dtype: str, direction: str, sequence: int, window: int, reason: str | None
) -> None:
    sizes = attention.sizes(1, 2, sequence, 64, window=window)
    case = Case("attention", "any", sizes, dtype, direction)
    said = ATTENTION.implementation(implementation).unsupported(case)
    assert said is None if reason is None else said and reason in said
