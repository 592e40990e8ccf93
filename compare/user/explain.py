"""`xlafuse.explain`: the fusion graphs of a user's function, compiled in a separate process."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import targets
from ..base.frameworks import OWNERS, Framework
from ..base.host import gpu_present, installed
from ..base.paths import PACKAGE, python_path
from ..graph import store
from ..graph.model import FusionGraph
from ..sources.explained import Agreement, Explained
from ..workers.client import interpreter
from ..workers.explain_request import NotSendable, of_packages, pack
from . import agreement

Progress = Callable[[str], None]

TIMEOUT = 1800.0
_PROGRESS_SECONDS = 30.0  # between two messages about a running compile
_WORKERS = {"jax": f"{PACKAGE}.workers.xla.explain", "torch": f"{PACKAGE}.workers.pytorch.explain"}
_JAX_STATE = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
    "jax_default_prng_impl", "jax_threefry_partitionable",
)

_SDPA = ("flash", "mem_efficient", "math", "cudnn")
# StableHLO has 'module @jit_f attributes', HLO has 'HloModule jit_f, is_scheduled'
_MODULE = re.compile(r"(?:module @|HloModule )(?:jit_)?([\w.-]+)")


class ExplainError(Exception):
    """A function could not be explained. The message names the function, the reason and the user's line.

    kind: the type of the error in the compiling process, or "". traceback: the one of that process, or "". frames: the
    traceback's frames in the user's code, or "".
    """

    def __init__(self, message: str, *, kind: str = "", traceback: str = "", frames: str = "") -> None:
        super().__init__(message)
        self.kind, self.traceback, self.frames = kind, traceback, frames


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

    devices: how many absent GPUs `jax.devices()` returns, for a JAX function with a mesh. Arguments lie whole on each.

    A separate process imports the function, or gets a copy of it and of the values that it closes over, and calls it.
    This process stays unchanged.

    Raises ExplainError.
    """
    functions = _functions(fn, name)
    given = args, kwargs
    owners = map(_frameworks_of_code, functions.values())
    if len(set().union(*(owner for owner in owners if len(owner) == 1))) > 1:  # arrays of one do not fit the other
        args, kwargs = agreement.neutral(args), agreement.neutral(kwargs)
    checked: tuple[Agreement, ...] = ()
    if check is not False:
        known = {name: framework or _framework(name, function, args, kwargs) for name, function in functions.items()}
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
        return agreement.check({name: (known[name], _uncompiled(fn)) for name, fn in functions.items()}, args, kwargs)
    except agreement.NotChecked as problem:
        raise ExplainError(str(problem)) from problem


def _frameworks_of_code(function: Any) -> set[Framework]:
    """Return the framework of a function's type, or else those of the names in its code."""
    function = _uncompiled(function)
    return _owners([function, getattr(function, "__self__", None)]) or _used_frameworks(function)


@dataclass(frozen=True)
class _Call:
    """One function with its arguments, or the `stablehlo` of a Lowered. The rest: see `explain_all`."""

    name: str
    framework: Framework
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stablehlo: str | None = None
    again: Callable[[], tuple[Any, Any, Any]] | None = None
    products: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


