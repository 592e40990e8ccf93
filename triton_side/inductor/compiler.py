"""Compile with TorchInductor, and keep what it emits: graphs, scheduler IR, code, and which kernel does what.

    compiled = inductor.compile(block.apply)
    with inductor.capture() as captured:
        outputs = compiled(inputs)
    captured.kernels        # one Kernel per kernel call in the emitted code, forward and backward
    captured.write(folder)

The emitted code decides: its order is the order of the kernels, and a call that could not be joined to operations is
listed in `Graph.unparsed`. The same works on a CPU (C++ kernels), on CUDA and on a GPU that is not there
(deviceless.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.fx.traceback import preserve_node_meta
from torch.multiprocessing.reductions import StorageWeakRef

from triton_side.calls import artifacts
from triton_side.inductor import _private as private
from triton_side.inductor.graph import (
    Buffer,
    Call,
    CompiledGraph,
    GraphBreak,
    Kernel,
    Part,
    Program,
    Provenance,
    Refusal,
    SourceNode,
    helper,
    kind_of,
    own_operations,
)


@dataclasses.dataclass
class Graph:
    """One compiled graph: post-grad FX graph, scheduler IR before and after fusion, output code (all text), kernels.

    unit: number of the traced function that it belongs to; a graph break begins another one. unparsed: calls in the
        code that Inductor did not announce as kernels; nothing is known of them. refusals: pairs of scheduler nodes
        that Inductor looked at and did not fuse.
    """

    part: Part
    unit: int
    fx: str
    pre_fusion: str
    post_fusion: str
    code: str
    unparsed: tuple[str, ...]
    refusals: tuple[Refusal, ...] = dataclasses.field(repr=False)
    _calls: tuple[_Call, ...] = dataclasses.field(repr=False)
    _emitted: private.Emitted = dataclasses.field(repr=False)
    _measured: bool = dataclasses.field(repr=False)
    _holds: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """In emitted order. Provenance as of now: on CUDA a kernel is tuned when it first runs."""
        return tuple(_kernel(call, self._emitted, self._measured) for call in self._calls)

    def compiled(self) -> CompiledGraph:
        """All of it as plain data."""
        emitted = self._emitted
        workspaces = [call.emission.workspace for call in self._calls]
        memory = {**emitted.memory} | {workspace.name: workspace for workspace in workspaces if workspace is not None}
        calls = [self._plain_call(kernel, call) for kernel, call in zip(self.kernels, self._calls, strict=True)]
        return CompiledGraph(
            part=self.part,
            unit=self.unit,
            calls=own_operations(calls, memory),
            memory=memory,
            inputs=tuple(name for name in emitted.inputs if name in memory),
            outputs=tuple(name if name in memory else None for name in emitted.outputs),
            refusals=self.refusals,
            unparsed=self.unparsed,
            holds={name: number for name, number in self._holds.items() if name in memory},
        )

    def _plain_call(self, kernel: Kernel, call: _Call) -> Call:
        return Call(
            kernel=kernel,
            sources=call.sources,
            nodes=tuple(itself for _, _, itself in call.emission.nodes if itself.op not in ("placeholder", "get_attr")),
            operations=call.emission.operations,
            runtime_name=private.runtime_name(self._emitted.module, kernel.name),
        )

    def triton_kernels(self) -> dict[str, Any]:
        """Kernel name -> triton CompiledKernel in use (on CUDA, once tuned, the winner), in emitted order."""
        found = {
            call.emission.name: private.triton_kernel(self._emitted.module, call.emission.name) for call in self._calls
        }
        return {n: k.compiled for n, k in found.items() if k is not None and k.compiled is not None}


@dataclasses.dataclass(frozen=True)
class _Call:
    emission: private.Emission
    sources: tuple[SourceNode, ...]


class _Places:
    """Numbers of the places in memory where tensors begin."""

    def __init__(self) -> None:
        # The weak references keep the addresses of memory that was seen from being used again.
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self._places: dict[tuple[int, int], int] = {}  # storage and offset

    def of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), StorageWeakRef(storage)))
        return self._places.setdefault((number, int(tensor.storage_offset())), len(self._places))


@dataclasses.dataclass
class Captured:
    """What Inductor emitted during a `capture`. joint: the joint forward and backward FX graph, None for inference; of
    several functions' (after a graph break), the last. breaks: where a function was cut in two, and why.
    """

    joint: str | None
    graphs: tuple[Graph, ...]
    breaks: tuple[GraphBreak, ...] = ()
    _places: _Places = dataclasses.field(default_factory=_Places, repr=False)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All kernel calls, forward before backward, each graph in emitted order."""
        return tuple(kernel for graph in self.graphs for kernel in graph.kernels)

    def program(self) -> Program:
        """Everything as plain data, which needs no torch; provenance as of now."""
        return Program(tuple(graph.compiled() for graph in self.graphs), self.breaks)

    def saw(self, graph: Graph, taken: Sequence[Any], returned: Sequence[Any]) -> None:
        """Remember, of the first call of a graph, where its inputs and its first results were."""
        inputs, outputs = graph._emitted.inputs, graph._emitted.outputs
        if graph._holds or len(taken) != len(inputs) or len(returned) > len(outputs):
            return
        for name, value in (*zip(inputs, taken, strict=True), *zip(outputs, returned, strict=False)):
            if name is not None and isinstance(value, torch.Tensor):
                graph._holds[name] = self._places.of(value)

    def graph(self, part: Part) -> Graph:
        """The graph of `part`. Raises KeyError unless there is exactly one."""
        found = [graph for graph in self.graphs if graph.part == part]
        if len(found) != 1:
            raise KeyError(f"{len(found)} {part} graphs were compiled; capture one call of one function at a time")
        return found[0]

    def write(self, folder: str | Path) -> None:
        """Store everything under `folder`: kernels.json (each `Kernel` with its `sources`, one `SourceNode` an
        operation), joint_graph.py and, per graph, a folder with its texts.

        A second forward (backward) graph goes to forward-1 (backward-1), and so on. The graph's folder also holds, in
        triton/, the representations of every Triton kernel (triton_side.calls.artifacts) and resources.json with
        registers, spills and shared memory.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.joint is not None:
            (folder / "joint_graph.py").write_text(self.joint)
        listing = [
            dataclasses.asdict(kernel) | {"sources": [dataclasses.asdict(source) for source in call.sources]}
            for graph in self.graphs for kernel, call in zip(graph.kernels, graph._calls, strict=True)
        ]
        (folder / "kernels.json").write_text(json.dumps(listing, indent=1) + "\n")
        count: dict[str, int] = {}
        for graph in self.graphs:
            index = count[graph.part] = count.get(graph.part, -1) + 1
            target = folder / (f"{graph.part}-{index}" if index else graph.part)
            target.mkdir(exist_ok=True)
            (target / "fx_graph.py").write_text(graph.fx)
            (target / "ir_pre_fusion.txt").write_text(graph.pre_fusion)
            (target / "ir_post_fusion.txt").write_text(graph.post_fusion)
            (target / "output_code.py").write_text(graph.code)
            resources = {}
            kernels = {name: artifacts.of_triton(compiled) for name, compiled in graph.triton_kernels().items()}
            artifacts.disassemble(kernels.values())
            for name, kernel in kernels.items():
                kernel.write(target / "triton", name)
                resources[name] = dataclasses.asdict(kernel.resources)
            if resources:
                (target / "triton" / "resources.json").write_text(json.dumps(resources, indent=1) + "\n")


def compile(
    apply: Callable[..., Any], *, max_autotune: bool = False, fullgraph: bool = True
) -> Callable[..., Any]:
    """`torch.compile` of `apply` with static shapes.

    max_autotune: mode "max-autotune-no-cudagraphs" instead of the default mode. fullgraph: a graph break is an error,
    and torch.autograd.grad becomes part of the graph; otherwise a break cuts the function into several graphs.
    """
    private.trace_gradients(fullgraph)
    mode = "max-autotune-no-cudagraphs" if max_autotune else None
    return torch.compile(apply, fullgraph=fullgraph, dynamic=False, mode=mode)


@contextlib.contextmanager
def capture() -> Iterator[Captured]:
    """Record the compiles inside the `with`; the yielded `Captured` is complete when it ends.

    Where an input requires grad, the backward graph is compiled together with the forward one, so only the forward call
    has to be inside. What this process compiled before stays compiled, and is not compiled again: forget it first with
    `torch.compiler.reset()` to capture it, but never between a program's compile and its timing.

    Inductor's caches are off inside, and so is its static launcher, which keeps no IR: the kernels are the same, a
    launch may cost the host more.

    Raises:
        RuntimeError: nothing was compiled inside, or Inductor's custom passes are in use.
    """
    with recording(measured=True) as captured:
        yield captured


def timing_under(lock: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Inside, whatever Inductor times on a GPU to choose a kernel it times within a `lock()`: several processes that
    compile for one GPU need not wait for each other, and measure without each other."""
    return private.timing_under(lock)


