"""The one file that uses TorchInductor's private names (versions.py lists the tested releases of torch).

It reports what Inductor's texts lack, and the texts, as plain records (`SourceNode`, `LoadedGraph`, `Refusal`) to a
`Listener`; compiler.py has the one that is used.
"""

from __future__ import annotations

import ast
import contextlib
import copy
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
    GraphBreak,
    Part,
    Refusal,
    Shape,
    SourceNode,
)
from xlafuse.triton_side.inductor.ir_text import stack_lines
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
        *_CUSTOM_PASSES, "triton.tiling_prevents_pointwise_fusion", "triton.tiling_prevents_reduction_fusion",
        "trace.provenance_tracking_level", "force_disable_caches", "use_static_cuda_launcher",
        "max_autotune", "max_autotune_gemm",
    ),
    "torch._inductor.compile_fx": ("compile_fx",),
    "torch._inductor.cudagraph_utils": ("log_cudagraph_skip_and_bump_counter",),
    "torch._inductor.debug": ("_inductor_triton_kernel_to_post_grad_node_info",),
    "torch._inductor.graph": ("GraphLowering._compile_to_module_lines",),
    "torch._inductor.virtualized": ("V",),
    "torch._inductor.ir": ("MutationOutput", "TemplateBuffer"),
    "torch._inductor.choices": (
        "InductorChoices.can_fuse", "InductorChoices.can_fuse_vertical", "InductorChoices.can_fuse_horizontal",
    ),
    "torch._inductor.codegen.simd": ("SIMDScheduling.codegen_mix_order_reduction",),
    "torch._inductor.fx_passes.pad_mm": ("_should_pad", "get_cached_should_pad"),
    "torch._inductor.runtime.benchmarking": ("TritonBenchmarker.benchmark_gpu", "InductorBenchmarker.benchmark_gpu"),
    "torch._inductor.runtime.coordinate_descent_tuner": ("CoordescTuner.autotune_single_field",),
    "torch._inductor.scheduler": (
        "WhyNoFuse", "Scheduler.can_fuse", "Scheduler.get_backend", "Scheduler.prune_redundant_deps",
        "Scheduler.topological_sort_schedule", "Scheduler.will_fusion_create_cycle",
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
import torch._inductor.config as inductor_config  # noqa: E402
import torch._inductor.debug as inductor_debug  # noqa: E402
from torch._dynamo import convert_frame as dynamo_frames  # noqa: E402
from torch._dynamo import decorators as dynamo_decorators  # noqa: E402
from torch._dynamo import output_graph as dynamo_output  # noqa: E402
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks  # noqa: E402
from torch._higher_order_ops.utils import registered_hop_fake_fns  # noqa: E402
from torch._inductor import select_algorithm  # noqa: E402
from torch._inductor.choices import InductorChoices  # noqa: E402
from torch._inductor.codegen.simd import SIMDScheduling  # noqa: E402
from torch._inductor.compile_fx import compile_fx  # noqa: E402, F401
from torch._inductor.fx_passes import joint_graph, pad_mm  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.ir import MutationOutput, TemplateBuffer  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._inductor.runtime.benchmarking import InductorBenchmarker, TritonBenchmarker  # noqa: E402
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner  # noqa: E402
from torch._inductor.runtime.triton_heuristics import (  # noqa: E402
    CachingAutotuner,
    HeuristicType,
    OutOfResources,
    PTXASError,
)
from torch._inductor.scheduler import WhyNoFuse  # noqa: E402
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
class LoadedGraph:
    """One compiled graph.

    nodes: the FX nodes after the passes, by name. replaced: by such a name, the nodes before the passes that a pattern
        matcher replaced by it.
    origins: by name of a buffer, or of an operation of the scheduler, the FX nodes that it computes. An operation that
        is no template also has those that its operands come from.
    handles: Inductor's provenance mapping: the FX nodes of each call that it announces in the code, by handle.
    padding_measured: names, in the joint graph, of the GEMMs for which Inductor measures on a GPU whether padding their
        operands pays. If it pads them, also the names of the nodes that replace them.
    split_measured: on a GPU, Inductor measures how to split reductions over rows and columns at once.
    module: the loaded output code, whose globals hold its Triton kernels.
    """

    part: Part
    fx: str
    nodes: Mapping[str, SourceNode]
    replaced: Mapping[str, tuple[str, ...]]
    origins: Mapping[str, tuple[str, ...]]
    handles: Mapping[str, list[str]]
    code: str
    gemm_autotuned: bool
    padding_measured: frozenset[str]
    split_measured: bool
    module: Any


class Listener(Protocol):
    """The receiver of a compile's steps, in the order in which they happen."""

    def source_graph(self, nodes: Mapping[str, SourceNode]) -> None: ...
    def joint_graph(self, readable: str) -> None: ...
    def scheduler_ir(self, part: Part, fused: bool, text: str) -> None: ...
    def fusion_refused(self, refusal: Refusal) -> None: ...
    def forced(self, part: Part) -> tuple[frozenset[str], frozenset[str]] | None: ...
    def was_forced(self, refusal: str) -> None: ...
    def graph_loaded(self, loaded: LoadedGraph) -> None: ...
    def graph_broken(self, graph_break: GraphBreak) -> None: ...
    def graph_runs(self) -> AbstractContextManager[None]: ...
    def graph_called(self, module: Any, taken: Sequence[Any], returned: Sequence[Any]) -> None: ...


_CONFIGS = (dynamo_config, functorch_config, inductor_config)


def all_settings() -> list[dict[str, Any]]:
    """Return a copy of all options of PyTorch's compilers."""
    return [config.get_config_copy() for config in _CONFIGS]


def restore_settings(kept: list[dict[str, Any]]) -> None:
    """Set the options that differ from those that `all_settings` returned."""
    for config, now, values in zip(_CONFIGS, all_settings(), copy.deepcopy(kept), strict=True):
        config.load_config({name: value for name, value in values.items() if now[name] != value})


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
    load = GraphLowering._compile_to_module_lines
    should_pad = inspect.unwrap(pad_mm._should_pad)  # without the disk cache of torch 2.13, which ignores the device
    mix_orders = SIMDScheduling.codegen_mix_order_reduction

    origins: dict[str, list[torch.fx.Node]] = {}
    split_measured: list[Any] = []
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

    def padding_decided(match: Any, *args: Any, **kwargs: Any) -> bool:
        remembered = pad_mm.get_cached_should_pad

        def asked(key: str) -> Any:  # called after all rules that need no measurement
            padding_measured.add(match.output_node().name)
            return remembered(key)

        with _patched(pad_mm, "get_cached_should_pad", asked):
            return should_pad(match, *args, **kwargs)

    def mixing_orders(scheduling: Any, node: Any) -> None:
        search = CoordescTuner.autotune_single_field

        def searching(*args: Any, **kwargs: Any) -> Any:
            split_measured.append(node)
            return search(*args, **kwargs)

        with _patched(CoordescTuner, "autotune_single_field", searching):
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
        replaced = _replacements(graph.orig_gm.graph, rewritten)
        inside = [node for nodes in origins.values() for node in nodes]  # a subgraph's nodes are not in the graph
        listener.graph_loaded(
            LoadedGraph(
                part=_part(graph),
                fx=graph.orig_gm.print_readable(print_output=False),
                nodes={
                    node.name: _source(node) for node in (*graph.orig_gm.graph.nodes, *inside)
                    if node.op not in ("placeholder", "output")
                },
                replaced=replaced,
                origins={name: tuple(node.name for node in nodes) for name, nodes in origins.items()},
                handles={
                    handle: list(names)
                    for handle, names in inductor_debug._inductor_triton_kernel_to_post_grad_node_info.items()
                },
                code=wrapper_code.value,
                gemm_autotuned=bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm),
                padding_measured=frozenset(padding_measured),
                split_measured=bool(split_measured),
                module=module,
            )
        )
        origins.clear()
        split_measured.clear()
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
            if fused and (wanted := listener.forced(_part(V.graph))) is not None:
                pair = [next((n for n in nodes if names & n.get_operation_names()), None) for names in wanted]
                if None not in pair:  # a subgraph has operations of its own
                    nodes, refusal = _fused(nodes, *pair)
                    listener.was_forced(refusal)
            listener.scheduler_ir(_part(V.graph), fused, "\n\n".join(node.debug_str() for node in nodes) + "\n")
            for buffer in V.graph.buffers:
                if not isinstance(buffer, MutationOutput):  # it has no origins
                    origins[buffer.get_name()] = _exact_origins(buffer)
            for operation in V.graph.operations:
                is_template = isinstance(operation, TemplateBuffer)
                nodes_of = _exact_origins(operation) if is_template else list(operation.get_origins())
                origins[operation.get_operation_name()] = nodes_of
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(settings))
        # Otherwise backward is compiled at the first backward(). On CUDA that happens in a thread of autograd, which
        # these settings do not reach, because they are context variables.
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        for module in (torch.autograd, torch.autograd.graph):  # the first imports the function by name
            stack.enter_context(_patched(module, "_engine_run_backward", traced_backward))
        stack.enter_context(_patched(GraphLowering, "_compile_to_module_lines", loaded))
        stack.enter_context(_patched(CachingAutotuner, "_precompile_config", compiled_one))
        stack.enter_context(_patched(pad_mm, "_should_pad", padding_decided))
        stack.enter_context(_patched(SIMDScheduling, "codegen_mix_order_reduction", mixing_orders))
        stack.enter_context(_patched(WhyNoFuse, "__call__", refused))
        stack.enter_context(_patched(dynamo_frames, "format_error_msg", skipped))
        known_breaks = len(dynamo_output.graph_break_reasons)
        try:
            yield
        finally:
            active = False
        for reason in dynamo_output.graph_break_reasons[known_breaks:]:
            listener.graph_broken(GraphBreak(text=str(reason.reason), line=users_line(reason.user_stack)))


