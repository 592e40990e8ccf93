"""Every implementation on its block's small check cases: outputs and gradients against float64.

On a CPU, XLA, eager PyTorch, its library calls and Triton's interpreter take every shape. Ordinary shapes run in every
dtype, and their forward pass alone in one; extreme shapes run in one dtype, and forward only where no training step
covers it. XLA runs in a shape's first dtype and in bfloat16, without such forward passes; Triton's interpreter runs in
one dtype. Inductor and XLA's variants take fewer, because each of theirs costs seconds: Inductor one block of each
kind, as its code for a block is the compiled eager one.

On a GPU, code that a person wrote for a dtype (Triton, CUDA, libraries) runs in every dtype. A compiler's code is the
same in every dtype, so compilers run in bfloat16, and in float32 where no training step covers the forward pass.
Variants of compilers, and replays of CUDA graphs, run in bfloat16 only, and skip forward passes that a step covers and
edge shapes. The CPU shows that the formulas hold in every dtype, and a run checks each case that it times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compare.numerics.errors import ErrorCheck
from compare.spec.blocks import BLOCKS
from compare.spec.case import Case
from compare.spec.implementation import Implementation

Check = Callable[[Case, str, str], dict[str, Any]]
pytestmark = pytest.mark.slow

COMPILERS = {"xla", "inductor"}
VARIANTS = {
    "xla-remat", "xla-unfused", "xla-chunked", "xla-dense", "xla-scan", "xla-scan-remat", "eager", "inductor-remat",
    "flex", "inductor-cudagraphs", "triton-cudagraphs",
}
# A row reduction, a loss of labels, a gather and its scatter, a product with sums over rows, random bits and two
# outputs, attention, sorted tokens, and an optimizer's step.
BUILT_BY_INDUCTOR = {
    "softmax", "cross_entropy", "embedding", "linear_gelu", "dropout_residual_norm", "attention", "moe", "adamw",
}


def rows() -> list[tuple[Case, Implementation]]:
    one_gpu = [block for block in BLOCKS.values() if not block.spans_gpus]
    return [
        (c, i) for b in one_gpu for c in b.cpu_check_cases() for i in b.implementations
        if c.direction in i.directions and not i.unsupported(c) and has_layout(c, i)
    ]


def has_layout(case: Case, implementation: Implementation) -> bool:
    """JAX's arrays have no strides, so a transposed case would only repeat the contiguous one."""
    return case.layout == "contiguous" or implementation.backend.worker != "xla"


def has_cpu_path(case: Case, implementation: Implementation) -> bool:
    if implementation.backend.cpu_check_worker is None or implementation.needs_gpu:
        return False
    if implementation.backend.family == "inductor":  # C++ builds of seconds each
        return case.block in BUILT_BY_INDUCTOR and (case.dtype, case.name, case.direction) == (
            "float32", "odd", BLOCKS[case.block].directions[-1]
        )
    extreme, covered = is_extreme(case), in_a_step(case, implementation)
    if extreme and covered:
        return False
    if implementation.name == "xla-remat":  # recomputes what the rows of xla check
        return case.dtype == "float32" and case.name in ("odd", "small")
    if implementation.name.startswith("xla-"):
        return case.dtype == "float32"
    dtypes = next(s for s in BLOCKS[case.block].shapes if s.name == case.name).dtypes
    if implementation.name == "triton":  # its interpreter is silently wrong in bfloat16; kernels have float16 cases
        return case.dtype == ("float32" if "float32" in dtypes else "float16")
    if implementation.name == "xla":  # tests/xlafuse/test_blocks.py compiles each block's forward pass, too
        return not covered and (case.dtype == dtypes[0] or (case.dtype == "bfloat16" and not extreme))
    return case.dtype == dtypes[0] or not (extreme or covered)


def has_gpu_path(case: Case, implementation: Implementation) -> bool:
    if implementation.backend.autotunes_for_minutes:
        return False
    if implementation.name not in COMPILERS | VARIANTS:
        return True
    covered = in_a_step(case, implementation)
    if implementation.name in VARIANTS and (covered or (is_extreme(case) and implementation.name != "flex")):
        return False
    if case.dtype == "bfloat16":
        return True
    every = supported(implementation, case.block)
    dtypes = {c.dtype for c in every if replace(c, dtype=case.dtype) == case}
    if case.dtype == "float16":
        return dtypes == {"float16"} or not any(c.dtype == "bfloat16" for c in every)
    if "bfloat16" not in dtypes:
        return True
    return implementation.name in COMPILERS and not is_extreme(case) and not covered


def supported(implementation: Implementation, block: str) -> list[Case]:
    return [c for c in BLOCKS[block].cpu_check_cases() if not implementation.unsupported(c)]


def is_extreme(case: Case) -> bool:
    return case.name.startswith(("tiny", "large", "transposed", "one-"))


def in_a_step(case: Case, implementation: Implementation) -> bool:
    """A training step of the same shape checks this case's outputs, too."""
    steps = [c for c in supported(implementation, case.block) if c.differentiates]
    return not case.differentiates and any(
        replace(c, direction=case.direction) == case for c in steps if c.direction in implementation.directions
    )


def name(value: object) -> str:
    return value.id if isinstance(value, Case) else value.name if isinstance(value, Implementation) else str(value)


def assert_right(case: Case, outcome: dict[str, Any]) -> None:
    checks = [ErrorCheck(**error) for error in outcome["errors"]]
    block = BLOCKS[case.block]
    expected = {t.name for t in block.outputs}
    if case.differentiates:
        expected |= {f"d_{t.name}" for t in block.inputs if t.differentiable}
    assert {check.name for check in checks} == expected
    assert all(check.passes for check in checks), checks


CPU_ROWS = [(c, i) for c, i in rows() if has_cpu_path(c, i)]
GPU_ROWS = [(c, i) for c, i in rows() if has_gpu_path(c, i)]


def test_a_gpu_runs_all_code_that_a_person_wrote_for_a_dtype() -> None:
    left = [i for c, i in rows() if (c, i) not in GPU_ROWS and not i.backend.autotunes_for_minutes]
    assert {i.name for i in left} == COMPILERS | VARIANTS


def test_a_gpu_runs_every_check_shape_by_both_compilers() -> None:
    ran = {(c.block, c.name, i.name) for c, i in GPU_ROWS}
    assert {(c.block, c.name, i.name) for c, i in rows() if i.name in COMPILERS} <= ran


@pytest.mark.parametrize(("case", "implementation"), CPU_ROWS, ids=name)
def test_on_the_cpu(check_on_cpu: Check, case: Case, implementation: Implementation) -> None:
    outcome = check_on_cpu(case, implementation.name, implementation.backend.cpu_check_worker)
    assert outcome["device"] == "cpu"
    assert_right(case, outcome)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "implementation"), GPU_ROWS, ids=name)
def test_on_the_gpu(check_on_gpu: Check, case: Case, implementation: Implementation) -> None:
    outcome = check_on_gpu(case, implementation.name, implementation.backend.worker)
    assert outcome["device"] != "cpu"
    assert_right(case, outcome)
