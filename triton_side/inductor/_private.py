"""The one file that uses TorchInductor's private names (versions.py lists the tested releases of torch).

It reports each step of a compile as a plain record (`SourceNode`, `Announcement`, `LoadedGraph`, `Refusal`) to a
`Listener`; compiler.py has the one that is used.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import logging
import math
import operator
import re
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from xlafuse.triton_side.calls import stages
from xlafuse.triton_side.inductor.graph import (
    DTYPES,
    GraphBreak,
    Memory,
    Part,
    Refusal,
    Shape,
    SourceNode,
    sum_before_cast,
)
from xlafuse.triton_side.versions import TORCH_BUILDS

_CUSTOM_PASSES = (
    "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)
# module -> the private names that this file reads or replaces
_NAMES = {
    "torch._dynamo.config": ("trace_autograd_ops",),
    "torch._dynamo.convert_frame": ("format_error_msg",),
    "torch._dynamo.decorators": ("mark_static_address",),
    "torch._dynamo.output_graph": ("graph_break_reasons",),
    "torch._functorch._aot_autograd.logging_utils": ("setup_stacktrace_preservation_hooks",),
    "torch._functorch.config": ("force_non_lazy_backward_lowering",),
    "torch.autograd.graph": ("_engine_run_backward",),
    "torch._inductor.config": (
        *_CUSTOM_PASSES, "trace.provenance_tracking_level", "force_disable_caches", "use_static_cuda_launcher",
        "max_autotune", "max_autotune_gemm",
    ),
    "torch._inductor.compile_fx": ("compile_fx",),
    "torch._inductor.cudagraph_utils": ("log_cudagraph_skip_and_bump_counter",),
    "torch._inductor.debug": ("set_kernel_post_grad_provenance_tracing",),
    "torch._inductor.codegen.cpp": ("set_kernel_post_grad_provenance_tracing",),
    "torch._inductor.graph": (
        "GraphLowering._compile_to_module_lines", "GraphLowering.get_numel", "GraphLowering.get_dtype",
    ),
    "torch._inductor.dependencies": ("StarDep", "WeakDep"),
    "torch._inductor.virtualized": ("V",),
    "torch._inductor.ir": (
        "Layout", "MultiOutput", "MultiOutputLayout", "NonOwningLayout", "ExternKernel.codegen_comment",
        "ScatterFallback.codegen", "IndexPutFallback.codegen", "InplaceBernoulliFallback.codegen",
    ),
    "torch._inductor.codegen.common": ("InplacedBuffer.other_names",),
    "torch._inductor.codegen.simd": (
        "SIMDScheduling.codegen_mix_order_reduction", "SIMDScheduling.generate_combo_kernel_code",
    ),
    "torch._inductor.codegen.triton": ("set_kernel_post_grad_provenance_tracing", "TritonKernel.call_kernel"),
    "torch._inductor.codegen.wrapper": ("PythonWrapperCodegen.write_provenance_debug_handle",),
    "torch._inductor.fx_passes.pad_mm": ("_should_pad", "get_cached_should_pad"),
    "torch._inductor.runtime.benchmarking": ("TritonBenchmarker.benchmark_gpu", "InductorBenchmarker.benchmark_gpu"),
    "torch._inductor.runtime.coordinate_descent_tuner": ("CoordescTuner.autotune_single_field",),
    "torch._inductor.scheduler": (
        "BaseSchedulerNode.get_nodes", "BaseSchedulerNode.is_foreach", "SchedulerNode", "WhyNoFuse",
        "Scheduler.can_buffer_be_removed_through_fusion",
    ),
    "torch._inductor.select_algorithm": (
        "add_preprocessing_fn", "get_algorithm_selector_cache", "TritonTemplateCaller",
    ),
    "torch._inductor.fx_passes.joint_graph": ("UniformValueConstantFolder._deduce_value",),
    "torch._inductor.runtime.triton_helpers": ("set_driver_to_gpu",),
    "torch._inductor.runtime.triton_heuristics": (
        "CachingAutotuner.precompile", "CachingAutotuner._precompile_config", "HeuristicType.REDUCTION",
        "OutOfResources", "PTXASError",
    ),
    "torch._higher_order_ops.utils": ("registered_hop_fake_fns",),
    "torch._ops": ("HigherOrderOperator.dispatch",),
    "torch._subclasses.fake_tensor": (
        "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensorMode.dispatch",
        "UnsupportedOperatorException",
    ),
    "torch.utils._pytree": ("arg_tree_leaves", "tree_leaves"),
}


def _require_names() -> None:
    missing = []
    for module_name, names in _NAMES.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            missing.append(module_name)
            continue
        for name in names:
            try:
                functools.reduce(getattr, name.split("."), module)
            except AttributeError:
                missing.append(f"{module_name}.{name}")
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which reading TorchInductor needs; "
            f"install one of the tested versions: {', '.join(sorted({release for release, _ in TORCH_BUILDS}))}"
        )


_require_names()

import torch._dynamo.config as dynamo_config  # noqa: E402
import torch._functorch.config as functorch_config  # noqa: E402
import torch._inductor.codegen.cpp as codegen_cpp  # noqa: E402
import torch._inductor.codegen.triton as codegen_triton  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402
import torch._inductor.debug as inductor_debug  # noqa: E402
import torch._inductor.ir as ir  # noqa: E402
from torch._dynamo import convert_frame as dynamo_frames  # noqa: E402
from torch._dynamo import decorators as dynamo_decorators  # noqa: E402
from torch._dynamo import output_graph as dynamo_output  # noqa: E402
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks  # noqa: E402
from torch._higher_order_ops.utils import registered_hop_fake_fns  # noqa: E402
from torch._inductor import select_algorithm  # noqa: E402
from torch._inductor.codegen.common import InplacedBuffer  # noqa: E402
from torch._inductor.codegen.simd import SIMDScheduling  # noqa: E402
from torch._inductor.codegen.triton import TritonKernel as TritonCodegen  # noqa: E402
from torch._inductor.compile_fx import compile_fx  # noqa: E402, F401
from torch._inductor.dependencies import StarDep, WeakDep  # noqa: E402
from torch._inductor.fx_passes import joint_graph, pad_mm  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._inductor.runtime.benchmarking import InductorBenchmarker, TritonBenchmarker  # noqa: E402
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner  # noqa: E402
from torch._inductor.runtime.triton_heuristics import (  # noqa: E402
    CachingAutotuner,
    HeuristicType,
    OutOfResources,
    PTXASError,
)
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode, WhyNoFuse  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._ops import HigherOrderOperator  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Announcement:
    """One kernel call as Inductor announces it.

    handle: the number that Inductor writes into the emitted code next to the call.
    nodes: (FX node name, names of the nodes it replaced, the node as a SourceNode), in graph order.
    reads, writes: buffer names with bytes; None where the scheduler does not know the node.
    split_measured: on a GPU, Inductor measures how to split this reduction over rows and columns at once.
    operations: the scheduler's names of the operations inside.
    workspace: the buffer in which a reduction over rows and columns at once leaves partial results, or sums before the
        cast. The scheduler does not know it.
    """

    handle: int
    name: str
    nodes: tuple[tuple[str, tuple[str, ...], SourceNode], ...]
    reads: Mapping[str, int] | None
    writes: Mapping[str, int] | None
    is_reduction: bool
    is_template: bool
    is_extern: bool
    split_measured: bool = False
    operations: frozenset[str] = frozenset()
    workspace: Memory | None = None


@dataclasses.dataclass(frozen=True)
class LoadedGraph:
    """One compiled graph.

    module: the loaded output code, whose globals hold its Triton kernels.
    padding_measured: names, in the joint graph, of the GEMMs for which Inductor measures on a GPU whether padding their
        operands pays. If it pads them, also the names of the nodes that replace them.
    memory: every buffer that has a shape, by name.
    inputs, outputs: names of buffers, in order; None for a value that is no tensor.
    """

    part: Part
    fx: str
    fx_nodes: Mapping[str, SourceNode]
    code: str
    gemm_autotuned: bool
    padding_measured: frozenset[str]
    module: Any
    memory: Mapping[str, Memory]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]


class Listener(Protocol):
    """The receiver of a compile's steps, in the order in which they happen."""

    def source_graph(self, nodes: Mapping[str, SourceNode]) -> None: ...
    def joint_graph(self, readable: str) -> None: ...
    def scheduler_ir(self, part: Part, fused: bool, text: str) -> None: ...
    def fusion_refused(self, refusal: Refusal) -> None: ...
    def kernel_announced(self, announcement: Announcement) -> None: ...
    def graph_loaded(self, loaded: LoadedGraph) -> None: ...
    def graph_broken(self, graph_break: GraphBreak) -> None: ...
    def graph_runs(self) -> AbstractContextManager[None]: ...
    def graph_called(self, module: Any, taken: Sequence[Any], returned: Sequence[Any]) -> None: ...


