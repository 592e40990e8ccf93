"""Compile with TorchInductor and keep its output: graphs, scheduler IR, code, and which kernel computes what.

    compiled = compiler.compile(block.apply)
    with compiler.capture() as captured:
        outputs = compiled(inputs)
    captured.kernels        # one Kernel per kernel call in the emitted code, forward and backward
    captured.write(folder)

Kernels are in the order of the emitted code. A call that could not be matched with operations is listed in
`Graph.unparsed`. Capturing works on a CPU (C++ kernels), on CUDA and for an absent GPU (triton_side.deviceless).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.fx.traceback import preserve_node_meta

from xlafuse.triton_side.calls import artifacts, effects
from xlafuse.triton_side.calls.dispatch import EagerRecorder, Operation
from xlafuse.triton_side.calls.launches import Storages, TensorArgument
from xlafuse.triton_side.inductor import _private as private
from xlafuse.triton_side.inductor import eager
from xlafuse.triton_side.inductor.graph import (
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
    part_viewed,
    without_views,
    without_waits,
)
from xlafuse.triton_side.inductor.graph_reader import MAPPINGS, Facts, GraphReader, Texts
from xlafuse.triton_side.inductor.output_code import EmittedCall, EmittedCode, read_code

MOST_BREAKS = 3  # named in an error


@dataclasses.dataclass
class Graph:
    """One compiled graph: post-grad FX graph, scheduler IR before and after fusion, output code (all text), kernels.

    unit: number of the traced function that the graph belongs to; a graph break starts another one.
    refusals: pairs of scheduler nodes that Inductor considered and did not fuse.
    """

    part: Part
    unit: int
    fx: str
    pre_fusion: str
    post_fusion: str
    code: str
    refusals: tuple[Refusal, ...] = dataclasses.field(repr=False)
    _before: Mapping[str, tuple[SourceNode, ...]] = dataclasses.field(repr=False)
    _loaded: private.LoadedGraph = dataclasses.field(repr=False)
    _measured: bool = dataclasses.field(repr=False)
    _storages_of: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def handles(self) -> Mapping[str, list[str]]:
        """Inductor's provenance mapping: the FX nodes of each call that it announces in the code, by handle."""
        return self._loaded.handles

    @functools.cached_property
    def emitted(self) -> EmittedCode:
        """The kernel calls in the code, in order."""
        return read_code(self.code)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The kernel calls in emitted order. On CUDA a kernel's first run autotunes it, which may change `provenance`.
        """
        return self._read().calls

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(call.kernel for call in self.calls)

    @property
    def unparsed(self) -> tuple[str, ...]:
        """Calls in the code that the reader does not know; their operations are unknown."""
        return self._read().unparsed

    def compiled(self) -> CompiledGraph:
        """Return everything as plain data. For an absent GPU also the resources of Triton kernels."""
        graph = self._read(resources={} if self._measured else self._resources())
        storages = {name: number for name, number in self._storages_of.items() if name in graph.memory}
        return without_views(without_waits(dataclasses.replace(graph, storages=storages)))

    def _read(self, resources: Mapping[str, dict[str, int]] = MappingProxyType({})) -> CompiledGraph:
        graph = self._reader.compiled(self.unit)
        calls = [
            self._with_choice(call, emitted, resources.get(call.kernel.name))
            for call, emitted in zip(graph.calls, self.emitted.calls, strict=True)
        ]
        return dataclasses.replace(graph, part=self.part, calls=tuple(calls))

    @functools.cached_property
    def _reader(self) -> GraphReader:
        texts = Texts("", self.code, after=self.fx, ir=self.post_fusion, handles=self.handles)
        facts = Facts(self._loaded.nodes, self._before, self._loaded.origins, self.refusals)
        return GraphReader(texts, self.emitted, facts=facts)

    def _with_choice(self, call: Call, emitted: EmittedCall, resources: dict[str, int] | None) -> Call:
        """Return a call with what only the loaded code says: which configuration runs, and how it was chosen."""
        kernel = call.kernel
        triton = private.triton_kernel(self._loaded.module, kernel.name)
        definition = self.emitted.definitions.get(kernel.name)
        chosen: Provenance = "device" if self._measured else "not autotuned"
        provenance: Provenance = "compiled"
        if triton is not None and triton.candidates > 1:
            provenance = "device" if triton.tuned else "not autotuned"
        elif kernel.is_template or (self._loaded.split_measured and definition and definition.reduces_both_ways):
            provenance = chosen
        elif kernel.kind == "gemm" and (
            self._loaded.gemm_autotuned or any(s.name in self._loaded.padding_measured for s in call.sources)
        ):
            provenance = chosen
        config = triton.config if triton is not None else None
        kernel = dataclasses.replace(kernel, provenance=provenance, config=config)
        if kernel.kind == "custom" and triton is not None and triton.compiled is not None:
            kernel = self._with_effects(kernel, emitted, triton.compiled)
        return dataclasses.replace(
            call, kernel=kernel, grid=self.emitted.grid(emitted, config), resources=resources,
            runtime_name=private.runtime_name(self._loaded.module, kernel.name),
        )

    def _with_effects(self, kernel: Kernel, emitted: EmittedCall, compiled: Any) -> Kernel:
        """Return a user's Triton kernel with its reads and writes, of which Inductor knows a part only."""
        parameters = effects.arguments_in_ir(compiled.src.signature.items())
        found = effects.of_ttir(compiled.asm["ttir"], compiled.name)
        memory = self._reader.memory

        def buffers(touched: Collection[int]) -> tuple[Buffer, ...]:
            names = dict.fromkeys(emitted.arguments.get(parameters[index], "") for index in sorted(touched))
            known = [memory[name] for name in names if name in memory]
            return tuple(Buffer(each.name, part_viewed(each, each.bytes, emitted.viewed)) for each in known)

        return dataclasses.replace(kernel, inputs=buffers(found.reads), outputs=buffers(found.writes))

    def _resources(self) -> dict[str, dict[str, int]]:
        found = {name: artifacts.of_triton(compiled) for name, compiled in self.triton_kernels().items()}
        artifacts.read_resources(found.values())
        return {name: dataclasses.asdict(kernel.resources) for name, kernel in found.items()}

    def triton_kernels(self) -> dict[str, Any]:
        """Return kernel name -> Triton's CompiledKernel in use, in emitted order. After autotuning it is the winner."""
        found = {call.name: private.triton_kernel(self._loaded.module, call.name) for call in self.emitted.calls}
        return {n: k.compiled for n, k in found.items() if k is not None and k.compiled is not None}


