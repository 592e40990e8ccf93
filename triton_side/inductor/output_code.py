"""Parse Inductor's emitted code. Nothing is executed, and no torch is needed.

It reads the code once, line by line; versions.py lists the tested releases of torch. `ast` parses each line of `call`.
It refuses deep nesting with an error; such a line counts as unparsed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from xlafuse.triton_side.inductor.graph import DTYPES, Layout, Memory, Part, Shape
from xlafuse.triton_side.inductor.ir_text import MAX_LINE, SIZES, fx_memory, memory
from xlafuse.triton_side.inductor.kernel_code import Work, work_of
from xlafuse.triton_side.inductor.launch import VIEW, configuration, grid, layouts_in, shape_of


@dataclass
class EmittedCall:
    """A kernel call.

    handle: Inductor's "name:number", or "". atens: the operations that its comment names. sums_partials: it adds up a
    kernel's partial results.
    views: the views in its arguments. viewed: the elements that it can reach of buffers that it has as views only, or
    of which it changes a part. scatters: an operation of PyTorch that changes a part of its first argument in place.
    arguments: parameter -> buffer, of a generated kernel. sizes: parameter -> number. last: the numbers after them.
    passed: parameter -> the layout of a tensor, or a number. line: the statement.
    items: of a library call with several results, their numbers: buf2 = buf1[0].
    """

    name: str
    handle: str
    reads: list[str]
    writes: list[str]
    is_extern: bool
    atens: tuple[str, ...] = ()
    sums_partials: bool = False
    views: tuple[str, ...] = ()
    viewed: Mapping[str, int] = field(default_factory=dict)
    scatters: bool = False
    arguments: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    last: tuple[int, ...] = ()
    passed: dict[str, Layout | float] = field(default_factory=dict)
    line: str = ""
    items: dict[str, int] = field(default_factory=dict)

    @property
    def layouts(self) -> dict[str, Layout | None] | None:
        """The layouts of a library call's operands; None for a generated kernel."""
        return layouts_in(self.line) if self.is_extern else None


@dataclass
class EmittedCode:
    """The contents of one output_code.py.

    aot_id: such as "0_forward", or "". strides: of buffers. on_cpu: its kernels are C++ for a CPU.
    """

    aot_id: str
    calls: list[EmittedCall] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)
    strides: dict[str, Shape] = field(default_factory=dict)
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

    def grid(self, call: EmittedCall, config: str | None) -> Shape | None:
        """Return the grid of a generated kernel's launch with Triton's configuration; None where the code is silent."""
        definition = self.definitions.get(call.name)
        known = definition.grid_type if definition is not None and config is not None else ""
        return grid(known, call.sizes, configuration(config), call.last)

    def with_strides(self, memory: Mapping[str, Memory]) -> dict[str, Memory]:
        return {name: replace(each, strides=self.strides.get(name)) for name, each in memory.items()}


USERS_OWN = "user_autotune"


@dataclass
class Fragment:
    """The part of the FX graph that a definition's comment lists, for its first call.

    nodes: FX nodes with their operands. loads, stores: values by FX node; those that are no node's by buffer ("buf0").
    lines: the comment's lines with nodes, without "#   ".
    """

    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Definition:
    """A kernel's definition.

    parameters: (name, use), in order; the use is "read", "write", "both", or "" if it is no buffer.
    heuristic: Inductor's Triton heuristic ("pointwise", "template", ...); a user's own Triton kernel has
    "user_autotune". Inductor does not write down which of its arguments it reads.
    work: of a kernel that Inductor generated, by its source; None where that does not tell.
    grid_type: Inductor's name for the rule of its grid, or "".
    points: the points that the kernel iterates over; None where they are unknown.
    loads, stores: by parameter, the points of all its accesses with different indices.
    source: of a Triton kernel, as Inductor wrote it.
    """

    runtime_name: str | None
    parameters: tuple[tuple[str, str], ...]
    heuristic: str
    fragment: Fragment = field(default_factory=Fragment)
    work: Work | None = None
    grid_type: str = ""
    points: int | None = None
    loads: Mapping[str, int] = field(default_factory=dict)
    stores: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    @property
    def reduces_both_ways(self) -> bool:
        """Return whether it is a reduction over rows and columns at once."""
        return self.grid_type == "MixOrderReductionGrid"

    @property
    def kind(self) -> Work | Literal["custom"] | None:
        return "custom" if self.heuristic == USERS_OWN else self.work