@contextlib.contextmanager
def autotuned_gemms() -> Iterator[None]:
    """Compile matrix products as mode="max-autotune" does."""
    with inductor_config.patch(max_autotune_gemm=True):
        yield


def inductor_settings(settings: Mapping[str, str]) -> AbstractContextManager[None]:
    """Set options of torch._inductor.config by name, their values as text. Raises ValueError for unknown ones."""
    typed: dict[str, Any] = {}
    for name, text in settings.items():
        try:
            known = functools.reduce(getattr, name.split("."), inductor_config)
        except AttributeError:
            near = difflib.get_close_matches(name, inductor_config.get_config_copy(), n=3)
            also = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"torch {torch.__version__} has no option torch._inductor.config.{name}{also}") from None
        typed[name] = _typed(text, known)
    patch: AbstractContextManager[None] = inductor_config.patch(typed)
    return patch


def _typed(text: str, known: Any) -> Any:
    try:
        value = ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (SyntaxError, ValueError):
        return text
    return bool(value) if isinstance(known, bool) and value in (0, 1) else value


def set_gradient_tracing(wanted: bool) -> None:
    """Set whether torch.compile traces torch.autograd.grad into its graph. If not, it breaks the graph there."""
    dynamo_config.trace_autograd_ops = wanted


def mark_static(tensors: Iterable[torch.Tensor]) -> None:
    """Mark tensors as inputs whose addresses stay from call to call. Inductor captures again where one changes."""
    for tensor in tensors:
        dynamo_decorators.mark_static_address(tensor, guard=False)


