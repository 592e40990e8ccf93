"""One Triton kernel of Inductor's emitted code: its source, its launch, and the operations in it. Nothing is executed.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from typing import Any

from xlafuse.triton_side.inductor import output_code

from ..base.usage import UsageError

_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "i1": "bool", "u1": "bool",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
}
_FX_DTYPES = {
    "b8": "bool", "bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    **{f"{short}{bits}": f"{long}{bits}" for short, long in (("f", "float"), ("i", "int"), ("u", "uint"))
       for bits in (8, 16, 32, 64)},
}
_COARSEST = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64")
_TUPLE = r"(\([\d, ]*\))"
_EMPTY = re.compile(rf"(\w+) = empty_strided_\w+\({_TUPLE}, {_TUPLE}, torch\.\w+\)")
_ASSERTED = re.compile(rf"assert_size_stride\((\w+), {_TUPLE}, {_TUPLE}")
_VIEW = re.compile(rf"(\w+) = reinterpret_tensor\(\w+, {_TUPLE}, {_TUPLE}")
_INLINE = re.compile(rf"reinterpret_tensor\((\w+), {_TUPLE}, {_TUPLE}, \d+\)")
_RENAMED = re.compile(r"(\w+) = (\w+); del \2\b")
# '#   %mul : Tensor "f32[8][1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = ...)'
_NODE = re.compile(
    r'#   %(\w+) : \S+ (?:"(\w+)\[([\d, ]*)\][^"]*"|\S*)\S* = '
    r"(?:(PlaceHolder)\[|call_function\[target=([\w.]+)\]\(args = (.*), kwargs = (.*)\)$)"
)
_RETURN = re.compile(r"#   return (.+)$")
_SIGNATURE = re.compile(r"'signature': (\{[^{}]*\})")


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
    """Return a kernel of an output_code.py by its name. Raises UsageError for one that is not Triton."""
    read = output_code.read_code(code)
    definition = read.definitions.get(kernel)
    lines = code.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith(f"{kernel} = async_compile.triton(")), None)
    if definition is None or start is None:
        raise UsageError(f"{kernel}: a call of a library, not a Triton kernel; it has no source to write")
    end = next(at for at in range(start + 1, len(lines) + 1) if at == len(lines) or lines[at].startswith("'''"))
    source = "\n".join(lines[start + 1 : end]) + "\n"
    signature = _literal((_SIGNATURE.search(source) or ["", "{}"])[1]) or {}
    arguments = tuple(_arguments(lines, kernel, definition.parameters, signature))
    fragment, notes = _fragment(lines[:start]), []
    operations, reads, writes = _operations(fragment, arguments)
    if not operations:
        notes.append("the comments of the emitted code do not say which operations this kernel has, or not completely")
    used = {argument[4] for argument in arguments if argument[1] != "size"}
    return ExtractedTriton(
        source, arguments, operations, reads, writes, next((each for each in _COARSEST if each in used), ""),
        tuple(notes),
    )


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _arguments(lines: list[str], kernel: str, parameters: Any, signature: dict[str, str]) -> list[tuple[Any, ...]]:
    """Return the arguments of the first launch."""
    known: dict[str, tuple[Any, Any]] = {}
    for line in output_code.body_of_call(lines):
        for pattern in (_EMPTY, _ASSERTED, _VIEW):
            if match := pattern.match(line):
                known[match[1]] = _literal(match[2]), _literal(match[3])
        if (match := _RENAMED.match(line)) and match[2] in known:
            known[match[1]] = known[match[2]]
        if line.startswith((f"{kernel}.run(", f"{kernel}(")):
            inline = {f"view_{at}": found for at, found in enumerate(_INLINE.finditer(line))}
            for name, found in inline.items():
                known[name] = _literal(found[2]), _literal(found[3])
                line = line.replace(found[0], name, 1)
            given = [each.strip() for each in line.partition("(")[2].rpartition(")")[0].split(",")]
            return _bound(kernel, given, parameters, signature, known)
    raise UsageError(f"{kernel}: the emitted code does not launch it")


def _bound(
    kernel: str, given: list[str], parameters: Any, signature: dict[str, str], known: dict[str, tuple[Any, Any]]
) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for (name, use), value in zip(parameters, given, strict=False):
        kind = str(signature.get(name, ""))
        if not kind.startswith("*"):
            number = _literal(value)
            if not isinstance(number, (int, float)):
                raise UsageError(f"{kernel}: its argument {name} is {value!r}; only launches of static shapes are read")
            found.append((name, "size", number))
            continue
        size, stride = known.get(value, (None, None))
        if size is None or stride is None or kind[1:] not in _DTYPES:
            raise UsageError(f"{kernel}: shape or dtype of its argument {name} ({value}, {kind}) are not in the dump")
        found.append((name, use or "read", size, stride, _DTYPES[kind[1:]]))
    return found


@dataclass(frozen=True)
class _Fragment:
    """The graph fragment above a kernel. places: input -> (dtype, shape). nodes: Python statements."""

    places: dict[str, tuple[str, tuple[int, ...]]]
    nodes: dict[str, tuple[str, tuple[str, tuple[int, ...]]]]
    returned: tuple[str, ...]


def _fragment(lines: list[str]) -> _Fragment | None:
    at = next((at for at in range(len(lines) - 1, -1, -1) if not lines[at].startswith("#")), -1)
    places: dict[str, Any] = {}
    nodes: dict[str, Any] = {}
    returned: tuple[str, ...] = ()
    inside = False
    for line in lines[at + 1 :]:
        inside |= line.startswith("# Graph fragment:")
        if match := _RETURN.match(line):
            returned = tuple(re.findall(r"%(\w+)", match[1]))
        elif match := _NODE.match(line):
            shape = tuple(int(size) for size in (match[3] or "").split(",") if size.strip())
            described = (match[2] or "", shape)
            if match[4]:
                places[match[1]] = described
            else:
                python = _python(match[5], match[6], match[7])
                if python is None:
                    return None
                nodes[match[1]] = python, described
        elif inside and line.startswith("#   %"):
            return None
    return _Fragment(places, nodes, returned) if nodes and returned else None


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
    plain = all(isinstance(each, allowed) for each in ast.walk(call))
    calls = [ast.unparse(each.func) for each in ast.walk(call) if isinstance(each, ast.Call)]
    if not plain or not calls[0].startswith("torch.ops.") or any(each != "device" for each in calls[1:]):
        return None
    return text


def _operations(
    fragment: _Fragment | None, arguments: tuple[tuple[Any, ...], ...]
) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the operations as a function, and which argument each input and result is. ("", {}, {}) if unknown."""
    nothing: tuple[str, dict[str, str], dict[str, str]] = "", {}, {}
    if fragment is None:
        return nothing
    tensors = [argument for argument in arguments if argument[1] != "size"]
    words = {word for text, _ in fragment.nodes.values() for word in re.findall(r"\w+", text)}
    inputs = {name: described for name, described in fragment.places.items() if name in words - fragment.nodes.keys()}
    results = {name: fragment.nodes[name][1] for name in fragment.returned if name in fragment.nodes}
    reads = _matched(inputs, [each for each in tensors if each[1] != "write"])
    writes = _matched(results, [each for each in tensors if each[1] != "read"])
    if reads is None or writes is None or not writes:
        return nothing
    lines = [f"    {name} = {text}" for name, (text, _) in fragment.nodes.items()]
    body = "\n".join([*lines, f"    return {{{', '.join(f'{name!r}: {name}' for name in writes)}}}"])
    return f"def operations({', '.join(inputs)}):\n{body}\n", reads, writes


def _matched(names: dict[str, tuple[str, tuple[int, ...]]], tensors: list[tuple[Any, ...]]) -> dict[str, str] | None:
    """Give each name the first free argument of its dtype and number of elements; None where one has none."""
    left, found = list(tensors), {}
    for name, (dtype, shape) in names.items():
        wanted = _FX_DTYPES.get(dtype, dtype), math.prod(shape)
        fits = [each for each in left if (each[4], math.prod(each[2])) == wanted]
        if not fits:
            return None
        found[name] = fits[0][0]
        left.remove(fits[0])
    return found
