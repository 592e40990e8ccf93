"""Read Inductor's FX graphs and scheduler IR as text. Nothing is executed, and no torch is needed.

versions.py lists the tested releases of torch. Each reader goes through its text once, line by line.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from xlafuse.triton_side.inductor.graph import (
    DTYPES,
    HLO_NAMES,
    IS_CAUSAL,
    SUM_OF_PRODUCTS,
    FxText,
    Memory,
    Shape,
    SourceNode,
)

MAX_LINE = 1 << 20
MAX_ELEMENTS = 1 << 56  # no larger tensor can be allocated
_MAX_COMMENT = 1 << 12

SIZES = dict(DTYPES.values())


def memory(name: str, shape: Shape, dtype: tuple[str, int]) -> Memory:
    return Memory(name, shape, dtype[0], math.prod(shape) * dtype[1])


def fx_memory(name: str, dtype: str, extents: str) -> Memory | None:
    shape = _extents(extents)
    short = HLO_NAMES.get(dtype, dtype)
    return None if shape is None or short not in SIZES else memory(name, shape, (short, SIZES[short]))


def _extents(text: str) -> Shape | None:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) > 64 or not all(re.fullmatch(r"\d{1,15}", word) for word in words):
        return None
    shape = tuple(int(word) for word in words)
    return shape if math.prod(shape) < MAX_ELEMENTS else None


# FX graphs


_FX_TYPE = re.compile(r'\b(\w+): "(\w+)\[([^\]]*)\][^"]*"')
_FX_NODE = re.compile(r'\s+(\w+)(?:: "[^"]*")? = ([\w.]+)(?:\((.*?)\))?(\[\d+\])?(?:;  .*)?$')
_FX_PLACE = re.compile(r"#.*?File: (.+?):(\d+) in (.+?)(?:, code: |$)")
_TORCH = re.compile(r"(^|/(site|dist)-packages/)torch/")  # such a line is not the user's
_LIBRARY = re.compile(rf"(^|/)(site-packages|dist-packages|lib/python3\.\d+)/|{_TORCH.pattern}|^<")
_NO_MODEL = re.compile(rf"(^|/)lib/python3\.\d+/(?!site-|dist-)|{_TORCH.pattern}|^<")  # torch and Python itself
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (.+))?')
# calls.stages writes one key per stage. Older dumps have one key for all.
_FX_STAGES = re.compile(r"'stage ([^']*)': True|'stage': '([^']*)'")


def read_fx(text: str, *, backward: bool = False) -> FxText:
    """Read an FX graph as `print_readable` prints it. backward: mark its nodes as a gradient's.

    The text has one frame of each node, so a node's place may be in a library.
    """
    found = FxText()
    line_of: str | None = None
    place_of: str | None = None
    stage: str | None = None
    for line in text.splitlines():
        stripped = line.lstrip()
        if len(line) > MAX_LINE:
            continue
        if stripped.startswith("#"):
            comment = stripped[:_MAX_COMMENT]
            place = _FX_PLACE.match(comment)
            line_of = f"{place[1]}:{place[2]}" if place and not _TORCH.search(place[1]) else None
            place_of = f"{place[1]}:{place[2]} {place[3]}" if place else None
            marks = _FX_STAGES.findall(comment.partition(" File: ")[0]) if comment.startswith("# Annotation: ") else []
            stage = "/".join(nested or single for nested, single in marks) or None
            continue
        if stripped.startswith("return "):
            found.outputs = tuple(re.findall(r"\w+", stripped.removeprefix("return ")))
        for name, dtype, extents in _FX_TYPE.findall(line.split(" = ", 1)[0] if " = " in line else line):
            described = fx_memory(name, dtype, extents)
            if described is not None:
                found.memory[name] = described
        match = _FX_NODE.match(line)
        if not match or stripped.startswith("def "):
            continue
        name, target, arguments, item = match.groups()
        if arguments is None:  # getitem = call[0]
            arguments, target = target, "getitem"
        words = re.findall(r"\b\w+\b(?!\s*=)", arguments)  # a keyword may have the name of a node: "index = 0"
        inputs = tuple(word for word in words if word in found.nodes or word in found.memory)
        shapes = tuple(found.memory[word].shape for word in inputs if word in found.memory)
        own = (found.memory[name].shape,) if name in found.memory else ()
        op = _op(target)
        causal = _is_causal(op, arguments)
        whole = found.nodes.get(inputs[0]) if op == "getitem" and inputs else None
        if whole is not None and whole.op.startswith("aten._foreach_"):  # its line has no type
            found.nodes[whole.name] = replace(whole, shapes=whole.shapes + own)
        found.nodes[name] = SourceNode(name, op, stage, line_of, inputs, backward, own, shapes, causal, place_of)
        found.arguments[name] = arguments if item is None else item
    return found


class StackLines(NamedTuple):
    """A `SourceNode`'s line and place. innermost: the innermost frame of its stack, written as a place.

    place: the innermost frame of the user's own files, else of a library that has the model, such as transformers.
    """

    innermost: str | None
    line: str | None
    place: str | None


def stack_lines(stack: str) -> StackLines:
    """Read the Python stack of a node."""
    found = [(f"{file}:{line}", function) for file, line, function in _FRAME.findall(stack)]
    frames = [(line, f"{line} {function}".rstrip()) for line, function in found]
    lines = [line for line, _ in frames if not _TORCH.search(line)]
    places = [place for _, place in frames if not is_library(place)] or [
        place for _, place in frames if may_be_model(place)
    ]
    return StackLines(
        frames[-1][1] if frames else None, lines[-1] if lines else None, places[-1] if places else None
    )


def is_library(place: str) -> bool:
    """Return whether a place is in an installed package or in Python itself."""
    return bool(_LIBRARY.search(place))


def may_be_model(place: str) -> bool:
    """Return whether a place is in code that a model may be written in: the user's, or a library's other than torch."""
    return not _NO_MODEL.search(place)


def _is_causal(op: str, arguments: str) -> bool | None:
    if op not in IS_CAUSAL:
        return None
    if named := re.search(r"\bis_causal = (True|False)\b", arguments):
        return named[1] == "True"
    # A list such as [True, True, True, False] is one argument.
    given = re.sub(r"\[[^\]]*\]", "list", arguments).split(",")
    positional = [argument.strip() for argument in given if "=" not in argument]
    if IS_CAUSAL[op] >= len(positional):
        return False
    return {"True": True, "False": False}.get(positional[IS_CAUSAL[op]])


def _op(target: str) -> str:
    """'torch.ops.aten.mul.Tensor' -> 'aten.mul'."""
    words = target.removeprefix("torch.ops.").split(".")
    if words[0] == "higher_order":
        return words[-1]
    if target.startswith("torch.ops."):
        return ".".join(words[:2])
    # Inductor's own functions are printed with their module's name.
    return SUM_OF_PRODUCTS if target.endswith(SUM_OF_PRODUCTS) else words[-1]


def replaced(before: FxText, present: Collection[str]) -> dict[frozenset[str], tuple[str, ...]]:
    """Return the nodes that pattern matchers removed: the operands of each group of nodes -> the nodes, in order.

    A group is a set of connected nodes that are not in `present`. The printed graphs do not say which node replaced a
    group, so the caller looks for a new node with the same operands. Two groups with equal operands are left out.
    """
    leader: dict[str, str] = {}

    def root(name: str) -> str:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    for name, node in before.nodes.items():
        if name not in present:
            leader[name] = name
            for operand in node.inputs:
                if operand in leader:
                    leader[root(operand)] = name
    groups: dict[str, list[str]] = {}
    for name in leader:
        groups.setdefault(root(name), []).append(name)
    found: dict[frozenset[str], tuple[str, ...]] = {}
    ambiguous = set()
    for names in groups.values():
        own = set(names)
        operands = frozenset(o for name in names for o in before.nodes[name].inputs if o not in own)
        if operands in found:
            ambiguous.add(operands)
        found[operands] = tuple(names)
    return {operands: names for operands, names in found.items() if operands not in ambiguous}


# Scheduler IR


@dataclass
class IrNode:
    """A scheduler node after fusion.

    reads: elements that it reads, by buffer: the points of its loop for each dependency. writes: buffers that others
    use. stores: elements that it writes, by buffer. A part of a buffer counts as the buffer. reads and stores lack
    the buffers of a library call, for which Inductor counts whole buffers.
    """

    operations: frozenset[str]
    reads: Counter[str]
    writes: frozenset[str]
    stores: Counter[str]


_IR_NODE = re.compile(r"(op\w+): (\w+)\(")
_DEPENDENCY = re.compile(r"(?:MemoryDep|StarDep)\((?:name=)?'(\w+)'")
_LAYOUT = re.compile(r"\b(\w+)\.layout = \w*Layout\('[^']*', torch\.(\w+), size=(\[[^\]]*\])")
_USERS = re.compile(r"\b(\w+)\.users = ")
_INSIDE = re.compile(r"\b(\w+)\.(?:mutations|aliases) = \['(\w+)'\]")
_USER = re.compile(r"NodeUser\(node=(?:\w+\(name='(\w+)'\)|(OUTPUT))")


def read_ir(text: str) -> tuple[list[IrNode], dict[str, Memory]]:
    """Return the nodes of an ir_post_fusion.txt, in order, and the buffers that they write."""
    nodes: list[IrNode] = []
    made: dict[str, Memory] = {}
    owner: dict[str, str] = {}  # a part of a buffer, or its name after a change in place -> the buffer
    block: list[str] = []
    for line in (*text.splitlines(), ""):
        if line.strip():
            block.append(line)
            continue
        if block and (match := _IR_NODE.match(block[0])):
            nodes.append(_ir_node(match[1], match[2], block[1:], made, owner))
        block = []
    return nodes, made


def _ir_node(name: str, kind: str, lines: list[str], made: dict[str, Memory], owner: dict[str, str]) -> IrNode:
    own = frozenset(re.findall(r"op\d+", name))
    read: Counter[str] = Counter()  # dependencies
    writes: dict[str, None] = {}
    users: dict[str, set[str]] = {}
    points: int | None = None
    attribute = buffer = ""
    end = next((index for index, line in enumerate(lines) if line.startswith(f"{name}.snodes")), len(lines))
    for line in lines[:end]:
        if line.startswith(f"{name}."):
            attribute = line[len(name) + 1 :].split(" ", 1)[0]
            if attribute == "sizes" and kind == "SchedulerNode":
                points = math.prod(int(extent) for extent in re.findall(r"\d{1,15}", line.split("=", 1)[1]))
        if attribute in ("unmet_dependencies", "met_dependencies"):
            read.update(_DEPENDENCY.findall(line))
        elif attribute == "writes":
            writes |= dict.fromkeys(_DEPENDENCY.findall(line))
        elif attribute == "outputs":
            if match := _LAYOUT.search(line):
                described = fx_memory(match[1], DTYPES.get(match[2], ("", 0))[0], match[3].strip("[]"))
                if described is not None:
                    made[match[1]] = described
            if match := _INSIDE.search(line):
                owner[match[1]] = owner.get(match[2], match[2])
            if match := _USERS.search(line):
                buffer = match[1]
            if buffer:
                users.setdefault(buffer, set()).update(other or output for other, output in _USER.findall(line))
    seen = frozenset(owner.get(name, name) for name in writes if users.get(name, {"OUTPUT"}) - own)
    reads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    if points is not None:
        for name, count in read.items():
            reads[owner.get(name, name)] += count * points
        for name in writes:
            stores[owner.get(name, name)] += points
    for member in _members(lines[end:], made, owner):
        reads.update(member.reads)
        stores.update(member.stores)
    return IrNode(own, reads, seen, stores)


def _members(lines: list[str], made: dict[str, Memory], owner: dict[str, str]) -> Iterator[IrNode]:
    """Yield the nodes of a fused node, whose descriptions follow one by one."""
    heads = [index for index, line in enumerate(lines) if _IR_NODE.match(line)]
    for index, following in pairwise([*heads, len(lines)]):
        if match := _IR_NODE.match(lines[index]):
            yield _ir_node(match[1], match[2], lines[index + 1 : following], made, owner)
