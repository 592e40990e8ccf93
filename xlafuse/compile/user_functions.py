"""Compilation of a user's function with its own arguments: any pytrees, keywords, static values and nnx modules.

`compiler.compile` takes functions of arrays; this file turns a call into such a function. Arrays among the arguments
may be `jax.ShapeDtypeStruct`s, and nothing is run.
"""

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.compile import _jax_private, compiler, hlo_edit
from xlafuse.dumps import artifacts
from xlafuse.hlo import provenance
from xlafuse.hlo.gpu_program import kernels, parse

_JITTED = type(jax.jit(lambda: None))
_PARAMS, _VARIABLES = "nnx_params", "nnx_variables"


@dataclass(frozen=True)
class CompiledCall:
    """One compiled call.

    autotuning: provenance by kernel. closed_over: (shape, dtype) of arrays that the function uses without taking them
    as arguments, and that are the module's first parameters; see `environment.configure_environment`. compiled: the
    executable; None for a target.
    """

    hlo_text: str
    autotuning: Mapping[str, provenance.Provenance]
    closed_over: tuple[tuple[tuple[int, ...], str], ...] = ()
    compiled: jax.stages.Compiled | None = None


def compile_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *,
    target: compiler.Target | None = None, dump_to: Path | None = None,
    options: Mapping[str, Any] = MappingProxyType({}), edit: hlo_edit.Edit | None = None,
) -> CompiledCall:
    """Compile `function(*args, **kwargs)` in one module, as `jax.jit` would.

    A jitted function keeps its options (static and donated arguments); its Python numbers are traced unless they are
    static. For other functions, Python values, strings and None are static. flax nnx modules are split, whether called
    or passed as arguments: their variables are inputs, and variables that the call changes are outputs.

    options: XLA's flags by name, without dashes. edit: of the scheduled module.

    Raises the errors of jax, XLA and the function.
    """
    with having_devices_of(target):
        if isinstance(function, _JITTED):
            trace, given = function.trace, (tuple(args), dict(kwargs))
        else:
            call, inputs = bind(function, args, kwargs)
            trace, given = jax.jit(call).trace, (tuple(inputs.values()), {})
        traced, lowered = _lowered(trace, given, target)
    with artifacts.raw_dump_folder(dump_to) as raw:
        dumping = artifacts.dump_options(raw) if raw is not None else {}
        with hlo_edit.editing(edit):
            compiled, _, source, _ = compiler.compile_lowered(lowered, {**options, **dumping}, target)
        text = compiled.as_text()
        if raw is not None and dump_to is not None:
            artifacts.keep_artifacts(raw, dump_to, parse(text).name, lowered.as_text(debug_info=True))
    closed_over = _jax_private.constant_inputs(traced)
    autotuning = _autotuning(text, source)
    return CompiledCall(text, autotuning, closed_over, None if target else compiled)


def _lowered(
    trace: Callable[..., Any], given: tuple[tuple[Any, ...], dict[str, Any]], target: compiler.Target | None
) -> tuple[Any, Any]:
    """Return the call, traced and lowered. An array lies as its own sharding says.

    For several GPUs, an array without one lies as the function's shardings and `shard_map`s say. Where the function has
    none, each GPU has the whole array.
    """
    platform = target.platform if target else None
    if target is not None and target.devices > 1:
        args, kwargs = _structs(given, None)
        traced = trace(*args, **kwargs)
        lowered = _jax_private.lower(traced, platform)
        if _jax_private.device_count(lowered) > 1:
            return traced, lowered
    args, kwargs = _structs(given, compiler.target_sharding(target))
    traced = trace(*args, **kwargs)
    return traced, _jax_private.lower(traced, platform)


def having_devices_of(target: compiler.Target | None) -> AbstractContextManager[None]:
    """Import and trace as on a machine with the target's GPUs: `jax.devices()` returns them, and meshes hold them."""
    return _jax_private.having(compiler.target_devices(target))


