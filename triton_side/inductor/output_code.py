"""Parse Inductor's emitted code. Nothing is executed, and no torch is needed.

It reads the code once, line by line; versions.py lists the tested releases of torch. `ast` parses each line of `call`.
It refuses deep nesting with an error; such a line counts as unparsed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from triton_side.inductor.graph import DTYPES, Memory, Part, Shape, sum_before_cast
from triton_side.inductor.ir_text import MAX_ELEMENTS, MAX_LINE, SIZES, fx_memory, memory
from triton_side.inductor.kernel_code import Work, work_of


@dataclass
class EmittedCall:
    """A kernel call.

    handle: Inductor's "name:number", or "". elements: points that a generated kernel iterates over; None for a library
    call. atens: the operations that its comment names. sums_partials: it adds up a kernel's partial results.
    views: the views in its arguments. viewed: the elements that it can reach of buffers that it has as views only.
    arguments: parameter -> buffer, of a generated kernel.
    """

    name: str
    handle: str
    reads: list[str]
    writes: list[str]
    is_extern: bool
    elements: int | None = None
    atens: tuple[str, ...] = ()
    sums_partials: bool = False
    views: tuple[str, ...] = ()
    viewed: Mapping[str, int] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass
class EmittedCode:
    """The contents of one output_code.py. aot_id: such as "0_forward", or "". on_cpu: its kernels are C++ for a CPU."""

    aot_id: str
    calls: list[EmittedCall] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str | None, ...] = ()
    unparsed: list[str] = field(default_factory=list)
    definitions: dict[str, Definition] = field(default_factory=dict)
    on_cpu: bool = False

    @property
    def part(self) -> Part:
        return "backward" if self.aot_id.endswith("backward") else "forward"

    @property
    def unit(self) -> int:
        number = re.match(r"\d{1,9}", self.aot_id)
        return int(number[0]) if number else 0


USERS_OWN = "user_autotune"


@dataclass
class Fragment:
    """The part of the FX graph that a definition's comment lists, for its first call.

    nodes: FX nodes with their operands. loads, stores: values by FX node; those that are no node's by buffer ("buf0").
    """

    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Definition:
    """A kernel's definition.

    parameters: (name, use), in order; the use is "read", "write", "both", or "" if it is no buffer.
    heuristic: Inductor's Triton heuristic ("pointwise", "template", ...); a user's own Triton kernel has
    "user_autotune". Inductor does not write down which of its arguments it reads.
    work: of a kernel that Inductor generated, by its source; None where that does not tell.
    """

    runtime_name: str | None
    parameters: tuple[tuple[str, str], ...]
    heuristic: str
    fragment: Fragment = field(default_factory=Fragment)
    work: Work | None = None

    @property
    def kind(self) -> Work | Literal["custom"] | None:
        return "custom" if self.heuristic == USERS_OWN else self.work


# "triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''"
# "cpp_fused_0 = async_compile.cpp_pybinding([...], r'''"
_DEFINED = re.compile(r"(\w+) = async_compile\.(triton|cpp\w*)\((?:'(\w+)')?")
_TRITON_PARAMETERS = re.compile(r"def (\w+)\((.*)\):\s*$")
_CPP_PARAMETER = re.compile(r"(?<![\w:])(const )?[\w:]+\*(?: __restrict__)? (\w+)")
_MUTATED = re.compile(r"'mutated_arg_names': \[([^\]]*)\]")
_FRAGMENT = re.compile(r'#   %(\w+) : [^"]*"(\w+)\[([^\]]*)\][^"]*"\S* = (PlaceHolder|\w+)')
_VALUE = re.compile(r"%(\w+)")
_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+:\d+)\s*$")
_INPUT = re.compile(r"    (\w+) = rand_strided\((\([^)]*\)), .*dtype=torch\.(\w+)\)")
_ON_CPU = re.compile(r"async_compile\.cpp|= empty_strided_cpu\(|device='cpu'")
_ON_GPU = re.compile(r"async_compile\.triton\(|= empty_strided_(?!cpu)\w+\(|device='(?!cpu)\w+|_DeviceGuard\(")
_AOT_ID = re.compile(r"# AOT ID: \['([^']*)'\]")


def read_code(text: str) -> EmittedCode:
    """Return the kernels that an output_code.py calls, in order, and the buffers between them."""
    lines = text.splitlines()
    aot_id = next((match[1] for line in lines[:5] if (match := _AOT_ID.match(line))), "")
    code = EmittedCode(aot_id, on_cpu=bool(_ON_CPU.search(text)) and not _ON_GPU.search(text))
    code.definitions = dict(_definitions(lines))
    known: dict[str, Memory] = {}
    for line in lines:
        if match := _INPUT.match(line):
            shape = _shape(match[2])
            if shape is not None and match[3] in DTYPES:
                known[match[1]] = memory(match[1], shape, DTYPES[match[3]])
        elif match := _FRAGMENT.match(line):
            described = fx_memory(match[1], match[2], match[3])
            if described is not None and match[4] == "PlaceHolder":
                known.setdefault(match[1], described)
    body = _Body(code, known)
    body.read(body_of_call(lines))
    if not body.returned:
        code.unparsed.append("`call` does not return: the file is cut short, or is no emitted code")
    return code


# "(buf3, buf1) = self.partitions[0](partition0_args)", "partition0_args = [tangents_1, primals_2]"
_PARTITION_CALL = re.compile(r"(?:.+ = )?self\.partitions\[(\d+)\]\(")
# "decompose_k_mm_2_split_0_args = [arg0_1]", "(buf0,) = decompose_k_mm_2_split_0(decompose_k_mm_2_split_0_args)"
_SUBGRAPH_CALL = re.compile(r"\((.+)\) = (decompose_k\w+)\(\2_args\)")
_SUBGRAPH_ARGUMENTS = re.compile(r"(decompose_k\w+)_args = \[([\w, ]*)\]$")
_WORD = re.compile(r"\w+")
_PARTITION_ARGUMENTS = re.compile(r"(partition\d+_args = \[|del partition\d+_args$)")


def body_of_call(lines: Sequence[str]) -> Iterator[str]:
    """Yield the statements and comments of `call`, without indentation.

    In mode reduce-overhead, Inductor moves the kernels that become one CUDA graph into a function `partition_N`. A
    product that it splits along K (`decompose_k_mm_...`) is a function, too. Their statements stand here in place of
    their calls.
    """
    renamed = subgraph_buffers(lines)
    for line in _function(lines, "call"):
        if match := _PARTITION_CALL.match(line):
            inner = _function(lines, f"partition_{match[1]}")
            yield from (each for each in inner if not each.endswith("= args") and not each.startswith("return "))
        elif match := _SUBGRAPH_CALL.match(line):
            for each in _function(lines, match[2]):
                if not each.endswith("= args") and not each.startswith("return "):
                    yield re.sub(r"\w+", lambda word: renamed.get(word[0], word[0]), each)
        elif not _PARTITION_ARGUMENTS.match(line) and not _SUBGRAPH_ARGUMENTS.match(line):
            yield line


def subgraph_buffers(lines: Sequence[str]) -> dict[str, str]:
    """Return, for the parameters and results of each subgraph's function, the buffers of `call` that they are."""
    found: dict[str, str] = {}
    given: dict[str, list[str]] = {}
    for line in _function(lines, "call"):
        if match := _SUBGRAPH_ARGUMENTS.match(line):
            given[match[1]] = _WORD.findall(match[2])
        elif match := _SUBGRAPH_CALL.match(line):
            for each in _function(lines, match[2]):
                if each.endswith(" = args"):
                    taken = _WORD.findall(each.removesuffix(" = args"))
                    found |= dict(zip(taken, given.get(match[2], ()), strict=False))
                elif each.startswith("return "):
                    found |= dict(zip(_WORD.findall(each)[1:], _WORD.findall(match[1]), strict=False))
    return found