def explain_all(
    functions: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, grad: bool = False,
    target: str | None = None, framework: Framework | None = None, timeout: float = TIMEOUT,
    progress: Progress = lambda message: None, products: Mapping[str, str] = types.MappingProxyType({}),
    autotune: Path | None = None, settings: Mapping[str, Mapping[str, str]] = types.MappingProxyType({}),
    timed: bool = False, devices: int = 1,
    again: Mapping[str, Callable[[], tuple[Any, Any, Any]]] = types.MappingProxyType({}),
) -> Explained:
    """Explain functions by name, as `explain` does. progress: called at the start of a compile and twice a minute.

    products: for each function, the kernels of matrix products on an absent target: "triton" or "cublas" for JAX
    (`xlafuse.compile.compiler.Target`), "padded" or "triton" for PyTorch
    (`triton_side.deviceless.user_functions.compile_call`). Default: the target's recorded results, or the compiler's
    choice without autotuning. autotune: a folder with XLA's recorded results, autotune-<jax version>.textproto, which
    take precedence over the target pack's. settings: for each function, options of its compile by name: XLA's flags,
    or those of torch._inductor.config. timed: on this machine's GPU, time the functions of each framework in turns.
    devices: as for `explain`. again: picklable functions that import a function and make its arguments once more.

    JAX's functions are compiled by the Python of `workers.client.interpreter("xla")`. Where one cannot travel there,
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
    waiting: dict[Framework, list[_Call]] = {}
    for name, function in functions.items():
        if _is_stage(function, "Compiled"):
            _refuse_arguments(name, args, kwargs, grad, framework)
            if chosen is not None:
                raise ExplainError(f"{name} is already compiled: target= goes with a function or its Lowered")
            done[name] = _read_compiled(name, function)
            continue
        call = replace(
            _make_call(name, function, tuple(args), dict(kwargs), framework, grad), products=products.get(name),
            settings=settings.get(name, {}), again=again.get(name),
        )
        if call.settings and call.stablehlo is not None:
            raise ExplainError(f"{name} is already lowered: settings go only with a function")
        waiting.setdefault(call.framework, []).append(call)
    if targets.is_tpu(target) and "torch" in waiting:
        names = ", ".join(call.name for call in waiting["torch"])
        raise ExplainError(f"{names}: XLA compiles JAX functions for {target}, and this is PyTorch's; name a GPU")
    if devices > 1 and "torch" in waiting:
        names = ", ".join(call.name for call in waiting["torch"])
        raise ExplainError(f"{names}: devices={devices} goes with JAX functions of a mesh, and this is PyTorch's")
    deadline = time.monotonic() + timeout
    for framework, calls in waiting.items():
        progress(f"compiling {', '.join(call.name for call in calls)} for {target or 'this GPU'} ({framework})")
        try:
            asked = {
                "grad": grad, "target": target, "timed": timed and target is None, "devices": devices,
                "autotune": autotune and str(autotune.absolute()),
            }
            result = _compile(framework, calls, asked, deadline, progress)
        except subprocess.TimeoutExpired:
            raise ExplainError(
                f"compiling was stopped after {timeout:g} s; timeout= (--timeout) allows more"
            ) from None
        for name, graph in result.graphs.items():
            done[name] = Explained({name: graph}, rounds={name: result.rounds[name]} if result.rounds else {})
        done[calls[-1].name] = replace(done[calls[-1].name], notes=result.notes)
    graphs = {name: done[name].graph for name in functions}
    static = [
        f"{name}: torch.compile was given dynamic=True, but these are the kernels of static shapes; others may differ"
        for name, function in functions.items() if _is_dynamic(function)
    ]
    notes = (*static, *(note for name in functions for note in done[name].notes))
    rounds = {name: found for each in done.values() for name, found in each.rounds.items()}
    return Explained(graphs, notes, rounds=rounds)


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
    if _is_stage(fn, "Compiled"):
        raise ExplainError(f"{_name(fn)} is already compiled for one device; give the function or its Lowered")
    call = _make_call(_name(fn), fn, tuple(args), dict(kwargs), framework, grad)
    state = _jax_state() if call.framework == "jax" else _torch_state()
    digest = hashlib.sha256(pickle.dumps((call.framework, _packed(call), state)))
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


# The functions and their arguments


def _functions(fn: Any, name: str | None) -> dict[str, Any]:
    if isinstance(fn, Mapping):
        several = {str(key): function for key, function in fn.items()}
    elif isinstance(fn, (list, tuple)):
        several = {}
        for function in fn:
            base = own = _name(function)
            number = 1
            while own in several:
                number += 1
                own = f"{base}-{number}"
            several[own] = function
    else:
        return {name or _name(fn): fn}
    if name is not None:
        raise ExplainError("name= names one graph; for several functions, give {name: function}")
    if not several:
        raise ExplainError("there is no function to explain")
    return several


def _name(fn: Any) -> str:
    fn = _uncompiled(fn)
    if _is_stage(fn, "Lowered") or _is_stage(fn, "Compiled"):
        named = _MODULE.search(fn.as_text() or "")
        return named[1] if named else type(fn).__name__.lower()
    if isinstance(fn, functools.partial):
        return _name(fn.func)
    if isinstance(fn, types.MethodType) and not isinstance(fn.__self__, type):
        return f"{type(fn.__self__).__name__}.{fn.__name__}"
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


def _uncompiled(fn: Any) -> Any:
    """Return the function behind a torch.compile wrapper, or `fn` itself."""
    return getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None) or fn


def _is_dynamic(fn: Any) -> bool:
    """Return whether `fn` is a wrapper of torch.compile(dynamic=True), as far as the wrapper shows it (torch 2.13)."""
    if "_torchdynamo_orig_callable" not in getattr(fn, "__dict__", {}):
        return False
    held = [getattr(fn, "dynamo_ctx", None), *(cell.cell_contents for cell in getattr(fn, "__closure__", None) or ())]
    return any(getattr(each, "_dynamic", None) is True for each in held)


def _is_stage(fn: Any, kind: str) -> bool:
    stages: Any = sys.modules.get("jax.stages")
    return stages is not None and isinstance(fn, getattr(stages, kind))


def _refuse_arguments(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], grad: bool, framework: Framework | None
) -> None:
    if args or kwargs or grad:
        raise ExplainError(f"{name} is already lowered: it takes neither arguments nor grad=True")
    if framework == "torch":
        raise ExplainError(f"{name} is already lowered by JAX: framework='torch' goes with a function")


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


def _make_call(
    name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], framework: Framework | None, grad: bool
) -> _Call:
    if _is_stage(function, "Lowered"):
        _refuse_arguments(name, args, kwargs, grad, framework)
        text = function.as_text(dialect="stablehlo", debug_info=True)
        return _Call(name, "jax", None, (), {}, stablehlo=text)
    function = _uncompiled(function)
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = _uncompiled(function.func)
    if not callable(function):
        raise ExplainError(f"{function!r:.80} cannot be called; give a function, a module, or a Lowered of jax")
    _refuse_factory(name, function, args, kwargs)
    return _Call(name, framework or _framework(name, function, args, kwargs), function, args, kwargs)


def _refuse_factory(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a class, and a function without parameters that is given arguments: they make what the user means."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a function of C
        return
    needed = any(
        parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in signature.parameters.values()
    )
    if isinstance(function, type):
        write = f"write a function without parameters that returns one, such as {name}(...), and give its call"
        raise ExplainError(
            f"{name} is a class; to explain an instance of it, {write if needed else _call_of(function)}"
        )
    if not signature.parameters and (args or kwargs):
        raise ExplainError(
            f"{name} has no parameters, and arguments are given; if they are for what it returns, {_call_of(function)}"
        )


def _call_of(factory: Any) -> str:
    """Return how a user gives the result of a function, on the command line and in Python."""
    name = factory.__qualname__
    try:
        file = os.path.relpath(inspect.getfile(factory))
    except (TypeError, OSError, ValueError):  # of no file
        return f"give {name}()"
    return f"give {name}(), on the command line '{file}:{name}()'"


def _framework(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Framework:
    """Return the framework of the function's type, else of its arguments', else of the names that its code uses.

    Raises ExplainError without an answer.
    """
    of_function = _owners([function, getattr(function, "__self__", None)])
    found = of_function or _owners(_leaves((args, kwargs)))
    if not found and len(used := _used_frameworks(function)) == 1:
        return used.pop()
    if len(found) == 1:
        return found.pop()
    if found:
        raise ExplainError(f"{name} has both JAX and PyTorch arrays as arguments; give arrays of one, or framework=")
    raise ExplainError(
        f"neither {name}, the names that it uses nor its arguments tell JAX from PyTorch: say "
        "framework='jax' or framework='torch' (--framework), or give jax.ShapeDtypeStructs or tensors"
    )


def _owners(values: Iterable[Any]) -> set[Framework]:
    found: set[Framework] = set()
    for value in values:
        for cls in type(value).__mro__:
            owner = OWNERS.get((cls.__module__ or "").split(".")[0])
            if owner is not None:
                found.add(owner)
    return found


def _used_frameworks(function: Any) -> set[Framework]:
    """Return the frameworks behind the names in a function's code: globals, closed-over values, imports inside it.

    An object counts as its `__call__`. Functions of its module that it calls or closes over count too.
    """
    found: set[Framework] = set()
    waiting, seen = [function], set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, (types.FunctionType, types.MethodType, type)):
            function = type(function).__call__ if callable(function) else None  # an object that is called
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            found |= {OWNERS[top] for top in _imported(code) if top in OWNERS}
            for used in _named_values(function, code):
                module = used.__name__ if isinstance(used, types.ModuleType) else getattr(used, "__module__", None)
                owner = OWNERS.get(str(module).split(".")[0])
                if owner is not None:
                    found.add(owner)
                elif isinstance(used, (Mapping, list, tuple)) or hasattr(used, "__dataclass_fields__"):
                    found |= _owners(_leaves(used))
                elif module == function.__module__:
                    waiting.append(used)
                else:
                    found |= _owners([used])
    return found


def _named_values(function: types.FunctionType, code: types.CodeType) -> list[Any]:
    """Return the values of a code's global names, and those that the function closes over."""
    values = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell: the name is bound later
            values.append(cell.cell_contents)
    return values