_TILING = dict.fromkeys(("triton.tiling_prevents_pointwise_fusion", "triton.tiling_prevents_reduction_fusion"), False)


def _fused(nodes: Sequence[Any], one: Any, other: Any) -> tuple[Sequence[Any], str]:
    """Return a scheduler's nodes after fusing two more, and ""; or the same nodes, and why Inductor does not fuse them.

    All of Inductor's rules apply, but for those by which it expects no gain (`InductorChoices`, `_TILING`).
    """
    if other.get_operation_names() & one.ancestors:
        one, other = other, one
    scheduler = one.scheduler
    reasons: list[str] = []

    def refused(why: Any, reason: str, *args: Any) -> None:
        reasons.append(reason % args)

    def willing(*args: Any) -> bool:
        return True

    with contextlib.ExitStack() as stack:
        stack.enter_context(_patched(WhyNoFuse, "__call__", refused))
        stack.enter_context(inductor_config.patch(_TILING))
        for name in ("can_fuse", "can_fuse_vertical", "can_fuse_horizontal"):
            stack.enter_context(_patched(InductorChoices, name, staticmethod(willing)))
        allowed = scheduler.can_fuse(one, other, can_reorder=True)
        if not allowed or scheduler.will_fusion_create_cycle(one, other):
            return nodes, "; ".join(dict.fromkeys(reasons)) or "Inductor gives no reason"
    made = scheduler.get_backend(one.get_device()).fuse(one, other)
    scheduler.name_to_fused_node.update({node.get_name(): made for node in made.get_nodes()})
    left = [node for node in nodes if node is not one and node is not other]
    ordered = scheduler.topological_sort_schedule(sorted([*left, made], key=lambda node: node.min_order))
    scheduler.prune_redundant_deps(ordered)
    return ordered, ""


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