def compile_phases(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *,
    target: compiler.Target | None = None, dump_to: Path | None = None,
    options: Mapping[str, Any] = MappingProxyType({}), edits: Mapping[str, hlo_edit.Edit] = MappingProxyType({}),
) -> tuple[compiler.Compilation, compiler.Compilation]:
    """Compile a training step around `function(*args, **kwargs)`; return its forward and backward executables.

    forward(inputs) -> (outputs, residuals): the residuals are what JAX's vjp saves. backward(residuals, cotangents of
    the float outputs) -> gradients of all inputs of a floating or complex dtype. Inputs are the arrays among the
    arguments and the `nnx.Param`s of nnx modules. Residuals that are inputs or outputs are not copied.
    options: as for `compile_call`. edits: of the scheduled modules, by phase.

    Raises TypeError if nothing can be differentiated, and the errors of jax, XLA and the function.
    """
    call, inputs = bind(function, args, kwargs)
    leaves, tree = jax.tree.flatten(inputs)
    chosen = [
        _is_inexact(leaf) and name != _VARIABLES for name, value in inputs.items() for leaf in jax.tree.leaves(value)
    ]
    if not any(chosen):
        raise TypeError("grad=True needs an input of a floating dtype to differentiate by; there is none")

    def forward(inputs: OrderedDict[str, Any]) -> Any:
        leaves = jax.tree.leaves(inputs)

        def of_chosen(differentiated: list[Any]) -> Any:
            rest = iter(differentiated)
            merged = [next(rest) if take else leaf for take, leaf in zip(chosen, leaves, strict=True)]
            outputs, changed = call(*jax.tree.unflatten(tree, merged).values())
            results = jax.tree.leaves(outputs)
            return [y for y in results if _is_inexact(y)], ([y for y in results if not _is_inexact(y)], changed)

        differentiated = [leaf for take, leaf in zip(chosen, leaves, strict=True) if take]
        outputs, pullback, others = jax.vjp(of_chosen, differentiated, has_aux=True)
        return (outputs, others), pullback

    def backward(residuals: Any, cotangents: list[Any]) -> Any:
        (gradients,) = residuals(cotangents)
        return gradients

    for phase in (forward, backward):
        phase.__name__ = f"{call.__name__}_{phase.__name__}"
    compile_phase = functools.partial(compiler.compile, matmul_precision=None, target=target, options=options)
    folders = {part: None if dump_to is None else dump_to / part for part in ("forward", "backward")}
    with hlo_edit.editing(edits.get("forward")):
        saved = compile_phase(forward, [inputs], dump_to=folders["forward"])
    (outputs, _), residuals = saved.output_structs
    if not outputs:
        raise TypeError("grad=True needs an output of a floating dtype; there is none")
    with hlo_edit.editing(edits.get("backward")):
        return saved, compile_phase(backward, [residuals, outputs], dump_to=folders["backward"])


def compile_stablehlo(
    text: str, *, target: compiler.Target | None = None, dump_to: Path | None = None
) -> CompiledCall:
    """Compile a StableHLO module in jax's text form (`Lowered.as_text(debug_info=True)`)."""
    with artifacts.raw_dump_folder(dump_to) as raw:
        dumping = artifacts.dump_options(raw) if raw is not None else {}
        device = compiler.target_devices(target)[0] if target else None

        def compiled(options: dict[str, Any], dump: bool) -> str:
            return _jax_private.compile_stablehlo(text, options | (dumping if dump else {}), device)

        source: provenance.Source = "device"
        if target is None:
            hlo_text = compiled({}, True)
        else:
            hlo_text, source = compiler.with_choices(compiled, str, text, target)
        if raw is not None and dump_to is not None:
            artifacts.keep_artifacts(raw, dump_to, parse(hlo_text).name, text)
    return CompiledCall(hlo_text, _autotuning(hlo_text, source))


def bind(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], OrderedDict[str, Any]]:
    """Return (call, inputs): a function of arrays, and its arguments by name.

    `call(*inputs.values())` returns (`function(*args, **kwargs)`, the module variables that it changed). Inputs have
    the names and the order of the function's parameters. Before them come the `nnx.Param`s of nnx modules
    ("nnx_params") and their other variables, such as statistics and counters ("nnx_variables").
    """
    function, args, kwargs = _without_modules(function, args, kwargs)
    named = _named(function, args, kwargs)
    inputs: OrderedDict[str, Any] = OrderedDict()  # as a pytree it keeps its order; a dict is sorted
    rebuild: dict[str, Callable[[Any], Any]] = {}
    for name, value in named.items():
        leaves, tree = jax.tree.flatten(value)
        arrays = [_is_array(leaf) for leaf in leaves]
        if all(arrays) and leaves:
            inputs[name] = value
            continue
        rebuild[name] = functools.partial(_refill, leaves, arrays, tree)
        if any(arrays):
            inputs[name] = [leaf for leaf, array in zip(leaves, arrays, strict=True) if array]

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        full = {name: rebuild[name](given.get(name, ())) if name in rebuild else given[name] for name in named}
        positional = [full.pop(name) for name in list(full) if name not in kwargs]
        outputs = function(*positional, **full)
        return tuple(outputs) if isinstance(outputs, _Changed) else (outputs, [])

    call.__name__ = call.__qualname__ = getattr(function, "__name__", type(function).__name__)
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in inputs]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # jax names parameters by it
    return call, inputs


