"""The operation graph of an HLO module: fusions and calls are followed into, loops are entered once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from xlafuse.hlo.call_expansion import check_expansion
from xlafuse.hlo.shape import Element, Shape
from xlafuse.hlo.text_reader import Computation, Instruction, Module

from ...graph.model import StepPhase
from .operation_graph import ELEMENTWISE, Occurrence, Operation, OperationBuilder, OperationGraph

Tree: TypeAlias = "Operation | tuple[Tree, ...]"

_MOVES = frozenset("bitcast broadcast convert copy opt-barrier reshape transpose add-dependency".split())
_NAMES = {
    "exponential": "exp", "exponential-minus-one": "expm1", "log-plus-one": "log1p", "cosine": "cos", "sine": "sin",
    "dynamic-slice": "slice", "dynamic-update-slice": "update", "reduce-precision": "copy",
    "rng": "random", "rng-bit-generator": "random", "all-reduce": "copy", "ragged-dot": "ragged-product",
}
_REDUCTIONS = {"add": "reduce-sum", "maximum": "reduce-max", "minimum": "reduce-min"}
_ATTENTION = "__cudnn$fmha"
_MOST_NESTED = 100  # computations, of which each is called by the one before


def from_hlo(module: Module) -> OperationGraph:
    """Return the operations of a module, before or after XLA's passes.

    An occurrence's kernel is the name of the instruction that runs: a fusion, a library call, an operation. The phase
    is that of the op_name: jax marks gradients and what checkpointing computes again.

    Raises ValueError if the module's calls expand more than those of any real module.
    """
    check_expansion(module)
    reader = _Reader(module)
    entry = module.computations.get(module.entry)
    if entry is not None:
        reader.computation(entry, None, "")
    return reader.builder.graph()


def phase_of(op_name: str) -> StepPhase:
    if "rematted_computation" in op_name:
        return "recompute"
    return "backward" if "transpose(" in op_name else "forward"


class _Reader:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.builder = OperationBuilder()
        self._open: set[str] = set()

    def computation(self, computation: Computation, arguments: Sequence[Tree] | None, kernel: str) -> Tree:
        """Add a computation's operations and return its result. kernel: that of a fused computation, else ""."""
        known: dict[str, Tree] = {}
        result: Tree = ()
        self._open.add(computation.name)
        for name, instruction in computation.instructions.items():
            operands = [self._operand(known, operand) for operand in instruction.operands]
            if instruction.opcode == "parameter":
                index = instruction.index or 0
                given = arguments is not None and index < len(arguments)
                known[name] = arguments[index] if arguments is not None and given else self._fresh(instruction.result)
            else:
                known[name] = self._read(computation, instruction, operands, kernel)
            if instruction.is_root:
                result = known[name]
        self._open.discard(computation.name)
        return result

    def _operand(self, known: dict[str, Tree], operand: str) -> Tree:
        name, *path = operand.split("#")
        value = known.get(name, ())
        for index in path:
            value = _element(value, int(index))
        return value

    def _fresh(self, element: Element, op: str = "input", operands: Sequence[Operation] = (), **facts: Any) -> Tree:
        """Return a new value, or a tree of new values, that equals no other."""
        if element.shape is None:
            return tuple(self._fresh(part, op, operands, **facts) for part in element.elements)
        return self.builder.unique(op, element.shape.dims, element.shape.dtype, operands, **facts)

    def _read(self, computation: Computation, instruction: Instruction, operands: list[Tree], kernel: str) -> Tree:
        """Return an instruction's value, of an unknown operation where its operands do not fit its own."""
        try:
            return self._value(computation, instruction, operands, kernel)
        except (IndexError, ValueError):
            return self._fresh(instruction.result, "other")

    def _value(
        self, computation: Computation, instruction: Instruction, operands: list[Tree], kernel: str
    ) -> Tree:
        opcode = instruction.synchronous_opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return _element(operands[0], instruction.index or 0) if operands else ()
        if opcode.endswith(("-done", "-update")) or opcode == "domain":
            return operands[0] if operands else ()
        called = self._called(instruction)
        if called is not None and opcode in ("fusion", "call", "async"):
            name = kernel or (instruction.name if opcode == "fusion" else "")
            return self.computation(called, operands, name)
        if called is not None and opcode == "while":
            return self._loop(called, instruction, operands)
        arrays = [operand for operand in operands if isinstance(operand, Operation)]
        occurrence = Occurrence(kernel or instruction.name, phase_of(instruction.op_name), instruction.source)
        if len(arrays) != len(operands) or len(instruction.shapes) != 1 or instruction.result.shape is None:
            return self._several(computation, instruction, operands, occurrence)
        return self._operation(computation, instruction, arrays, occurrence)

    def _called(self, instruction: Instruction) -> Computation | None:
        names = instruction.called("calls", "body")
        if instruction.opcode in ("call", "async-start"):
            names = instruction.called("to_apply", "calls")
        if not names or names[0] in self._open or len(self._open) >= _MOST_NESTED:
            return None
        return self.module.computations.get(names[0])

    def _loop(self, body: Computation, instruction: Instruction, operands: list[Tree]) -> Tree:
        """Enter a loop's body once. Its state is new values, except what the body hands on unchanged.

        A scan writes the value of each iteration into an array. The array is an operation "stacked" of this value.
        Backward's scan takes slices of it, which are the value.
        """
        root, first = body.root, next((p for p in body.instructions.values() if p.opcode == "parameter"), None)
        if root is None or first is None:
            return self._fresh(instruction.result)
        state = self._fresh(first.result)
        initial = operands[0] if operands else ()
        if isinstance(state, tuple) and isinstance(initial, tuple) and root.opcode == "tuple":
            state = tuple(
                given if _hands_on(body, first, result, index) else value
                for index, (value, given, result) in enumerate(zip(state, initial, root.operands, strict=True))
            )
        made, result = self.computation(body, [state], ""), self._fresh(instruction.result)
        if isinstance(made, tuple) and isinstance(state, tuple) and isinstance(result, tuple):
            result = tuple(map(self._after_loop, state, made, result))
        return result

    def _after_loop(self, before: Tree, made: Tree, result: Tree) -> Tree:
        if made is before:
            return made
        if isinstance(made, Operation) and made.op == "update" and made.operands[0] is before:
            return self.builder.unique("stacked", made.shape, made.dtype, [made.operands[1]])
        return result

    def _several(
        self, computation: Computation, instruction: Instruction, operands: list[Tree], occurrence: Occurrence
    ) -> Tree:
        """Add an operation with several results or with a tuple as operand."""
        arrays = [leaf for operand in operands for leaf in _leaves(operand)]
        if instruction.opcode in ("custom-call", "custom-call-start") and instruction.shapes:
            first = self._call(computation, instruction, arrays, instruction.shapes[0], occurrence)
            if isinstance(instruction.result.shape, Shape):
                return first
            rest = [self._fresh(part, "other", arrays) for part in instruction.result.elements[1:]]
            return (first, *rest)
        op = _NAMES.get(instruction.opcode, instruction.opcode)
        if op == "reduce":
            op = "other"
        value = self._fresh(instruction.result, op, arrays)
        for leaf in _leaves(value):
            leaf.occurrences[occurrence] = None
        return value

    def _operation(
        self, computation: Computation, instruction: Instruction, operands: list[Operation], occurrence: Occurrence
    ) -> Operation:
        opcode, shape = instruction.synchronous_opcode, instruction.shapes[0]
        dims, dtype = shape.dims, shape.dtype
        op = _NAMES.get(opcode, opcode)
        add = self.builder.add
        if (opcode in _MOVES or op == "copy") and operands:
            axes = instruction.dimensions if opcode == "broadcast" else None
            return self.builder.moved(operands[0], dims, dtype, axes)
        if opcode == "constant":
            value = _number(instruction.detail)
            literal = instruction.detail or instruction.name
            return add("constant", dims, dtype, key=literal if value is None else value, value=value)
        if opcode == "iota":
            dimension = len(dims) - next(iter(instruction.dimensions), 0)
            return add("iota", dims, dtype, key=dimension, occurrence=occurrence, axis=dimension)
        if op == "slice" and operands[0].op == "stacked" and math.prod(dims) == operands[0].operands[0].elements:
            return self.builder.moved(operands[0].operands[0], dims, dtype)
        given = [_given(computation, name) for name in instruction.operands]
        if opcode == "dot":
            summed = math.prod(given[0][0][axis] for axis in instruction.contracting if axis < len(given[0][0]))
            return self.builder.product(dims, dtype, operands, given, summed, occurrence)
        if opcode == "custom-call":
            return self._call(computation, instruction, operands, shape, occurrence)
        if opcode == "reduce":
            return self._reduction(instruction, operands, given, occurrence)
        if opcode == "compare":
            direction = instruction.direction
            return add(op, dims, dtype, operands, given, occurrence, direction, direction=direction)
        if opcode == "dynamic-slice":  # a scan's layer: forward and backward count in opposite directions
            return add(op, dims, dtype, operands[:1], given[:1], occurrence, dims)
        if opcode == "slice":
            return add(op, dims, dtype, operands, given, occurrence, instruction.detail)
        if opcode in ("all-gather", "all-to-all", "reduce-scatter", "random", "rng", "rng-bit-generator", "infeed"):
            made = self.builder.unique(op, dims, dtype, operands)
            made.occurrences[occurrence] = None
            return made
        key = () if op in ELEMENTWISE else (dims, instruction.dimensions)
        return add(op, dims, dtype, operands, given, occurrence, key)

    def _reduction(
        self, instruction: Instruction, operands: list[Operation], given: list[tuple[tuple[int, ...], str]],
        occurrence: Occurrence,
    ) -> Operation:
        """Add a reduction. XLA sums a long product in parts; the sum of the parts is the product."""
        applied = self.module.computations.get(next(iter(instruction.called("to_apply")), ""))
        root = applied.root if applied is not None else None
        op = _REDUCTIONS.get(root.opcode if root is not None else "", "other")
        shape, axes = instruction.shapes[0], instruction.dimensions
        taken, rank = operands[0], len(given[0][0])
        if op == "reduce-sum" and taken.op == "product" and axes == (0,) and taken.facts["batch"] == given[0][0][0]:
            if occurrence.line in {known.line for known in taken.occurrences}:
                whole = taken.facts["k"] * taken.facts["batch"]
                return self.builder.product(shape.dims, shape.dtype, taken.operands, taken.given, whole, occurrence)
        trailing = axes == tuple(range(rank - len(axes), rank))
        return self.builder.reduction(op, shape.dims, shape.dtype, taken, given[0], trailing, occurrence)

    def _call(
        self, computation: Computation, instruction: Instruction, operands: list[Operation], shape: Shape,
        occurrence: Occurrence,
    ) -> Operation:
        """Add a library call: cuBLAS's product with its epilogue, cuDNN's attention, or another one."""
        target = instruction.custom_call_target
        given = [_given(computation, name) for name in instruction.operands]
        config = _config(instruction.backend_config)
        gemm, attention = config.get("gemm_backend_config"), config.get("cudnn_fmha_backend_config")
        if target.startswith("__cublas") and isinstance(gemm, dict) and len(operands) > 1:
            numbers = gemm.get("dot_dimension_numbers", {})
            summed = math.prod(given[0][0][int(axis)] for axis in numbers.get("lhs_contracting_dimensions", ()))
            made = self.builder.product(shape.dims, shape.dtype, operands[:2], given[:2], summed, occurrence)
            return self._epilogue(gemm, made, operands[2:], shape, occurrence)
        if target.startswith(_ATTENTION) and isinstance(attention, dict):
            facts = {
                "backward": "Backward" in target, "mask": attention.get("mask_type", ""),
                "window": attention.get("sliding_window_length", 0), "bias": "Bias" in target,
                "scores": [int(n) for n in attention.get("intermediate_tensor_shape", {}).get("dimensions", ())],
                "layout": attention.get("bmm1_dot_dimension_numbers", {}).get("lhs_batch_dimensions", ()),
            }
            return self.builder.add("attention", shape.dims, shape.dtype, operands, given, occurrence, target, **facts)
        op = "topk" if "topk" in target.lower() else "other"
        made = self.builder.unique(op, shape.dims, shape.dtype, operands, target=target)
        made.given = tuple(given)
        made.occurrences[occurrence] = None
        return made

    def _epilogue(
        self, gemm: dict[str, Any], made: Operation, others: list[Operation], shape: Shape, occurrence: Occurrence
    ) -> Operation:
        """Add what cuBLAS computes after the product: c + ..., a bias, an activation."""
        rest = list(others)
        epilogue = str(gemm.get("epilogue", ""))
        if gemm.get("beta") and rest:
            made = self.builder.add("add", shape.dims, shape.dtype, [made, rest.pop(0)], occurrence=occurrence)
        if "BIAS" in epilogue and rest:
            made = self.builder.add("add", shape.dims, shape.dtype, [made, rest.pop(0)], occurrence=occurrence)
        for word in ("GELU", "RELU", "SILU"):
            if word in epilogue:
                made = self.builder.add(word.lower(), shape.dims, shape.dtype, [made], occurrence=occurrence)
        return made


def _given(computation: Computation, operand: str) -> tuple[tuple[int, ...], str]:
    shape = computation.operand_shape(operand)
    return ((), "") if shape is None else (shape.dims, shape.dtype)


def _element(value: Tree, index: int) -> Tree:
    return value[index] if isinstance(value, tuple) and index < len(value) else ()


def _leaves(value: Tree) -> list[Operation]:
    return [value] if isinstance(value, Operation) else [leaf for part in value for leaf in _leaves(part)]


def _hands_on(body: Computation, state: Instruction, result: str, index: int) -> bool:
    """Return whether a loop's body returns an element of its state unchanged."""
    name, *path = result.split("#")
    if path:
        return name == state.name and path == [str(index)]
    part = body.instructions.get(name)
    return part is not None and part.opcode == "get-tuple-element" and part.index == index \
        and part.operands == (state.name,)


def _number(literal: str) -> float | None:
    if literal in ("true", "false"):
        return float(literal == "true")
    try:
        return float(literal)
    except ValueError:
        return None


def _config(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
