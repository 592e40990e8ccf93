"""The suite that every implementation inherits: each block's check cases, outputs and gradients, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compare.numerics.errors import ErrorCheck
from compare.run.for_target import CHECKS
from compare.spec.blocks import BLOCKS
from compare.spec.case import Case
from compare.spec.implementation import Implementation

Check = Callable[[Case, str, str], dict[str, Any]]


# Kernels that a compiler, or PyTorch for each operation, makes of plain code: another type is the same code there. So a
# GPU runs these rows in bfloat16, those of the compilers themselves in float32, too, where a training step is checked
# with its outputs as well as its gradients and so stands for the forward pass, as it does for variants in any type; a
# case that has neither type, or whose block has no bfloat16, in what there is. Shapes at an edge (one row, column or
# token, values near the largest, transposed inputs) compilers take in one type, and variants, but for FlexAttention,
# not at all. What a person wrote for a type (Triton, CUDA, libraries) runs in each.
# That formulas hold in every type is checked on the CPU, by XLA and eager PyTorch (by what XLA recomputes or scans in
# float32), and a run checks what it times.
COMPILERS = {"xla", "inductor"}
THEIR_VARIANTS = {
    "xla-remat", "xla-unfused", "xla-chunked", "xla-dense", "xla-scan", "xla-scan-remat", "eager", "inductor-remat",
    "flex",
}


def rows() -> list[tuple[Case, Implementation]]:
    return [
        (c, i) for b in BLOCKS.values() for c in b.cases("check") for i in b.implementations
        if c.direction in i.directions
    ]


def has_cpu_path(case: Case, implementation: Implementation) -> bool:
    if implementation.backend_name not in CHECKS or implementation.needs_gpu or implementation.unsupported(case):
        return False
    if implementation.backend.worker == "xla" and case.layout != "contiguous":
        return False  # an array of JAX has no strides: the case is another of its sizes
    if implementation.backend_name == "triton":
        # Triton's interpreter is silently wrong in bfloat16. A layer, whose case is "small", takes 5 to 10 s, and is
        # made of kernels that have float16 cases of their own.
        return case.dtype == "float32" or (case.dtype == "float16" and case.name != "small")
    if implementation.name.startswith("xla-"):
        return case.dtype == "float32"
    if implementation.backend_name == "inductor":  # a C++ build of seconds each; of a layer, whose case is "small", 30
        return (case.dtype, case.name, case.direction) == ("float32", "odd", BLOCKS[case.block].directions[-1])
    return True


def has_gpu_path(case: Case, implementation: Implementation) -> bool:
    if implementation.backend_name == "inductor-max" or implementation.unsupported(case):
        return False
    if implementation.backend.worker == "xla" and case.layout != "contiguous":
        return False  # as on the CPU
    if implementation.name not in COMPILERS | THEIR_VARIANTS:
        return True
    every = [c for c in BLOCKS[case.block].cases("check") if not implementation.unsupported(c)]
    steps = [c for c in every if c.differentiates and c.direction in implementation.directions]
    stood_for = not case.differentiates and any(replace(c, direction=case.direction) == case for c in steps)
    if implementation.name in THEIR_VARIANTS and (stood_for or (at_an_edge(case) and implementation.name != "flex")):
        return False
    if case.dtype == "bfloat16":
        return True
    dtypes = {c.dtype for c in every if replace(c, dtype=case.dtype) == case}
    if case.dtype == "float16":
        return dtypes == {"float16"} or not any(c.dtype == "bfloat16" for c in every)
    if "bfloat16" not in dtypes:
        return True
    return implementation.name in COMPILERS and not at_an_edge(case) and not stood_for


def at_an_edge(case: Case) -> bool:
    return case.name.startswith(("tiny", "large", "transposed"))


def name(value: object) -> str:
    return value.id if isinstance(value, Case) else value.name if isinstance(value, Implementation) else str(value)


def assert_right(case: Case, outcome: dict[str, Any]) -> None:
    verdicts = [ErrorCheck(**error) for error in outcome["errors"]]
    block = BLOCKS[case.block]
    expected = {t.name for t in block.outputs}
    if case.differentiates:
        expected |= {f"d_{t.name}" for t in block.inputs if t.differentiable}
    assert {v.name for v in verdicts} == expected
    assert all(v.passes for v in verdicts), verdicts


CPU_ROWS = [(c, i) for c, i in rows() if has_cpu_path(c, i)]
GPU_ROWS = [(c, i) for c, i in rows() if has_gpu_path(c, i)]


def test_what_a_gpu_leaves_out() -> None:
    """Types of what it runs in another; of variants, edges that the compilers run, and forward passes whose step it
    runs; layouts that an array of JAX does not have. Of hand-written code and libraries nothing else."""

    def key(case: Case, implementation: str, direction: str = "") -> tuple[str, ...]:
        return case.block, case.name, direction or case.direction, case.precision, implementation

    possible = [(c, i) for c, i in rows() if i.backend_name != "inductor-max" and not i.unsupported(c)]
    left = [row for row in possible if row not in GPU_ROWS]
    assert len(left) + len(GPU_ROWS) == len(possible)
    left = [(c, i) for c, i in left if c.layout == "contiguous" or i.backend.worker != "xla"]
    assert {i.name for _, i in left} == COMPILERS | THEIR_VARIANTS
    ran = {key(c, i.name) for c, i in GPU_ROWS}
    for case, implementation in left:
        if implementation.name in COMPILERS:
            assert key(case, implementation.name) in ran
        elif at_an_edge(case):
            assert key(case, "inductor") in ran
        else:
            assert {key(case, implementation.name, direction) for direction in (case.direction, "train", "joint")} & ran
    compiled = [(c, i) for c, i in left if i.name in COMPILERS and not at_an_edge(c)]
    assert {c.dtype for c, i in compiled if c.differentiates} == {"float16"}
    in_float32 = {(c.block, c.name, i.name) for c, i in GPU_ROWS if c.dtype == "float32"}
    assert {(c.block, c.name, i.name) for c, i in compiled if c.dtype == "float32"} <= in_float32
    halves = {(c.block, i.name) for c, i in GPU_ROWS if c.dtype == "bfloat16"}
    assert {(c.block, i.name) for c, i in left if c.dtype == "float32"} <= halves


@pytest.mark.parametrize(("case", "implementation"), CPU_ROWS, ids=name)
def test_on_the_cpu(check_on_cpu: Check, case: Case, implementation: Implementation) -> None:
    outcome = check_on_cpu(case, implementation.name, CHECKS[implementation.backend_name])
    assert outcome["device"] == "cpu"
    assert_right(case, outcome)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "implementation"), GPU_ROWS, ids=name)
def test_on_the_gpu(check_on_gpu: Check, case: Case, implementation: Implementation) -> None:
    outcome = check_on_gpu(case, implementation.name, implementation.backend.worker)
    assert outcome["device"] != "cpu"
    assert_right(case, outcome)
