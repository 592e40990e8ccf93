"""Every implementation on its block's small check cases: outputs and gradients against float64.

On a CPU, XLA, eager PyTorch, its library calls and Triton's interpreter take every shape. Ordinary shapes run in every
dtype, and their forward pass alone in one; extreme shapes run in one dtype, and forward only where no training step
covers it. XLA runs in a shape's first dtype and in bfloat16, without such forward passes; Triton's interpreter runs in
one dtype. Inductor and XLA's variants take fewer, because each of theirs costs seconds: Inductor one block of each
kind, as its code for a block is the compiled eager one.

`make test` runs one shape with incomplete tiles of each implementation of each block, in a training step where there is
one. Eager PyTorch and libraries run on every shape, XLA on one block of each kind, its variants on the first block
alone, Pallas without matmul, whose launches linear has. Triton's interpreter gets inputs of one seed, the others of
two. test_for_target.py checks one block of Inductor. The rest is marked `full`.

On a GPU, code that a person wrote for a dtype (Triton, CUDA, libraries) runs in every dtype. A compiler's code is the
same in every dtype, so compilers run in bfloat16, and in float32 where no training step covers the forward pass.
Variants of compilers, and replays of CUDA graphs, run in bfloat16 only, and skip forward passes that a step covers and
edge shapes. The CPU shows that the formulas hold in every dtype, and a run checks each case that it times.

Interpreters know nothing of TMA's limits, of Mosaic's copies, of `wgmma` or of Gluon. So each kernel in Pallas or Gluon
has edge cases of its own on a GPU (`GPU_ONLY`): incomplete last tiles, and several tiles for a program that takes
several.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from full_marks import examples, first_of_each, full

from xlafuse.compare.numerics.errors import ErrorCheck
from xlafuse.compare.spec.blocks import BLOCKS, attention, moe
from xlafuse.compare.spec.case import Case, Sizes
from xlafuse.compare.spec.implementation import Implementation

Check = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.slow

COMPILERS = {"xla", "inductor"}
VARIANTS = {
    "xla-remat", "xla-unfused", "xla-chunked", "xla-dense", "xla-scan", "xla-scan-remat", "eager", "inductor-remat",
    "flex", "inductor-cudagraphs", "triton-cudagraphs",
}
EAGER = {"eager", "library"}  # milliseconds each
# A row reduction, a loss of labels, a gather and its scatter, a product with sums over rows, random bits and two
# outputs, attention, sorted tokens, and an optimizer's step.
BUILT_BY_INDUCTOR = {
    "softmax", "cross_entropy", "embedding", "linear_gelu", "dropout_residual_norm", "attention", "moe", "adamw",
}

# Incomplete tiles along both axes; the last of several programs' tiles; a row of one tile.
PRODUCTS = [{"m": 136, "k": 320, "n": 320}, {"m": 2056, "k": 128, "n": 4160}, {"m": 8, "k": 64, "n": 576}]
# A last tile of two rows; the longest row; several tiles for each persistent program, and an incomplete one.
ROWS = [{"rows": 70, "columns": 1024}, {"rows": 5, "columns": 4096}, {"rows": 5001, "columns": 1024}]
# The sequence ends within a tile; two heads share keys, so an overwritten row would be another head's.
HEADS = [
    attention.sizes(2, 4, 200, head_dim, kv_heads=2, causal=causal) for head_dim in (64, 128) for causal in (0, 1)
]
LONG = [attention.sizes(2, 2, 408, head_dim, kv_heads=1, window=150) for head_dim in (64, 128, 256)]
FEW_HEADS = [attention.sizes(1, 16, 408, head_dim, kv_heads=1) for head_dim in (64, 128, 256)]  # splits of these
EXPERTS = [moe.sizes(200, 128, 192, 5, 2, used=4), moe.sizes(1000, 64, 320, 3, 2, used=2)]

# Kernel: its implementation, its block and the sizes at which it runs.
GPU_ONLY: dict[str, tuple[str, str, list[Sizes]]] = {
    "matmul_kernel": ("pallas", "matmul", PRODUCTS),
    "column_sums_kernel": ("pallas", "linear", PRODUCTS),
    "dpre_kernel": ("pallas", "linear_gelu", PRODUCTS),
    "rmsnorm_kernel": ("pallas", "rmsnorm", ROWS),
    "rmsnorm_backward_kernel": ("pallas", "rmsnorm", ROWS),
    "softmax_kernel": ("pallas", "softmax", ROWS),
    "softmax_backward_kernel": ("pallas", "softmax", ROWS),
    "swiglu_kernel": ("pallas", "swiglu", ROWS + [{"rows": 3, "columns": 1024}]),
    "swiglu_backward_kernel": ("pallas", "swiglu", ROWS + [{"rows": 3, "columns": 1024}]),
    "attention_forward_kernel": ("pallas", "attention", HEADS),
    "attention_backward_kernel": ("pallas", "attention", HEADS),
    "grouped_matmul_kernel": ("pallas", "moe", EXPERTS),
    "grouped_weight_gradient_kernel": ("pallas", "moe", EXPERTS),
    "hopper_attention_forward_kernel": ("triton", "attention", HEADS + LONG),
    "hopper_attention_backward_kernel": ("triton", "attention", HEADS + LONG + FEW_HEADS),
    "hopper_matmul_fp8_kernel": ("triton", "matmul_fp8", [{"m": 131, "k": 2320, "n": 264}]),
}


def rows() -> list[tuple[Case, Implementation]]:
    one_gpu = [block for block in BLOCKS.values() if not block.spans_gpus]
    return [
        (c, i) for b in one_gpu for c in b.cpu_check_cases() for i in b.implementations
        if c.direction in i.directions and not i.unsupported(c) and has_layout(c, i)
    ]


def gpu_only_rows() -> list[tuple[Case, Implementation]]:
    found = {}
    for name, block, every in GPU_ONLY.values():
        for sizes in every:
            edge = "edge-" + "x".join(map(str, sizes.values()))
            case = Case(block, edge, sizes, "bfloat16", BLOCKS[block].directions[-1])
            found[case.id, name] = case, BLOCKS[block].implementation(name)
    return list(found.values())


def has_layout(case: Case, implementation: Implementation) -> bool:
    """JAX's arrays have no strides, so a transposed case would only repeat the contiguous one."""
    return case.layout == "contiguous" or implementation.backend.worker != "xla"


