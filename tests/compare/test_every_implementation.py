"""The suite that every implementation inherits: each block's check cases, outputs and gradients, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compare.blocks import BLOCKS
from compare.check import Verdict
from compare.run_target import CHECKS
from compare.spec import Case, Implementation

Check = Callable[[Case, str, str], dict[str, Any]]


# Rows whose kernels a compiler, or PyTorch for each operation, makes of plain code: float16 is another type in the same
# code there, so a GPU does without it where the case is there in another one and the block in bfloat16. What a
# person wrote for a type (Triton, CUDA, libraries) runs in each. That formulas do not overflow in float16 is checked on
# the CPU, by XLA and eager PyTorch, and a run checks what it times.
FROM_PLAIN_CODE = {
    "xla", "xla-remat", "xla-unfused", "xla-chunked", "xla-dense", "xla-scan", "xla-scan-remat", "eager", "inductor",
    "inductor-remat", "flex",
}  # fmt: skip


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


def float16_adds_little(case: Case, implementation: Implementation) -> bool:
    every = BLOCKS[case.block].cases("check")
    others = [c for c in every if c.dtype != "float16" and not implementation.unsupported(c)]
    return any(c.dtype == "bfloat16" for c in others) and any(replace(c, dtype=case.dtype) == case for c in others)


def has_gpu_path(case: Case, implementation: Implementation) -> bool:
    if implementation.compiler == "inductor-max" or implementation.unsupported(case):
        return False
    plain = case.dtype == "float16" and implementation.name in FROM_PLAIN_CODE
    return not (plain and float16_adds_little(case, implementation))


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
GPU_ROWS = [(c, i) for c, i in rows() if has_gpu_path(c, i)]


def test_a_gpu_leaves_out_float16_alone_of_what_it_runs_otherwise() -> None:
    def key(case: Case, implementation: Implementation) -> tuple[object, ...]:
        return case.block, case.name, case.direction, case.precision, implementation.name

    names = {i.name for b in BLOCKS.values() for i in b.implementations}
    assert FROM_PLAIN_CODE <= names
    possible = [(c, i) for c, i in rows() if i.compiler != "inductor-max" and not i.unsupported(c)]
    run = {(key(c, i), c.dtype) for c, i in GPU_ROWS}
    left = [(c, i) for c, i in possible if (key(c, i), c.dtype) not in run]
    assert left and len(left) + len(GPU_ROWS) == len(possible)
    assert {c.dtype for c, _ in left} == {"float16"} and {i.name for _, i in left} == FROM_PLAIN_CODE
    assert {key(c, i) for c, i in left} <= {of for of, _ in run}  # the same case in another dtype
    assert {(c.block, i.name) for c, i in left} <= {(of[0], of[4]) for of, dtype in run if dtype == "bfloat16"}


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
