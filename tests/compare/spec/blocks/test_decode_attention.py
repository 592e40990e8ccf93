"""Caches that FlexAttention refuses."""

from __future__ import annotations

import pytest

from xlafuse.compare.plan.selection import resolve


@pytest.mark.parametrize(
    ("suite", "case", "reason"),
    [
        ("full", "llama-8b-8k-batch128", None),
        ("full", "llama-8b-64k-batch32", "keys of 2^31 numbers or more, here 2147483648"),
        ("check", "odd-lengths", "3 heads share keys"),
    ],
)
def test_flex_refuses_caches_with_a_reason(suite: str, case: str, reason: str | None) -> None:
    plan = resolve(["decode_attention"], suite=suite, cases=[case], implementations=["flex"])
    ((found, (flex,)),) = plan.work
    said = flex.unsupported(found)
    assert said is None if reason is None else reason in str(said)