def has_cpu_path(case: Case, implementation: Implementation) -> bool:
    if implementation.backend.cpu_check_worker is None or implementation.needs_gpu:
        return False
    if implementation.name == "triton-deterministic":  # the kernels of triton's row, where there is no GPU
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


@cache
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


def kind(row: tuple[Case, Implementation]) -> tuple[str, ...]:
    """Return the same for rows of which `make test` runs one."""
    case, implementation = row
    if implementation.name in EAGER:
        return implementation.name, case.block, case.name
    if implementation.name in VARIANTS:
        return (implementation.name,)
    if implementation.name == "xla" and case.block not in BUILT_BY_INDUCTOR:  # tests/xlafuse/test_blocks.py has each
        return ("xla",)
    if is_part_of_linear(row):
        return "pallas", "linear"
    return implementation.name, case.block


def is_part_of_linear(row: tuple[Case, Implementation]) -> bool:
    """In Pallas, a step of linear launches the kernel of matmul three times, with and without a bias."""
    case, implementation = row
    return (implementation.name, case.block) == ("pallas", "matmul")


def preference(row: tuple[Case, Implementation]) -> tuple[bool, bool, bool]:
    """Return a key that sorts ordinary shapes before extreme ones and training steps before forward passes.

    lm_step's ordinary shape takes 17 s in Triton's interpreter, its smallest one 2 s.
    """
    case, _ = row
    extreme = is_extreme(case) or case.name == "all-ignored"  # whose loss is zero
    return extreme != (case.block == "lm_step"), not case.differentiates, is_part_of_linear(row)


CPU_ROWS = [(c, i) for c, i in rows() if has_cpu_path(c, i)]
BY_INDUCTOR = [(c, i) for c, i in CPU_ROWS if i.backend.family == "inductor"]
OTHERS = sorted((row for row in CPU_ROWS if row not in BY_INDUCTOR), key=preference)
GPU_ROWS = [(c, i) for c, i in rows() if has_gpu_path(c, i)] + gpu_only_rows()


def test_a_gpu_runs_all_code_that_a_person_wrote_for_a_dtype() -> None:
    ran = {(c.id, i.name) for c, i in GPU_ROWS}
    left = [i for c, i in rows() if (c.id, i.name) not in ran and not i.backend.autotunes_for_minutes]
    assert {i.name for i in left} == COMPILERS | VARIANTS


def test_a_gpu_runs_every_check_shape_by_both_compilers() -> None:
    ran = {(c.block, c.name, i.name) for c, i in GPU_ROWS}
    assert {(c.block, c.name, i.name) for c, i in rows() if i.name in COMPILERS} <= ran


def test_each_kernel_that_only_a_gpu_executes_has_an_edge_case() -> None:
    kernels = {
        node.name
        for folder, decorator in {"xlafuse/pallas": "kernel", "triton_side/kernels/hopper": "gluon.jit"}.items()
        for file in (Path(__file__).parents[2] / folder).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if any(ast.unparse(used).startswith(decorator) for used in node.decorator_list)
    }
    assert set(GPU_ONLY) == kernels
    assert all(implementation.unsupported(case) is None for case, implementation in gpu_only_rows())


@pytest.mark.parametrize(
    ("case", "implementation"), [*first_of_each(OTHERS, kind), *(full(*row) for row in BY_INDUCTOR)], ids=name
)
def test_on_the_cpu(check_on_cpu: Check, case: Case, implementation: Implementation) -> None:
    worker = implementation.backend.cpu_check_worker
    # Each call takes seconds in Triton's interpreter; the test below calls a program with inputs of two seeds there.
    outcome = check_on_cpu(case, implementation.name, worker, examples(1, 2) if worker == "interpreter" else 2)
    assert outcome["device"] == "cpu"
    assert_right(case, outcome)


@pytest.mark.parametrize("implementation", ["xla", "eager", "library", full("inductor"), "triton"])
def test_outputs_and_gradients_in_one_program(check_on_cpu: Check, implementation: str) -> None:
    case = Case("softmax", "odd", {"rows": 7, "columns": 257}, "float32", "joint")
    worker = BLOCKS["softmax"].implementation(implementation).backend.cpu_check_worker
    assert_right(case, check_on_cpu(case, implementation, worker))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "implementation"), GPU_ROWS, ids=name)
def test_on_the_gpu(check_on_gpu: Check, case: Case, implementation: Implementation) -> None:
    outcome = check_on_gpu(case, implementation.name, implementation.backend.worker)
    assert outcome["device"] != "cpu"
    assert_right(case, outcome)
