"""Epilogues of cuBLAS calls and merged products get their earlier names, unless these are ambiguous."""

from __future__ import annotations

from xlafuse.compare.graph.build.epilogues import with_epilogues
from xlafuse.compare.graph.model import FusionGraph, Kernel, SourceOp
from xlafuse.hlo import gpu_program

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


def before(user: str) -> gpu_program.Module:
    module = gpu_program.parse(BEFORE.replace("USER", user))
    assert not module.unparsed
    return module


def test_an_epilogue_gets_the_name_of_the_addition() -> None:
    _, added = ops(with_epilogues(graph(PRODUCT, SourceOp("add")), before(ADD)))
    assert (added.op, added.stage, added.line, added.backward) == ("add", "residual", "mlp.py:4", False)


def test_a_named_epilogue_stays() -> None:
    named = SourceOp("add", "elsewhere", "mlp.py:9", "jit(f)/elsewhere/add@mlp.py:9#")
    assert ops(with_epilogues(graph(PRODUCT, named), before(ADD))) == (PRODUCT, named)


def test_an_ambiguous_epilogue_stays_unnamed() -> None:
    other = SourceOp("add")
    twice = ADD.removeprefix("ROOT ") + "\n  ROOT sub.1 = bf16[8,8]{1,0} subtract(convert.1, add.1)"
    multiplied = ADD.replace("add(x", "multiply(x")
    for user in (twice, multiplied):
        assert ops(with_epilogues(graph(PRODUCT, other), before(user))) == (PRODUCT, other)
    assert ops(with_epilogues(graph(other), before(ADD))) == (other,)


# Products of one operand, which XLA's dot-merger makes one.

TWO = """HloModule m

ENTRY main {
  x = bf16[8,8]{1,0} parameter(0)
  w = bf16[8,8]{1,0} parameter(1)
  v = bf16[8,4]{1,0} parameter(2)
  dot.1 = bf16[8,8]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/gate/dot_general" source_file="mlp.py" source_line=3}
  dot.2 = bf16[8,4]{1,0} dot(OPERAND, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/up/dot_general" source_file="mlp.py" source_line=4}
  ROOT t = (bf16[8,8]{1,0}, bf16[8,4]{1,0}) tuple(dot.1, dot.2)
}
"""
GATE = SourceOp("dot_general", "gate", "mlp.py:3", "jit(f)/gate/dot_general@mlp.py:3#")
UP = SourceOp("dot_general", "up", "mlp.py:4", "jit(f)/up/dot_general@mlp.py:4#")
BOTH = 2 * 8 * 8 * (8 + 4)


def merged(flops: float | None, *others: Kernel, operand: str = "x") -> tuple[SourceOp, ...]:
    kernels = (Kernel("gemm_fusion_dot", "gemm", source_ops=(GATE,), flops=flops), *others)
    return ops(with_epilogues(FusionGraph("m", "xla", kernels), gpu_program.parse(TWO.replace("OPERAND", operand))))


def test_a_product_merged_into_another_is_named() -> None:
    assert merged(BOTH) == merged(BOTH + 64) == (GATE, UP)  # with an elementwise operation beside them


def test_a_product_that_has_a_kernel_was_not_merged() -> None:
    assert merged(BOTH, Kernel("dot.2", "gemm", source_ops=(UP,))) == (GATE,)


def test_other_flops_or_other_operands_are_no_merged_product() -> None:
    assert merged(BOTH - 1) == merged(2 * BOTH) == merged(None) == merged(BOTH, operand="v") == (GATE,)


def test_a_gradient_is_named_by_its_transpose() -> None:
    module = TWO.replace("OPERAND", "x").replace(
        "ROOT t = (bf16[8,8]{1,0}, bf16[8,4]{1,0}) tuple(dot.1, dot.2)",
        'transpose.1 = bf16[4,8]{1,0} transpose(dot.2), dimensions={1,0}, '
        'metadata={op_name="jit(f)/transpose(jvp(up))/transpose" source_file="mlp.py" source_line=4}\n'
        "  ROOT t = (bf16[8,8]{1,0}, bf16[4,8]{1,0}) tuple(dot.1, transpose.1)",
    )
    found = with_epilogues(
        FusionGraph("m", "xla", (Kernel("dot", "gemm", source_ops=(GATE,), flops=BOTH),)), gpu_program.parse(module)
    )
    assert [(op.op, op.stage, op.backward) for op in ops(found)][1:] == [("transpose", "up", True)]
