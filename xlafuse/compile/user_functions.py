"""Compile what a user wrote, called with the arguments it takes: any pytrees, keywords, static values, nnx modules.

`compiler.compile` compiles functions of arrays; this file turns a call into one. Arrays among the arguments may be
`jax.ShapeDtypeStruct`s; nothing is run.
"""

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.compile import _jax_private, compiler
from xlafuse.dumps import artifacts
from xlafuse.hlo import provenance
from xlafuse.hlo.gpu_program import kernels, parse

_JITTED = type(jax.jit(lambda: None))
_PARAMS, _VARIABLES = "nnx_params", "nnx_variables"


@dataclass(frozen=True)
class CompiledCall:
    """One executable, as XLA planned it. autotuning: provenance by kernel. closed_over: arrays (shape, dtype) that the
    function did not take as arguments and that became constants of the code."""

    hlo_text: str
    autotuning: Mapping[str, provenance.Provenance]
    closed_over: tuple[tuple[tuple[int, ...], str], ...] = ()


def compile_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *,
    target: compiler.Target | None = None, dump_to: Path | None = None,
) -> CompiledCall:
    """Compile `function(*args, **kwargs)` in one module, as `jax.jit` would.

    What is jitted already keeps the options it was jitted with (static and donated arguments), and Python numbers that
    it does not call static are traced. Otherwise Python values, strings and None among the arguments are static.
    flax nnx modules, called or among the arguments, are split: their variables are inputs, and those that the call
    changes are outputs.

    Raises whatever jax, XLA or the function does.
    """
    if isinstance(function, _JITTED):
        args, kwargs = _on_target((tuple(args), dict(kwargs)), target)
        traced = function.trace(*args, **kwargs)
    else:
        call, inputs = bind(function, args, kwargs)
        traced = jax.jit(call).trace(*_on_target(tuple(inputs.values()), target))
    lowered = traced.lower(lowering_platforms=("cuda",)) if target else traced.lower()
    consts = tuple((tuple(c.shape), str(c.dtype)) for c in traced.jaxpr.consts if getattr(c, "ndim", 0))
    with artifacts.raw_dump_folder(dump_to) as raw:
        options = artifacts.dump_options(raw) if raw is not None else {}
        compiled, _, missed = compiler.compile_lowered(lowered, options, target)
        text = compiled.as_text()
        if raw is not None and dump_to is not None:
            artifacts.keep_artifacts(raw, dump_to, parse(text).name, lowered.as_text(debug_info=True))
    return CompiledCall(text, _autotuning(text, target, replayed=missed is None), consts)


def compile_phases(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *,
    target: compiler.Target | None = None, dump_to: Path | None = None,
) -> tuple[compiler.Compilation, compiler.Compilation]:
    """(forward, backward) of a training step around `function(*args, **kwargs)`: two executables.

    forward(inputs) -> (outputs, what JAX's vjp saves); backward(what was saved, cotangents of the float outputs) ->
    gradients of all inputs of a floating or complex dtype, where "all" is every array among the arguments and, of an
    nnx module, its `nnx.Param`s. Residuals that are inputs or outputs are passed on, not copied.

    Raises TypeError where nothing can be differentiated, or whatever jax, XLA or the function does.
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

    for half in (forward, backward):
        half.__name__ = f"{call.__name__}_{half.__name__}"
    compile_half = functools.partial(compiler.compile, matmul_precision=None, target=target)
    folders = {part: None if dump_to is None else dump_to / part for part in ("forward", "backward")}
    saved = compile_half(forward, [inputs], dump_to=folders["forward"])
    (outputs, _), residuals = saved.output_structs
    if not outputs:
        raise TypeError("grad=True needs an output of a floating dtype; there is none")
    return saved, compile_half(backward, [residuals, outputs], dump_to=folders["backward"])


def compile_stablehlo(
    text: str, *, target: compiler.Target | None = None, dump_to: Path | None = None
) -> CompiledCall:
    """Compile a StableHLO module as jax prints it (`Lowered.as_text(debug_info=True)`)."""
    with artifacts.raw_dump_folder(dump_to) as raw:
        options = artifacts.dump_options(raw) if raw is not None else {}
        if target is not None:
            options |= compiler.PRODUCTS[target.products]
        hlo_text = _jax_private.compile_stablehlo(text, options, target.config_text if target else None)
        if raw is not None and dump_to is not None:
            artifacts.keep_artifacts(raw, dump_to, parse(hlo_text).name, text)
    return CompiledCall(hlo_text, _autotuning(hlo_text, target, replayed=False))


def bind(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], OrderedDict[str, Any]]:
    """(call, inputs): `call(*inputs.values())` is (`function(*args, **kwargs)`, the module variables that it changed),
    and inputs hold arrays alone.

    Inputs are named after the function's parameters, and come in their order. Before them come the `nnx.Param`s of
    nnx modules ("nnx_params") and their other variables, statistics and counters ("nnx_variables").
    """
    function, args, kwargs = _without_modules(function, args, kwargs)
    named = _named(function, args, kwargs)
    inputs: OrderedDict[str, Any] = OrderedDict()  # as a pytree it keeps its order, which a dict does not
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
    """Arguments by the names of the parameters that take them, positional ones first."""
    names: list[str] = []
    try:
        bound = inspect.signature(function).bind_partial(*args)
    except (TypeError, ValueError):  # no signature to be had, or too many arguments: the call itself will say so
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
    """What a call with nnx modules returned, and the variables that it changed."""


@dataclass(frozen=True)
class _Slot:
    """Where one of the call's nnx modules stood."""

    index: int


def _without_modules(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """The call as a function of its nnx modules' variables: (function, args, kwargs)."""
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
        before = jax.tree.leaves((params, variables))  # now, for the call changes them where they are
        merged = nnx.merge(graph, params, variables)
        put_back = functools.partial(jax.tree.map, lambda leaf: merged[leaf.index] if isinstance(leaf, _Slot) else leaf)
        called = getattr(merged[0], method) if is_module else function
        outputs = called(*put_back(args), **put_back(kwargs))
        after = jax.tree.leaves(nnx.split(merged, nnx.Param, ...)[1:])
        # What the call left alone is no output: nnx.jit hands those arrays on, too.
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


def _on_target(tree: Any, target: compiler.Target | None) -> Any:
    """Arrays as structs, on the target's device if there is one; Python values as they are."""
    sharding = (
        jax.sharding.SingleDeviceSharding(_jax_private.target_device(target.config_text)) if target else None
    )

    def struct(leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(struct, tree)


def _autotuning(text: str, target: compiler.Target | None, replayed: bool) -> dict[str, provenance.Provenance]:
    source: provenance.Source = "device"
    if target is not None:
        source = "replay" if target.autotune_results is not None and replayed else "nothing"
    return {kernel.name: provenance.of(kernel, source) for kernel in kernels(parse(text))}