def _function(lines: Sequence[str], name: str) -> Iterator[str]:
    inside = False
    for line in lines:
        if re.match(rf"\s*def {name}\(", line):
            inside = True
        elif inside and line.strip() and not line.startswith("    "):
            return
        elif inside and re.match(r"\s*def ", line):
            return
        elif inside and line.strip():
            yield line.strip()


def _definitions(lines: list[str]) -> Iterator[tuple[str, Definition]]:
    fragment = Fragment()
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.startswith("# Topologically Sorted Source Nodes"):
            fragment = Fragment()
        elif line.startswith("#   ") and len(line) <= MAX_LINE:
            result, calls, operands = line.partition(" = call_function[")
            if " = PlaceHolder[" in line:
                fragment.loads += _VALUE.findall(line)[:1]
            elif calls:
                operands = operands.partition("](args = ")[2]
                fragment.nodes |= dict.fromkeys(_VALUE.findall(result)[:1], tuple(_VALUE.findall(operands)))
            elif line.startswith("#   return "):
                fragment.stores += _VALUE.findall(line)
        if not (match := _DEFINED.match(line)):
            continue
        source = []
        while position < len(lines) and not lines[position].startswith("'''"):
            source.append(lines[position])
            position += 1
        name, language, runtime = match.groups()
        if language == "triton":
            yield name, _triton_definition(runtime, source, fragment)
        else:
            yield name, _cpp_definition(source, fragment)
        fragment = Fragment()