def _named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by parameter name, positional ones first."""
    names: list[str] = []
    try:
        bound = inspect.signature(function).bind_partial(*args)
    except (TypeError, ValueError):  # no signature, or too many arguments: the call itself raises
        names = [f"arg{index}" for index in range(len(args))]
    else:
        for name, value in bound.arguments.items():
            variadic = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            names += [f"{name}_{index}" for index in range(len(value))] if variadic else [name]
    if len(set(names) | set(kwargs)) != len(args) + len(kwargs):
        names = [f"arg{index}" for index in range(len(args))]
    return dict(zip(names, args, strict=True)) | dict(kwargs)


def _refill(leaves: list[Any], arrays: list[bool], tree: Any, given: list[Any]) -> Any:
    rest = iter(given)
    return tree.unflatten(next(rest) if array else leaf for leaf, array in zip(leaves, arrays, strict=True))


class _Changed(tuple[Any, list[Any]]):
    """The result of a call with nnx modules, and the variables that it changed."""


@dataclass(frozen=True)
class _Slot:
    """The place of an nnx module among the arguments."""

    index: int


def _without_modules(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Return (function, args, kwargs) of the call as a function of its nnx modules' variables."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return function, args, kwargs
    modules: list[Any] = []

    def taken_out(value: Any) -> Any:
        def slot(leaf: Any) -> Any:
            if not isinstance(leaf, nnx.Pytree):
                return leaf
            modules.append(leaf)
            return _Slot(len(modules) - 1)

        return jax.tree.map(slot, value, is_leaf=lambda leaf: isinstance(leaf, nnx.Pytree))

    receiver = getattr(function, "__self__", function)
    is_module = isinstance(receiver, nnx.Pytree)
    method = getattr(function, "__name__", "__call__")
    slots = taken_out(((receiver,) if is_module else (), tuple(args), dict(kwargs)))
    if not modules:
        return function, args, kwargs
    graph, params, variables = nnx.split(modules, nnx.Param, ...)

    def split_call(params: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        before = jax.tree.leaves((params, variables))  # read now, because the call changes them in place
        merged = nnx.merge(graph, params, variables)
        put_back = functools.partial(jax.tree.map, lambda leaf: merged[leaf.index] if isinstance(leaf, _Slot) else leaf)
        called = getattr(merged[0], method) if is_module else function
        outputs = called(*put_back(args), **put_back(kwargs))
        after = jax.tree.leaves(nnx.split(merged, nnx.Param, ...)[1:])
        # Unchanged variables are no outputs; nnx.jit passes them on, too.
        return _Changed((outputs, [new for new in after if not any(new is old for old in before)]))

    split_call.__name__ = type(receiver).__name__ if is_module else getattr(function, "__name__", "call")
    try:
        own = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        own = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    before_own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in (_PARAMS, _VARIABLES)]
    kept = [parameter.replace(default=inspect.Parameter.empty) for parameter in own]
    split_call.__signature__ = inspect.Signature([*before_own, *kept])  # type: ignore[attr-defined]
    _, args, kwargs = slots
    return split_call, (params, variables, *args), kwargs


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _structs(tree: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Return arrays as structs, with this sharding where they have no NamedSharding; Python values stay."""

    def struct(leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        weak, own = bool(getattr(leaf, "weak_type", False)), getattr(leaf, "sharding", None)
        placed = own if isinstance(own, jax.sharding.NamedSharding) else sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=weak)

    return jax.tree.map(struct, tree)


def _autotuning(text: str, source: provenance.Source) -> dict[str, provenance.Provenance]:
    return {kernel.name: provenance.of(kernel, source) for kernel in kernels(parse(text))}