@contextlib.contextmanager
def recording(measured: bool) -> Iterator[Captured]:
    """`capture`; not measured: for a GPU that is not there, on which nothing is timed to choose a kernel."""
    captured = Captured(joint=None, graphs=())
    recorder = _Recorder(captured, measured)
    with private.listening(recorder), preserve_node_meta():
        yield captured
    if not captured.graphs:
        raise RuntimeError("nothing was compiled inside the capture: call the compiled function inside it")


class _Recorder:
    """Puts together what private.listening reports, graph by graph."""

    def __init__(self, captured: Captured, measured: bool) -> None:
        self.captured = captured
        self.measured = measured
        self.sources: dict[str, SourceNode] = {}
        self.graph_names: set[str] = set()
        self.units = 0
        self.refusals: dict[tuple[frozenset[str], frozenset[str]], Refusal] = {}
        self.ir: dict[tuple[Part, bool], str] = {}
        self.emissions: dict[int, private.Emission] = {}

    def source(self, nodes: Mapping[str, SourceNode]) -> None:
        self.sources = dict(nodes)
        self.graph_names = set()

    def joint(self, readable: str) -> None:
        if any(name.startswith("tangents") for name in self.sources):
            self.captured.joint = readable

    def scheduled(self, part: Part, fused: bool, text: str) -> None:
        self.ir[part, fused] = self.ir.get((part, fused), "") + text

    def refused(self, refusal: Refusal) -> None:
        self.refusals.pop((refusal.first, refusal.second), None)  # the last word comes last
        self.refusals[refusal.first, refusal.second] = refusal

    def broke(self, graph_break: GraphBreak) -> None:
        if graph_break not in self.captured.breaks:  # met once in the caller, and again in the function itself
            self.captured.breaks = (*self.captured.breaks, graph_break)

    def called(self, module: Any, taken: Sequence[Any], returned: Sequence[Any]) -> None:
        graph = next(graph for graph in self.captured.graphs if graph._emitted.module is module)
        if len(returned) == len(graph._emitted.outputs):
            self.captured.saw(graph, taken, returned)

    def emission(self, emission: private.Emission) -> None:
        self.emissions[emission.handle] = emission

    def emitted(self, emitted: private.Emitted) -> None:
        self.graph_names |= emitted.fx_names
        if emitted.part == "forward":
            self.units += 1
        handles, unparsed = _calls_in(emitted.code)
        emissions = _each_product_once([self.emissions[handle] for handle in handles])
        claimed = {name for emission in emissions for _, replaced, _ in emission.nodes for name in replaced}
        graph = Graph(
            part=emitted.part,
            unit=self.units - 1,
            fx=emitted.fx,
            pre_fusion=self.ir.pop((emitted.part, False), ""),
            post_fusion=self.ir.pop((emitted.part, True), ""),
            code=emitted.code,
            unparsed=unparsed,
            refusals=tuple(self.refusals.values()),
            _calls=tuple(_Call(emission, self._sources_of(emission, claimed)) for emission in emissions),
            _emitted=emitted,
            _measured=self.measured,
        )
        self.emissions, self.refusals = {}, {}
        order = {"forward": 0, "backward": 1}
        self.captured.graphs = tuple(sorted((*self.captured.graphs, graph), key=lambda graph: order[graph.part]))

    def _sources_of(self, emission: private.Emission, claimed: set[str]) -> tuple[SourceNode, ...]:
        """The nodes before pattern matching; one made by a match stands for the matched ones, which no graph has.

        claimed: all those in whose place some node stands.
        """
        found: dict[str, SourceNode] = {}
        position = {name: index for index, name in enumerate(self.sources)}
        for name, replaced, itself in emission.nodes:
            if name in self.sources:
                found[name] = self.sources[name]
                continue
            own = {name for name in replaced if name in self.sources}
            others = claimed & self._gone(own) - own
            matched = self._gone(own, {name for name in others if not self._gone({name}) & own})  # between: its own
            found |= {key: self.sources[key] for key in sorted(matched, key=position.__getitem__)} or {name: itself}
        return tuple(source for source in found.values() if source.op not in ("placeholder", "get_attr"))

    def _gone(self, names: set[str], apart: Collection[str] = ()) -> set[str]:
        """These, and what they are computed from, as far as no graph has it and it is not `apart`."""
        found: set[str] = set()
        known = self.graph_names.union(apart)
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            found.add(name)
            waiting += [taken for taken in self.sources[name].inputs if taken not in known and taken not in found]
        return found