# "triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''"
# "cpp_fused_0 = async_compile.cpp_pybinding([...], r'''"
_DEFINED = re.compile(r"(\w+) = async_compile\.(triton|cpp\w*)\((?:'(\w+)')?")
_TRITON_PARAMETERS = re.compile(r"def (\w+)\((.*)\):\s*$")
_CPP_PARAMETER = re.compile(r"(?<![\w:])(const )?[\w:]+\*(?: __restrict__)? (\w+)")
_GRID_TYPE = re.compile(r"'grid_type': '(\w+)'")
_MUTATED = re.compile(r"'mutated_arg_names': \[([^\]]*)\]")
_FRAGMENT = re.compile(r'#   %(\w+) : [^"]*"(\w+)\[([^\]]*)\][^"]*"\S* = (PlaceHolder|\w+)')
_VALUE = re.compile(r"%(\w+)")
_PARTIALS = re.compile(r"\]\.view\((\d{1,15}), (\d{1,15})\)\.")
_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+:\d+)\s*$")
_INPUT = re.compile(r"    (\w+) = rand_strided\((\([^)]*\)), (\([^)]*\)).*dtype=torch\.(\w+)\)")
# "_tensor_constant0 = None  # device(type='cuda', index=0) torch.float32 (3,) (1,) 7f1c"
_CONSTANT = re.compile(r"(\w+) = None  # device\(.*\) torch\.(\w+) (\([^)]*\)) (\([^)]*\)) ")
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
        if match := _CONSTANT.match(line):
            shape = shape_of(match[3])
            if shape is not None and match[2] in DTYPES:
                code.memory[match[1]] = replace(memory(match[1], shape, DTYPES[match[2]]), constant=True)
            if (strides := shape_of(match[4])) is not None:
                code.strides[match[1]] = strides
        elif match := _INPUT.match(line):
            shape = shape_of(match[2])
            if shape is not None and match[4] in DTYPES:
                known[match[1]] = memory(match[1], shape, DTYPES[match[4]])
            if (strides := shape_of(match[3])) is not None:
                code.strides[match[1]] = strides
        elif match := _FRAGMENT.match(line):
            described = fx_memory(match[1], match[2], match[3])
            if described is not None and match[4] == "PlaceHolder":
                known.setdefault(match[1], described)
    body = _Body(code, known)
    body.read(_body_of_call(lines))
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


def _body_of_call(lines: Sequence[str]) -> Iterator[str]:
    """Yield the statements and comments of `call`, without indentation.

    In mode reduce-overhead, Inductor moves the kernels that become one CUDA graph into a function `partition_N`. A
    product that it splits along K (`decompose_k_mm_...`) is a function, too. Their statements stand here in place of
    their calls.
    """
    renamed = _subgraph_buffers(lines)
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


def _subgraph_buffers(lines: Sequence[str]) -> dict[str, str]:
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
            if line.startswith(("#   %", "#   return ")):
                fragment.lines.append(line.removeprefix("#   "))
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
    heuristic, mutated, parameters, grid_type = "", set(), [], ""
    accesses = _Accesses()
    for line in source:
        if match := _GRID_TYPE.search(line):
            grid_type = match[1]
        if match := re.match(r"@triton_heuristics\.(\w+)", line):
            heuristic = match[1]
        elif match := _MUTATED.search(line):
            mutated = set(re.findall(r"\w+", match[1]))
        elif (match := _TRITON_PARAMETERS.match(line)) and match[1] == runtime:
            parameters = [part.split(":")[0].strip() for part in match[2].split(",") if "constexpr" not in part]
        elif parameters:
            accesses.read(line)

    def use(name: str) -> str:
        if name.startswith("in_out_ptr"):
            return "both"
        if name.startswith(("out_ptr", "ws_ptr")):
            return "both" if name in accesses.atomic else "write"
        if re.fullmatch(r"\w*numel|ks\d+|load_seed_offset\w*|sem_ptr\w*", name):
            return ""
        return "both" if name in mutated or heuristic == USERS_OWN else "read"

    generated = heuristic not in (USERS_OWN, "template")
    text = "".join(f"{line}\n" for line in source)
    work = work_of(text, runtime, heuristic) if generated and runtime else None
    counted = generated and accesses.points > 0
    return Definition(
        runtime, tuple((name, use(name)) for name in parameters), heuristic, fragment, work, grid_type,
        accesses.points if counted else None, accesses.total("load") if counted else {},
        accesses.total("store") if counted else {}, text,
    )


