"""Inductor's compiled graphs as plain data, without torch, so that dumps can be read where torch is not installed.

compiler.capture fills these classes from a compile, dump.read from files. A value that the source lacks is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from xlafuse.triton_side.calls.flops import Shape, grouped_product_flops

Part = Literal["forward", "backward"]
Kind = Literal[
    "elementwise", "reduction", "gemm", "attention", "copy", "scatter", "collective", "library", "custom", "memset"
]
Provenance = Literal["compiled", "device", "replayed", "not autotuned", "eager", ""]

# torch's dtype -> (HLO's name, bytes)
DTYPES = {
    "bfloat16": ("bf16", 2), "float16": ("f16", 2), "float32": ("f32", 4), "float64": ("f64", 8), "bool": ("pred", 1),
    "int8": ("s8", 1), "int16": ("s16", 2), "int32": ("s32", 4), "int64": ("s64", 8),
    "uint8": ("u8", 1), "uint16": ("u16", 2), "uint32": ("u32", 4), "uint64": ("u64", 8),
    "complex64": ("c64", 8), "complex128": ("c128", 16), "float8_e4m3fn": ("f8e4m3fn", 1),
    "float8_e5m2": ("f8e5m2", 1), "float8_e4m3fnuz": ("f8e4m3fnuz", 1), "float8_e5m2fnuz": ("f8e5m2fnuz", 1),
    "float8_e8m0fnu": ("f8e8m0fnu", 1),
}
# HLO's name of each dtype that FX graphs or Triton's signatures spell in another way
HLO_NAMES = {
    "i8": "s8", "i16": "s16", "i32": "s32", "i64": "s64", "b8": "pred", "i1": "pred", "u1": "pred", "fp16": "f16",
    "fp32": "f32", "fp64": "f64", "fp8e4nv": "f8e4m3fn", "fp8e5": "f8e5m2",
}


@dataclass(frozen=True)
class SourceNode:
    """An FX node.

    stage: the stages given with `xlafuse.triton_side.calls.stages.stage`, else the path of its module ("layers/0/mlp"),
        which only a compile in this process knows.
    line: "file:line" outside torch. place: "file:line function" outside of every library, that of the innermost call.
    inputs: names of the nodes that it takes.
    backward: the node was traced for a gradient.
    shapes, input_shapes: shapes of the tensors that it returns and takes, in order; () if unknown.
    causal: whether an attention call uses a causal mask; None for other nodes, or if unknown.
    """

    name: str
    op: str
    stage: str | None
    line: str | None
    inputs: tuple[str, ...]
    backward: bool = False
    shapes: tuple[Shape, ...] = ()
    input_shapes: tuple[Shape, ...] = ()
    causal: bool | None = None
    place: str | None = None


@dataclass(frozen=True)
class Buffer:
    """A buffer that a kernel reads or writes: its name in the emitted code, and the bytes that the kernel touches.

    A generated kernel counts the points of its loop for each access by another index, at most the whole buffer. A
    library call or a template counts whole buffers, or what its views reach. None if a dump does not say.
    """

    name: str
    bytes: int | None


@dataclass(frozen=True)
class Kernel:
    """One kernel call in the emitted code.

    name: as in the code (`triton_poi_fused_mul_0`, `extern_kernels.mm`, `cpp_fused_add_1`). A reduction over rows and
        columns at once leaves partial results in a workspace; the PyTorch calls after it are `aten.sum`, and `aten.to`
        for the cast.
    ops: the operations inside, in graph order, as they were before Inductor's pattern matchers (`aten.mm` and
        `aten.add` where the code calls addmm); one entry per FX node. If a match replaced operations by several others,
        the kernels have the new operations.
    fx_nodes: the post-grad FX nodes by name.
    stages: those of its operations.
    lines: "file:line" of the code outside torch that wrote the operations.
    inputs, outputs: None if a dump does not say.
    is_template: generated from a hand-written template (max-autotune's GEMMs, FlexAttention).
    is_extern: a library call.
    provenance: "device": chosen by measuring on this device; "compiled": there was no choice; "not autotuned": a GPU
        would measure, but none has; "eager": Inductor did not compile this operation, and PyTorch runs it; "": a dump
        does not say. Inductor measures configurations of Triton kernels. In
        every mode it also measures whether to pad GEMM operands whose sizes are no multiple of 16 bytes, which adds
        kernels. With max-autotune it also measures GEMM implementations, and the split of a reduction over rows and
        columns at once.
    config: the Triton configuration compiled or chosen, else None.
    """

    name: str
    part: Part
    kind: Kind
    ops: tuple[str, ...]
    fx_nodes: tuple[str, ...]
    stages: tuple[str, ...]
    lines: tuple[str, ...]
    inputs: tuple[Buffer, ...] | None
    outputs: tuple[Buffer, ...] | None
    is_template: bool
    is_extern: bool
    provenance: Provenance
    config: str | None


Layout = tuple[Shape, Shape]  # shape, and strides in elements


@dataclass(frozen=True)
class Memory:
    """A buffer of a graph: shape, dtype in HLO's short form, size. strides: in elements, None if unknown."""

    name: str
    shape: Shape
    dtype: str
    bytes: int
    constant: bool = False
    strides: Shape | None = None

    @property
    def layout(self) -> Layout | None:
        return None if self.strides is None or len(self.strides) != len(self.shape) else (self.shape, self.strides)


@dataclass(frozen=True)
class Call:
    """A kernel with the operations inside.

    sources: its FX nodes before the pattern matchers. nodes: its FX nodes after them, which it computes.
    operations: the scheduler's names ("op3"). runtime_name: the GPU kernel's name; None for a library's.
    workspace_bytes: scratch of one launch that no other kernel reads. flops: None if unknown.
    views: the views in its arguments, as the emitted code writes them.
    grid: blocks in x, y, z of a generated kernel; None if unknown.
    resources: of its compiled code, as xlafuse.triton_side.calls.artifacts.Resources; None if unknown.
    layouts: of a library call, by the names in its arguments, as `launch.layouts_in` returns them; None for a generated
        kernel, which gets addresses.
    """

    kernel: Kernel
    sources: tuple[SourceNode, ...]
    nodes: tuple[SourceNode, ...]
    operations: frozenset[str] = frozenset()
    runtime_name: str | None = None
    workspace_bytes: int = 0
    views: tuple[str, ...] = ()
    grid: Shape | None = None
    resources: Mapping[str, int] | None = None
    layouts: Mapping[str, Layout | None] | None = None

    def layout_of(self, memory: Memory, *, reads: bool) -> Layout | None:
        """Return the layout of a buffer as the kernel is given it; None if unknown.

        A library call's result may stand before the call.
        """
        found = None if self.layouts is None else self.layouts.get(memory.name)
        known = self.layouts is None or not reads or memory.name in self.layouts
        return found or (memory.layout if known else None)

    @property
    def flops(self) -> float | None:
        if self.kernel.kind == "copy":
            return 0.0
        counts = [flops(node, by_library=self.kernel.is_extern) for node in self.nodes]
        return sum(count or 0 for count in counts) if counts and None not in counts else None


@dataclass(frozen=True)
class Refusal:
    """Two sets of scheduler operations that Inductor did not fuse, with its last message about them."""

    first: frozenset[str]
    second: frozenset[str]
    text: str


@dataclass(frozen=True)
class GraphBreak:
    """Where tracing stopped ("file:line", or "") and why, in Dynamo's words.

    skipped: the function of which Dynamo therefore compiles nothing, or "". Functions that it calls may be compiled.
    """

    text: str
    line: str
    skipped: str = ""

    @property
    def reason(self) -> str:
        """The first line of the text, and its explanation if it has one."""
        title, *details = self.text.splitlines() or [""]
        if title.startswith("generic_jump"):
            return "a branch depends on the value of a tensor"
        if title == "step_unsupported":
            return "Dynamo cannot trace this line"
        found = [words[1] for detail in details if (words := re.match(r"\s*Explanation: (.+)", detail))]
        return ": ".join([title, *found[:1]]).rstrip(".")

    def __str__(self) -> str:
        so = f", so {self.skipped}() itself runs uncompiled" if self.skipped else ""
        return f"the graph breaks{f' at {self.line}' if self.line else ''}: {self.reason}{so}"


@dataclass
class FxText:
    """An FX graph.

    nodes: by name, in order, without placeholders. memory: of every node that is a tensor. outputs: what it returns.
    arguments: of each node, as printed.
    """

    nodes: dict[str, SourceNode] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CompiledGraph:
    """One compiled graph.

    unit: number of the traced function that the graph belongs to; a graph break starts another one. An operation
        between compiled graphs is a unit, too, and so is each call of a graph that is called several times.
    inputs, outputs: names of buffers, in order; None for a value that is no tensor.
    storages: a number for each input's and output's place in memory at the first call. Equal numbers in several units
        mean the same tensor. Empty if the code did not run.
    traced: the FX graph before Inductor's passes; of a capture, that of forward and backward together.
    """

    part: Part
    unit: int
    calls: tuple[Call, ...]
    memory: Mapping[str, Memory]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    refusals: tuple[Refusal, ...] = ()
    unparsed: tuple[str, ...] = ()
    storages: Mapping[str, int] = field(default_factory=dict)
    traced: FxText = field(default_factory=FxText, compare=False, repr=False)


@dataclass(frozen=True)
class Program:
    """All graphs of one call, forward before backward, units in the order of the trace. notes: on what was left out."""

    graphs: tuple[CompiledGraph, ...]
    breaks: tuple[GraphBreak, ...] = ()
    notes: tuple[str, ...] = ()


def part_viewed(whole: Memory, size: int, viewed: Mapping[str, int]) -> int:
    """Return the bytes of `size` that a library call reads. viewed: the elements in its views of buffers."""
    elements = math.prod(whole.shape)
    if whole.name not in viewed or not elements:
        return size
    return min(size, viewed[whole.name] * (whole.bytes // elements))


def without_waits(graph: CompiledGraph) -> CompiledGraph:
    """Return the graph without its waits for exchanges between GPUs, which launch nothing.

    Inductor gives the wait's operation to the exchange, too; the exchange gets its own.
    """
    calls = []
    for call in graph.calls:
        _, functional, name = call.kernel.name.partition(f"{EXCHANGES}.")
        own = f"{EXCHANGES}.{name.partition('.')[0]}"
        if not functional:
            calls.append(call)
        elif own != WAIT:
            of_exchange = [
                tuple(replace(node, op=own) if node.op == WAIT else node for node in nodes)
                for nodes in (call.sources, call.nodes)
            ]
            calls.append(replace(call, sources=of_exchange[0], nodes=of_exchange[1]))
    return replace(graph, calls=tuple(calls))


def without_views(graph: CompiledGraph) -> CompiledGraph:
    """Return the graph without its calls of PyTorch's views, which launch nothing. Other calls use the viewed buffers.

    Inductor has no code for complex numbers, and calls PyTorch for views of them.
    """
    viewed: dict[str, str] = {}  # a view -> the buffer with its memory
    calls = []
    for call in graph.calls:
        name = call.kernel.name.removeprefix("torch.ops.").split(".")
        if ".".join(name[:2]) in VIEWS and len(call.kernel.inputs or ()) == 1 and call.kernel.outputs:
            (base,) = _names(call.kernel.inputs)
            viewed |= {output.name: viewed.get(base, base) for output in call.kernel.outputs}
        else:
            inputs = _of_bases(call.kernel.inputs, viewed, graph.memory)
            outputs = _of_bases(call.kernel.outputs, viewed, graph.memory)
            kernel = replace(call.kernel, inputs=inputs, outputs=outputs)
            layouts = call.layouts
            if layouts is not None:
                layouts = {name: layout for name, layout in layouts.items() if name not in viewed.values()}
            calls.append(replace(call, kernel=kernel, layouts=layouts))
    return replace(
        graph,
        calls=tuple(calls),
        outputs=tuple(viewed.get(name, name) if name is not None else None for name in graph.outputs),
        storages={viewed.get(name, name): number for name, number in graph.storages.items()},
    )


def _of_bases(
    buffers: tuple[Buffer, ...] | None, viewed: Mapping[str, str], memory: Mapping[str, Memory]
) -> tuple[Buffer, ...] | None:
    """Return the accesses with each view's bytes as its base's; two of one base touch at most the whole."""
    if buffers is None or not any(buffer.name in viewed for buffer in buffers):
        return buffers
    bytes_of: dict[str, int | None] = {}
    for buffer in buffers:
        name = viewed.get(buffer.name, buffer.name)
        earlier = bytes_of.get(name, 0)
        total = None if earlier is None or buffer.bytes is None else earlier + buffer.bytes
        bytes_of[name] = total if total is None or name not in memory else min(total, memory[name].bytes)
    return tuple(Buffer(name, size) for name, size in bytes_of.items())


_HELPER = "#helper"


def own_operations(nodes: Iterable[SourceNode]) -> set[str]:
    """Return the operations that a kernel computes; {"unknown"} if it only helps a library call."""
    return {node.op for node in nodes if not node.name.endswith(_HELPER)} or {"unknown"}


def helper_node(node: SourceNode, op: str | None) -> SourceNode:
    """Return `node` without shapes, for a kernel that only prepares or finishes the call that computes it.

    op: the kernel's own operation, where it is known.
    """
    return replace(node, name=f"{node.name}{_HELPER}", op=op or node.op, shapes=(), input_shapes=())


def second_step(nodes: Iterable[SourceNode], partial: Memory | None) -> tuple[SourceNode, ...]:
    """Return the reductions among `nodes` under new names, for a kernel that reduces the partial results."""
    shapes = () if partial is None else (partial.shape,)
    reductions = (node for node in nodes if node.op in TWO_STEPS)
    return tuple(replace(node, name=f"{node.name}#2", input_shapes=shapes) for node in reductions)


def _names(buffers: tuple[Buffer, ...] | None) -> set[str]:
    return {buffer.name for buffer in buffers or ()}


SUM_OF_PRODUCTS = "mm_plus_mm"  # Inductor's name for a @ b + c @ d
GEMM = {
    SUM_OF_PRODUCTS,
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._int_mm", "aten._scaled_mm", "aten.linear", "aten.dot",
    "aten.mv", "aten._grouped_mm",
}
# The position of the argument `is_causal`. Printed graphs omit it if it has its default.
IS_CAUSAL = {
    "aten._scaled_dot_product_flash_attention": 4, "aten._scaled_dot_product_flash_attention_backward": 11,
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten._scaled_dot_product_efficient_attention": 6, "aten._scaled_dot_product_efficient_attention_backward": 11,
    "aten._scaled_dot_product_cudnn_attention": 6, "aten._scaled_dot_product_cudnn_attention_backward": 14,
}
ATTENTION = re.compile(r"scaled_dot_product|flash_attention|flex_attention|efficient_attention|cudnn_attention")
SCATTER = {
    "aten.scatter", "aten.scatter_add", "aten.scatter_reduce", "aten.index_put", "aten._unsafe_index_put",
    "aten.index_add", "aten.index_copy", "aten._unsafe_masked_index_put_accumulate",
}
EXCHANGES = "_c10d_functional"  # the namespace of operations between GPUs
WAIT = f"{EXCHANGES}.wait_tensor"
# Operations whose result shares their operand's memory, whatever the operand.
VIEWS = {
    "aten._conj", "aten._neg_view", "aten.view_as_real", "aten.view_as_complex", "aten.alias", "aten.detach",
    "aten.view", "aten._reshape_alias", "aten.as_strided", "aten.permute", "aten.transpose", "aten.t", "aten.expand",
    "aten.slice", "aten.select", "aten.unsqueeze", "aten.squeeze", "aten.diagonal", "aten.unfold",
}
MOVEMENT = {
    "aten.clone", "aten.copy", "aten.copy_", "aten.cat", "aten.permute", "aten.transpose", "aten.t",
    "aten.view", "aten.reshape", "aten.expand", "aten.slice", "aten.select", "aten.unsqueeze", "aten.squeeze",
    "aten.constant_pad_nd", "aten.flip", "aten.split", "aten.split_with_sizes", "getitem", "aten.as_strided",
    "aten.unbind", "aten.repeat", "aten._unsafe_view",
}
MAKES_OR_MOVES = MOVEMENT | SCATTER | {
    "aten.full", "aten.full_like", "aten.empty", "aten.arange", "prims.iota", "aten.scalar_tensor", "aten.alias",
    "aten.detach", "aten.gather", "aten.index", "aten.index_select", "aten.embedding", "aten.lift_fresh_copy",
}
REDUCTIONS = {
    "aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.prod", "aten.any", "aten.all",
    "aten.argmax", "aten.argmin", "aten.var", "aten.var_mean", "prims.sum", "prims.xor_sum",
}
_ONLINE_SOFTMAX = "prims.prepare_softmax_online"
TWO_STEPS = REDUCTIONS | {_ONLINE_SOFTMAX}  # Inductor may split these into two kernels
_COSTS_VARY = {"aten.sort", "aten.topk", "aten.cumsum", "aten.cumprod", "aten.rand", "aten.randn", "aten.nonzero"}


def operation_of(call: str) -> str:
    """Return the operation that a call computes: "aten.scatter" for "torch.ops.aten.scatter_.src".

    Calls below `extern_kernels` compute operations of aten.
    """
    called = re.sub(r"^extern_kernels\.", "aten.", call.removeprefix("torch.ops."))
    return ".".join(called.split(".")[:2]).removesuffix("_")


def kind_of(
    name: str, targets: set[str], before: set[str], by_code: Kind | None, *, is_template: bool, is_extern: bool,
    is_reduction: bool,
) -> Kind:
    """Return a kernel's kind. targets, before: its operations after and before pattern matching.

    by_code: the kind that the code of a generated or a user's kernel shows. Its operations do not: a kernel that only
    lays out operands for a call has the call's.
    """
    if by_code is not None:
        return by_code
    if (is_extern or is_template) and any(ATTENTION.search(word) for word in (*targets, name)):
        return "attention"
    library = f"aten.{name.removeprefix('extern_kernels.').removesuffix('_dtype')}"
    if is_template or (is_extern and (targets & GEMM or library in GEMM)):
        return "gemm"
    if {op.removesuffix("_") for op in before} & SCATTER or (is_extern and operation_of(name) in SCATTER):
        return "scatter"
    if is_extern:
        return "collective" if f"{EXCHANGES}." in name else "library"
    if is_reduction:
        return "reduction"
    if before <= MOVEMENT:
        return "copy"
    return "elementwise"


def flops(node: SourceNode, *, by_library: bool = False) -> float | None:
    """Return the floating-point operations of one FX node; None if its shapes or its arithmetic are not known.

    - A matrix product counts 2 M N K.
    - Attention counts its two products forward and its five backward, over half of the scores if it is causal. None for
      FlexAttention, whose mask is data.
    - A reduction counts one per input element.
    - Other arithmetic, conversions included, counts one per output element, as in XLA's cost analysis.
    - Moving data counts none.

    by_library: a library call computes it; then only products, convolutions, attention and reductions are known.
    """
    if node.op.removesuffix("_") in MAKES_OR_MOVES:
        return 0.0
    if node.op == _ONLINE_SOFTMAX:  # a maximum, a difference, an exponential and a sum
        return 4.0 * math.prod(node.input_shapes[0]) if node.input_shapes else None
    if ATTENTION.search(node.op):
        return _attention_flops(node)
    if node.op in REDUCTIONS:
        return float(math.prod(node.input_shapes[0])) if node.input_shapes else None
    if not node.shapes or node.op in _COSTS_VARY:
        return None
    made = math.prod(node.shapes[0])
    if node.op.startswith("aten._foreach_"):
        made = sum(map(math.prod, node.shapes))
    if node.op == SUM_OF_PRODUCTS:
        return 2.0 * made * sum(shape[-1] for shape in node.input_shapes[::2]) if len(node.input_shapes) == 4 else None
    if node.op == "aten._grouped_mm":
        return grouped_product_flops(*node.input_shapes[:2]) if len(node.input_shapes) > 1 else None
    if node.op in GEMM:
        first = 1 if node.op in ("aten.addmm", "aten.baddbmm") else 0
        return 2.0 * made * node.input_shapes[first][-1] if len(node.input_shapes) > first + 1 else None
    if node.op == "aten.convolution":
        return 2.0 * made * math.prod(node.input_shapes[1][1:]) if len(node.input_shapes) > 1 else None
    if by_library:
        return None
    taken = max((math.prod(shape) for shape in node.input_shapes), default=0)
    return float(made) if node.op.startswith(("aten.", "prims.")) and made >= taken else None


def _attention_flops(node: SourceNode) -> float | None:
    backward = node.op.endswith("backward")
    if "._scaled_dot_product" not in node.op or node.causal is None:
        return None  # other attention calls have other operand layouts
    skipped = 1 if backward else 0  # the gradient of the output comes first
    operands = node.input_shapes[skipped : skipped + 3]
    if len(operands) < 3 or any(len(shape) != 4 for shape in operands):
        return None
    query, key, value = operands
    pairs = math.prod(query[:-1]) * key[-2]
    inner = 3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1]
    return (1.0 if node.causal else 2.0) * pairs * inner