def _each_product_once(emissions: list[private.Emission]) -> list[private.Emission]:
    """A kernel that brings an operand of a library call or template into its layout has the call among its origins."""

    def calls(emission: private.Emission) -> bool:
        return emission.is_template or (emission.is_extern and bool(emission.operations))  # not what finishes another

    called = {name for emission in emissions if calls(emission) for name, _, _ in emission.nodes}

    def without_calls(emission: private.Emission) -> private.Emission:
        own = tuple(node for node in emission.nodes if node[0] not in called)
        helping = tuple((helper(itself).name, (), helper(itself)) for _, _, itself in emission.nodes)
        return dataclasses.replace(emission, nodes=own or helping)

    return [emission if calls(emission) else without_calls(emission) for emission in emissions]


# '        # [Provenance debug handles] triton_poi_fused_mul_0:3'
_HANDLE = re.compile(r"# \[Provenance debug handles\] \S+:(\d+)\s*$")
# 'extern_kernels.mm(a, b, out=c)', 'buf0 = torch.ops.aten.sort.stable(...)', 'triton_poi_fused_mul_0.run(...)',
# 'cpp_fused_add_1(...)'
_CALL = re.compile(r"\s+(?:\w+ = )?((?:extern_kernels|torch\.ops|aten|prims)\.[\w.]+|\w+\.run|cpp_\w+)\(")
# 'buf1 = workspace_0[0 * (64) * (256) : (0 + 1) * (64) * (256)].view(64, 256).sum(dim=0).to(torch.bfloat16)'
_FINISH = re.compile(r"\s+\w+ = workspace_\d+\[")


