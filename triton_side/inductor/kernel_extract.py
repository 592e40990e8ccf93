"""One Triton kernel of Inductor's emitted code: its source, its launch, and the operations in it. Nothing is executed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xlafuse.triton_side.inductor.graph import DTYPES, HLO_NAMES, Memory
from xlafuse.triton_side.inductor.ir_text import fx_memory
from xlafuse.triton_side.inductor.output_code import Definition, EmittedCall, Fragment, read_code

_TORCH_NAMES = {short: name for name, (short, _) in DTYPES.items()}
_COARSEST = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64")
# '%mul : Tensor "f32[8][1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = ...)'
_NODE = re.compile(
    r'%(\w+) : \S+ (?:"(\w+)\[([\d, ]*)\][^"]*"|\S*)\S* = '
    r"(?:(PlaceHolder)\[|call_function\[target=([\w.]+)\]\(args = (.*), kwargs = (.*)\)$)"
)
_SIGNATURE = re.compile(r"'signature': (\{[^{}]*\})")


class NotExtracted(ValueError):
    """A kernel cannot be extracted; the message says why."""


@dataclass(frozen=True)
class ExtractedTriton:
    """A kernel and its launch.

    arguments: ("name", use, size, stride, dtype) of a tensor, ("name", "size", value) of a number. operations: Python
    of a function of the inputs, or "" where the dump lacks them. reads, writes: the operations' names -> arguments.
    """

    source: str
    arguments: tuple[tuple[Any, ...], ...]
    operations: str
    reads: dict[str, str]
    writes: dict[str, str]
    dtype: str
    notes: tuple[str, ...]


def extract(code: str, kernel: str) -> ExtractedTriton:
    """Return a kernel of an output_code.py by its name. Raises NotExtracted for one that is not Triton."""
    emitted = read_code(code)
    definition = emitted.definitions.get(kernel)
    if definition is None or not definition.source:
        raise NotExtracted(f"{kernel}: a call of a library, not a Triton kernel; it has no source to write")
    call = next((call for call in emitted.calls if call.name == kernel), None)
    if call is None:
        raise NotExtracted(f"{kernel}: the emitted code does not launch it")
    arguments = tuple(_arguments(definition, call))
    operations, reads, writes = _operations(_graph(definition.fragment), arguments)
    notes = []
    if not operations:
        notes.append("the comments of the emitted code do not say which operations this kernel has, or not completely")
    dtypes = {argument[4] for argument in arguments if argument[1] != "size"}
    return ExtractedTriton(
        definition.source, arguments, operations, reads, writes,
        next((dtype for dtype in _COARSEST if dtype in dtypes), ""), tuple(notes),
    )


def _arguments(definition: Definition, call: EmittedCall) -> Iterable[tuple[Any, ...]]:
    """Yield the arguments of a launch."""
    types = _types(definition.source)
    for name, use in definition.parameters:
        pointer, passed = str(types.get(name, "")), call.passed.get(name)
        if pointer.startswith("*"):
            dtype = _TORCH_NAMES.get(HLO_NAMES.get(pointer[1:], pointer[1:]))
            if dtype is None or not isinstance(passed, tuple):
                raise NotExtracted(f"{call.name}: the dump lacks shape or dtype of its argument {name} ({pointer})")
            yield name, use or "read", *passed, dtype
        elif isinstance(passed, (int, float)):
            yield name, "size", passed
        else:
            raise NotExtracted(f"{call.name}: its argument {name} is no number, so the shapes are not static")


def _types(source: str) -> dict[str, str]:
    """Return the types of a kernel's parameters, as in {'in_ptr0': '*bf16', 'xnumel': 'i32'}."""
    signature = _SIGNATURE.search(source)
    try:
        types = ast.literal_eval(signature[1]) if signature else {}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return types if isinstance(types, dict) else {}


