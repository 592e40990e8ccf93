"""The suite that every implementation inherits: each block's check cases, outputs and gradients, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compare.blocks import BLOCKS
from compare.check import Verdict
from compare.run_target import CHECKS
from compare.spec import Case, Implementation

Check = Callable[[Case, str, str], dict[str, Any]]


def rows() -> list[tuple[Case, Implementation]]:
    return [
        (c, i) for b in BLOCKS.values() for c in b.cases("check") for i in b.implementations
        if c.direction in i.directions
    ]


def has_cpu_path(case: Case, implementation: Implementation) -> bool:
    if implementation.compiler not in CHECKS or implementation.needs_gpu or implementation.unsupported(case):
        return False
    if implementation.compiler == "triton":
        return case.dtype != "bfloat16"  # Triton's interpreter is silently wrong in bfloat16
    if implementation.compiler == "inductor":  # a C++ build of seconds each; of a layer, whose case is "small", 30
        return (case.dtype, case.name, case.direction) == ("float32", "odd", BLOCKS[case.block].directions[-1])
    return True


def name(value: object) -> str:
    return value.id if isinstance(value, Case) else value.name if isinstance(value, Implementation) else str(value)


def assert_right(case: Case, outcome: dict[str, Any]) -> None:
    verdicts = [Verdict(**error) for error in outcome["errors"]]
    block = BLOCKS[case.block]
    expected = {t.name for t in block.outputs}
    if case.differentiates:
        expected |= {f"d_{t.name}" for t in block.inputs if t.differentiable}
    assert {v.name for v in verdicts} == expected
    assert all(v.right for v in verdicts), verdicts


CPU_ROWS = [(c, i) for c, i in rows() if has_cpu_path(c, i)]
GPU_ROWS = [(c, i) for c, i in rows() if i.compiler != "inductor-max" and not i.unsupported(c)]


@pytest.mark.parametrize(("case", "implementation"), CPU_ROWS, ids=name)
def test_on_the_cpu(check_on_cpu: Check, case: Case, implementation: Implementation) -> None:
    outcome = check_on_cpu(case, implementation.name, CHECKS[implementation.compiler])
    assert outcome["device"] == "cpu"
    assert_right(case, outcome)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "implementation"), GPU_ROWS, ids=name)
def test_on_the_gpu(check_on_gpu: Check, case: Case, implementation: Implementation) -> None:
    outcome = check_on_gpu(case, implementation.name, implementation.framework)
    assert outcome["device"] != "cpu"
    assert_right(case, outcome)
