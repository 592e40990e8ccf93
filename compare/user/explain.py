"""`xlafuse.explain`: the fusion graphs of a user's function, compiled in a separate process."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import targets
from ..base.frameworks import Framework
from ..base.host import gpu_present
from ..functions.framework import frameworks_of_code, is_stage, name_of, uncompiled
from ..graph import store
from ..graph.model import FusionGraph
from ..sources.explained import Agreement, Explained
from ..workers.client import WorkerTimeout
from . import agreement
from .call import Call, ExplainError, gpus_of_arguments, make_call, packed, refuse_arguments, state_of
from .compiling import Progress, compile_calls

TIMEOUT = 1800.0


def explain(
    fn: Any, *args: Any, grad: bool = False, target: str | None = None, name: str | None = None,
    framework: Framework | None = None, timeout: float = TIMEOUT, check: bool | tuple[Any, ...] = False,
    devices: int = 1, **kwargs: Any,
) -> Explained:
    """Return the kernels that the compiler makes of `fn(*args, **kwargs)`, their operations and missed fusions.

    fn: a JAX function, jitted or not, a `jax.stages.Lowered` or `Compiled` (without arguments), a flax nnx module; a
        torch function or `nn.Module`, compiled or not; a method of either kind of module. To compare several with the
        same arguments, give a list of them or {name: function}.
    args, kwargs: pytrees of arrays or their stand-ins (`jax.ShapeDtypeStruct`, meta and fake tensors, numpy arrays).
        Only shapes and dtypes count, and nothing runs on a machine without a GPU. Python values are static, except
        those that a `jax.jit` function traces.
    grad: explain a training step: a forward call that saves the residuals and a backward call, compiled separately, as
        one graph of two phases. JAX: with respect to every float argument and `nnx.Param`. PyTorch: to tensors that
        require grad, or to every float argument where none does. Not for a function that takes its gradient itself.
    target: the GPU to compile for without having it. Default: this machine's GPU, or "h200" without one.
    name: the graph's name. Default: the function's.
    framework: "jax" or "torch"; needed where neither the function, its arguments nor the names in its code tell.
    timeout: seconds for all compiles together.
    check: for several functions: call them on this process's CPU, with these arguments or with the smaller ones of a
        tuple, and say whether their results agree. Backward is not checked.

    devices: how many absent GPUs `jax.devices()` returns, for a JAX function with a mesh; at least those of the mesh of
        its arguments. An argument lies as its NamedSharding says, or else as the function's `in_shardings` and
        `shard_map`s do.

    A separate process imports the function, or gets a copy of it and of the values that it closes over, and calls it.
    This process stays unchanged.

    Raises ExplainError.
    """
    functions = _functions(fn, name)
    given = args, kwargs
    owners = map(frameworks_of_code, functions.values())
    if len(set().union(*(owner for owner in owners if len(owner) == 1))) > 1:  # arrays of one do not fit the other
        args, kwargs = agreement.neutral(args), agreement.neutral(kwargs)
    checked: tuple[Agreement, ...] = ()
    if check is not False:
        known = {
            name: make_call(name, function, args, kwargs, framework, grad).framework
            for name, function in functions.items()
        }
        checked = _check(functions, known, given[0] if check is True else check, given[1])
    found = explain_all(
        functions, args, kwargs, grad=grad, target=target, framework=framework, timeout=timeout, devices=devices
    )
    return replace(found, agreement=checked)


def _check(
    functions: Mapping[str, Any], known: Mapping[str, Framework], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Agreement, ...]:
    if len(functions) < 2:
        raise ExplainError("check= compares several functions; give a list of them")
    if not isinstance(args, tuple):
        raise ExplainError(f"check= takes True or a tuple of arguments, got a {type(args).__name__}")
    try:
        return agreement.check({name: (known[name], uncompiled(fn)) for name, fn in functions.items()}, args, kwargs)
    except agreement.NotChecked as problem:
        raise ExplainError(str(problem)) from problem


def explain_all(
    functions: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, grad: bool = False,
    target: str | None = None, framework: Framework | None = None, timeout: float = TIMEOUT,
    progress: Progress = lambda message: None, products: Mapping[str, str] = types.MappingProxyType({}),
    autotune: Path | None = None, settings: Mapping[str, Mapping[str, str]] = types.MappingProxyType({}),
    force: Mapping[str, str] = types.MappingProxyType({}), timed: bool = False, devices: int = 1,
    again: Mapping[str, Callable[[], tuple[Any, Any, Any]]] = types.MappingProxyType({}),
) -> Explained:
    """Explain functions by name, as `explain` does. progress: called at the start of a compile and twice a minute.

    products: for each function, the kernels of matrix products on an absent target: "triton" or "cublas" for JAX
    (`xlafuse.compile.compiler.Target`), "padded" or "triton" for PyTorch
    (`triton_side.deviceless.user_functions.compile_call`). Default: the target's recorded results, or the compiler's
    choice without autotuning. autotune: a folder with XLA's recorded results, autotune-<jax version>.textproto, which
    take precedence over the target pack's. settings: for each function, options of its compile by name: XLA's flags,
    or those of torch._inductor.config. force: for each function, two kernels ("KERNEL+KERNEL") of the last compile
    without any, which are to be one. timed: on this machine's GPU, time the functions of each framework in turns.
    devices: as for `explain`. again: picklable functions that import a function and make its arguments once more.

    JAX's functions are compiled by the Python of `workers.client.interpreter`. Where one cannot travel there,
    this Python compiles all of them, and a note says so.
    """
    if target is not None and target not in targets.names():
        raise ExplainError(f"unknown target {target!r}; known: {', '.join(targets.names())}")
    chosen = target
    if target is None and not gpu_present():
        target = targets.DEFAULT
    if devices < 1 or (devices > 1 and target is None):
        raise ExplainError(f"devices={devices}: give 1 or more GPUs, and with several a target=, such as 'h200'")
    if targets.is_tpu(target) and devices > 1:
        raise ExplainError(f"devices={devices}: a TPU target is one chip; give 1")
    done: dict[str, Explained] = {}
    waiting: dict[Framework, list[Call]] = {}
    for name, function in functions.items():
        if is_stage(function, "Compiled"):
            refuse_arguments(name, args, kwargs, grad, framework)
            if chosen is not None:
                raise ExplainError(f"{name} is already compiled: target= goes with a function or its Lowered")
            if settings.get(name) or force.get(name):
                raise ExplainError(f"{name} is already compiled: settings and --force go only with a function")
            done[name] = _read_compiled(name, function)
            continue
        call = replace(
            make_call(name, function, tuple(args), dict(kwargs), framework, grad), products=products.get(name),
            settings=settings.get(name, {}), force=force.get(name, ""), again=again.get(name),
        )
        if (call.settings or call.force) and call.stablehlo is not None:
            raise ExplainError(f"{name} is already lowered: settings and --force go only with a function")
        waiting.setdefault(call.framework, []).append(call)
    if targets.is_tpu(target) and "torch" in waiting:
        names = ", ".join(call.name for call in waiting["torch"])
        raise ExplainError(f"{names}: XLA compiles JAX functions for {target}, and this is PyTorch's; name a GPU")
    if devices > 1 and "torch" in waiting:
        names = ", ".join(call.name for call in waiting["torch"])
        raise ExplainError(f"{names}: devices={devices} goes with JAX functions of a mesh, and this is PyTorch's")
    if target is not None and not targets.is_tpu(target):
        devices = max([devices, *(gpus_of_arguments(call) for call in waiting.get("jax", ()))])
    deadline = time.monotonic() + timeout
    for framework, calls in waiting.items():
        progress(f"compiling {', '.join(call.name for call in calls)} for {target or 'this GPU'} ({framework})")
        try:
            asked = {
                "grad": grad, "target": target, "timed": timed and target is None, "devices": devices,
                "autotune": autotune and str(autotune.absolute()),
            }
            result = compile_calls(framework, calls, asked, deadline, progress)
        except WorkerTimeout:
            raise ExplainError(
                f"compiling was stopped after {timeout:g} s; timeout= (--timeout) allows more"
            ) from None
        for name, graph in result.graphs.items():
            done[name] = Explained({name: graph}, times={name: result.times[name]} if result.times else {})
        done[calls[-1].name] = replace(done[calls[-1].name], notes=result.notes, agreement=result.agreement)
    graphs = {name: done[name].graph for name in functions}
    static = [
        f"{name}: torch.compile was given dynamic=True, but these are the kernels of static shapes; others may differ"
        for name, function in functions.items() if _is_dynamic(function)
    ]
    notes = (*static, *(note for name in functions for note in done[name].notes))
    times = {name: found for explained in done.values() for name, found in explained.times.items()}
    checks = tuple(check for explained in done.values() for check in explained.agreement)
    return Explained(graphs, notes, checks, times)


def explain_targets(
    functions: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], *,
    timeout: float = TIMEOUT, **options: Any,
) -> Explained:
    """Explain functions for each of several targets, one after another, since a process pretends to have one GPU.

    options: as for `explain_all`. A graph has its target's name; with several functions, "function on target".
    """
    found, deadline = Explained({}), time.monotonic() + timeout
    for target in names:
        left = max(0.0, deadline - time.monotonic())
        explained = explain_all(functions, args, kwargs, target=target, timeout=left, **options)
        label = {name: target if len(functions) == 1 else f"{name} on {target}" for name in functions}
        graphs = {label[name]: replace(graph, name=label[name]) for name, graph in explained.graphs.items()}
        found |= replace(explained, graphs=graphs)
    return found


@dataclass(frozen=True)
class Identity:
    """A call's identity. digest: equal for calls of equal function, shapes, dtypes, Python values and settings."""

    name: str
    framework: Framework
    digest: str


