"""A replay of priority fusion from its log: the fusions that it made, and its last decision on every other node.

A fusion keeps its consumer's root, so every name in the log stands for one instruction of the module before the pass.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from xlafuse.dumps.fusion_log import Estimated, Fused, Ineligible, Step
from xlafuse.hlo.text_reader import Computation, Instruction, Module

Barrier = Literal["", "gemm", "library", "output", "order", "unsupported"]
Key = tuple[str, str, tuple[int, ...]]

# Names of copies: multi-output fusion writes "mul.16.1.clone.1", rematerialisation "mul.16.1.remat2".
_COPY = re.compile(r"(?:\.(?:clone|remat\d*)(?:\.\d+)?)+$")
_NUMBER = re.compile(r"\.\d+$")
_PRODUCTS = frozenset(("dot", "convolution", "scaled-dot", "ragged-dot"))
# Opcodes that priority fusion never fuses, besides custom calls and products.
_NOT_FUSIBLE = frozenset(
    "all-gather all-gather-done all-gather-start all-reduce all-reduce-done all-reduce-start all-to-all "
    "async-done async-start call cholesky collective-broadcast collective-permute collective-permute-done "
    "collective-permute-start conditional copy-done copy-start fft get-tuple-element infeed opt-barrier outfeed "
    "parameter recv recv-done reduce-scatter rng rng-bit-generator rng-get-and-update-state select-and-scatter "
    "send send-done sort topk triangular-solve while".split()
)


def stable_key(instruction: Instruction) -> Key:
    """Return the part of an instruction that the passes keep: its name without copy numbers, opcode, dimensions.

    "mul.16.0" before the pass is "mul.16.1" or "mul.16.1.clone.1" in the finished module.
    """
    dims = instruction.shapes[0].dims if len(instruction.shapes) == 1 else ()
    return _NUMBER.sub("", _COPY.sub("", instruction.name)), instruction.opcode, dims


def fusion_body(module: Module, fusion: Instruction) -> Computation | None:
    """Return the computation of a fusion, asynchronous or not; None for other instructions."""
    if fusion.synchronous_opcode != "fusion":
        return None
    return module.computations.get(next(iter(fusion.called("calls")), ""))


def kernel_computations(module: Module) -> Iterator[Computation]:
    """Yield the computations whose instructions are kernels: the entry and those of its loops, branches and calls.

    Left out are the bodies of fusions and reductions, and computations that nothing calls; priority fusion leaves such.
    """
    pending, seen = [module.entry], set()
    while pending:
        name = pending.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        computation = module.computations[name]
        yield computation
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "conditional", "call"):
                pending += [called for _, called in instruction.calls]
            elif instruction.opcode == "async-start":
                pending += instruction.called("calls", "to_apply")


class Replay:
    """The graph of the pass after all steps of its log. Nodes are names in the log; unknown names are ignored.

    origin: every name in the log -> its root instruction in `before`. last: XLA's last decision on a node.
    """

    def __init__(self, before: Module, steps: Iterable[Step]) -> None:
        self.origin: dict[str, str] = {}
        self.last: dict[str, Ineligible | Estimated] = {}
        self._instruction: dict[str, Instruction] = {}
        self._key: dict[str, Key] = {}
        self._products: set[str] = set()
        self._operands: dict[str, dict[str, None]] = {}
        self._users: dict[str, dict[str, None]] = {}
        self._readers: dict[str, dict[str, None]] = {}
        for computation in kernel_computations(before):
            self._add(before, computation)
        self._run(steps)

    def __iter__(self) -> Iterator[str]:
        return iter(self._operands)

    def __contains__(self, node: object) -> bool:
        return node in self._operands

    def key(self, node: str) -> Key:
        """Return the stable key of the node's root."""
        return self._key[self.origin[node]]

    def operands(self, node: str) -> Iterable[str]:
        return self._operands.get(node, ())

    def users(self, node: str) -> Iterable[str]:
        return self._users.get(node, ())

    def readers(self, node: str) -> Collection[str]:
        """Return the users of a node; a bitcast is replaced by its own users."""
        if node not in self._readers:
            found: dict[str, None] = {}
            pending, seen = [node], set()
            while pending:
                for user in self.users(pending.pop()):
                    if self.key(user)[1] != "bitcast":
                        found[user] = None
                    elif user not in seen:
                        seen.add(user)
                        pending.append(user)
            self._readers[node] = found
        return self._readers[node]

    def barrier(self, node: str) -> Barrier:
        """Return why priority fusion calls a node not fusible, "" if it does not.

        Reasons: a matrix product ("gemm"), a library call, the output of its computation, which is not a kernel, an
        optimization barrier ("order"), another opcode ("unsupported").
        """
        instruction = self._instruction[self.origin[node]]
        if instruction.opcode == "custom-call":
            return "gemm" if instruction.custom_call_target.startswith("__cublas") else "library"
        if instruction.opcode in _PRODUCTS:
            return "gemm"
        if instruction.opcode == "fusion" and instruction.fusion_kind == "kCustom":
            return "gemm" if self.origin[node] in self._products else "unsupported"
        if instruction.opcode == "tuple":
            users = [self._instruction[self.origin[user]].opcode for user in self.users(node)]
            return "output" if instruction.is_root else "order" if "opt-barrier" in users else "unsupported"
        return "unsupported" if instruction.opcode in _NOT_FUSIBLE else ""

    def _add(self, before: Module, computation: Computation) -> None:
        for name, instruction in computation.instructions.items():
            inside = fusion_body(before, instruction)
            root = inside.root if inside is not None else None
            self.origin[name] = name
            self._instruction[name] = instruction
            self._key[name] = stable_key(root or instruction)
            if inside is not None and any(i.opcode in _PRODUCTS for i in inside.instructions.values()):
                self._products.add(name)
            self._operands[name] = {}
            for operand in instruction.operands:
                operand = operand.split("#")[0]
                if operand in self._operands:
                    self._operands[name][operand] = None
                    self._users.setdefault(operand, {})[name] = None

    def _run(self, steps: Iterable[Step]) -> None:
        made: set[str] = set()  # fusions made since the last estimate
        fusing = False
        for step in steps:
            if isinstance(step, Fused):
                if not fusing:
                    made.clear()
                made.add(step.fusion)
                self._fuse(step.producer, step.consumer, step.fusion)
            elif isinstance(step, Ineligible):
                self.last[step.producer] = step
            else:
                self._estimate(step, changed=step.producer in made)
            fusing = isinstance(step, Fused)

    def _estimate(self, step: Estimated, changed: bool) -> None:
        """Add an estimate to the last one if XLA logged only the change.

        XLA does so for new consumers of a producer that it expects to fuse. This rule follows XLA's sources, and agrees
        with the total benefits in the visualisation of jax 0.11.
        """
        known = self.last.get(step.producer)
        if isinstance(known, Estimated) and known.unfused_us >= known.fused_us and not changed:
            fused, unfused = known.fused_us + step.fused_us, known.unfused_us + step.unfused_us
            step = Estimated(step.producer, step.consumers, fused, unfused)
        self.last[step.producer] = step

    def _fuse(self, producer: str, consumer: str, fusion: str) -> None:
        if producer not in self._operands or consumer not in self._operands:
            return
        operands = self._operands.pop(consumer)
        operands.pop(producer, None)
        operands |= self._operands[producer]
        users = self._users.pop(consumer, {})
        self.origin[fusion] = self.origin[consumer]
        self._operands[fusion] = operands
        self._users[fusion] = users
        for user in users:
            self._operands[user].pop(consumer, None)
            self._operands[user][fusion] = None
        self._users[producer].pop(consumer, None)
        for operand in operands:
            readers = self._users.setdefault(operand, {})
            readers.pop(consumer, None)
            readers[fusion] = None
        if fusion != consumer:
            self.last.pop(consumer, None)
        if not self._users[producer]:
            self._remove(producer)

    def _remove(self, node: str) -> None:
        for operand in self._operands.pop(node):
            self._users[operand].pop(node, None)
        self._users.pop(node, None)
        self.last.pop(node, None)
