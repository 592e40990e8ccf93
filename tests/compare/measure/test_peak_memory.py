"""Peak memory of calls whose need is known: XLA's as planned by its compiler, PyTorch's as measured on a GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from worker_programs import WorkerProgram

from xlafuse.compare.spec.blocks import attention
from xlafuse.compare.spec.case import Case
from xlafuse.compare.spec.dtype import DTYPES
from xlafuse.compare.workers.pool import WorkerPool

MIB = 1 << 20


def peaks(pool: WorkerPool, folder: Path, case: Case, implementation: str) -> dict[str, dict[str, Any]]:
    """Return the peak memory of a run's first round, by phase: bytes, planned, reason."""
    with WorkerProgram(pool, folder, case, implementation) as program:
        program.ask("check")
        found: dict[str, dict[str, Any]] = program.measure(first=True)["peak_memory"]
    return found


def number(peak: dict[str, Any], implementation: str) -> int:
    """Return the bytes that reports show: XLA's plan, and the measurement of the others."""
    shown, other = ("planned", "bytes") if implementation.startswith("xla") else ("bytes", "planned")
    assert peak.get(other) is None and ("reason" in peak) == (shown == "planned")
    found: int = peak[shown]
    return found


MEASURED = [pytest.param(name, marks=pytest.mark.gpu) for name in ("eager", "inductor", "triton", "cuda")]


@pytest.mark.parametrize("elements", [3 * MIB, pytest.param(33_000_001, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("implementation", ["xla", *MEASURED])
def test_vector_add_needs_only_its_output(
    pool: WorkerPool, tmp_path: Path, implementation: str, elements: int
) -> None:
    case = Case("vector_add", "any", {"elements": elements}, "float32", "fwd")
    found = number(peaks(pool, tmp_path, case, implementation)["forward"], implementation)
    output = 4 * elements
    # PyTorch may leave up to 1 MiB of a large block unsplit.
    assert output <= found <= output + (0 if implementation == "xla" else MIB)


@pytest.mark.gpu  # on a CPU, XLA has no unfused compile of it
@pytest.mark.parametrize("implementation", ["xla-unfused", "eager"])
def test_unfused_attention_needs_its_scores(pool: WorkerPool, tmp_path: Path, implementation: str) -> None:
    sizes = attention.sizes(1, 8, 1024, 64)
    case = Case("attention", "scores", sizes, "bfloat16", "fwd")
    found = number(peaks(pool, tmp_path, case, implementation)["forward"], implementation)
    scores = 8 * 1024 * 1024 * DTYPES["bfloat16"].itemsize
    assert scores <= found <= 8 * scores  # in bfloat16 or float32, once to a few times


@pytest.mark.parametrize("implementation", ["xla", MEASURED[0], MEASURED[2]])
def test_backward_does_not_count_saved_tensors(pool: WorkerPool, tmp_path: Path, implementation: str) -> None:
    rows = 512 if implementation == "xla" else 4096  # the plan of a compile
    case = Case("softmax", "any", {"rows": rows, "columns": 1024}, "float32", "train")
    found = {part: number(peak, implementation) for part, peak in peaks(pool, tmp_path, case, implementation).items()}
    array = 4 * math.prod(case.sizes.values())
    # The gradient and at most two temporaries. Eager PyTorch computes the gradient of total in y = e / total as
    # -dy * ((e / total) / total): four arrays at the same time.
    arrays = 4 if implementation == "eager" else 3
    assert array <= found["backward"] <= arrays * array + (0 if implementation == "xla" else 4 * MIB)
    assert array <= found["forward"]
