"""A cuBLAS call's epilogue gets the name that its operation had before optimization, where only one can be meant."""

from __future__ import annotations

from compare.graph.epilogues import with_epilogues
from compare.graph.model import FusionGraph, Kernel, SourceOp
from xlafuse import hlo

BEFORE = """HloModule m

ENTRY main {
  x = bf16[8,8]{1,0} parameter(0)
  w = bf16[8,8]{1,0} parameter(1)
  dot.1 = f32[8,8]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/down/dot_general" source_file="mlp.py" source_line=3}
  convert.1 = bf16[8,8]{1,0} convert(dot.1)
  USER
}
"""
ADD = (
    'ROOT add.1 = bf16[8,8]{1,0} add(x, convert.1), '
    'metadata={op_name="jit(f)/residual/add" source_file="mlp.py" source_line=4}'
)
PRODUCT = SourceOp("dot_general", "down", "mlp.py:3", "jit(f)/down/dot_general@mlp.py:3#")


def graph(*ops: SourceOp) -> FusionGraph:
    return FusionGraph("m", "xla", (Kernel("cublas-lt-matmul", "gemm", source_ops=ops),))


def ops(found: FusionGraph) -> tuple[SourceOp, ...]:
    assert found.kernels
    return found.kernels[0].source_ops


def before(user: str) -> hlo.Module:
    module = hlo.parse(BEFORE.replace("USER", user))
    assert not module.unparsed
    return module


def test_the_addition_that_took_the_product() -> None:
    _, added = ops(with_epilogues(graph(PRODUCT, SourceOp("add")), before(ADD)))
    assert (added.op, added.stage, added.line, added.backward) == ("add", "residual", "mlp.py:4", False)


def test_what_is_named_stays() -> None:
    named = SourceOp("add", "elsewhere", "mlp.py:9", "jit(f)/elsewhere/add@mlp.py:9#")
    assert ops(with_epilogues(graph(PRODUCT, named), before(ADD))) == (PRODUCT, named)


def test_nothing_is_guessed() -> None:
    other = SourceOp("add")
    twice = ADD.removeprefix("ROOT ") + "\n  ROOT sub.1 = bf16[8,8]{1,0} subtract(convert.1, add.1)"
    multiplied = ADD.replace("add(x", "multiply(x")
    for user in (twice, multiplied):
        assert ops(with_epilogues(graph(PRODUCT, other), before(user))) == (PRODUCT, other)
    assert ops(with_epilogues(graph(other), before(ADD))) == (other,)