def _imported(code: types.CodeType) -> set[str]:
    """Return the top-level packages that a code imports."""
    return {str(each.argval).split(".")[0] for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}


def _leaves(value: Any, depth: int = 0) -> Iterable[Any]:
    if depth > 50:
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        value = [getattr(value, field) for field in value.__dataclass_fields__]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, depth + 1)
    else:
        yield value


# The compiling process


class _Stays(Exception):
    """A call cannot be made in another Python; the message says why."""


def _compile(
    framework: Framework, calls: list[_Call], asked: Mapping[str, Any], deadline: float, progress: Progress,
) -> Explained:
    python, note = sys.executable, ""
    if framework == "jax":
        python = interpreter("xla")
    if python != sys.executable:
        try:
            return _compile_in(python, framework, calls, asked, deadline, progress)
        except _Stays as problem:
            version = installed("jax")["jax"]
            note = f"compiled by this Python's jax {version} and not by {python}: {' '.join(str(problem).split())}"
            progress(note)
    try:
        found = _compile_in(sys.executable, framework, calls, asked, deadline, progress)
    except ExplainError as problem:
        if note and problem.kind == "Skip":
            problem.args = (f"{problem}; {note}",)
        raise
    return replace(found, notes=(*found.notes, *([note] if note else [])))