# "    xnumel = 1024", and in a foreach kernel's branch for one tensor "        xnumel = 1024"
_EXTENT = re.compile(r"\s+\w*[xyz_]numel = (\d{1,15})$")
_BRANCH = re.compile(r"\s+(?:el)?if pid < |\s+(?:el)?if pid % ")
# "tmp0 = tl.load(in_ptr0 + (x0), xmask)", "tl.atomic_add(out_ptr0 + (x0), tmp4, xmask, sem='relaxed')"
_ACCESS = re.compile(r"tl\.(load|store|atomic_\w+)\((\w+) \+ \(")


class _Accesses:
    """Counts the points of a Triton kernel's loops and of its loads and stores, line by line."""

    def __init__(self) -> None:
        self.atomic: set[str] = set()
        self._branches: list[int] = [1]
        self._extents = False
        self._found: dict[tuple[str, str, str, int], None] = {}  # "load" or "store", parameter, index, branch

    @property
    def points(self) -> int:
        """The points of all branches; 0 if their extents are not in the code."""
        return sum(self._branches[1:] or self._branches) if self._extents else 0

    def read(self, line: str) -> None:
        if _BRANCH.match(line):
            self._branches.append(1)
        elif match := _EXTENT.match(line):
            self._branches[-1] *= int(match[1])
            self._extents = True
        elif match := _ACCESS.search(line):
            kind, parameter = match.groups()
            branch, index = len(self._branches) - 1, _until_closed(line[match.end() :])
            if kind.startswith("atomic"):  # it reads what it changes
                self.atomic.add(parameter)
            for side in ("load", "store") if kind.startswith("atomic") else (kind,):
                self._found[side, parameter, index, branch] = None

    def total(self, side: str) -> dict[str, int]:
        total: dict[str, int] = {}
        for kind, parameter, _, branch in self._found:
            if kind == side:
                total[parameter] = total.get(parameter, 0) + self._branches[branch]
        return total