def _calls_in(code: str) -> tuple[list[int], tuple[str, ...]]:
    """Handles of the announced kernels in the order of the code, and calls without one."""
    handles: list[int] = []
    unparsed: list[str] = []
    announced = 0
    body = code[code.index("def call(") : code.find("\ndef get_args(")]
    for line in body.splitlines():
        if match := _HANDLE.search(line):
            handles.append(int(match[1]))
            announced += 1
        elif _CALL.match(line):
            if not announced:
                unparsed.append(line.strip())
            announced = 0
        elif _FINISH.match(line):  # one line, up to two kernels, all announced ahead of the first such line
            calls = 2 if ".to(" in line else 1
            if announced < calls:
                unparsed.append(line.strip())
            announced = max(0, announced - calls)
    return handles, tuple(unparsed)


def _kernel(call: _Call, emitted: private.Emitted, measured: bool) -> Kernel:
    emission = call.emission
    triton = private.triton_kernel(emitted.module, emission.name)
    kind = kind_of(
        emission.name,
        targets={itself.op for _, _, itself in emission.nodes},
        before={source.op for source in call.sources},
        is_template=emission.is_template,
        is_extern=emission.is_extern,
        is_reduction=emission.is_reduction,
    )
    chosen: Provenance = "device" if measured else "not autotuned"
    provenance: Provenance = "compiled"
    if triton is not None and triton.candidates > 1:
        provenance = "device" if triton.tuned else "not autotuned"
    elif emission.split_measured or emission.is_template:
        provenance = chosen
    elif kind == "gemm" and (emitted.gemm_autotuned or any(s.name in emitted.padding_measured for s in call.sources)):
        provenance = chosen
    return Kernel(
        name=emission.name,
        part=emitted.part,
        kind=kind,
        ops=tuple(source.op for source in call.sources),
        fx_nodes=tuple(name for name, _, _ in emission.nodes),
        stages=tuple(dict.fromkeys(source.stage for source in call.sources if source.stage)),
        lines=tuple(dict.fromkeys(source.line for source in call.sources if source.line)),
        inputs=_buffers(emission.reads),
        outputs=_buffers(emission.writes),
        is_template=emission.is_template,
        is_extern=emission.is_extern,
        provenance=provenance,
        config=triton.config if triton is not None else None,
    )


def _buffers(accesses: Mapping[str, int] | None) -> tuple[Buffer, ...] | None:
    return None if accesses is None else tuple(Buffer(name, size) for name, size in accesses.items())