@contextlib.contextmanager
def cuda_graph_skips() -> Iterator[list[str]]:
    """Yield a list that gets the messages of Inductor's log about functions without CUDA graphs."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    log, handler = logging.getLogger("torch._inductor.cudagraph_utils"), Keep(logging.WARNING)
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def observe_compiles(listener: Listener) -> Iterator[None]:
    """Report each step of Inductor to `listener`, with Inductor's caches off and backward compiled with forward."""
    for name in _CUSTOM_PASSES:
        if getattr(inductor_config, name) is not None:
            raise RuntimeError(f"torch._inductor.config.{name} is in use; set it to None, because a capture needs it")
    announce = inductor_debug.set_kernel_post_grad_provenance_tracing
    load = GraphLowering._compile_to_module_lines
    should_pad = inspect.unwrap(pad_mm._should_pad)  # without the disk cache of torch 2.13, which ignores the device
    mix_orders = SIMDScheduling.codegen_mix_order_reduction
    combine = SIMDScheduling.generate_combo_kernel_code

    combined: list[list[Any]] = []  # the scheduler nodes of each kernel that Inductor announces next
    rewritten: list[torch.fx.Graph] = []  # kept alive, so that no other graph gets their ids
    padding_measured: set[str] = set()
    active = True

    run_backward = torch.autograd.graph._engine_run_backward

    def traced_backward(outputs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # AOTAutograd sets these hooks only if it differentiates the graph itself. Without them the nodes of a
        # torch.autograd.grad inside the graph would not say which operation they are the gradient of.
        if get_proxy_mode() is not None:
            setup_stacktrace_preservation_hooks([y.grad_fn for y in outputs if y.grad_fn is not None])
        return run_backward(outputs, *args, **kwargs)

    def before_joint_passes(graph: torch.fx.Graph) -> None:
        _pass_stages_on(graph)
        rewritten[:] = [graph]
        padding_measured.clear()
        listener.source_graph({node.name: _source(node) for node in graph.nodes})

    def after_joint_passes(graph: torch.fx.Graph) -> None:
        # A node that replaces a GEMM by one with padded operands has a new name.
        for node in graph.nodes:
            sources = node.meta.get("from_node", ())
            if any(source.graph_id == id(graph) and source.name in padding_measured for source in sources):
                padding_measured.add(node.name)
        assert graph.owning_module is not None
        listener.joint_graph(graph.owning_module.print_readable(print_output=False))

    def announced(schedule: Any, kernel_name: str, is_extern: bool = False) -> int | None:
        handle = announce(schedule, kernel_name, is_extern=is_extern)
        if handle is None:
            raise RuntimeError("Inductor gave a kernel no debug handle although provenance tracking is on")
        nodes = schedule if is_extern else _own_nodes(schedule, combined)
        listener.kernel_announced(_announcement(handle, kernel_name, nodes, is_extern, rewritten))
        return handle

    def combining(*args: Any, **kwargs: Any) -> Any:
        made = combine(*args, **kwargs)
        combined[:] = [nodes for _, _, nodes in made]
        return made

    def announcing(codegen: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def announced_first(kernel: Any, wrapper: Any) -> None:
            kernel.codegen_comment(wrapper)
            codegen(kernel, wrapper)

        return announced_first

    def padding_decided(match: Any, *args: Any, **kwargs: Any) -> bool:
        remembered = pad_mm.get_cached_should_pad

        def asked(key: str) -> Any:  # called after all rules that need no measurement
            padding_measured.add(match.output_node().name)
            return remembered(key)

        with _patched(pad_mm, "get_cached_should_pad", asked):
            return should_pad(match, *args, **kwargs)

    def mixing_orders(scheduling: Any, node: Any) -> None:
        search = CoordescTuner.autotune_single_field
        launch = TritonCodegen.call_kernel
        searched = False

        def searching(*args: Any, **kwargs: Any) -> Any:
            nonlocal searched
            searched = True
            return search(*args, **kwargs)

        def launched(kernel: Any, name: str, *args: Any, **kwargs: Any) -> None:
            if not kernel.mix_order_reduction:
                return launch(kernel, name, *args, **kwargs)
            first, *rest = _mix_order_announcements(kernel, name, announce, rewritten)
            for announcement in (dataclasses.replace(first, split_measured=searched), *rest):
                listener.kernel_announced(announcement)
            V.graph.wrapper_code.write_provenance_debug_handle(first.name, first.handle)
            launch(kernel, name, *args, **kwargs)
            for announcement in rest:  # their calls follow on the next lines
                V.graph.wrapper_code.write_provenance_debug_handle(announcement.name, announcement.handle)

        with (
            _patched(CoordescTuner, "autotune_single_field", searching),
            _patched(TritonCodegen, "call_kernel", launched),
        ):
            mix_orders(scheduling, node)

    def loaded(graph: GraphLowering, wrapper_code: Any) -> Any:
        module: Any = load(graph, wrapper_code)
        call = module.call

        def observed(args: list[Any]) -> Any:
            if not active:
                return call(args)
            taken = list(args)  # a copy, because the call empties `args`
            with listener.graph_runs():
                returned = call(args)
            listener.graph_called(module, taken, returned)
            return returned

        module.call = observed
        for kernel in vars(module).values():
            if isinstance(kernel, CachingAutotuner):
                _candidates.setdefault(kernel, len(kernel.compile_results))  # autotuning may leave only the winner
        listener.graph_loaded(
            LoadedGraph(
                part=_part(graph),
                fx=graph.orig_gm.print_readable(print_output=False),
                fx_nodes={node.name: _source(node) for node in graph.orig_gm.graph.nodes},
                code=wrapper_code.value,
                gemm_autotuned=bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm),
                padding_measured=frozenset(padding_measured),
                module=module,
                memory=_memory_of(graph),
                inputs=tuple(graph.graph_input_names),
                outputs=tuple(_output_name(output) for output in graph.graph_outputs),
            )
        )
        return module

    explain = WhyNoFuse.__call__

    def refused(why: Any, reason: str, *args: Any) -> None:
        explain(why, reason, *args)
        # The name of a fused node lists its members: op1_op2. CUTLASS's messages may name none.
        first, second = (frozenset(_OPERATION.findall(name)) for name in (why.name1, why.name2))
        listener.fusion_refused(Refusal(first, second, text=reason % args))

    precompile_config = CachingAutotuner._precompile_config

    def compiled_one(kernel: CachingAutotuner, config: Any) -> Any:
        result = precompile_config(kernel, config)
        _compiled_by_descent.setdefault(kernel, {})[str(config)] = result
        return result

    failure = dynamo_frames.format_error_msg

    def skipped(problem: Exception, code: types.CodeType, *args: Any, **kwargs: Any) -> str:
        # Dynamo calls it where it leaves a function uncompiled; `graph_break_reasons` lacks some of these reasons.
        stack = list(getattr(problem, "real_stack", None) or ())
        own = users_line([traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)])
        text = str(getattr(problem, "msg", problem))
        listener.graph_broken(GraphBreak(text, users_line(stack) or own, code.co_name if own else ""))
        return failure(problem, code, *args, **kwargs)

    def scheduled(fused: bool) -> Callable[[Sequence[Any]], Sequence[Any]]:
        def custom_pass(nodes: Sequence[Any]) -> Sequence[Any]:
            listener.scheduler_ir(_part(V.graph), fused, "\n\n".join(node.debug_str() for node in nodes) + "\n")
            return nodes

        return custom_pass

    settings = {
        "trace.provenance_tracking_level": 1,
        "force_disable_caches": True,
        # The static launcher discards a kernel's IR once it has the cubin.
        "use_static_cuda_launcher": False,
        "joint_custom_pre_pass": before_joint_passes,
        "joint_custom_post_pass": after_joint_passes,
        "post_grad_custom_pre_pass": rewritten.append,
        "_pre_fusion_custom_pass": scheduled(fused=False),
        "_post_fusion_custom_pass": scheduled(fused=True),
    }
    importers = (inductor_debug, codegen_triton, codegen_cpp)  # the last two import the function by name
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(settings))
        # Otherwise backward is compiled at the first backward(). On CUDA that happens in a thread of autograd, which
        # these settings do not reach, because they are context variables.
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        for module in (torch.autograd, torch.autograd.graph):  # the first imports the function by name
            stack.enter_context(_patched(module, "_engine_run_backward", traced_backward))
        for module in importers:
            stack.enter_context(_patched(module, "set_kernel_post_grad_provenance_tracing", announced))
        stack.enter_context(_patched(GraphLowering, "_compile_to_module_lines", loaded))
        stack.enter_context(_patched(CachingAutotuner, "_precompile_config", compiled_one))
        stack.enter_context(_patched(pad_mm, "_should_pad", padding_decided))
        stack.enter_context(_patched(SIMDScheduling, "codegen_mix_order_reduction", mixing_orders))
        stack.enter_context(_patched(SIMDScheduling, "generate_combo_kernel_code", combining))
        # Inductor announces no call of PyTorch that only changes its operand.
        for fallback in (ir.ScatterFallback, ir.IndexPutFallback, ir.InplaceBernoulliFallback):
            stack.enter_context(_patched(fallback, "codegen", announcing(fallback.codegen)))
        stack.enter_context(_patched(WhyNoFuse, "__call__", refused))
        stack.enter_context(_patched(dynamo_frames, "format_error_msg", skipped))
        known_breaks = len(dynamo_output.graph_break_reasons)
        try:
            yield
        finally:
            active = False
        for reason in dynamo_output.graph_break_reasons[known_breaks:]:
            listener.graph_broken(GraphBreak(text=str(reason.reason), line=users_line(reason.user_stack)))