def _until_closed(text: str) -> str:
    """Return the text up to the bracket that closes one opened before it."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:position]
    return text


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
        self.layouts: dict[str, Layout] = {}  # of buffers and views
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
        if layout := self._layout(value):
            self.layouts[name] = layout
        if _sums_partials(value):
            return self._finish(name, value)
        base = self._buffer(value)
        if base in self.library_results and isinstance(value, ast.Subscript | ast.Name) and not reuse:
            result = self.library_results[base]
            result.writes[:] = [*(other for other in result.writes if other != base), name]
            match value:
                case ast.Subscript(slice=ast.Constant(value=int() as item)):
                    result.items[name] = item
            self._describe(name)
            return True
        if base is not None:
            if not reuse or base == name:
                self.owner[name] = base
                return True
            sizes = value.args[1] if isinstance(value, ast.Call) and len(value.args) > 1 else None
            self.reused[name] = base
            strides = self.code.strides.get(base)
            if isinstance(value, ast.Call) and len(value.args) > 2:
                strides = shape_of(value.args[2])
            if strides is not None:
                self.code.strides[name] = strides
            old = self.code.memory.get(base)
            if old is not None:
                shape = old.shape if sizes is None else shape_of(sizes)
                if shape is not None:
                    self.code.memory[name] = memory(name, shape, (old.dtype, SIZES[old.dtype]))
            return True
        if isinstance(value, ast.Call):
            called = _dotted(value.func)
            if called.startswith("empty_strided") and len(value.args) > 2:
                dtype = _dotted(value.args[2]).removeprefix("torch.")
                shape = shape_of(value.args[0])
                if shape is not None and dtype in DTYPES:
                    self.code.memory[name] = memory(name, shape, DTYPES[dtype])
                if (strides := shape_of(value.args[1])) is not None:
                    self.code.strides[name] = strides
                    if shape is not None:
                        self.layouts[name] = shape, strides
                self.owner.pop(name, None)
                return True
            return self._call(value, name)
        return False

    def _call(self, call: ast.Call, target: str | None) -> bool:
        called = _dotted(call.func)
        if called == "assert_size_stride" and len(call.args) > 2 and isinstance(call.args[0], ast.Name):
            shape, strides = shape_of(call.args[1]), shape_of(call.args[2])
            if strides is not None:
                self.code.strides[call.args[0].id] = strides
                if shape is not None:
                    self.layouts[call.args[0].id] = shape, strides
            return True
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
        new = self._announce(EmittedCall(called, "", list(dict.fromkeys(reads)), writes, is_extern=True))
        operation = called.removeprefix("torch.ops.").partition(".")[2].partition(".")[0]
        if operation.endswith("_"):  # such an operation of PyTorch changes its first argument
            self._change(new, operation, call)
        if target is not None:
            self.library_results[target] = new
            self._describe(target)
            new.writes.append(target)
        return True

    def _change(self, new: EmittedCall, operation: str, call: ast.Call) -> None:
        """Describe the buffers that an operation in place changes, and how much of them a scatter touches."""
        positions = _CHANGED_LISTS.get(operation, (0,))
        given = [argument for position in positions for argument in call.args[position : position + 1]]
        changed = [name for argument in given for name in self._buffers_in(argument)]
        new.writes += [name for name in dict.fromkeys(changed) if name not in new.writes]
        self.written |= set(changed)
        if operation not in _SCATTERS or len(changed) != 1:
            return
        new.scatters = True
        others = [name for argument in call.args[1:] for name in self._buffers_in(argument)]
        if not _accumulates(operation, call) and changed[0] not in others:
            new.reads.remove(changed[0])
        if (touched := self._touched(operation, call)) is not None:
            new.viewed = {**new.viewed, changed[0]: min(touched, new.viewed.get(changed[0], touched))}

    def _touched(self, operation: str, call: ast.Call) -> int | None:
        """Return the most elements of its first argument that a scatter touches; None if shapes are unknown."""
        if operation != "index_put_":  # an element for each element of the index
            index = self._shape_of(call.args[2]) if len(call.args) > 2 else None
            return None if index is None else math.prod(index)
        whole, indices = self._shape_of(call.args[0]), call.args[1]
        if whole is None or not isinstance(indices, ast.List | ast.Tuple) or len(indices.elts) > len(whole):
            return None
        broadcast: list[int] = []
        for each in indices.elts:
            if isinstance(each, ast.Constant):  # None: all of this dimension
                continue
            shape = self._shape_of(each)
            if shape is None or self._is_mask(each):
                return None
            longest = max(len(broadcast), len(shape))
            sides = [[1] * (longest - len(side)) + list(side) for side in (broadcast, shape)]
            broadcast = [max(pair) for pair in zip(*sides, strict=True)]
        kept = [
            extent for position, extent in enumerate(whole)
            if position >= len(indices.elts) or isinstance(indices.elts[position], ast.Constant)
        ]
        return math.prod(kept) * math.prod(broadcast)

    def _shape_of(self, node: ast.expr) -> Shape | None:
        match node:
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[_, sizes, *_]):
                return shape_of(sizes)
            case ast.Name(id=name) if self.owner.get(name, name) == name and name in self.code.memory:
                return self.code.memory[name].shape
        return None

    def _is_mask(self, node: ast.expr) -> bool:
        known = self.code.memory.get(self._buffer(node) or "")
        return known is None or known.dtype in ("pred", "u8")

    def _generated(self, name: str, call: ast.Call) -> bool:
        definition = self.code.definitions.get(name)
        if definition is None:
            return False
        new = EmittedCall(name, "", [], [], is_extern=False)
        for (parameter, use), argument in zip(definition.parameters, call.args, strict=False):
            if isinstance(argument, ast.Constant) and isinstance(argument.value, int):
                new.sizes[parameter] = argument.value
            passed = self._layout(argument) or _number(argument)
            if passed is not None:
                new.passed[parameter] = passed
            match argument:
                case ast.Call(func=ast.Attribute(value=whole, attr="item"), args=[]):
                    argument = whole  # the kernel takes its one element
            buffer = self._buffer(argument) if use else None
            if buffer is None:
                continue
            new.arguments[parameter] = buffer
            if use == "both":
                old = self.reused.get(buffer, buffer)
                while old not in self.written and old in self.reused:
                    old = self.reused[old]
                if old in self.written:  # otherwise no kernel has written that memory, so there is nothing to read
                    new.reads.append(old)
            elif use == "read":
                new.reads.append(buffer)
            if use != "read":
                new.writes.append(buffer)
        last = call.args[len(definition.parameters) :]
        numbers = [argument.value for argument in last if isinstance(argument, ast.Constant)]
        new.last = tuple(number for number in numbers if isinstance(number, int))
        new.reads, new.writes = list(dict.fromkeys(new.reads)), list(dict.fromkeys(new.writes))
        self._announce(new)
        return True

    def _layout(self, node: ast.expr) -> Layout | None:
        """Return shape and strides of a buffer or a view; None where they are unknown."""
        match node:
            case ast.Name(id=name):
                return self.layouts.get(name)
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[_, sizes, steps, *_]):
                shape, strides = shape_of(sizes), shape_of(steps)
                return None if shape is None or strides is None else (shape, strides)
        return None

    def _finish(self, name: str, value: ast.expr) -> bool:
        """Read `workspace_0[...].view(...).sum(dim=0).to(torch.bfloat16)`: one or two calls of PyTorch."""
        nodes = list(ast.walk(value))
        workspace = next(node.id for node in nodes if isinstance(node, ast.Name) and node.id.startswith("workspace_"))
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        methods = [function.attr for function in calls if isinstance(function, ast.Attribute)]
        self._describe(name)
        reduction = next((method for method in methods if method not in ("to", "view", "reshape")), "sum")
        converts = "to" in methods
        sums = f"{name}_sum" if converts else name
        new = self._announce(
            EmittedCall(f"aten.{reduction}", "", [workspace], [sums], is_extern=True, sums_partials=True)
        )
        if part := _PARTIALS.search(self.line):
            new.viewed = {workspace: int(part[1]) * int(part[2])}
        if converts:
            self._announce(EmittedCall("aten.to", "", [sums], [name], is_extern=True, sums_partials=True))
        return True

    def _announce(self, call: EmittedCall) -> EmittedCall:
        # Other handles belong to later calls.
        position = next((i for i, handle in enumerate(self.handles) if handle.rpartition(":")[0] == call.name), None)
        call.handle = self.handles.pop(position) if position is not None else ""
        call.atens, self.atens = self.atens, ()
        call.views, call.viewed, call.line = _views_in(self.line), elements_viewed(self.line), self.line
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
        known = (self.code.memory, self.code.inputs, self.library_results, self.written, self.reused)
        return name if any(name in names for names in known) else None

    def _buffers_in(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.List | ast.Tuple):
            return [name for element in node.elts for name in self._buffers_in(element)]
        name = self._buffer(node)
        return [] if name is None else [name]


def _views_in(line: str) -> tuple[str, ...]:
    """Return the views of other shapes or offsets among a call's arguments, without its result."""
    return tuple(view[0] for view in VIEW.finditer(line.partition("out=")[0]))