def _compile_in(
    python: str, framework: Framework, calls: list[_Call], asked: Mapping[str, Any], deadline: float,
    progress: Progress,
) -> Explained:
    """Compile in a process of a Python. Raises _Stays where that is another one, to which a call cannot travel."""
    elsewhere = python != sys.executable
    path = [str(Path(entry).absolute()) for entry in sys.path]
    if elsewhere:  # this Python's library and packages are not for another one
        library = Path(sysconfig.get_path("stdlib"))
        path = [each for each in path if not of_packages(each) and not Path(each).is_relative_to(library)]
    with tempfile.TemporaryDirectory(prefix="xlafuse-explain-") as name:
        folder = Path(name)
        request = {
            **asked, "path": path, "folder": os.getcwd(), "elsewhere": elsewhere,
            "state": _jax_state() if framework == "jax" else _torch_state(),
            "calls": [_packed(call, elsewhere=elsewhere) for call in calls],
        }
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        command = [python, "-m", _WORKERS[framework], str(folder)]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        environment.pop("TRITON_INTERPRET", None)  # it keeps Triton from compiling
        environment.pop("TORCH_COMPILE_DEBUG", None)  # it loads Dynamo before torch can pretend to have a GPU
        with (folder / "log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                    start_new_session=True,  # so that killpg ends the compilers that it starts, too
                )
            except OSError as problem:
                raise ExplainError(f"{python} does not start ({problem.strerror}); set XLAFUSE_XLA_PYTHON") from None
        try:
            _wait(process, deadline, progress)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _reply(folder, process.returncode)


