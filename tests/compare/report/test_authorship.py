"""The count of lines of code, without comments, docstrings and blank lines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_rows import rows_of, timed_record

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.report import authorship as view
from xlafuse.compare.report import kernel_lines
from xlafuse.compare.report.kernel_lines import Lines, lines_of
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.implementation import Implementation

SOURCE = '''"""A module's docstring."""

import triton

from written.kernels import shared
from written.kernels.shared import helper
from written.elsewhere import unrelated

LIMIT = 4  # no line of a function


@triton.jit
def unused_kernel(x):
    return x


@triton.jit
def kernel(x, y):
    """What it does,

    at length.
    """
    # A comment.
    value = helper(x)  # a comment behind code

    text = """
    no docstring
    """
    return value, shared.second(text)


class Function:
    @staticmethod
    def forward(x):
        kernel[(1,)](x, x)


def apply(inputs):
    """The door."""
    unrelated()
    return Function.forward(inputs)


def with_cuda(inputs):
    return launch("add.cu", inputs)
'''
SHARED = '''import triton


@triton.jit
def helper(x):
    return x + 1


@triton.jit
def second(x):
    return x
'''
TABLE = """import triton

from written.kernels import shared
from written.kernels.block import LIMIT


@triton.jit
def forward(x):
    return x


@triton.jit
def backward(x):
    return x


KERNELS = (forward, backward, shared.second)
SETS = {"all": KERNELS}


def apply(inputs):
    return [kernel(inputs, LIMIT) for kernel in SETS["all"]]
"""
PALLAS = '''from written.kernels.library import differentiable, kernel, run


@kernel
def body(x, y):
    y[...] = doubled(x)


def doubled(x):
    return 2 * x


def launch(x):
    return run(body, x)


@differentiable
def operation(x):
    return launch(x)


def forward(x):
    return operation(x), x


def backward(x, dy):
    return dy


operation.defvjp(forward, backward)


def apply(inputs):
    return operation(inputs)