def elements_viewed(line: str) -> dict[str, int]:
    """Return the elements that a call can reach of each buffer of which all arguments are views."""
    arguments = line.partition("out=")[0].partition("(")[2]
    bare = set(re.findall(r"\w+", VIEW.sub("", arguments)))
    reached: dict[str, int] = {}
    for name, sizes, strides in VIEW.findall(arguments):
        shape, steps = shape_of(sizes), shape_of(strides)
        if shape is None or steps is None or len(shape) != len(steps):
            bare.add(name)  # the extent of its view is unknown
            continue
        distinct = math.prod(extent for extent, step in zip(shape, steps, strict=True) if step)
        span = 1 + sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True))
        reached[name] = reached.get(name, 0) + (min(distinct, span) if math.prod(shape) else 0)
    return {name: elements for name, elements in reached.items() if name not in bare}


# Operations in place that touch a part of their first argument.
_SCATTERS = {"scatter_", "scatter_add_", "scatter_reduce_", "index_put_"}
# The arguments that an operation in place changes, if not the first alone.
_CHANGED_LISTS = {
    "_fused_adam_": (0, 2, 3, 4), "_fused_adamw_": (0, 2, 3, 4), "_fused_sgd_": (0, 2), "_fused_adagrad_": (0, 2),
}


def _accumulates(operation: str, call: ast.Call) -> bool:
    """Return whether a scatter reads what it changes."""
    if operation == "index_put_":
        given = [*call.args[3:4], *(word.value for word in call.keywords if word.arg == "accumulate")]
        return any(not isinstance(value, ast.Constant) or bool(value.value) for value in given)
    return operation != "scatter_" or any(word.arg == "reduce" for word in call.keywords)


_VIEWS = ("reinterpret_tensor", "copy_if_misaligned", "alloc_from_pool")
_NO_KERNEL = (
    "assert_", "torch.cuda.", "get_raw_stream", "run_intermediate_hooks", "copy_if_misaligned", "torch._C.", "print",
    "torch.ops.inductor._reinterpret_tensor", "_DeviceGuard", "start_graph", "end_graph", "graph_", "V.",
)


def _number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, (int, float)) else None


def _sums_partials(value: ast.expr) -> bool:
    parts = [node.value for node in ast.walk(value) if isinstance(node, ast.Subscript)]
    return any(isinstance(part, ast.Name) and part.id.startswith("workspace_") for part in parts)


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
