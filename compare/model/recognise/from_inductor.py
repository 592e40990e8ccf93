"""The operation graph of a program that Inductor compiled: its FX graphs before Inductor's passes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from xlafuse.triton_side.inductor.graph import ATTENTION, VIEWS, CompiledGraph, Program, SourceNode

from ...graph.model import StepPhase
from .operation_graph import Occurrence, Operation, OperationBuilder, OperationGraph, Shape

Tree: TypeAlias = "Operation | tuple[Operation, ...]"

_MOVES = {view.removeprefix("aten.") for view in VIEWS - {"aten.slice", "aten.select", "aten.unfold"}} | set(
    "clone contiguous convert_element_type copy lift_fresh_copy reshape _to_copy to _unsafe_view repeat".split()
)
_NAMES = {
    "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negate", "sigmoid": "logistic", "pow": "power",
    "where": "select", "clamp_min": "maximum", "clamp_max": "minimum", "bitwise_and": "and", "logical_and": "and",
    "bitwise_or": "or", "logical_or": "or", "bitwise_not": "not", "logical_not": "not", "cat": "concatenate",
    "embedding": "gather", "index": "gather", "index_select": "gather", "index_put": "scatter",
    "scatter_add": "scatter",
    "_unsafe_index": "gather", "_unsafe_index_put": "scatter", "select": "slice", "bitwise_xor": "xor",
    "inductor_random": "random", "rand": "random", "bernoulli": "random", "native_dropout": "random",
    "_grouped_mm": "ragged-product", "fill": "constant",
}
_COMPARISONS = set("lt le gt ge eq ne".split())
_REDUCTIONS = {"sum": "reduce-sum", "amax": "reduce-max", "amin": "reduce-min", "mean": "mean", "var": "variance"}
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # the position of the left operand
_NUMBER = re.compile(r"-?(?:\d[\d.]*(?:e[+-]?\d+)?|inf)$|True$|False$")


def from_inductor(program: Program) -> OperationGraph:
    """Return the operations of a compile or dump. Kernels have their names in the fusion graph.

    Forward and backward are one graph: backward takes what forward saved by its name there. A forward operation that
    backward computes again has an occurrence in each.
    """
    forward = [graph for graph in program.graphs if graph.part == "forward"]
    backward = sorted((graph for graph in program.graphs if graph.part == "backward"), key=lambda graph: -graph.unit)
    builder = OperationBuilder()
    calls: Counter[str] = Counter()
    known: dict[int, dict[str, Tree]] = {}
    for graph in (*forward, *backward):
        _Reader(builder, graph, _places(graph, calls), known.setdefault(graph.unit, {})).read()
    return builder.graph()


def _places(graph: CompiledGraph, calls: Counter[str]) -> dict[str, list[tuple[str, SourceNode]]]:
    """Return the kernels of each FX node. calls: the number of calls of each kernel so far (see build.from_inductor).

    A trace without provenance names a kernel's operations where it is defined. Later calls repeat them on other arrays,
    of operations that it does not say, so they are left out.
    """
    found: dict[str, list[tuple[str, SourceNode]]] = {}
    defined: set[tuple[str, ...]] = set()
    for call in graph.calls:
        calls[call.kernel.name] += 1
        number = calls[call.kernel.name]
        kernel = call.kernel.name if number == 1 else f"{call.kernel.name}#{number}"
        names = (call.kernel.name, *(source.name for source in call.sources))
        if names in defined:
            continue
        defined.add(names)
        for source in call.sources:
            if not source.name.endswith("#helper"):
                found.setdefault(source.name.partition("#")[0], []).append((kernel, source))
    return found


class _Reader:
    def __init__(
        self, builder: OperationBuilder, graph: CompiledGraph, kernels: dict[str, list[tuple[str, SourceNode]]],
        known: dict[str, Tree],
    ) -> None:
        self.builder, self.text, self.kernels, self.known = builder, graph.traced, kernels, known
        self.earlier = frozenset(known)
        self.part = graph.part
        self.of_gradient = {name for name in self.text.memory if name.startswith("tangents_")}

    def read(self) -> None:
        for name, memory in self.text.memory.items():
            if name not in self.text.nodes and name not in self.known:
                self.known[name] = self.builder.unique("input", memory.shape, memory.dtype)
        for name, node in self.text.nodes.items():
            if not self.of_gradient.isdisjoint(node.inputs):
                self.of_gradient.add(name)
            value = self.known[name] if name in self.earlier else self._read(node)
            for part in (value,) if isinstance(value, Operation) else value:
                self._note(part, node)
            self.known[name] = value

    def _note(self, value: Operation, node: SourceNode) -> None:
        """Note the kernels that compute a value, and its phase where none is known.

        A node of backward is a gradient's if forward has none of its name. A graph of both phases shows it by the
        cotangents from which it is computed.
        """
        if node.op.partition(".")[2] in _MOVES or value.op in ("constant", "input"):
            return
        kernels = self.kernels.get(node.name) or [("", node)]
        gradient = node.name in self.of_gradient or any(source.backward for _, source in kernels)
        if self.part == "backward" and node.name not in self.earlier:
            gradient = True
        phase: StepPhase = "backward" if gradient else "recompute" if self.part == "backward" else "forward"
        if kernels[0][0]:  # a known kernel takes the place of an unknown one, and of the phase that went with it
            for occurrence in [occurrence for occurrence in value.occurrences if not occurrence.kernel]:
                del value.occurrences[occurrence]
        elif value.occurrences:
            return
        value.occurrences.update({Occurrence(kernel, phase, source.line or ""): None for kernel, source in kernels})

    def _read(self, node: SourceNode) -> Tree:
        """Return the value of a node, of an unknown operation where its arguments do not fit its own."""
        try:
            return self._value(node)
        except (IndexError, ValueError):
            return self.builder.unique("other", *self._described(node.name))

    def _value(self, node: SourceNode) -> Tree:
        text = self.text.arguments.get(node.name, "")
        op = node.op.partition(".")[2] or node.op
        shape, dtype = self._described(node.name)
        if op == "getitem":
            whole = self.known.get(node.inputs[0], ()) if node.inputs else ()
            index = int(text.strip("[]")) if text.strip("[]").isdigit() else 0
            return self._item(whole, index, shape, dtype)
        words = _split(text)
        operands = [value for word in words if (value := self._argument(word)) is not None]
        given = [self._described(word) for word in words if self._argument(word) is not None]
        if op in _MOVES and operands:
            return self.builder.moved(operands[0], shape, dtype)
        if ATTENTION.search(node.op):
            return self._attention(node, operands, given, shape, dtype)
        return self._operation(node, op.rstrip("_"), words, operands, given, shape, dtype)

    def _operation(
        self, node: SourceNode, op: str, words: list[str], operands: list[Operation],
        given: list[tuple[Shape, str]], shape: Shape, dtype: str,
    ) -> Tree:
        builder = self.builder
        if op in ("full", "scalar_tensor", "full_like", "zeros_like", "ones_like"):
            position = {"full": 1, "scalar_tensor": 0, "full_like": 1}.get(op)
            word = {"zeros_like": "0", "ones_like": "1"}.get(op) or words[position or 0]
            value = _number(word)
            return builder.add("constant", (), dtype, key=value if value is not None else node.name, value=value)
        if op in ("arange", "iota"):
            return builder.add("iota", shape, dtype, key=1, axis=1)
        if op in _PRODUCTS and len(operands) > _PRODUCTS[op] + 1:
            first = _PRODUCTS[op]
            made = builder.product(
                shape, dtype, operands[first : first + 2], given[first : first + 2], given[first][0][-1], None
            )
            if first:
                self._note(made, node)
                made = builder.add("add", shape, dtype, [operands[0], made])
            return made
        if op in _REDUCTIONS and operands:
            dims, rank = _integers(words[1]) if len(words) > 1 else (), len(given[0][0])
            reduced = {axis % rank for axis in dims} if dims and rank else set(range(rank))
            trailing = reduced == set(range(rank - len(reduced), rank))
            return builder.reduction(_REDUCTIONS[op], shape, dtype, operands[0], given[0], trailing, None)
        if op in ("var_mean", "topk", "sort", "split", "split_with_sizes", "unbind", "max", "prepare_softmax_online"):
            return tuple(self._part(node, op, words, operands, given, index) for index in range(self._items(node)))
        if op in _COMPARISONS and len(operands) == 2:
            return builder.add(
                "compare", shape, dtype, operands, given, key=op.upper(), direction=op.upper()
            )
        if op == "reciprocal":
            return builder.add("divide", shape, dtype, [self._constant(1.0), *operands], given)
        if op == "relu":
            return builder.add("maximum", shape, dtype, [*operands, self._constant(0.0)], given)
        if op == "rsub":
            op, operands = "sub", operands[1::-1]
        alpha = re.search(r"\balpha = (-?[\d.e+-]+)", self.text.arguments.get(node.name, ""))
        if op in ("add", "sub") and alpha and len(operands) == 2:
            scaled = builder.add("multiply", shape, dtype, [operands[1], self._constant(float(alpha[1]))])
            operands = [operands[0], scaled]
        if op == "gelu":
            op = "gelu" if "tanh" in " ".join(words) else "gelu_erf"
        name = _NAMES.get(op, op)
        if name in ("slice", "concatenate", "gather", "scatter"):  # other words are axes and positions
            kept = [index for index, operand in enumerate(operands) if operand.op != "constant"] or [0]
            operands, given = [operands[index] for index in kept], [given[index] for index in kept]
        if name == "gather" and node.op == "aten.gather":
            operands, given = [operands[0], operands[-1]], [given[0], given[-1]]
        if name in ("random", "constant"):
            return builder.unique(name if name == "random" else "other", shape, dtype, operands)
        key = tuple(words[1:]) if name in ("slice", "concatenate", "gather", "scatter") or name == op else ()
        key = tuple(word for word in key if word not in self.known)
        return builder.add(name, shape, dtype, operands, given, key=(shape, key) if key else ())

    def _part(
        self, node: SourceNode, op: str, words: list[str], operands: list[Operation],
        given: list[tuple[Shape, str]], index: int,
    ) -> Operation:
        """Return one of several results; their shapes are those of the items that are taken."""
        shape, dtype = self._item_shape(node, index)
        if op == "var_mean":
            rank, dims = len(given[0][0]), _integers(words[1]) if len(words) > 1 else ()
            reduced = {axis % rank for axis in dims} if dims and rank else set(range(rank))
            trailing = reduced == set(range(rank - len(reduced), rank))
            made = self.builder.reduction(
                ("variance", "mean")[index], shape, dtype, operands[0], given[0], trailing, None
            )
        elif op in ("topk", "sort"):
            made = self.builder.unique(op, shape, dtype, operands)
        elif op in ("split", "split_with_sizes", "unbind"):
            made = self.builder.add("slice", shape, dtype, operands[:1], given[:1], key=(index, shape, *words[1:]))
        else:
            made = self.builder.unique("other", shape, dtype, operands)
        return made

    def _items(self, node: SourceNode) -> int:
        own = [n for n in self.text.nodes.values() if n.op == "getitem" and n.inputs[:1] == (node.name,)]
        indices = [int(text) for n in own if (text := self.text.arguments[n.name].strip("[]")).isdigit()]
        return max(indices, default=-1) + 1

    def _item_shape(self, node: SourceNode, index: int) -> tuple[Shape, str]:
        for name, other in self.text.nodes.items():
            if other.op == "getitem" and other.inputs[:1] == (node.name,):
                if self.text.arguments[name].strip("[]") == str(index):
                    return self._described(name)
        return (), ""

    def _item(self, whole: Tree, index: int, shape: Shape, dtype: str) -> Operation:
        if isinstance(whole, Operation):  # a call with several results, such as an attention's
            if index == 0:
                whole.variants[shape, dtype] = None
                return whole
            return self.builder.add("item", shape, dtype, [whole], key=index)
        if index < len(whole):
            return whole[index]
        return self.builder.unique("other", shape, dtype)

    def _attention(
        self, node: SourceNode, operands: list[Operation], given: list[tuple[Shape, str]], shape: Shape, dtype: str
    ) -> Operation:
        backward = node.op.endswith("backward")
        first = 1 if backward else 0
        with_bias = node.op.startswith(("aten._scaled_dot_product_efficient", "aten._scaled_dot_product_cudnn"))
        masked = re.search(r"attn_(?:mask|bias) = (?!None)", self.text.arguments.get(node.name, ""))
        unknown = node.causal is None or masked or (with_bias and not backward and operands[3:4] and given[3][0])
        mask = "data" if unknown else "CAUSAL" if node.causal else "NO_MASK"
        return self.builder.add(
            "attention", shape or given[first][0], dtype or given[first][1], operands, given, key=node.name,
            backward=backward, mask=mask, window=0, bias=False,
        )

    def _constant(self, value: float) -> Operation:
        return self.builder.add("constant", (), "f32", key=value, value=value)

    def _argument(self, word: str) -> Operation | None:
        if word in self.known:
            value = self.known[word]
            return value if isinstance(value, Operation) else next(iter(value), None)
        return None if (number := _number(word)) is None else self._constant(number)

    def _described(self, name: str) -> tuple[Shape, str]:
        memory = self.text.memory.get(name)
        return ((), "") if memory is None else (memory.shape, memory.dtype)


def _split(text: str) -> list[str]:
    """Return positional arguments; the parts of a list follow one by one where they are names of nodes."""
    words: list[str] = []
    depth, start = 0, 0
    for end, letter in enumerate(f"{text},"):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            word = text[start:end].strip()
            start = end + 1
            if word.startswith("[") and re.search(r"[a-zA-Z_]\w*", word):
                words += [part.strip() for part in word.strip("[]").split(",")]
            elif word and " = " not in word:
                words.append(word)
    return words


def _number(word: str) -> float | None:
    if not _NUMBER.match(word):
        return None
    return float(word == "True") if word in ("True", "False") else float(word)


def _integers(word: str) -> Sequence[int]:
    return tuple(int(number) for number in re.findall(r"-?\d{1,9}", word))


