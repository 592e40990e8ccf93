"""Names that XLA drops from products, out of the module as it was before optimization.

Of a cuBLAS call XLA keeps that it also adds (its beta, or a bias), and drops the addition's name: there, the addition
is what takes the product's result. Of products that share an operand and become one it keeps one name: there, all are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from xlafuse.hlo.flops import Flops
from xlafuse.hlo.gpu_program import Module
from xlafuse.hlo.source_lines import stage_of
from xlafuse.hlo.text_reader import Instruction

from ..model import FusionGraph, Kernel, SourceOp

_OPCODES = {"add": "add", "bias": "add", "relu": "maximum"}  # an epilogue's word -> the instruction that it was
_CARRIES = frozenset(("convert", "bitcast", "reshape", "transpose", "copy"))
Users = dict[str, list[Instruction]]


@dataclass(frozen=True)
class _Product:
    """A product before optimization. named: the instruction that XLA names it by, which is the transpose of its result
    where that is all that becomes of it. users: by name, who uses what in its computation."""

    instruction: Instruction
    named: Instruction
    users: Users
    flops: int | None


def with_epilogues(graph: FusionGraph, before: Module) -> FusionGraph:
    """The graph with stage and line of its products' epilogues, where `before` shows one operation that each can be,
    and of the products that were merged into another one.

    A product counts as merged where no kernel here has its name, it shares an operand with the product that a kernel
    has, and the kernel's FLOPs are those of all such products together, with less than one more. before: the module
    that went into XLA's optimization. What it does not decide stays as it was.
    """
    products = _products(before)
    named = {_name(op) for kernel in graph.kernels or () for op in kernel.source_ops}
    lost = [product for name, product in products.items() if product is not None and name not in named]

    def attributed(kernel: Kernel) -> Kernel:
        if kernel.kind != "gemm":
            return kernel
        names = map(_name, kernel.source_ops)
        found = next((product for name in names if (product := products.get(name)) is not None), None)
        if found is None:
            return kernel
        ops = kernel.source_ops if all(op.site for op in kernel.source_ops) else _named(kernel.source_ops, found)
        return replace(kernel, source_ops=ops + _merged(kernel, found, lost))

    return replace(graph, kernels=tuple(map(attributed, graph.kernels or ())))


def _name(op: SourceOp) -> str:
    return op.site.partition("@")[0]


def _merged(kernel: Kernel, named: _Product, lost: Iterable[_Product]) -> tuple[SourceOp, ...]:
    """The products without a kernel that this one computes beside the one it is named by."""
    operands = set(named.instruction.operands)
    beside = [each for each in lost if each.users is named.users and operands.intersection(each.instruction.operands)]
    counts = [each.flops or 0 for each in (named, *beside)]
    # What else the kernel computes, and what padding adds to a product, is less than a product is.
    if kernel.flops is None or not sum(counts) <= kernel.flops < sum(counts) + min(counts):
        return ()
    return tuple(_source_op(each.named) for each in beside)


def _products(before: Module) -> dict[str, _Product | None]:
    """By op_name; None where several have the name."""
    found: dict[str, _Product | None] = {}
    flops = Flops(before)
    for computation in before.computations.values():
        users: Users = defaultdict(list)
        for instruction in computation.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        for instruction in computation.instructions.values():
            if instruction.opcode != "dot":
                continue
            takers = users.get(instruction.name, [])
            named = takers[0] if len(takers) == 1 and takers[0].opcode == "transpose" else instruction
            if name := named.op_name:
                product = _Product(instruction, named, users, flops.of(computation, instruction))
                found[name] = None if name in found else product
    return found


def _named(ops: tuple[SourceOp, ...], product: _Product) -> tuple[SourceOp, ...]:
    result, at = [], product.instruction
    for op in ops:
        taker = None if op.site or op.op not in _OPCODES else _taker(at, product.users)
        if taker is None or taker.opcode != _OPCODES[op.op] or not taker.op_name:
            result.append(op)
            continue
        at = taker
        result.append(_source_op(taker))
    return tuple(result)


def _source_op(instruction: Instruction) -> SourceOp:
    name = instruction.op_name
    site = f"{name}@{instruction.source}#{instruction.site}"
    return SourceOp(name.rsplit("/", 1)[-1], stage_of(name), instruction.source, site, backward="transpose(" in name)


def _taker(instruction: Instruction, users: Users) -> Instruction | None:
    """The one instruction that computes with a result, through what only carries it; None where there are several."""
    while len(takers := users.get(instruction.name, [])) == 1:
        instruction = takers[0]
        if instruction.opcode not in _CARRIES:
            return instruction
    return None
