"""Cases that fused attention libraries refuse are refused before a run; every attention block has a cuDNN row."""

from pathlib import Path

import pytest

import xlafuse
from xlafuse.compare.spec.blocks import BLOCKS, attention
from xlafuse.compare.spec.case import Case

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
        ("sdpa-flash", "bfloat16", "train", 66, 7, "window only as a mask"),
        ("sdpa-cudnn", "bfloat16", "train", 66, 7, "window only as a mask"),
        ("flex", "float32", "train", 67, 7, None),
    ],
)
def test_refused_cases_have_a_reason(
    implementation: str, dtype: str, direction: str, sequence: int, window: int, reason: str | None
) -> None:
    sizes = attention.sizes(1, 2, sequence, 64, window=window)
    case = Case("attention", "any", sizes, dtype, direction)
    said = ATTENTION.implementation(implementation).unsupported(case)
    assert said is None if reason is None else said and reason in said


def test_every_block_with_attention_has_a_cudnn_implementation() -> None:
    """A block has attention if its plain JAX program mentions it."""
    programs = {name: (Path(xlafuse.__file__).parent / f"blocks/{name}.py").read_text() for name in BLOCKS}
    attending = {name for name, program in programs.items() if "attention" in program}
    assert {"attention_packed", "decode_attention_paged", "gpt2_block", "lm_step"} <= attending
    rows = {name: {i.name for i in block.implementations} for name, block in BLOCKS.items()}
    assert attending == {name for name, found in rows.items() if "xla-cudnn" in found}