@contextlib.contextmanager
def benchmark_under_lock(lock: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Hold `lock()` during every `benchmark_gpu`, by which Inductor times Triton kernels and choices for a GEMM."""

    def locked(benchmark: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(benchmark)
        def alone(*args: Any, **kwargs: Any) -> Any:
            with lock():
                return benchmark(*args, **kwargs)

        return alone

    with contextlib.ExitStack() as stack:
        for benchmarker in (TritonBenchmarker, InductorBenchmarker):
            stack.enter_context(_patched(benchmarker, "benchmark_gpu", locked(benchmarker.benchmark_gpu)))
        yield


_OPERATION = re.compile(r"op\d+")


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = inspect.getattr_static(owner, name)  # keeps a staticmethod a staticmethod
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _part(graph: Any) -> Part:
    return "backward" if graph.is_backward else "forward"


def _memory_of(graph: Any) -> dict[str, Memory]:
    found = {name: _memory(name, buffer) for name, buffer in graph.name_to_buffer.items()}
    found |= {name: _memory(name, value) for name, value in graph.graph_inputs.items()}
    for name, value in graph.constants.items():
        if isinstance(value, torch.Tensor):
            found[name] = _described(name, value.shape, value.dtype, constant=True)
    return {name: memory for name, memory in found.items() if memory is not None}


def _memory(name: str, value: Any) -> Memory | None:
    """Return the buffer; None for a symbol, multi-output call, view or mutation, which has no memory of its own."""
    layout = value.maybe_get_layout() if isinstance(value, ir.IRNode) else None
    if not isinstance(layout, ir.Layout) or (name in V.graph.name_to_buffer and _owner(name) != name):
        return None
    return _described(name, layout.size, layout.dtype)


def _described(name: str, size: Sequence[Any], dtype: torch.dtype, constant: bool = False) -> Memory:
    shape = tuple(int(extent) for extent in size)
    short = str(dtype).removeprefix("torch.")
    short = DTYPES[short][0] if short in DTYPES else short
    return Memory(name, shape, short, math.prod(shape) * dtype.itemsize, constant)


def _output_name(output: Any) -> str | None:
    name = output.maybe_get_name()
    return None if name is None else _owner(name)


_LIBRARIES = re.compile(r"/site-packages/|/lib/python3\.\d+/")


def users_line(stack: Sequence[Any]) -> str:
    """Return the innermost line of the user's own code, else the innermost outside torch and this package; or ""."""
    outside = [frame for frame in stack if not frame.filename.startswith((_TORCH_FOLDER, _OWN_FOLDER))]
    frames = [frame for frame in outside if not _LIBRARIES.search(frame.filename)] or outside
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _announcement(
    handle: int, name: str, schedule: Any, is_extern: bool, rewritten: Sequence[torch.fx.Graph]
) -> Announcement:
    scheduler = V.graph.scheduler
    if is_extern:
        operations = frozenset([schedule.get_operation_name()])
        nodes = _exact_origins(schedule)
        members = [scheduler.name_to_fused_node.get(schedule.get_operation_name())]
        template = False
    else:
        # The others mark loops.
        groups: list[Any] = [node for node in schedule if isinstance(node, BaseSchedulerNode)]
        scheduled = [node for group in groups for node in group.get_nodes() if node.node is not None]
        operations = frozenset(node.get_name() for node in scheduled)
        nodes = []
        for node in scheduled:
            nodes += _exact_origins(node.node) if node.is_template() else node.node.get_origins()
        members = [scheduler.name_to_fused_node.get(node.get_name()) for node in scheduled]
        if any(member is not None and member.is_foreach() for member in members):  # it may become several kernels
            members = groups
        template = any(node.is_template() for node in scheduled)
    graph = V.graph.orig_gm.graph
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    replacements = _replacements(graph, rewritten)
    ordered = sorted(dict.fromkeys(nodes), key=lambda node: position.get(node.name, len(position)))
    fused = list(dict.fromkeys(members))
    return Announcement(
        handle=handle,
        name=name,
        nodes=tuple((node.name, replacements.get(node.name, ()), _source(node)) for node in ordered),
        reads=_accesses(fused, reads=True),
        writes=_accesses(fused, reads=False),
        is_reduction=not is_extern and any(node.is_reduction() for node in scheduled),
        is_template=template,
        is_extern=is_extern,
        operations=operations,
    )


def _own_nodes(schedule: Sequence[Any], combined: list[list[Any]]) -> Sequence[Any]:
    """Return the scheduler nodes of one kernel. combined: the nodes of each of the next kernels.

    Inductor announces each kernel of a foreach operation with all of the operation's nodes.
    """
    nodes = {node for each in schedule for node in ((each, *each.snodes) if hasattr(each, "snodes") else (each,))}
    return combined.pop(0) if combined and nodes.issuperset(combined[0]) else schedule


def _mix_order_announcements(
    kernel: Any, name: str, announce: Callable[..., int | None], rewritten: Sequence[torch.fx.Graph]
) -> list[Announcement]:
    """Return a kernel that reduces over rows and columns at once, and the calls after it; Inductor announces neither.

    The kernel leaves a partial result per split in a workspace. PyTorch then calls `workspace.sum(dim=0)` and a cast.
    """
    schedule = kernel.features.node_schedule
    (workspace,) = kernel.args.workspace_args
    workspace_bytes = int(workspace.count) * workspace.dtype.itemsize
    # Both dicts hold a marker for each buffer that the fusion removed.
    aliases = kernel.args.inplace_buffers.values()
    in_place = [buffer.other_names for buffer in aliases if isinstance(buffer, InplacedBuffer)]
    read = [*kernel.args.input_buffers, *(names[0] for names in in_place)]
    written = [name for name, inner in kernel.args.output_buffers.items() if isinstance(inner, str)]
    written += [names[-1] for names in in_place]

    def handle(name: str, schedule: list[Any]) -> int:
        number = announce(schedule, name)
        if number is None:
            raise RuntimeError("Inductor gave a kernel no debug handle although provenance tracking is on")
        return number

    first = dataclasses.replace(
        _announcement(handle(name, schedule), name, schedule, False, rewritten),
        reads={name: _size(name) for name in read},
        writes={name: _size(name) for name in written} | {workspace.outer_name: workspace_bytes},
        workspace=_described(workspace.outer_name, [workspace.count], workspace.dtype),
    )
    announcements = [first]

    def finish(
        name: str, reads: dict[str, int], writes: dict[str, int], nodes: Sequence[torch.fx.Node],
        made: Memory | None = None,
    ) -> None:
        announcements.append(
            Announcement(
                handle=handle(name, []),
                name=name,
                nodes=tuple((node.name, (), _source(node)) for node in nodes),
                reads=reads,
                writes=writes,
                is_reduction=False,
                is_template=False,
                is_extern=True,
                workspace=made,
            )
        )

    for partial in kernel.saved_partial_accumulate:
        result = partial.buffer_name
        reduction = _ATEN_REDUCTIONS.get(partial.reduction_type, partial.reduction_type)
        partial_results = {workspace.outer_name: workspace_bytes // len(kernel.saved_partial_accumulate)}
        origins = _exact_origins(V.graph.get_buffer(result))
        if V.graph.get_dtype(result) == workspace.dtype:
            finish(f"aten.{reduction}", partial_results, {result: _size(result)}, origins)
            continue
        sums = _described(sum_before_cast(result), V.graph.get_buffer(result).get_size(), workspace.dtype)
        finish(f"aten.{reduction}", partial_results, {sums.name: sums.bytes}, origins, sums)
        finish("aten.to", {sums.name: sums.bytes}, {result: _size(result)}, ())
    return announcements


_ATEN_REDUCTIONS = {"min": "amin", "max": "amax"}  # Inductor's name -> the name in the emitted code


def _exact_origins(buffer: Any) -> list[torch.fx.Node]:
    """Return the operation of a library call or template. Its `origins` also hold operations before it."""
    if buffer.origin_node is not None:
        return [_producer(buffer.origin_node)]
    origins = list(buffer.get_origins())
    called = [node for node in origins if node.target is getattr(buffer, "op_overload", None)]
    return called or origins


def _producer(node: torch.fx.Node) -> torch.fx.Node:
    """Return the operation itself if `node` only selects one of its outputs."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _accesses(groups: Sequence[Any], reads: bool) -> Mapping[str, int] | None:
    """Return the bytes by buffer that a kernel reads or writes, each byte once; None for unknown nodes.

    As Inductor does, it counts the points of a node's loop for each access, at most the whole buffer. A library call or
    a template may touch all of a buffer. Inductor's own count takes a buffer that is written through a view for as
    large as the view, and cuts the operands of a template to the size of its result.
    """
    if any(group is None for group in groups):
        return None
    nodes = [node for group in groups for node in group.get_nodes()]
    names = {node.get_name() for node in nodes}
    # A fused kernel may read what it wrote, by another index: that is no input. A mutation has its own name here.
    written = {dependency.name for node in nodes for dependency in node.read_writes.writes}
    total: dict[str, int] = {}
    for node in nodes:
        for dependency in node.read_writes.reads if reads else node.read_writes.writes:
            if _only_orders(dependency, node) or (reads and dependency.name in written):
                continue
            if isinstance(node, SchedulerNode) and not reads and _stays_inside(dependency.name, names):
                continue
            real = _owner(dependency.name)
            for name in _results_of(real) or [real]:
                if not _is_tensor(name):
                    continue
                size, points = _size(name), _points(node)
                if points is not None and name == real:
                    size = min(size, total.get(name, 0) + points * V.graph.get_dtype(name).itemsize)
                total[name] = size
    return total


def _only_orders(dependency: Any, node: Any) -> bool:
    """Return whether a dependency only says which kernel comes first, without an access.

    A kernel that overwrites a part of a buffer depends on the kernel before that wrote it. Its `mode` names an atomic
    operation, which reads what it changes.
    """
    if isinstance(dependency, WeakDep):
        return True
    if not isinstance(node, SchedulerNode) or not isinstance(dependency, StarDep) or dependency.mode is not None:
        return False
    return _owner(dependency.name) in {_owner(write.name) for write in node.read_writes.writes}


def _stays_inside(buffer: str, operations: set[str]) -> bool:
    """Return whether the kernel of these operations keeps the buffer in registers."""
    scheduler: Any = V.graph.scheduler
    return buffer in scheduler.name_to_buf and bool(
        scheduler.can_buffer_be_removed_through_fusion(buffer, operations)
    )


def _points(node: Any) -> int | None:
    """Return the points of a node's loop; None for a library call or a template, or if an extent is a symbol."""
    if not isinstance(node, SchedulerNode) or node.is_template():
        return None
    extents = [extent for ranges in node.get_ranges() for extent in ranges]
    try:
        return math.prod(map(int, extents))
    except TypeError:
        return None


def _is_tensor(buffer: str) -> bool:
    value = V.graph.name_to_buffer.get(buffer) or V.graph.graph_inputs.get(buffer)
    return isinstance(value, ir.IRNode) and isinstance(value.maybe_get_layout(), ir.Layout)


def _owner(buffer: str) -> str:
    """Return the buffer behind a name that the scheduler gives to a mutation, or to one part of a concatenation."""
    name = V.graph.scheduler.mutation_real_name.get(buffer, buffer)
    layout = getattr(V.graph.name_to_buffer.get(name), "layout", None)
    return _owner(layout.view.get_name()) if isinstance(layout, ir.NonOwningLayout) else name


def _results_of(buffer: str) -> list[str]:
    """Return the buffers that a call with several results fills; none for any other buffer."""
    if not isinstance(getattr(V.graph.name_to_buffer.get(buffer), "layout", None), ir.MultiOutputLayout):
        return []
    users: list[Any] = [user.node for user in V.graph.scheduler.name_to_buf[buffer].users]
    results = [node for node in users if isinstance(getattr(node, "node", None), ir.MultiOutput)]
    return [result.get_name() for node in results for result in node.get_outputs()]


def _size(buffer: str) -> int:
    return int(V.graph.get_numel(buffer)) * V.graph.get_dtype(buffer).itemsize


def _pass_stages_on(graph: torch.fx.Graph) -> None:
    """Copy stages to the gradients that torch.autograd.grad makes inside the graph.

    Each gradient gets the stage of the operation that it belongs to. If AOTAutograd differentiates, it has it already.
    """
    stages: dict[int, Any] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if not node.meta.get("autograd_backward"):
            stages.setdefault(number, node.meta.get("custom"))
        elif "custom" not in node.meta and stages.get(number) and not node.meta.get("is_gradient_acc"):
            node.meta["custom"] = stages[number]


def _source(node: torch.fx.Node) -> SourceNode:
    return SourceNode(
        name=node.name,
        op=_op(node.target) if node.op == "call_function" else node.op,
        stage=stages.of_node(node.meta),
        line=_user_line(node.meta.get("stack_trace")),
        inputs=tuple(argument.name for argument in node.all_input_nodes),
        backward=node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward")),
        shapes=_shapes(node.meta.get("val")),
        input_shapes=tuple(
            shape for argument in pytree.arg_tree_leaves(*node.args, **node.kwargs)
            if isinstance(argument, torch.fx.Node) for shape in _shapes(argument.meta.get("val"))
        ),
        causal=_is_causal(node),
    )


def _is_causal(node: torch.fx.Node) -> bool | None:
    """Return an attention call's `is_causal`; None if it has none, as FlexAttention with its block mask."""
    names = [a.name for a in node.target._schema.arguments] if isinstance(node.target, torch._ops.OpOverload) else []
    if "is_causal" not in names:
        return None
    position = names.index("is_causal")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("is_causal", False)
    return given if isinstance(given, bool) else None


def _shapes(value: Any) -> tuple[Shape, ...]:
    """Return the shapes of the tensors in `value`; () if an extent is a symbol."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(extent, int) for tensor in tensors for extent in tensor.shape):
        return ()
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _op(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))


def _replacements(graph: torch.fx.Graph, rewritten: Sequence[torch.fx.Graph]) -> dict[str, tuple[str, ...]]:
    """Return node name -> names of the nodes in the `rewritten` graphs that a pattern matcher replaced by it.

    If several operations replaced a node, there is no entry: which of them stands for which node is not known.
    """
    identities = {id(graph) for graph in rewritten}
    makers: dict[str, set[str]] = {}
    for node in graph.nodes:
        for source in node.meta.get("from_node", ()):
            if source.graph_id in identities:  # other graphs are the pattern's own, whose names may coincide
                makers.setdefault(source.name, set()).add(_producer(node).name)
    found: dict[str, tuple[str, ...]] = {}
    for source_name, names in makers.items():
        if len(names) == 1:
            (name,) = names
            found[name] = (*found.get(name, ()), source_name)
    return found


# '  File "/home/me/block.py", line 12, in apply'
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH_FOLDER = torch.__file__.rsplit("/", 1)[0] + "/"
_OWN_FOLDER = __file__.rsplit("/", 2)[0] + "/"


def _user_line(stack_trace: str | None) -> str | None:
    frames = _FRAME.findall(stack_trace or "")
    outside = [f"{file}:{line}" for file, line in frames if not file.startswith(_TORCH_FOLDER)]
    return outside[-1] if outside else None


# Triton kernels of a loaded module


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A Triton kernel of the emitted code.

    candidates: configurations that a GPU would measure. tuned: it has measured them.
    compiled: the CompiledKernel in use; None if it was compiled outside the capture.
    """

    candidates: int
    tuned: bool
    config: str
    compiled: Any


_candidates: weakref.WeakKeyDictionary[CachingAutotuner, int] = weakref.WeakKeyDictionary()
# Kernels that max-autotune's coordinate descent compiled, by configuration; `compile_results` lacks them.
_compiled_by_descent: weakref.WeakKeyDictionary[CachingAutotuner, dict[str, Any]] = weakref.WeakKeyDictionary()


def triton_kernel(module: Any, name: str) -> TritonKernel | None:
    """Return the compiled Triton kernel that the output code calls `name`, or None if there is none."""
    kernel = getattr(module, name, None)
    if not isinstance(kernel, CachingAutotuner) or not kernel.compile_results:
        return None
    results = kernel.compile_results
    candidates = _candidates[kernel]
    if len(kernel.launchers) != 1:
        return TritonKernel(candidates, tuned=False, config=str(results[0].config), compiled=results[0].kernel)
    winner = kernel.launchers[0].config
    tuned = candidates > 1 or getattr(winner, "found_by_coordesc", False)
    compiled = {str(result.config): result for result in results} | _compiled_by_descent.get(kernel, {})
    chosen = compiled.get(str(winner))
    return TritonKernel(candidates, tuned, config=str(winner), compiled=chosen.kernel if chosen else None)


def runtime_name(module: Any, name: str) -> str | None:
    """Return the profiler's name of the kernel that the output code calls `name`; None if it is no Triton kernel."""
    kernel = getattr(module, name, None)
    return str(kernel.fn.__name__) if isinstance(kernel, CachingAutotuner) else None


# Compiling for an absent GPU


class _NotRun(Exception):
    """Raised instead of running output code."""


@contextlib.contextmanager
def compiling_only(*, pad: bool = False) -> Iterator[None]:
    """Compile for the fake GPU of this process, without measuring, loading or running anything.

    The block ends where the compiled code would run. Each Triton kernel is compiled for its first configuration that
    fits. A GEMM that max-autotune would measure takes the first Triton template. `pad` decides whether a GEMM's
    operands are padded where Inductor would measure. A reduction over rows and columns at once keeps the split from
    which Inductor's search starts.
    """
    load = GraphLowering._compile_to_module_lines
    fold = joint_graph.UniformValueConstantFolder._deduce_value

    def loaded(graph: GraphLowering, wrapper_code: Any) -> Any:
        module: Any = load(graph, wrapper_code)
        module.call = _not_run
        return module

    def fold_on_cpu(folder: Any, node: torch.fx.Node) -> Any:
        # Constant folding would run factory functions (torch.zeros, ...) on the fake GPU.
        if "device" not in node.kwargs:
            return fold(folder, node)
        kwargs = node.kwargs
        node.kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            return fold(folder, node)
        finally:
            node.kwargs = kwargs

    selector = select_algorithm.get_algorithm_selector_cache()
    select_algorithm.add_preprocessing_fn(_first_template)
    try:
        with (
            _patched(GraphLowering, "_compile_to_module_lines", loaded),
            _patched(joint_graph.UniformValueConstantFolder, "_deduce_value", fold_on_cpu),
            _patched(triton_helpers, "set_driver_to_gpu", lambda: None),
            _patched(CachingAutotuner, "precompile", _precompile_first),
            _patched(pad_mm, "get_cached_should_pad", lambda key: pad),
            _patched(CoordescTuner, "autotune_single_field", _first_value),
            contextlib.suppress(_NotRun),
        ):
            yield
    finally:
        selector.preprocessing_fns.remove(_first_template)


def _not_run(*args: Any) -> Any:
    raise _NotRun


def _first_value(measure: Callable[[int], float], value: int, *bounds: int) -> int:
    return value


def _first_template(choices: list[Any]) -> list[Any]:
    templates = [choice for choice in choices if isinstance(choice, select_algorithm.TritonTemplateCaller)]
    return (templates or choices)[:1]


def _precompile_first(kernel: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
    if kernel.compile_results:
        return
    configs = kernel.configs
    # If a looped reduction runs short of registers on a GPU, Inductor adds configurations with a smaller block.
    may_add = kernel.heuristic_type == HeuristicType.REDUCTION
    _candidates[kernel] = len(configs) + may_add
    for config in configs:
        try:
            kernel.compile_results = [kernel._precompile_config(config)]
        except (OutOfResources, PTXASError) as error:
            failure = error
        else:
            kernel.configs = None
            return
    raise RuntimeError(f"none of {len(configs)} configurations of {kernel.fn.__name__} fits the GPU") from failure


def why_not_followed(problem: Exception) -> str:
    """Return why fake tensors cannot follow a call beyond an operation, or "" for any other problem."""
    op = str(getattr(problem, "func", problem)).rpartition(".")[0]
    match problem:
        case DynamicOutputShapeException():
            return f"the size of the result of {op} depends on data, which needs a GPU"
        case DataDependentOutputException():
            return f"the result of {op} depends on data, which needs a GPU"
        case UnsupportedOperatorException():
            return f"PyTorch has no rule for the result of {op} on tensors without data"
    return ""


class _AssumingValues(FakeTensorMode):
    """Fake tensors between the pieces of a broken graph: every number read from one is 1, and every mask is true.

    Dynamo traces with a mode of its own, so it still breaks graphs there. assumed: what was assumed, in words.
    """

    supports_higher_order_operators = True  # a user's Triton kernel, FlexAttention, torch.cond

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.assumed: dict[str, None] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator) and func not in registered_hop_fake_fns:
            # Subclasses do not inherit such a rule.
            return func.python_key_table[FakeTensorMode](self, *args, **(kwargs or {}))
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            self.assumed["a number read from a tensor is 1"] = None
            return _number_of(args[0].dtype)(1)
        if func is aten.nonzero.default:
            self.assumed["every element is nonzero, and every mask is true"] = None
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is aten.masked_select.default:
            self.assumed["every element is nonzero, and every mask is true"] = None
            return args[0].new_empty(math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape)))
        if func is aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            indices: list[Any] = []
            for index in args[1]:
                indices += index.nonzero().unbind(1) if _is_mask(index) else [index]
            args = (args[0], indices)
        try:
            return super().dispatch(func, types, args, kwargs)
        except NotImplementedError as problem:  # it has no rule for fake tensors, and no GPU can run it on real ones
            raise UnsupportedOperatorException(func) from problem


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _number_of(dtype: torch.dtype) -> Callable[[int], bool | int | float | complex]:
    if dtype == torch.bool:
        return bool
    return complex if dtype.is_complex else float if dtype.is_floating_point else int


def fake_tensor_mode() -> _AssumingValues:
    return _AssumingValues()