def _packed(call: _Call, *, elsewhere: bool = False) -> dict[str, Any]:
    asked = {"name": call.name, "products": call.products, "settings": dict(call.settings)}
    if elsewhere and call.again is not None:
        return {**asked, "again": pickle.dumps(functools.partial(_packed_again, call.again))}
    if call.stablehlo is not None:
        if elsewhere:
            raise _Stays(f"{call.name} was lowered by this process")
        return {**asked, "stablehlo": call.stablehlo}
    try:
        if call.framework == "torch":  # one pickle, so that shared tensors stay shared
            return {**asked, "parcel": pack((call.function, call.args, call.kwargs), arrays=False)}
        return {
            **asked,
            "function": pack(call.function, arrays=not _holds_parameters(call.function), elsewhere=elsewhere),
            "arguments": pack((call.args, call.kwargs), arrays=False, elsewhere=elsewhere),
        }
    except NotSendable as problem:
        raise (_Stays if elsewhere else ExplainError)(f"{call.name}: {problem}") from None


def _packed_again(again: Callable[[], tuple[Any, Any, Any]]) -> dict[str, Any]:
    """Import a function and make its arguments, in the compiling process. Return their part of the request."""
    function, args, kwargs = again()
    packed = _packed(_make_call("", function, tuple(args), dict(kwargs), "jax", False))
    return {name: packed[name] for name in ("stablehlo", "function", "arguments") if name in packed}


def _holds_parameters(function: Any) -> bool:
    """Return True where arrays in a JAX callable are inputs: those of an nnx module, not those of a closure."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(getattr(function, "__self__", function), nnx.Pytree)


def _jax_state() -> dict[str, Any]:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return {}
    values = {option: getattr(jax.config, option) for option in _JAX_STATE}
    return {option: getattr(value, "value", value) for option, value in values.items()}  # enums as plain data


def _torch_state() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    enabled = {kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _SDPA}
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": enabled,
        "autocast": _autocast_dtype(torch),
    }


def _autocast_dtype(torch: Any) -> str | None:
    if not torch.is_autocast_enabled("cuda"):
        return None
    return str(torch.get_autocast_dtype("cuda")).removeprefix("torch.")


def _wait(process: subprocess.Popen[bytes], deadline: float, progress: Progress) -> None:
    started = time.monotonic()
    while True:
        left = deadline - time.monotonic()
        try:
            process.wait(max(0.0, min(_PROGRESS_SECONDS, left)))
            return
        except subprocess.TimeoutExpired:
            if left <= _PROGRESS_SECONDS:
                raise
            progress(f"still compiling after {time.monotonic() - started:.0f} s")


def _reply(folder: Path, code: int) -> Explained:
    file = folder / "reply.json"
    log = (folder / "log").read_text(errors="replace")
    if not file.is_file():
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = next((f"; its last line: {line.strip()}" for line in reversed(log.splitlines()) if line.strip()), "")
        raise ExplainError(f"the compiling process died ({how}){last}", traceback=log)
    reply = json.loads(file.read_text())
    if "not_received" in reply:
        raise _Stays(reply["not_received"])
    if error := reply.get("error"):
        raise _error_of(error)
    graphs = {entry["name"]: store.load(Path(entry["file"])) for entry in reply["graphs"]}
    return Explained(graphs, tuple(reply["notes"]), rounds=reply["rounds"])


def _error_of(error: Mapping[str, Any]) -> ExplainError:
    before = f"{error['name']}: " if error["name"] else ""
    where = f" ({error['line']})" if error["line"] else ""
    message = error["message"] or "no message"
    return ExplainError(
        f"{before}{error['kind']}: {message}{where}", kind=error["kind"], traceback=error["traceback"],
        frames=error["frames"],
    )