def identify(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, framework: Framework | None = None, grad: bool = False
) -> Identity:
    """Return the identity of a call. Raises ExplainError, also for a `Compiled`."""
    if is_stage(fn, "Compiled"):
        raise ExplainError(f"{name_of(fn)} is already compiled for one device; give the function or its Lowered")
    call = make_call(name_of(fn), fn, tuple(args), dict(kwargs), framework, grad)
    digest = hashlib.sha256(pickle.dumps((call.framework, packed(call), state_of(call.framework))))
    return Identity(call.name, call.framework, digest.hexdigest())


def load(path: str | os.PathLike[str]) -> FusionGraph:
    """Return the fusion graph in a file.

    path: a file of `Explained.save` or `xlafuse inspect --json`, HLO as text or proto, Inductor's output_code.py, or a
    folder or archive with one compile's dump. Raises compare.graph.store.GraphError, which names the path, where it
    holds no graph or several.
    """
    from ..base.usage import UsageError
    from ..record.run_folder import RunFolderError
    from ..sources.opening import open_source

    try:
        results = open_source(Path(path)).results
        if len(results) != 1:
            raise store.GraphError(f"{path}: holds {len(results)} graphs; `xlafuse inspect {path}` lists them")
        return results[0].load()
    except (UsageError, RunFolderError) as problem:
        raise store.GraphError(str(problem)) from None