_LIBRARIES = re.compile(r"/site-packages/|/lib/python3\.\d+/")


def users_line(stack: Sequence[Any]) -> str:
    """Return the innermost line of the user's own code, else the innermost outside torch and this package; or ""."""
    outside = [frame for frame in stack if not frame.filename.startswith((_TORCH_FOLDER, _OWN_FOLDER))]
    frames = [frame for frame in outside if not _LIBRARIES.search(frame.filename)] or outside
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


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


def _pass_stages_on(graph: torch.fx.Graph) -> None:
    """Copy stages and modules to the gradients that torch.autograd.grad makes inside the graph.

    Each gradient gets those of the operation that it belongs to. If AOTAutograd differentiates, it has them already.
    """
    forward: dict[int, Mapping[str, Any]] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if not node.meta.get("autograd_backward"):
            forward.setdefault(number, node.meta)
        elif number in forward and not node.meta.get("is_gradient_acc"):
            for given, taken in (("custom", "custom"), ("nn_module_stack", "fwd_nn_module_stack")):
                if taken not in node.meta and forward[number].get(given):
                    node.meta[taken] = forward[number][given]


_ROOT = re.compile(r"[LG](\[[^\]]*\])+\.?")  # G['models'][0]


def _module_path(meta: Mapping[str, Any]) -> str | None:
    """Return the module of an FX node, or of the one that it is the gradient of: "layers/0/mlp"; None if unknown."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path, _ = next(reversed(stack.values()), ("", None))
    return _ROOT.sub("", path, count=1).replace(".", "/") or None


def _source(node: torch.fx.Node) -> SourceNode:
    _, line, place = stack_lines((node.meta.get("stack_trace") or "").replace(_TORCH_FOLDER, "torch/"))
    return SourceNode(
        name=node.name,
        op=_op(node.target) if node.op == "call_function" else node.op,
        stage=stages.of_node(node.meta) or _module_path(node.meta),
        line=line,
        place=place,
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


_TORCH_FOLDER = torch.__file__.rsplit("/", 1)[0] + "/"
_OWN_FOLDER = __file__.rsplit("/", 2)[0] + "/"


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
