"""Operation names that XLA drops from products, restored from the module before optimization.

XLA drops two kinds of names:
- A cuBLAS call that also adds (its beta, or a bias) loses the addition's name. Before optimization, the addition is the
  instruction that uses the product's result.
- Products that share an operand and are merged keep one name. Before optimization, each still has its own.
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

_OPCODES = {"add": "add", "bias": "add", "relu": "maximum"}  # an epilogue's word -> its instruction before optimization
_CARRIES = frozenset(("convert", "bitcast", "reshape", "transpose", "copy"))
Users = dict[str, list[Instruction]]


@dataclass(frozen=True)
class _Product:
    """A product before optimization.

    named: the instruction whose name XLA gives to the product. It is the transpose of the result, where that is the
        result's only use.
    users: the users of each instruction in its computation, by name.
    """

    instruction: Instruction
    named: Instruction
    users: Users
    flops: int | None


def with_epilogues(graph: FusionGraph, before: Module) -> FusionGraph:
    """Return the graph with the stage and line of its products' epilogues and of merged products.

    before: the module before XLA's optimization. An epilogue gets a name where `before` has one operation that it can
    be. A product counts as merged into a kernel under three conditions: no kernel has its name, it shares an operand
    with the kernel's product, and the kernel's FLOPs are those of all such products, plus less than one more. Ambiguous
    names stay unresolved.
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
    """Return the operations of the nameless products that this kernel computes, too."""
    operands = set(named.instruction.operands)
    others = [each for each in lost if each.users is named.users and operands.intersection(each.instruction.operands)]
    counts = [each.flops or 0 for each in (named, *others)]
    # A kernel's other work and its padding are smaller than a product.
    if kernel.flops is None or not sum(counts) <= kernel.flops < sum(counts) + min(counts):
        return ()
    return tuple(_source_op(each.named) for each in others)


def _products(before: Module) -> dict[str, _Product | None]:
    """Return the products by op_name; None where several have the name."""
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
    """Return the only instruction that computes with a result, past casts and copies; None if there are several."""
    while len(takers := users.get(instruction.name, [])) == 1:
        instruction = takers[0]
        if instruction.opcode not in _CARRIES:
            return instruction
    return None