class _StorageNumbers:
    """Numbers tensors by where in memory they begin. whole: the largest tensor of each storage."""

    def __init__(self) -> None:
        self.storages = Storages()
        self.whole: dict[int, TensorArgument] = {}
        self._numbers: dict[tuple[int, int], int] = {}  # storage and offset

    def of(self, tensor: torch.Tensor) -> int:
        described = self.storages.describe(tensor, 0)
        self.seen(described)
        return self.at(described.storage, described.offset)

    def at(self, storage: int, offset: int) -> int:
        return self._numbers.setdefault((storage, offset), len(self._numbers))

    def storages_at(self, numbers: Iterable[int]) -> set[int]:
        wanted = set(numbers)
        return {storage for (storage, _), number in self._numbers.items() if number in wanted}

    def seen(self, tensor: TensorArgument) -> None:
        known = self.whole.get(tensor.storage)
        if known is None or tensor.bytes > known.bytes:
            self.whole[tensor.storage] = tensor


@dataclasses.dataclass(frozen=True)
class _GraphCall:
    """One call of a compiled forward graph. storages: as in `CompiledGraph`."""

    graph: Graph
    storages: Mapping[str, int]


@dataclasses.dataclass
class Captured:
    """The graphs that Inductor compiled during a `capture`.

    joint: the joint forward and backward FX graph; None for inference. After a graph break, the last function's.
    breaks: where and why tracing stopped and began again.
    stopped: without a GPU, where and why a call could not be followed any further. assumed: what it took for granted.
    """

    joint: str | None
    graphs: tuple[Graph, ...]
    breaks: tuple[GraphBreak, ...] = ()
    stopped: GraphBreak | None = None
    assumed: Sequence[str] = ()
    _steps: list[_GraphCall | Operation] = dataclasses.field(default_factory=list, repr=False)
    _results: set[int] = dataclasses.field(default_factory=set, repr=False)
    _eager: EagerRecorder | None = dataclasses.field(default=None, repr=False)
    _storage_numbers: _StorageNumbers = dataclasses.field(default_factory=_StorageNumbers, repr=False)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All kernel calls: forward before backward, each graph in emitted order."""
        return tuple(kernel for graph in self.graphs for kernel in graph.kernels)

    def program(self) -> Program:
        """Return everything, as known now, as plain data that needs no torch."""
        graphs = [graph.compiled() for graph in self.graphs]
        if not self._steps:
            return Program(tuple(graphs), self.breaks)
        order = {"forward": 0, "backward": 1}
        units = sorted(self._units(graphs), key=lambda graph: order[graph.part])
        return Program(tuple(units), self.breaks, tuple(self._notes()))

    def _units(self, graphs: Sequence[CompiledGraph]) -> Iterator[CompiledGraph]:
        """Yield a graph for each call of a compiled one, and for each operation between them."""
        numbers = self._storage_numbers
        calls = Counter(step.graph.unit for step in self._steps if isinstance(step, _GraphCall))
        kept = set(self._results)
        found: list[CompiledGraph] = []
        for unit, step in reversed(list(enumerate(self._steps))):
            if isinstance(step, Operation):
                found.append(eager.graph_of(step, unit, numbers.whole, numbers.at, kept))
                kept |= {tensor.storage for tensor in step.reads}
                continue
            kept |= numbers.storages_at(step.storages.values())
            for graph in graphs:
                if graph.unit != step.graph.unit:
                    continue
                storages = graph.storages if calls[graph.unit] == 1 else {}
                if graph.part == "forward":
                    storages = {name: number for name, number in step.storages.items() if name in graph.memory}
                found.append(dataclasses.replace(graph, unit=unit, storages=storages))
        yield from reversed(found)
        for graph in graphs:
            if graph.unit not in calls:
                yield dataclasses.replace(graph, unit=len(self._steps) + graph.unit)

    def _operations(self) -> list[Operation]:
        return [step for step in self._steps if isinstance(step, Operation)]

    def _notes(self) -> Iterator[str]:
        if operations := self._operations():
            differentiated = any(graph.part == "backward" for graph in self.graphs)
            missing = differentiated and any(operation.writes for operation in operations)
            backward = "; their backward pass is missing" if missing else ""
            yield (
                f"outside the compiled graphs, PyTorch runs {eager.counted(operations)}; an operation counts as one "
                f"kernel, and may launch several{backward}"
            )
        if self.assumed:
            yield (
                f"without a GPU, it is assumed that {', and that '.join(self.assumed)}: what depends on it, such as "
                "sizes, is that of this case"
            )
        if self.stopped is not None:
            yield (
                f"the call is followed only to {self.stopped.line or 'an unknown line'}, because {self.stopped.text}; "
                "what comes after it is missing"
            )

    def why_nothing(self) -> str:
        """Return why there are no graphs."""
        if not self.breaks and self.stopped is None:
            return (
                "the function computes nothing that it returns or changes, or no compiled function was called inside "
                "the capture"
            )
        operations = self._operations()
        runs = [f"PyTorch runs {eager.counted(operations)}"] if operations else []
        more = [f"{len(self.breaks) - MOST_BREAKS} more breaks follow"] if len(self.breaks) > MOST_BREAKS else []
        named = map(str, self.breaks[:MOST_BREAKS])
        return "; ".join([*named, *more, *runs, *list(self._notes())[bool(operations) :]])

    @contextlib.contextmanager
    def following(self, device: str | None) -> Iterator[None]:
        """Record the calls of compiled graphs, and the operations between them whose tensors are on `device`.

        device: None for every device.
        """

        def add(operation: Operation) -> None:
            for tensor in (*operation.reads, *operation.writes):
                self._storage_numbers.seen(tensor)
            if not operation.backward:
                self._steps.append(operation)

        self._eager = EagerRecorder(add, self._storage_numbers.storages, device)
        with self._eager:
            yield

    def compiled_code(self) -> AbstractContextManager[None]:
        """Record no operations inside, where a compiled graph runs."""
        return self._eager.paused() if self._eager is not None else contextlib.nullcontext()

    def record_call(self, graph: Graph, taken: Sequence[Any], returned: Sequence[Any]) -> None:
        """Record a call of a graph, and where in memory its inputs and results are."""
        inputs, outputs = graph.emitted.inputs, graph.emitted.outputs
        storages: dict[str, int] = {}
        if len(taken) == len(inputs) and len(returned) <= len(outputs):
            for name, value in (*zip(inputs, taken, strict=True), *zip(outputs, returned, strict=False)):
                if name is not None and isinstance(value, torch.Tensor):
                    storages[name] = self._storage_numbers.of(value)
        if not graph._storages_of:
            graph._storages_of.update(storages)
        if self._eager is not None and graph.part == "forward":
            self._steps.append(_GraphCall(graph, storages))

    def record_results(self, results: Iterable[torch.Tensor]) -> None:
        """Record what the function returns."""
        self._results.update(map(self._storage_numbers.storages.of, results))

    def graph(self, part: Part) -> Graph:
        """Return the graph of `part`. Raises KeyError unless there is exactly one."""
        found = [graph for graph in self.graphs if graph.part == part]
        if len(found) != 1:
            raise KeyError(f"{len(found)} {part} graphs were compiled; capture one call of one function at a time")
        return found[0]

    def write(self, folder: str | Path) -> None:
        """Write everything to `folder`: kernels.json, joint_graph.py and a folder per graph.

        kernels.json has each `Kernel` with its `sources`, one `SourceNode` per operation. A graph's folder has its
        texts, and in triton/ the IRs of every Triton kernel (triton_side.calls.artifacts) and resources.json with
        registers, spills and shared memory. A second forward (backward) graph goes to forward-1 (backward-1), and so
        on.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.joint is not None:
            (folder / "joint_graph.py").write_text(self.joint)
        listing = [
            dataclasses.asdict(call.kernel) | {"sources": [dataclasses.asdict(source) for source in call.sources]}
            for graph in self.graphs for call in graph.calls
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
            (target / MAPPINGS).write_text(json.dumps({"cppCodeToPost": graph.handles}) + "\n")
            resources = {}
            kernels = {name: artifacts.of_triton(compiled) for name, compiled in graph.triton_kernels().items()}
            artifacts.disassemble(kernels.values())
            for name, kernel in kernels.items():
                kernel.write(target / "triton", name)
                resources[name] = dataclasses.asdict(kernel.resources)
            if resources:
                (target / "triton" / "resources.json").write_text(json.dumps(resources, indent=1) + "\n")


def compile(
    apply: Callable[..., Any], *, mode: str | None = None, fullgraph: bool = True
) -> Callable[..., Any]:
    """Return `torch.compile` of `apply` with static shapes.

    mode: as torch.compile takes it; None for the default mode.
    fullgraph: a graph break is an error, and torch.autograd.grad becomes part of the graph. Without it, a break splits
        the function into several graphs.
    """
    private.set_gradient_tracing(fullgraph)
    return torch.compile(apply, fullgraph=fullgraph, dynamic=False, mode=mode)


@contextlib.contextmanager
def capture() -> Iterator[Captured]:
    """Record the compiles inside the `with`; the yielded `Captured` is complete when the block ends.

    If an input requires grad, the backward graph is compiled together with the forward graph, so only the forward call
    must be inside. A function that this process has already compiled is not compiled again. To capture it, call
    `torch.compiler.reset()` first, but never between a program's compile and its timing.

    Inductor's caches are off inside. So is its static launcher, which keeps no IR: the kernels are the same, but a
    launch may cost more host time.

    Raises:
        RuntimeError: nothing was compiled inside, or Inductor's custom passes are in use.
    """
    with recording(measured=True) as captured:
        yield captured


def mark_static(tensors: Iterable[torch.Tensor]) -> None:
    """Mark tensors whose addresses stay, as those of a module's parameters: CUDA graphs read them in place.

    A later compile takes the mark; other tensors are copied into a graph at each call.
    """
    private.mark_static(tensors)


def cuda_graph_skips() -> AbstractContextManager[list[str]]:
    """Yield a list that gets Inductor's reason for each function that it runs without a CUDA graph.

    Inductor does not log all of them.
    """
    return private.cuda_graph_skips()


def benchmark_under_lock(lock: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Hold `lock()` whenever Inductor times kernels on a GPU to choose one.

    Several processes can then compile for one GPU at the same time without disturbing each other's measurements.
    """
    return private.benchmark_under_lock(lock)


@contextlib.contextmanager
def recording(measured: bool, forced: Forced | None = None) -> Iterator[Captured]:
    """Capture as `capture` does. measured: whether Inductor times kernels to choose one; an absent GPU cannot.

    forced: kernels of the only graph of a part that are to be one. Raises NotForced.
    """
    captured = Captured(joint=None, graphs=())
    recorder = _Recorder(captured, measured, forced)
    with private.observe_compiles(recorder), preserve_node_meta():
        yield captured
    if recorder.refused:
        raise NotForced(recorder.refused)
    if not captured.graphs:
        raise RuntimeError(f"TorchInductor compiled nothing: {captured.why_nothing()}")


@dataclasses.dataclass(frozen=True)
class Forced:
    """Two kernels of a graph, each by its scheduler operations, that are to be one."""

    part: Part
    first: frozenset[str]
    second: frozenset[str]


class NotForced(Exception):
    """Inductor cannot make the two kernels one; the message has its reason."""


class _Recorder:
    """Assembles the reports of private.observe_compiles into graphs. refused: why the `forced` kernels are still two.
    """

    def __init__(self, captured: Captured, measured: bool, forced: Forced | None) -> None:
        self.captured = captured
        self.measured = measured
        self.force = forced
        self.refused = "" if forced is None else "they did not occur again in a second compile"
        self.sources: dict[str, SourceNode] = {}
        self.position: dict[str, int] = {}
        self.graph_names: set[str] = set()
        self.units = 0
        self.refusals: dict[tuple[frozenset[str], frozenset[str]], Refusal] = {}
        self.ir: dict[tuple[Part, bool], str] = {}

    def source_graph(self, nodes: Mapping[str, SourceNode]) -> None:
        self.sources = dict(nodes)
        self.position = {name: index for index, name in enumerate(nodes)}
        self.graph_names = set()

    def joint_graph(self, readable: str) -> None:
        if any(name.startswith("tangents") for name in self.sources):
            self.captured.joint = readable

    def scheduler_ir(self, part: Part, fused: bool, text: str) -> None:
        self.ir[part, fused] = self.ir.get((part, fused), "") + text

    def fusion_refused(self, refusal: Refusal) -> None:
        self.refusals.pop((refusal.first, refusal.second), None)  # the last message wins, and its place is last
        self.refusals[refusal.first, refusal.second] = refusal

    def forced(self, part: Part) -> tuple[frozenset[str], frozenset[str]] | None:
        return None if self.force is None or self.force.part != part else (self.force.first, self.force.second)

    def was_forced(self, refusal: str) -> None:
        self.refused = refusal

    def graph_broken(self, graph_break: GraphBreak) -> None:
        known = {(cut.text, cut.line) for cut in self.captured.breaks}
        if (graph_break.text, graph_break.line) not in known:  # Dynamo reports it in the caller and in the function
            self.captured.breaks = (*self.captured.breaks, graph_break)

    def graph_runs(self) -> AbstractContextManager[None]:
        return self.captured.compiled_code()

    def graph_called(self, module: Any, taken: Sequence[Any], returned: Sequence[Any]) -> None:
        graph = next(graph for graph in self.captured.graphs if graph._loaded.module is module)
        if len(returned) == len(graph.emitted.outputs):
            self.captured.record_call(graph, taken, returned)

    def graph_loaded(self, loaded: private.LoadedGraph) -> None:
        self.graph_names |= loaded.nodes.keys()
        if loaded.part == "forward":
            self.units += 1
        claimed = {name for names in loaded.replaced.values() for name in names}
        graph = Graph(
            part=loaded.part,
            unit=self.units - 1,
            fx=loaded.fx,
            pre_fusion=self.ir.pop((loaded.part, False), ""),
            post_fusion=self.ir.pop((loaded.part, True), ""),
            code=loaded.code,
            refusals=tuple(self.refusals.values()),
            _before={
                name: tuple(self._before(node, loaded.replaced.get(name, ()), claimed))
                for name, node in loaded.nodes.items()
            },
            _loaded=loaded,
            _measured=self.measured,
        )
        self.refusals = {}
        order = {"forward": 0, "backward": 1}
        self.captured.graphs = tuple(sorted((*self.captured.graphs, graph), key=lambda graph: order[graph.part]))

    def _before(self, node: SourceNode, replaced: Sequence[str], claimed: set[str]) -> list[SourceNode]:
        """Return the nodes before pattern matching. A node that a match created yields the nodes that it replaced.

        claimed: all nodes that some node replaced.
        """
        if node.name in self.sources:
            return [self.sources[node.name]]
        own = {name for name in replaced if name in self.sources}
        others = claimed & self._removed_ancestors(own) - own
        # Removed nodes between `own` and the others belong to this match.
        stops = {name for name in others if not self._removed_ancestors({name}) & own}
        matched = self._removed_ancestors(own, stops)
        found = [self.sources[name] for name in sorted(matched, key=self.position.__getitem__)]
        return [each for each in found if each.op not in _NO_OPERATION] or [node]

    def _removed_ancestors(self, names: set[str], stops: Collection[str] = ()) -> set[str]:
        """Return `names` and their inputs, transitively, up to nodes that a graph still has or that are in `stops`."""
        found: set[str] = set()
        known = self.graph_names.union(stops)
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            found.add(name)
            waiting += [taken for taken in self.sources[name].inputs if taken not in known and taken not in found]
        return found


_NO_OPERATION = ("placeholder", "get_attr")
