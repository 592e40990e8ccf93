"""What attention's fused backends refuse is said before anything is started; and they stand where attention occurs."""

from pathlib import Path

import pytest

import xlafuse
from compare.spec.blocks import BLOCKS, attention
from compare.spec.case import Case

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


def test_cudnn_stands_wherever_a_plain_block_attends() -> None:
    """A block attends whose plain program in JAX speaks of attention, its own or that of a block it is made of."""
    programs = {name: (Path(xlafuse.__file__).parent / f"blocks/{name}.py").read_text() for name in BLOCKS}
    attending = {name for name, program in programs.items() if "attention" in program}
    assert {"attention_packed", "decode_attention_paged", "gpt2_block", "lm_step"} <= attending
    rows = {name: {i.name for i in block.implementations} for name, block in BLOCKS.items()}
    assert attending == {name for name, found in rows.items() if "xla-cudnn" in found}