def _functions(fn: Any, name: str | None) -> dict[str, Any]:
    if isinstance(fn, Mapping):
        several = {str(key): function for key, function in fn.items()}
    elif isinstance(fn, (list, tuple)):
        several = {}
        for function in fn:
            base = own = name_of(function)
            number = 1
            while own in several:
                number += 1
                own = f"{base}-{number}"
            several[own] = function
    else:
        return {name or name_of(fn): fn}
    if name is not None:
        raise ExplainError("name= names one graph; for several functions, give {name: function}")
    if not several:
        raise ExplainError("there is no function to explain")
    return several


def _is_dynamic(fn: Any) -> bool:
    """Return whether `fn` is a wrapper of torch.compile(dynamic=True), as far as the wrapper shows it (torch 2.13)."""
    if "_torchdynamo_orig_callable" not in getattr(fn, "__dict__", {}):
        return False
    held = [getattr(fn, "dynamo_ctx", None), *(cell.cell_contents for cell in getattr(fn, "__closure__", None) or ())]
    return any(getattr(each, "_dynamic", None) is True for each in held)


def _read_compiled(name: str, compiled: Any) -> Explained:
    """Read the HLO of a `Compiled`."""
    from importlib.metadata import version

    from xlafuse.hlo.gpu_program import parse

    from ..graph.build.from_hlo import from_hlo

    text = compiled.as_text()
    if text is None:
        raise ExplainError(f"{name} holds no HLO: it was loaded from a serialized executable")
    versions = {package: version(package) for package in ("jax", "jaxlib")}
    graph = replace(from_hlo(parse(text), versions=versions), name=name)
    shardings: Any = sys.modules["jax"].tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    on_cpu = f"{name} was compiled for the CPU, where fusions are no GPU kernels; give its Lowered to compile for a GPU"
    return Explained({name: graph}, (on_cpu,) if platforms == {"cpu"} else ())