'''
CUDA = """// A comment.
#include <math.h>  // counted
#include "pack.cuh"

/* several
   lines */
__global__ void add(float* x) {
  x[0] += 1;  /* behind code */
}
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "written" / "kernels"
    package.mkdir(parents=True)
    (tmp_path / "written" / "__init__.py").write_text("raise ImportError('source is read, not imported')\n")
    (tmp_path / "written" / "elsewhere.py").write_text("def unrelated():\n    return 0\n")
    (package / "block.py").write_text(SOURCE)
    (package / "shared.py").write_text(SHARED)
    (package / "table.py").write_text(TABLE)
    (package / "pallas.py").write_text(PALLAS)
    (package / "add.cu").write_text(CUDA)
    (package / "pack.cuh").write_text("struct Pack {};\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel_lines._parsed.cache_clear()
    return "written.kernels.block"


def of(target: str) -> Lines:
    return lines_of(Implementation("mine", target, "triton", "mine"))


def test_a_gluon_kernel_counts(written: str, tmp_path: Path) -> None:
    text = "from triton.experimental import gluon\n\n\n@gluon.jit(debug=True)\ndef kernel(x):\n    x.store(1)\n"
    text += "\n\ndef apply(inputs):\n    return kernel(inputs)\n"
    (tmp_path / "written" / "kernels" / "hopper.py").write_text(text)
    assert of("written.kernels.hopper:apply") == Lines(2, 2)


@pytest.mark.parametrize(
    ("target", "lines"),
    [
        # The kernel: def, value, three lines of text, return. Two helpers. class Function; apply without its docstring.
        ("block:apply", Lines(6 + 2 + 2, 4 + 3)),
        # The kernel and the function that it calls. launch, operation, forward, backward, apply.
        ("pallas:apply", Lines(2 + 2, 2 * 5)),
        ("table:apply", Lines(3 * 2, 2)),  # kernels in a constant that names another
        ("block:with_cuda", Lines(2 + 3 + 1, 2)),  # the file, and what it includes
    ],
)
def test_kernels_count_with_what_they_use_and_without_comments(written: str, target: str, lines: Lines) -> None:
    assert of(f"written.kernels.{target}") == lines


def test_missing_source_is_an_error(written: str) -> None:
    with pytest.raises(LookupError, match="defines no nothing"):
        of(f"{written}:nothing")
    with pytest.raises(LookupError, match="no source of written.kernels.other"):
        of("written.kernels.other:apply")


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda block: block.name)
def test_only_handwritten_implementations_have_kernel_lines(block) -> None:  # type: ignore[no-untyped-def]
    for implementation in block.implementations:
        found = lines_of(implementation)
        own_kernels = implementation.backend_name in (
            "triton", "triton-cudagraphs", "xla-triton", "cuda", "pallas", "xla-pallas"
        ) or (  # the MLP launches others'
            implementation.backend_name in ("triton-ranks", "triton-ranks-cudagraphs") and block.name == "moe_parallel"
        )
        assert (found.kernel > 0) == own_kernels, implementation.name
        assert found.other > 0


def test_every_kernel_of_a_measured_implementation_is_counted() -> None:
    """The kernels that the committed run launched are among the definitions that their `apply` reaches."""
    launched: dict[str, set[str]] = {}
    for result in open_source(PROJECT / "reports" / "h200").select({"implementation": ["triton"]}).results:
        if result.graph is not None:
            launched.setdefault(result.row.block, set()).update(kernel.name for kernel in result.graph.kernels)
    written = {
        name for file in (PROJECT / "triton_side" / "kernels").rglob("*.py")
        for name in re.findall(r"^def (\w+)", file.read_text(), re.MULTILINE)
    }
    assert launched
    for block, kernels in launched.items():
        reached = {name for _, name in kernel_lines.reached_by(BLOCKS[block].implementation("triton"))}
        assert kernels & written <= reached, block


def test_lines_of_the_vector_add_kernel() -> None:
    """The lines of the function in triton_side/kernels/vector_add.py."""
    source = (PROJECT / "triton_side" / "kernels" / "vector_add.py").read_text()
    body = source[source.index("def vector_add_kernel") : source.index("def configure")]
    code = [line for line in body.splitlines() if line.strip() and not line.strip().startswith(("#", "@"))]
    assert lines_of(BLOCKS["vector_add"].implementation("triton")).kernel == len(code)


def test_counting_imports_no_framework() -> None:
    program = (
        "import sys\n"
        "from xlafuse.compare.report.kernel_lines import lines_of\n"
        "from xlafuse.compare.spec.blocks import BLOCKS\n"
        "[lines_of(i) for i in BLOCKS['gelu'].implementations]; print({'torch', 'jax', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_speedup_is_the_geometric_mean_over_common_cases() -> None:
    times: dict[tuple[str, str], list[float | None]] = {
        ("gelu", "xla"): [10.0, 10.0, 10.0], ("gelu", "triton"): [5.0, 20.0, None], ("gelu", "gone"): [5.0],
        ("softmax", "xla"): [8.0], ("softmax", "triton"): [2.0],
    }
    records = []
    for (block, name), of_cases in times.items():
        cases = (case for case in BLOCKS[block].cases("full") if case.direction == "fwd")
        for us, case in zip(of_cases, cases, strict=False):
            status = {} if us else {"status": "failed", "detail": "why"}
            records.append(timed_record(case, name, us or 1.0, compiler=name, **status))
    rows = rows_of(*records)
    lines = {(line.block, line.implementation): line for line in view.of(rows)}
    gelu, softmax = lines["gelu", "triton"], lines["softmax", "triton"]
    assert (gelu.speedup_vs_xla, gelu.cases) == (pytest.approx(1.0), 2)
    assert (softmax.speedup_vs_xla, softmax.cases) == (pytest.approx(4.0), 1)
    assert {block for block, _ in lines} == {"gelu", "softmax"}  # no sum over blocks: each has other cases
    assert lines["gelu", "gone"].kernel_lines is None  # of another release
    text = view.render(view.of(rows), markdown=True)
    assert "## softmax" in text and "4.00x" in text and "means over different cases" in text