def _triton_definition(runtime: str | None, source: list[str], fragment: Fragment) -> Definition:
    heuristic, mutated, parameters = "", set(), []
    for line in source:
        if match := re.match(r"@triton_heuristics\.(\w+)", line):
            heuristic = match[1]
        elif match := _MUTATED.search(line):
            mutated = set(re.findall(r"\w+", match[1]))
        elif (match := _TRITON_PARAMETERS.match(line)) and match[1] == runtime:
            parameters = [part.split(":")[0].strip() for part in match[2].split(",") if "constexpr" not in part]

    def use(name: str) -> str:
        if name.startswith("in_out_ptr"):
            return "both"
        if name.startswith(("out_ptr", "ws_ptr")):
            return "write"
        if re.fullmatch(r"\w*numel|ks\d+|load_seed_offset\w*|sem_ptr\w*", name):
            return ""
        return "both" if name in mutated or heuristic == USERS_OWN else "read"

    generated = runtime and heuristic not in (USERS_OWN, "template")
    work = work_of("\n".join(source), runtime, heuristic) if generated and runtime else None
    return Definition(runtime, tuple((name, use(name)) for name in parameters), heuristic, fragment, work)


def _cpp_definition(source: list[str], fragment: Fragment) -> Definition:
    text = "\n".join(source)
    start = text.find("kernel(")
    signature = text[start : text.find(")", start)] if start >= 0 else ""

    def use(constant: str, name: str) -> str:
        return "both" if name.startswith("in_out_ptr") else "read" if constant else "write"

    parameters = tuple((name, use(constant, name)) for constant, name in _CPP_PARAMETER.findall(signature))
    work: Work | None = "scatter" if "atomic_add(" in text else "reduction" if "tmp_acc" in text else None
    return Definition(None, parameters, "", fragment, work)


