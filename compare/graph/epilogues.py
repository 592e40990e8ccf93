"""Which operation of the program a cuBLAS call's epilogue was.

XLA keeps that a product also adds (the call's beta, or a bias), and drops the addition's name. The module as it was
before optimization has it: the addition is what takes the product's result there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from compare.graph.model import FusionGraph, Kernel, SourceOp
from xlafuse.hlo import Module
from xlafuse.hlo_source import stage_of
from xlafuse.hlo_text import Instruction

_OPCODES = {"add": "add", "bias": "add", "relu": "maximum"}  # an epilogue's word -> the instruction that it was
_CARRIES = frozenset(("convert", "bitcast", "reshape", "transpose", "copy"))
Users = dict[str, list[Instruction]]


def with_epilogues(graph: FusionGraph, before: Module) -> FusionGraph:
    """The graph with stage and line of its products' epilogues, where `before` shows one operation that each can be.

    before: the module that went into XLA's optimization. What it does not decide stays as it was.
    """
    products = _products(before)

    def attributed(kernel: Kernel) -> Kernel:
        if kernel.kind != "gemm" or all(op.site for op in kernel.source_ops):
            return kernel
        names = [op.site.partition("@")[0] for op in kernel.source_ops if op.site]
        found = next((products[name] for name in names if products.get(name)), None)
        return kernel if found is None else replace(kernel, source_ops=_named(kernel.source_ops, *found))

    return replace(graph, kernels=tuple(map(attributed, graph.kernels or ())))


def _products(before: Module) -> dict[str, tuple[Instruction, Users] | None]:
    """By op_name each product and who uses what beside it; None where several have the name."""
    found: dict[str, tuple[Instruction, Users] | None] = {}
    for computation in before.computations.values():
        users: Users = defaultdict(list)
        for instruction in computation.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        for instruction in computation.instructions.values():
            if instruction.opcode == "dot" and instruction.op_name:
                found[instruction.op_name] = None if instruction.op_name in found else (instruction, users)
    return found


def _named(ops: tuple[SourceOp, ...], product: Instruction, users: Users) -> tuple[SourceOp, ...]:
    result, at = [], product
    for op in ops:
        taker = None if op.site or op.op not in _OPCODES else _taker(at, users)
        if taker is None or taker.opcode != _OPCODES[op.op] or not taker.op_name:
            result.append(op)
            continue
        at = taker
        result.append(
            SourceOp(
                taker.op_name.rsplit("/", 1)[-1], stage_of(taker.op_name), taker.source,
                f"{taker.op_name}@{taker.source}#{taker.site}", backward="transpose(" in taker.op_name,
            )
        )  # fmt: skip
    return tuple(result)


def _taker(instruction: Instruction, users: Users) -> Instruction | None:
    """The one instruction that computes with a result, through what only carries it; None where there are several."""
    while len(takers := users.get(instruction.name, [])) == 1:
        instruction = takers[0]
        if instruction.opcode not in _CARRIES:
            return instruction
    return None