@dataclass(frozen=True)
class _Graph:
    """The graph fragment above a kernel. nodes: Python and result of each operation."""

    inputs: dict[str, Memory | None]
    nodes: dict[str, tuple[str, Memory | None]]
    returned: tuple[str, ...]


def _graph(fragment: Fragment) -> _Graph | None:
    """Return the fragment's operations; None where one is not understood."""
    inputs: dict[str, Memory | None] = {}
    nodes: dict[str, tuple[str, Memory | None]] = {}
    returned: tuple[str, ...] = ()
    for line in fragment.lines:
        if line.startswith("return "):
            returned = tuple(re.findall(r"%(\w+)", line))
            continue
        match = _NODE.match(line)
        if match is None:
            return None
        name, dtype, extents, is_input, target, args, kwargs = match.groups()
        memory = fx_memory(name, dtype or "", extents or "")
        if is_input:
            inputs[name] = memory
        elif python := _python(target, args, kwargs):
            nodes[name] = python, memory
        else:
            return None
    return _Graph(inputs, nodes, returned) if nodes and returned else None


def _python(target: str, args: str, kwargs: str) -> str | None:
    """Return a call as Python, checked to be one of an operation with plain arguments; else None."""
    args, kwargs = (re.sub(r"%(\w+)", r"\1", text) for text in (args, kwargs))
    named = re.sub(r"(\w+): ", r"\1=", kwargs.strip()[1:-1])
    text = f"{target}({', '.join(filter(None, [args.strip()[1:-1].rstrip(', '), named]))})"
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    allowed = (ast.Call, ast.Name, ast.Attribute, ast.Constant, ast.List, ast.Tuple, ast.keyword, ast.UnaryOp,
               ast.USub, ast.Load)
    plain = all(isinstance(node, allowed) for node in ast.walk(call))
    calls = [ast.unparse(node.func) for node in ast.walk(call) if isinstance(node, ast.Call)]
    if not plain or not calls[0].startswith("torch.ops.") or any(name != "device" for name in calls[1:]):
        return None
    return text


def _operations(
    graph: _Graph | None, arguments: tuple[tuple[Any, ...], ...]
) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the operations as a function, and which argument each input and result is. ("", {}, {}) if unknown."""
    nothing: tuple[str, dict[str, str], dict[str, str]] = "", {}, {}
    if graph is None:
        return nothing
    tensors = [argument for argument in arguments if argument[1] != "size"]
    words = {word for text, _ in graph.nodes.values() for word in re.findall(r"\w+", text)}
    inputs = {name: memory for name, memory in graph.inputs.items() if name in words - graph.nodes.keys()}
    results = {name: graph.nodes[name][1] for name in graph.returned if name in graph.nodes}
    reads = _matched(inputs, [tensor for tensor in tensors if tensor[1] != "write"])
    writes = _matched(results, [tensor for tensor in tensors if tensor[1] != "read"])
    if reads is None or writes is None or not writes:
        return nothing
    lines = [f"    {name} = {text}" for name, (text, _) in graph.nodes.items()]
    body = "\n".join([*lines, f"    return {{{', '.join(f'{name!r}: {name}' for name in writes)}}}"])
    return f"def operations({', '.join(inputs)}):\n{body}\n", reads, writes


def _matched(names: Mapping[str, Memory | None], tensors: list[tuple[Any, ...]]) -> dict[str, str] | None:
    """Give each name the first free argument of its dtype and number of elements; None where one has none."""
    left, matched = list(tensors), {}
    for name, memory in names.items():
        fitting = next((tensor for tensor in left if memory is not None and _fits(memory, tensor)), None)
        if fitting is None:
            return None
        matched[name] = fitting[0]
        left.remove(fitting)
    return matched


def _fits(memory: Memory, tensor: tuple[Any, ...]) -> bool:
    _, _, size, _, dtype = tensor
    return (memory.dtype, math.prod(memory.shape)) == (DTYPES[dtype][0], math.prod(size))
