"""What attention's fused backends refuse is said before anything is started."""

import pytest

from compare.blocks import BLOCKS
from compare.spec import Case

ATTENTION = BLOCKS["attention"]


@pytest.mark.parametrize(
    ("implementation", "dtype", "direction", "sequence", "reason"),
    [
        ("sdpa-flash", "bfloat16", "train", 67, None),
        ("sdpa-flash", "float32", "fwd", 67, "float32"),
        ("sdpa-cudnn", "float16", "train", 67, None),
        ("sdpa-cudnn", "bfloat16", "fwd", 1, "length 1"),
        ("xla-cudnn", "bfloat16", "fwd", 67, None),
        ("xla-cudnn", "bfloat16", "train", 66, None),
        ("xla-cudnn", "bfloat16", "train", 67, "even sequence lengths only, not 67"),
        ("xla-cudnn", "bfloat16", "fwd", 1, "length 1"),
    ],
)
def test_attention_says_what_it_refuses(
    implementation: str, dtype: str, direction: str, sequence: int, reason: str | None
) -> None:
    sizes = {"batch": 1, "heads": 2, "sequence": sequence, "head_dim": 64}
    case = Case("attention", "any", sizes, dtype, direction)
    said = ATTENTION.implementation(implementation).unsupported(case)
    assert said is None if reason is None else said and reason in said