class _Body:
    """Reads the statements of `call`, in order."""

    def __init__(self, code: EmittedCode, known: Mapping[str, Memory]) -> None:
        self.code = code
        self.known = known
        self.owner: dict[str, str] = {}  # a view -> its buffer
        self.reused: dict[str, str] = {}  # a buffer -> the one whose memory it took over
        self.written: set[str] = set()
        self.library_results: dict[str, EmittedCall] = {}
        self.handles: list[str] = []
        self.returned = False
        self.atens: tuple[str, ...] = ()
        self.line = ""

    def read(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.line = line
            if match := _HANDLE.search(line):
                self.handles.append(match[1])
            elif line.startswith("#"):
                _, named, atens = line.partition("Original ATen: [")
                if named:
                    self.atens = tuple(re.findall(r"[\w.]+", atens.partition("]")[0]))
            elif not self._statement(line):
                self.code.unparsed.append(line[:500])

    def _statement(self, line: str) -> bool:
        if line.startswith(("with ", "if ", "for ", "try:", "else:", "finally:", "@")):
            return line.startswith(("with torch.", "with V."))
        if len(line) > MAX_LINE:
            return False
        try:
            return all(self._single(statement, line) for statement in ast.parse(line).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False

    def _single(self, statement: ast.stmt, line: str) -> bool:
        match statement:
            case ast.Delete() | ast.Pass() | ast.Import() | ast.ImportFrom() | ast.Global():
                return True
            case ast.Return(value=value):
                elements = value.elts if isinstance(value, ast.Tuple | ast.List) else [value] if value else []
                self.code.outputs = tuple(self._buffer(element) for element in elements)
                self.returned = True
                return True
            case ast.Expr(value=ast.Call() as call):
                return self._call(call, None)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                self._take_inputs([name.id for name in names if isinstance(name, ast.Name)])
                return True
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return self._assign(name, value, reuse="# reuse" in line)
        return False

    def _take_inputs(self, names: list[str]) -> None:
        for name in names:
            if name in self.known:
                self.code.memory[name] = self.known[name]
        self.code.inputs = tuple(names)
        self.written |= set(names)

    def _assign(self, name: str, value: ast.expr, reuse: bool) -> bool:
        if isinstance(value, ast.Constant):
            return True
        if _sums_partials(value):
            return self._finish(name, value)
        base = self._buffer(value)
        if base in self.library_results and isinstance(value, ast.Subscript | ast.Name) and not reuse:
            writes = self.library_results[base].writes
            writes[:] = [*(other for other in writes if other != base), name]
            self._describe(name)
            return True
        if base is not None:
            if not reuse or base == name:
                self.owner[name] = base
                return True
            sizes = value.args[1] if isinstance(value, ast.Call) and len(value.args) > 1 else None
            self.reused[name] = base
            old = self.code.memory.get(base)
            if old is not None:
                shape = old.shape if sizes is None else _shape(sizes)
                if shape is not None:
                    self.code.memory[name] = memory(name, shape, (old.dtype, SIZES[old.dtype]))
            return True
        if isinstance(value, ast.Call):
            called = _dotted(value.func)
            if called.startswith("empty_strided") and len(value.args) > 2:
                dtype = _dotted(value.args[2]).removeprefix("torch.")
                shape = _shape(value.args[0])
                if shape is not None and dtype in DTYPES:
                    self.code.memory[name] = memory(name, shape, DTYPES[dtype])
                self.owner.pop(name, None)
                return True
            return self._call(value, name)
        return False

    def _call(self, call: ast.Call, target: str | None) -> bool:
        called = _dotted(call.func)
        if called.startswith(_NO_KERNEL) or called.endswith((".clear", ".zero_", "record_stream")):
            return True
        if called.endswith(".run") or called in self.code.definitions:
            return self._generated(called.removesuffix(".run"), call)
        if not called.startswith(("extern_kernels.", "torch.ops.", "aten.", "prims.", "inductor_ops.")):
            return False
        output = next((self._buffer(word.value) for word in call.keywords if word.arg == "out"), None)
        arguments = [*call.args, *(word.value for word in call.keywords if word.arg != "out")]
        reads = [name for argument in arguments for name in self._buffers_in(argument)]
        writes = [] if output is None else [output]
        if called.removesuffix(".default").endswith("_") and reads:  # such an aten operation changes its first argument
            writes.append(reads[0])
        new = self._announce(EmittedCall(called, "", list(dict.fromkeys(reads)), writes, is_extern=True))
        if target is not None:
            self.library_results[target] = new
            self._describe(target)
            new.writes.append(target)
        return True

    def _generated(self, name: str, call: ast.Call) -> bool:
        definition = self.code.definitions.get(name)
        if definition is None:
            return False
        new = EmittedCall(name, "", [], [], is_extern=False)
        elements = 1
        for (parameter, use), argument in zip(definition.parameters, call.args, strict=False):
            if parameter.endswith("numel") and isinstance(argument, ast.Constant) and isinstance(argument.value, int):
                elements *= argument.value
            buffer = self._buffer(argument) if use else None
            if buffer is None:
                continue
            new.arguments[parameter] = buffer
            if use == "both":
                old = self.reused.get(buffer, buffer)
                if old in self.written:  # otherwise no kernel has written that memory, so there is nothing to read
                    new.reads.append(old)
            elif use == "read":
                new.reads.append(buffer)
            if use != "read":
                new.writes.append(buffer)
        new.reads, new.writes = list(dict.fromkeys(new.reads)), list(dict.fromkeys(new.writes))
        new.elements = elements if definition.runtime_name else None
        self._announce(new)
        return True

    def _finish(self, name: str, value: ast.expr) -> bool:
        """Read `workspace_0[...].view(...).sum(dim=0).to(torch.bfloat16)`: one or two calls of PyTorch."""
        nodes = list(ast.walk(value))
        workspace = next(node.id for node in nodes if isinstance(node, ast.Name) and node.id.startswith("workspace_"))
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        methods = [function.attr for function in calls if isinstance(function, ast.Attribute)]
        self._describe(name)
        reduction = next((method for method in methods if method not in ("to", "view", "reshape")), "sum")
        converts = "to" in methods
        sums = sum_before_cast(name) if converts else name
        self._announce(EmittedCall(f"aten.{reduction}", "", [workspace], [sums], is_extern=True, sums_partials=True))
        if converts:
            self._announce(EmittedCall("aten.to", "", [sums], [name], is_extern=True, sums_partials=True))
        return True

    def _announce(self, call: EmittedCall) -> EmittedCall:
        # Other handles belong to later calls.
        position = next((i for i, handle in enumerate(self.handles) if handle.rpartition(":")[0] == call.name), None)
        call.handle = self.handles.pop(position) if position is not None else ""
        call.atens, self.atens = self.atens, ()
        call.views, call.viewed = views_in(self.line), elements_viewed(self.line)
        self.written |= set(call.writes)
        self.code.calls.append(call)
        return call

    def _describe(self, name: str) -> None:
        if name in self.known:
            self.code.memory.setdefault(name, self.known[name])
        self.written.add(name)

    def _buffer(self, node: ast.expr | None) -> str | None:
        """Return the buffer that an expression is, or is a view of."""
        match node:
            case ast.Name(id=name):
                return self._root(name)
            case ast.Subscript(value=value):
                return self._buffer(value)
            case ast.Call(func=ast.Name(id=function), args=[value, *_]) if function in _VIEWS:
                return self._buffer(value)
        return None

    def _root(self, name: str) -> str | None:
        name = self.owner.get(name, name)
        known = (self.code.memory, self.code.inputs, self.library_results, self.written)
        return name if any(name in names for names in known) else None

    def _buffers_in(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.List | ast.Tuple):
            return [name for element in node.elts for name in self._buffers_in(element)]
        name = self._buffer(node)
        return [] if name is None else [name]


def views_in(line: str) -> tuple[str, ...]:
    """Return the views of other shapes or offsets among a call's arguments, without its result."""
    return tuple(view[0] for view in _VIEW.finditer(line.partition("out=")[0]))


def elements_viewed(line: str) -> dict[str, int]:
    """Return the elements that a call can reach of each buffer of which all arguments are views."""
    arguments = line.partition("out=")[0].partition("(")[2]
    bare = set(re.findall(r"\w+", _VIEW.sub("", arguments)))
    reached: dict[str, int] = {}
    for name, sizes, strides in _VIEW.findall(arguments):
        shape, steps = _shape(sizes), _shape(strides)
        if shape is None or steps is None or len(shape) != len(steps):
            bare.add(name)  # the extent of its view is unknown
            continue
        distinct = math.prod(extent for extent, step in zip(shape, steps, strict=True) if step)
        span = 1 + sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True))
        reached[name] = reached.get(name, 0) + (min(distinct, span) if math.prod(shape) else 0)
    return {name: elements for name, elements in reached.items() if name not in bare}


_VIEW = re.compile(r"reinterpret_tensor\((\w+), (\([^()]*\)), (\([^()]*\)), \d+\)")
_VIEWS = ("reinterpret_tensor", "copy_if_misaligned", "alloc_from_pool")
_NO_KERNEL = (
    "assert_", "torch.cuda.", "get_raw_stream", "run_intermediate_hooks", "copy_if_misaligned", "torch._C.", "print",
    "torch.ops.inductor._reinterpret_tensor", "_DeviceGuard", "start_graph", "end_graph", "graph_", "V.",
)


def _sums_partials(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id.startswith("workspace_") for node in ast.walk(value))


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _shape(sizes: str | ast.expr) -> Shape | None:
    """Return the shape, or None if no tensor can have these sizes."""
    try:
        value = ast.literal_eval(sizes)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(value, tuple) or len(value) > 64 or any(not isinstance(e, int) or e < 0 for e in value):
        return None
    return value if math.prod(value) < MAX_ELEMENTS else None
